"""A chat completion as OpenAI streams it, as chunks and as an answer: what was cut or refused is never one (1.17, 3.6)."""

from __future__ import annotations

from typing import Any, cast

from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.ports import AnswerCut
from turnkeeper.engine.wire import (
    FailureChunk,
    FailureOutcome,
    InvocationUsage,
    Message,
    ModelInvocationResponse,
    ModelToolRequest,
    Role,
    StreamChunk,
    StreamFailure,
    TextChunk,
    TextPart,
    ToolCall,
    ToolChunk,
    UsageChunk,
)


class OpenAIStream:
    """Takes a stream's events one by one; at its end there is an answer, or the reason why there is none.

    Attributes:
        text: what the model has said so far; of a stream that failed it is not to be used.
        failure: how the stream failed, if it did.
    """

    def __init__(self) -> None:
        self.text = ""
        self.failure: StreamFailure | None = None
        self._refusal = ""
        self._calls: dict[int, dict[str, str]] = {}
        self._usage: InvocationUsage | None = None
        self._finish: str | None = None

    def feed(self, event: dict[str, Any]) -> list[StreamChunk]:
        """The chunks of one event: text as it comes, usage when it is told. Tool calls come in pieces, and whole at the end."""
        chunks: list[StreamChunk] = []
        for choice in cast("list[dict[str, Any]]", event.get("choices") or []):
            delta: dict[str, Any] = choice.get("delta") or {}
            if delta.get("content"):
                self.text += delta["content"]
                chunks.append(TextChunk(value=delta["content"]))
            self._refusal += delta.get("refusal") or ""
            for piece in cast("list[dict[str, Any]]", delta.get("tool_calls") or []):
                self._add(piece)
            self._finish = choice.get("finish_reason") or self._finish
        usage: Any = event.get("usage")
        if usage:
            self._usage = InvocationUsage(
                input_tokens=usage.get("prompt_tokens", 0),
                output_tokens=usage.get("completion_tokens", 0),
                total_tokens=usage.get("total_tokens", 0),
            )
            chunks.append(UsageChunk(usage=self._usage))
        return chunks

    def _add(self, piece: dict[str, Any]) -> None:
        call = self._calls.setdefault(piece.get("index", len(self._calls)), {"id": "", "name": "", "arguments": ""})
        function: dict[str, Any] = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""

    def end(self) -> list[StreamChunk]:
        """The stream came to its end: the tool calls, or the model's refusal."""
        if self._refusal:
            return self._fail(FailureOutcome.DETERMINATE, f"Model refused: {self._refusal}")
        return [
            ToolChunk(tool_call=ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"]))
            for _, call in sorted(self._calls.items())
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
            unknown = self.failure.outcome is FailureOutcome.INDETERMINATE
            raise PortError(self.failure.message, outcome_unknown=unknown)
        if self._finish is None:
            raise AnswerCut("the stream ended without a finish reason")
        requests = [
            ModelToolRequest(
                id=call["id"],
                name=call["name"],
                arguments=call["arguments"],
                metadata={"argumentsText": call["arguments"]},
            )
            for _, call in sorted(self._calls.items())
        ]
        spoken = [Message(role=Role.ASSISTANT, parts=[TextPart(value=self.text)])] if self.text else []
        return ModelInvocationResponse(
            output=None if requests else self.text,
            usage=self._usage,
            assistant_messages=spoken,
            tool_requests=requests,
            metadata={"finishReason": self._finish},
        )
