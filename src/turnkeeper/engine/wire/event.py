"""Events of a run, in one gapless order (engine-contract.md 1.10)."""

from __future__ import annotations

from enum import Enum
from typing import Any

from turnkeeper.engine.wire.base import Int32, Int64, Wire, written


class EngineEventKind(str, Enum):
    """What happened; 1.10 lists the payload of each."""

    TURN_STARTED = "turn_started"
    POLICY_APPLIED = "policy_applied"
    CONTEXT_PREPARED = "context_prepared"
    MODEL_INVOCATION_STARTED = "model_invocation_started"
    MODEL_INVOCATION_FAILED = "model_invocation_failed"
    MODEL_INVOCATION_COMPLETED = "model_invocation_completed"
    MODEL_RECONCILIATION_REQUIRED = "model_reconciliation_required"
    MODEL_INVOCATION_RECONCILED = "model_invocation_reconciled"
    PERMISSION_REQUESTED = "permission_requested"
    PERMISSION_RESOLVED = "permission_resolved"
    TOOL_EXECUTION_STARTED = "tool_execution_started"
    TOOL_EXECUTION_COMPLETED = "tool_execution_completed"
    TOOL_RESULT_COMMITTED = "tool_result_committed"
    CONVERSATION_UPDATED = "conversation_updated"
    TOOL_RESULT_RECONCILED = "tool_result_reconciled"
    CHECKPOINT_CREATED = "checkpoint_created"
    TURN_COMMITTED = "turn_committed"
    TURN_CANCELLED = "turn_cancelled"
    TURN_FAILED = "turn_failed"
    TURN_RECONCILIATION_REQUIRED = "turn_reconciliation_required"
    POST_COMMIT_STARTED = "post_commit_started"
    POST_COMMIT_COMPLETED = "post_commit_completed"
    POST_COMMIT_FAILED = "post_commit_failed"


class EngineEvent(Wire, frozen=True, kw_only=True):
    """One event (1.10).

    Attributes:
        sequence: from 1, without gaps, within the run.
        timestamp: RFC 3339.
        invocation_id: the model call that it belongs to; absent on start, end and post-commit.
        iteration: absent on `turn_started` only.
        payload: as JSON; what is in it depends on the kind.
    """

    sequence: Int64
    id: str
    timestamp: str
    session_id: str
    turn_id: str
    run_id: str
    parent_run_id: str | None = None
    delegation_depth: Int32 = written(int)
    invocation_id: str | None = None
    iteration: Int32 | None = None
    kind: EngineEventKind
    payload: Any = None
