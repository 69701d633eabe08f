"""A chat completion as OpenAI streams it, as chunks and as an answer: what was cut or refused is never one (1.17, 3.6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, cast

from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.ports import AnswerCut
from turnkeeper.engine.wire import (
    FailureChunk,
    FailureOutcome,
    ModelInvocationResponse,
    StreamChunk,
    StreamFailure,
    TextChunk,
    ThinkingChunk,
    ToolCall,
    ToolChunk,
    UsageChunk,
)
from turnkeeper.models.failures import AnswerLost, Caller, ModelRefused
from turnkeeper.models.openai_chat import chat_answer, chat_text, chat_usage

_THOUGHTS: Final = ("reasoning_content", "reasoning")
"""Where servers that show the model's reasoning put it."""
_SPOKEN: Final = frozenset({"role", "content", "refusal", "tool_calls", "function_call"})
_CALL: Final = frozenset({"index", "id", "type", "function"})
_GROWS: Final = frozenset({"text", "summary", "data", "thinking"})
"""Fields of a streamed item that come in pieces; the others say the same each time."""


@dataclass
class _Call:
    """A tool call, as far as it is known."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    more: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())

    def whole(self) -> dict[str, Any]:
        """The call as an answer that is not streamed has it."""
        return {"id": self.id, "function": {"name": self.name, "arguments": self.arguments}, **self.more}


class OpenAIStream:
    """Takes a stream's events one by one; at its end there is an answer, or the reason why there is none.

    Attributes:
        text: what the model has said so far; of a stream that failed it is not to be used.
        failure: how the stream failed, if it did.
    """

    def __init__(self, caller: Caller | None = None) -> None:
        self.text = ""
        self.failure: StreamFailure | None = None
        self._caller = Caller("openai", None) if caller is None else caller
        self._refusal = ""
        self._content: list[Any] = []
        self._more: dict[str, Any] = {}
        self._calls: list[_Call] = []
        self._at: dict[int, _Call] = {}
        self._usage: Any = None
        self._finish: str | None = None
        self._known: dict[str, Any] = {}

    def feed(self, event: dict[str, Any]) -> list[StreamChunk]:
        """The chunks of one event: text as it comes, usage when it is told. Tool calls come in pieces, and whole at the end."""
        chunks: list[StreamChunk] = []
        self._known |= {name: event[name] for name in ("id", "model") if event.get(name)}
        for choice in cast("list[dict[str, Any]]", event.get("choices") or []):
            delta: dict[str, Any] = choice.get("delta") or {}
            content: Any = delta.get("content")
            if isinstance(content, list):
                _join(self._content, cast("list[Any]", content))
            text = chat_text(content)
            if text:
                self.text += text
                chunks.append(TextChunk(value=text))
            chunks += [ThinkingChunk(value=delta[name]) for name in _THOUGHTS if isinstance(delta.get(name), str)][:1]
            _grow(self._more, {name: value for name, value in delta.items() if name not in _SPOKEN}, whole=False)
            self._refusal += delta.get("refusal") or ""
            for piece in cast("list[dict[str, Any]]", delta.get("tool_calls") or []):
                self._add(piece)
            self._finish = choice.get("finish_reason") or self._finish
        usage = chat_usage(event.get("usage"))
        if usage is not None:
            self._usage = event["usage"]
            chunks.append(UsageChunk(usage=usage))
        return chunks

    def _add(self, piece: dict[str, Any]) -> None:
        function: dict[str, Any] = piece.get("function") or {}
        index: Any = piece.get("index")
        call = self._at.get(index) if isinstance(index, int) else None
        if index is None and not piece.get("id") and self._calls:
            call = self._calls[-1]
        if call is not None and piece.get("id") and function.get("name") and call.id not in ("", piece["id"]):
            call = None  # some servers count every call as the first one
        if call is None:
            call = _Call()
            self._calls.append(call)
            if isinstance(index, int):
                self._at[index] = call
        call.id = piece.get("id") or call.id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""
        _grow(call.more, {name: value for name, value in piece.items() if name not in _CALL}, whole=True)

    def end(self) -> list[StreamChunk]:
        """The stream came to its end: the tool calls, or the model's refusal."""
        if self._refusal:
            return self._fail(FailureOutcome.DETERMINATE, f"Model refused: {self._refusal}")
        return [
            ToolChunk(tool_call=ToolCall(id=call.id, name=call.name, arguments=call.arguments)) for call in self._calls
        ]

    def cut(self, message: str) -> list[StreamChunk]:
        """The connection was lost: nobody knows what the provider went on to say, and to bill."""
        return self._fail(FailureOutcome.INDETERMINATE, message)

    def _fail(self, outcome: FailureOutcome, message: str) -> list[StreamChunk]:
        self.failure = StreamFailure(outcome=outcome, message=message)
        return [FailureChunk(failure=self.failure)]

    def response(self) -> ModelInvocationResponse:
        """The whole answer.

        Raises:
            PortError: the stream was cut (its outcome is unknown), or the model refused.
            AnswerCut: the stream ended before the answer did.
        """
        if self.failure is not None:
            raise self._failed(self.failure)
        if self._finish is None:
            raise AnswerCut("the stream ended without a finish reason")
        content: Any = self._content or self.text
        message = {**self._more, "content": content, "tool_calls": [call.whole() for call in self._calls]}
        completion = {
            **self._known,
            "choices": [{"message": message, "finish_reason": self._finish}],
            "usage": self._usage,
        }
        return chat_answer(completion, self._caller)

    def _failed(self, failure: StreamFailure) -> PortError:
        if failure.outcome is FailureOutcome.INDETERMINATE:
            return AnswerLost(self._caller.provider, failure.message, "stream_transport")
        return ModelRefused(self._caller.provider, failure.message, code="refusal")


def _grow(known: dict[str, Any], piece: dict[str, Any], *, whole: bool) -> None:
    """Put a piece's fields to those that are known. `whole`: a text in it is all of it, and not the next part."""
    for name, value in piece.items():
        have: Any = known.get(name)
        if value is None:
            continue
        if isinstance(value, str) and isinstance(have, str) and (not whole or name in _GROWS):
            known[name] = have + value
        elif isinstance(value, dict) and isinstance(have, dict):
            _grow(cast("dict[str, Any]", have), cast("dict[str, Any]", value), whole=True)
        elif isinstance(value, list):
            items = cast("list[Any]", have) if isinstance(have, list) else []
            _join(items, cast("list[Any]", value))
            known[name] = items
        else:
            known[name] = value


def _join(known: list[Any], pieces: list[Any]) -> None:
    """Put pieces of items to those that are known: by their index, or by being the next text of the same kind."""
    for piece in pieces:
        if not isinstance(piece, dict):
            known.append(piece)
            continue
        fields = cast("dict[str, Any]", piece)
        index: Any = fields.get("index")
        items = [cast("dict[str, Any]", one) for one in known if isinstance(one, dict)]
        same = [one for one in items if index is not None and one.get("index") == index]
        last = items[-1] if items else {}
        if same:
            _grow(same[0], fields, whole=True)
        elif last.keys() == fields.keys() == {"type", "text"} and last["type"] == fields["type"]:
            last["text"] += fields["text"]
        else:
            known.append(dict(fields))
