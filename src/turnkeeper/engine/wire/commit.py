"""How a run ended (engine-contract.md 1.12)."""

from __future__ import annotations

from enum import Enum
from typing import Any

from turnkeeper.engine.wire.base import Int32, Int64, Wire, listed
from turnkeeper.engine.wire.context import InvocationContextState, ModelInvocationContextSnapshot
from turnkeeper.engine.wire.invocation import ModelReconciliationState
from turnkeeper.engine.wire.message import Message
from turnkeeper.engine.wire.tool import ModelToolResult


class EngineTurnStatus(str, Enum):
    """How a turn ended (1.12)."""

    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RECONCILIATION_REQUIRED = "reconciliation_required"


class TurnCommit(Wire, frozen=True, kw_only=True):
    """The end of a turn (1.12). It carries no run id; `iterations` counts accepted model answers."""

    session_id: str
    turn_id: str
    status: EngineTurnStatus
    output: Any = None
    messages: list[Message]
    iterations: Int32
    last_sequence: Int64
    context_state: InvocationContextState
    model_reconciliation: ModelReconciliationState | None = None


class TurnEngineResult(Wire, frozen=True, kw_only=True):
    """What a run hands back (1.12): snapshots of this process's run, results of the whole turn."""

    commit: TurnCommit
    snapshots: list[ModelInvocationContextSnapshot] = listed(list[ModelInvocationContextSnapshot])
    tool_results: list[ModelToolResult] = listed(list[ModelToolResult])
    post_commit_error: str | None = None
