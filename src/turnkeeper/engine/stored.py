"""What a turn log holds, read as the engine's types: also where the turn was driven by hand, in a chat form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from turnkeeper.engine.transcript import request_ids, result_text
from turnkeeper.engine.wire import (
    Message,
    ModelInvocationResponse,
    ModelToolRequest,
    ModelToolResult,
    Outcome,
    message_from,
    to_builtins,
)
from turnkeeper.errors import InvalidInput, SchemaConflict
from turnkeeper.log import values
from turnkeeper.log.keeping import KEEPING, Keeping
from turnkeeper.turn.identity import raw_calls
from turnkeeper.turn.state import Round, Transcript, TurnState, thaw_messages, thaw_tail

_WIRE_FIELDS = frozenset({"output", "toolRequests", "assistantMessages"})

UNKNOWN_TEXT = (
    "The outcome of this call is not known: it may have happened or not. It was not tried again. Do not assume either."
)
"""What the model is told of an effect whose outcome stays unknown."""


def stored_messages(state: TurnState) -> list[Message]:
    """The canonical transcript."""
    return [message_from(message, f"messages[{i}]") for i, message in enumerate(thaw_messages(state.transcript))]


class Reader:
    """Reads what a log's frames hold, each of them once, however often it is asked for: states share what they do not change.

    What it gives is shared as well, so it is for who looks at it or hands it out once, and not for who lets others change it.
    """

    def __init__(self) -> None:
        self._transcript: tuple[Transcript | None, list[Message]] = (None, [])
        self._first: tuple[Transcript | None, int] = (None, 0)
        self._responses: dict[int, tuple[bytes, ModelInvocationResponse]] = {}
        self._named: dict[int, tuple[bytes, ModelInvocationResponse]] = {}
        self._results: dict[tuple[bytes, str, str], ModelToolResult] = {}
        self._thawed: dict[bytes, Any] = {}

    def _thaw(self, frame: bytes) -> Any:
        """A decision's or a result's value, which is also looked into for the strings that its round's commit shares with it."""
        if frame not in self._thawed:
            self._thawed[frame] = values.thaw(frame)
        return self._thawed[frame]

    def messages(self, state: TurnState) -> list[Message]:
        """The canonical transcript: a list of its own each time."""
        known, messages = self._transcript
        fresh: list[Transcript] = []
        transcript = state.transcript
        while transcript is not None and transcript is not known:
            fresh.append(transcript)
            transcript = transcript.previous
        messages = messages[:] if transcript is not None else []
        for one in reversed(fresh):
            del messages[one.keep :]
            start = len(messages)
            messages += [message_from(m, f"messages[{start + i}]") for i, m in enumerate(thaw_tail(one, self._thaw))]
        self._transcript = (state.transcript, messages)
        return messages[:]

    def count_at_first(self, state: TurnState) -> int:
        """How many messages the turn was begun with."""
        first = state.transcript
        while first is not None and first.previous is not None:
            first = first.previous
        known, count = self._first
        if first is not known and first is not None:
            count = len(thaw_tail(first))
            self._first = (first, count)
        return 0 if first is None else count

    def response(self, round_: Round) -> ModelInvocationResponse:
        """The canonical decision of a round."""
        return self._kept(self._responses, round_, self._respond)

    def named_response(self, round_: Round) -> ModelInvocationResponse:
        """A round's decision, with an id of its own for each tool request: a provider's may be empty or repeated (5.1, 2)."""
        return self._kept(self._named, round_, self._name)

    def _kept(
        self,
        known: dict[int, tuple[bytes, ModelInvocationResponse]],
        round_: Round,
        make: Callable[[Round], ModelInvocationResponse],
    ) -> ModelInvocationResponse:
        frame, response = known.get(round_.index, (b"", None))
        if response is None or frame is not round_.response:
            response = make(round_)
            known[round_.index] = (round_.response, response)
        return response

    def _respond(self, round_: Round) -> ModelInvocationResponse:
        return stored_response_from(self._thaw(round_.response), f"decision of round {round_.index}")

    def _name(self, round_: Round) -> ModelInvocationResponse:
        response = self.response(round_)
        ids = request_ids(response, round_.index)
        if all(request.id == given for request, given in zip(response.tool_requests, ids, strict=True)):
            return response
        named = [
            msgspec.structs.replace(request, id=given)
            for request, given in zip(response.tool_requests, ids, strict=True)
        ]
        return msgspec.structs.replace(response, tool_requests=named)

    def result(self, frame: bytes, request: ModelToolRequest) -> ModelToolResult:
        """The result of a slot, under the id of its request."""
        request_id = request.id or ""
        key = (frame, request_id, request.name)
        found = self._results.get(key)
        if found is None:
            found = _stored_result(self._thaw(frame), request_id, request.name)
            if found.request_id != request_id:
                found = msgspec.structs.replace(found, request_id=request_id)
            self._results[key] = found
        return found


def stored_response(round_: Round) -> ModelInvocationResponse:
    """The canonical decision of a round."""
    return stored_response_from(values.thaw(round_.response), f"decision of round {round_.index}")


def stored_response_from(response: dict[str, Any], field: str) -> ModelInvocationResponse:
    """A decision from its wire form, or from an assistant message in a chat form."""
    if response.keys() & _WIRE_FIELDS:
        try:
            return msgspec.convert(response, ModelInvocationResponse)
        except msgspec.ValidationError as e:
            raise SchemaConflict(field, str(e)) from e
    requests = [
        ModelToolRequest(id=call_id, name=name, arguments=arguments) for call_id, name, arguments in raw_calls(response)
    ]
    message = message_from({"role": "assistant", **response}, field)
    metadata = {name: item for name, item in message.metadata.items() if name != "tool_calls"}
    spoken = Message(role=message.role, parts=message.parts, metadata=metadata)
    return ModelInvocationResponse(
        output=None if requests else message.text or None, assistant_messages=[spoken], tool_requests=requests
    )


def stored_result(frame: bytes, request_id: str, name: str) -> ModelToolResult:
    """The result of a slot."""
    return _stored_result(values.thaw(frame), request_id, name)


def _stored_result(record: Any, request_id: str, name: str) -> ModelToolResult:
    if isinstance(record, dict) and "outcome" in record:
        return _result_from(cast("dict[str, Any]", record), name)
    output: Any = cast("dict[str, Any]", record).get("content", record) if isinstance(record, dict) else record
    return ModelToolResult(request_id=request_id, name=name, outcome=Outcome.SUCCESS, output=output)


def _result_from(record: dict[str, Any], name: str) -> ModelToolResult:
    try:
        return msgspec.convert(record, ModelToolResult)
    except msgspec.ValidationError as e:
        raise SchemaConflict(f"result of {name}", str(e)) from e


def stored_form(result: ModelToolResult, field: str) -> dict[str, Any]:
    """A result as a slot keeps it.

    Raises:
        InvalidInput: its output cannot be kept exactly, or has no form that a model can be shown; names the path.
    """
    # The output as it is: whatever else would be made of it on the way (a list of a set) is not what the tool gave.
    record = {**to_builtins(msgspec.structs.replace(result, output=None)), "output": result.output}
    kept: dict[str, Any] = values.storable(record, field)
    try:
        result_text(result.output)
    except (TypeError, ValueError) as e:
        raise InvalidInput(f"{field}.output", f"has no form in JSON ({e})") from e
    return kept


def kept_result(result: ModelToolResult, field: str, keeping: Keeping = KEEPING) -> tuple[ModelToolResult, bytes]:
    """A result as it comes back from its slot, redacted, and the slot's frame.

    Raises:
        InvalidInput: as `stored_form`; or it could not be redacted.
        ValueTooLarge: it is over the limit of results.
    """
    record = stored_form(result, field)
    record["output"] = keeping.redacted("result", record["output"], f"{field}.output")
    return _result_from(record, result.name), values.seal(record, field, limit=keeping.limits.result)


def final_text(response: ModelInvocationResponse) -> str | None:
    """The text of a final answer, or None where the model had nothing to say."""
    if isinstance(response.output, str):
        return response.output
    if response.output is not None:
        return msgspec.json.encode(response.output).decode()
    spoken = [message.text for message in response.assistant_messages if message.parts]
    return spoken[-1] if spoken else None
