"""One model call: what is asked, what came back, and what is kept where that is unknown (engine-contract.md 1.5, 1.6, 1.8)."""

from __future__ import annotations

from typing import Any

import msgspec

from turnkeeper.engine.wire.base import Int32, Int64, Wire
from turnkeeper.engine.wire.context import InvocationContextState, ModelInvocationContextSnapshot
from turnkeeper.engine.wire.message import Message
from turnkeeper.engine.wire.tool import ModelToolRequest


class ModelInvocationRequest(Wire, frozen=True, kw_only=True):
    """What a model is asked (1.5)."""

    context: ModelInvocationContextSnapshot


class InvocationUsage(Wire, frozen=True, kw_only=True):
    """Tokens of one model call (1.6)."""

    input_tokens: Int64
    output_tokens: Int64
    total_tokens: Int64


class ModelInvocationResponse(Wire, frozen=True, kw_only=True):
    """A model's answer (1.6). Without tool requests it is the final one.

    `metadata["finishReason"] == "length"` says that the answer was cut: none of its calls is run.
    """

    output: Any = None
    usage: InvocationUsage | None = None
    assistant_messages: list[Message] = msgspec.field(default_factory=list)
    tool_requests: list[ModelToolRequest] = msgspec.field(default_factory=list)
    next_context_state: InvocationContextState | None = None
    metadata: dict[str, Any] | None = None


class ModelReconciliationState(Wire, frozen=True, kw_only=True):
    """A model call of which nobody knows what came of it: the exact request, and the attempt, counted from zero (1.8)."""

    invocation_id: str
    request: ModelInvocationRequest
    failed_attempt: Int32
    message: str
    metadata: dict[str, Any] | None = None
