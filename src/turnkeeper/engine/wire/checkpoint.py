"""The portable checkpoint of a run, and what a run is resumed from (engine-contract.md 1.2, 1.9)."""

from __future__ import annotations

from typing import Any

from turnkeeper.engine.wire.base import Int32, Int64, Wire, listed, written
from turnkeeper.engine.wire.context import InvocationContextState
from turnkeeper.engine.wire.invocation import ModelInvocationResponse, ModelReconciliationState
from turnkeeper.engine.wire.message import Message
from turnkeeper.engine.wire.tool import ModelToolRequest, ModelToolResult


class EngineCheckpoint(Wire, frozen=True, kw_only=True):
    """A run after a committed model or tool round, whole enough to go on from anywhere (1.2).

    Attributes:
        id: of this checkpoint.
        session_id: shared by a whole tree of delegated runs.
        turn_id: the turn.
        run_id: the run; kept when it is resumed.
        parent_run_id: the run that delegated this one.
        delegation_depth: 0 for a run that nobody delegated.
        iteration: the zero-based model round that this belongs to.
        last_sequence: of the last event included; the event that tells of this checkpoint has the next one.
        messages: the conversation, without what an unfinished tool round will add.
        stable_prefix_messages: how many of them, from the front, a provider's prefix cache may reuse.
        inputs: of the turn.
        active_invocation_id: the model call that the round belongs to; no proof that one is in flight.
        pending_tool_requests: those not yet executed, in the model's order.
        completed_tool_results: of the whole turn, oldest first; ids may repeat over rounds.
        completed_model_iterations: model answers that were accepted.
        reconciliation_required: blocked, as the outcome of an effect is unknown.
        model_reconciliation: set where that effect is a model call; a tool's otherwise.
        pending_output: what the model proposed as final output.
        final_output_ready: the model is done; what is left is to commit.
        pending_model_response: the answer that asked for the tools, held until all of them have results.
        resume_same_iteration: the state precedes the model call of its iteration.
        policy_applied_for_iteration: the host's policy for this iteration is in the messages already.
        context_state: what a provider holds. Every reader demands it.
        metadata: the host's; whatever Turnkeeper adds to the contract is here.
    """

    id: str = written(str)
    session_id: str = written(str)
    turn_id: str = written(str)
    run_id: str = written(str)
    parent_run_id: str | None = None
    delegation_depth: Int32 = written(int)
    iteration: Int32 = written(int)
    last_sequence: Int64 = written(int)
    messages: list[Message] = written(list[Message])
    stable_prefix_messages: Int32 = written(int)
    inputs: Any = None
    active_invocation_id: str | None = None
    pending_tool_requests: list[ModelToolRequest] = listed(list[ModelToolRequest])
    completed_tool_results: list[ModelToolResult] = listed(list[ModelToolResult])
    completed_model_iterations: Int32 = written(int)
    reconciliation_required: bool = written(bool)
    model_reconciliation: ModelReconciliationState | None = None
    pending_output: Any = None
    final_output_ready: bool = written(bool)
    pending_model_response: ModelInvocationResponse | None = None
    resume_same_iteration: bool = written(bool)
    policy_applied_for_iteration: bool = written(bool)
    context_state: InvocationContextState
    metadata: dict[str, Any] | None = None


class ResumeContext(Wire, frozen=True, kw_only=True):
    """A checkpoint and the bounds to resume it with (1.9). A journal sequence of 0 stands for the checkpoint's own."""

    checkpoint: EngineCheckpoint
    max_iterations: Int32
    max_model_attempts: Int32
    last_journal_sequence: Int64 = written(int)
    metadata: dict[str, Any] | None = None
