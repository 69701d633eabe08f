"""A model that answers from a script: for tests, demos and offline work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnkeeper.engine.ports import ModelRequest
from turnkeeper.engine.stored import stored_response_from
from turnkeeper.engine.wire import Message, ModelInvocationResponse, ModelToolRequest, Role, TextPart
from turnkeeper.errors import InvalidInput

Answer = ModelInvocationResponse | str | dict[str, Any]


def text(content: str) -> ModelInvocationResponse:
    """A final answer."""
    message = Message(role=Role.ASSISTANT, parts=[TextPart(value=content)])
    return ModelInvocationResponse(output=content, assistant_messages=[message])


def calls(*requests: tuple[str, Any], spoken: str = "") -> ModelInvocationResponse:
    """An answer that calls tools: (name, arguments) each."""
    parts = [TextPart(value=spoken)] if spoken else []
    return ModelInvocationResponse(
        assistant_messages=[Message(role=Role.ASSISTANT, parts=[*parts])],
        tool_requests=[
            ModelToolRequest(id=f"call_{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(requests)
        ],
    )


class ScriptedModel:
    """Answers the round with the answer of that place in the script, whatever it is asked, as often as it is asked.

    Args:
        script: an answer for each round: a text, a chat message (`{"role": "assistant", "tool_calls": …}`), or a response;
            or a function from the request to one of these.
    """

    def __init__(self, script: Sequence[Answer] | Callable[[ModelRequest], Answer]) -> None:
        self._script = script
        self.requests: list[ModelRequest] = []
        """Every request that was made, in order."""

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `turnkeeper.engine.ports.ModelPort.invoke`."""
        self.requests.append(request)
        if callable(self._script):
            answer = self._script(request)
        elif request.round_index < len(self._script):
            answer = self._script[request.round_index]
        else:
            raise InvalidInput("script", f"has no answer for round {request.round_index}")
        if isinstance(answer, str):
            return text(answer)
        if isinstance(answer, ModelInvocationResponse):
            return answer
        return stored_response_from(answer, f"script[{request.round_index}]")
