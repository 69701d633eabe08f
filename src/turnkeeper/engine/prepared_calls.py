"""One tool call of a round: its tool, its bound arguments or why it is not run, and what came of it as a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from turnkeeper.engine.arguments import InvalidArguments, parse_arguments
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.outcomes import EffectRefused, OutcomeUnknown
from turnkeeper.engine.tools import Tool
from turnkeeper.engine.wire import ModelToolResult, Outcome
from turnkeeper.turn.identity import ToolCall


class PreparedCall:
    """One slot's call, ready to run or with the reason why it is not run."""

    def __init__(self, slot_index: int, call: ToolCall, request_id: str) -> None:
        self.slot_index = slot_index
        self.call = call
        self.request_id = request_id
        self.tool: Tool | None = None
        self.arguments: dict[str, Any] = {}
        self.refusal: ModelToolResult | None = None
        self.fence = 0
        self.since = 0.0
        """The time, by `time.monotonic`, before the write that took the slot."""

    def result(self, outcome: Outcome, output: Any, error_kind: str | None = None) -> ModelToolResult:
        """A result of this call."""
        return ModelToolResult(
            request_id=self.request_id, name=self.call.tool_name, outcome=outcome, output=output, error_kind=error_kind
        )

    def failed(self, error_kind: str, text: str) -> ModelToolResult:
        """A failure that the model is told of."""
        return self.result(Outcome.FAILED, text, error_kind)

    def refused(self, error: Exception) -> ModelToolResult:
        """The failure of a call that surely had no effect, in the words of what was raised."""
        if isinstance(error, PortError):
            told = self.failed("tool_error", f"{self.call.tool_name} failed: {error.message}")
            return replace(told, metadata=None if error.metadata is None else dict(error.metadata))
        text = str(error) or type(error).__name__
        return self.failed(error.kind if isinstance(error, EffectRefused) else "tool_error", text)

    def returned(self, output: Any) -> tuple[ModelToolResult | None, Exception | None]:
        """What a function has returned, as a result or, where it says that its outcome is unknown, as that (2.13)."""
        if not isinstance(output, ModelToolResult):
            return self.result(Outcome.SUCCESS, output), None
        if output.outcome is Outcome.INDETERMINATE:
            return None, OutcomeUnknown("it may have happened" if output.output is None else str(output.output))
        return replace(output, request_id=self.request_id, name=self.call.tool_name), None

    def prepare(self, tools: Mapping[str, Tool], raw_arguments: Any, *, cut: bool, limit: int) -> None:
        """Find its tool and bind its arguments; where that cannot be, it is refused, and the model told why."""
        self.tool = tools.get(self.call.tool_name)
        if cut:
            self.refusal = self.failed(
                "invalid_arguments",
                "The answer was cut at its length limit, so the call's "
                "arguments may be cut as well. It was not run; make it again, shorter.",
            )
        elif self.tool is None:
            known = ", ".join(sorted(tools)) or "none"
            self.refusal = self.failed("unknown_tool", f"There is no tool {self.call.tool_name!r}. Tools: {known}.")
        else:
            try:
                self.arguments = self.tool.bind(parse_arguments(raw_arguments, limit))
            except InvalidArguments as e:
                self.refusal = self.failed("invalid_arguments", f"Invalid arguments, the tool was not run: {e}")
