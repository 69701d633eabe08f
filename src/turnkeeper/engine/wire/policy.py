"""What a host's policies are asked and answer (engine-contract.md 1.14)."""

from __future__ import annotations

from typing import Any

from turnkeeper.engine.wire.base import Int32, Wire, written
from turnkeeper.engine.wire.message import Message


class HostPolicyRequest(Wire, frozen=True, kw_only=True):
    """Asked before a model call."""

    session_id: str
    turn_id: str
    iteration: Int32
    messages: list[Message]
    stable_prefix_messages: Int32 = written(int)
    inputs: Any = None


class HostPolicyResult(Wire, frozen=True, kw_only=True):
    """The conversation as the host wants it."""

    messages: list[Message]
    stable_prefix_messages: Int32 = written(int)
    metadata: dict[str, Any] | None = None


class FinalOutputPolicyRequest(Wire, frozen=True, kw_only=True):
    """Asked before a commit."""

    session_id: str
    turn_id: str
    iteration: Int32
    messages: list[Message]
    output: Any = None
    inputs: Any = None


class FinalOutputPolicyResult(Wire, frozen=True, kw_only=True):
    """The final output as the host wants it."""

    output: Any = None
    metadata: dict[str, Any] | None = None


class RetryPolicyRequest(Wire, frozen=True, kw_only=True):
    """Asked before a model call is repeated: how many failed (from 1), and the number of the next, counted from one."""

    failed_attempts: Int32
    next_attempt: Int32
    max_attempts: Int32
    reason: str
