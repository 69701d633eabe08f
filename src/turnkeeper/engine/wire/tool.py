"""Tool calls that a model asks for, what came of them, and the permission to run them (engine-contract.md 1.4, 1.11)."""

from __future__ import annotations

from enum import Enum
from typing import Any

from turnkeeper.engine.wire.base import Wire


class ModelToolRequest(Wire, frozen=True, kw_only=True):
    """A tool call that the model asks for (1.4). `id` is the provider's, as given: it may be empty, repeated or None.

    A document always has text there: one with None is not saved.
    """

    id: str | None
    name: str
    arguments: Any = None
    metadata: dict[str, Any] | None = None


class Outcome(str, Enum):
    """How a tool call ended (1.4)."""

    SUCCESS = "success"
    FAILED = "failed"
    INDETERMINATE = "indeterminate"


class ModelToolResult(Wire, frozen=True, kw_only=True):
    """What came of a tool call (1.4)."""

    request_id: str
    name: str
    outcome: Outcome
    output: Any = None
    error_kind: str | None = None
    metadata: dict[str, Any] | None = None


class EnginePermissionDecision(Wire, frozen=True, kw_only=True):
    """Whether a tool call may run (1.11). A denial's `metadata["errorKind"]` takes the place of `permission_denied`."""

    approved: bool
    reason: str | None = None
    metadata: dict[str, Any] | None = None
