"""The portable checkpoint as a projection of a turn's state: computed when asked for, never stored (engine-contract.md 1.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from turnkeeper.engine.identity import METADATA_KEY, RunIdentity
from turnkeeper.engine.stored import UNKNOWN_TEXT, Reader
from turnkeeper.engine.transcript import assistant_messages
from turnkeeper.engine.usage import NOTHING, usage_of, was_held
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    InvocationContextState,
    Message,
    ModelInvocationContextSnapshot,
    ModelInvocationRequest,
    ModelInvocationResponse,
    ModelReconciliationState,
    ModelToolRequest,
    ModelToolResult,
    Outcome,
    Portability,
    message_from,
    to_builtins,
)
from turnkeeper.log import values
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import derived_id
from turnkeeper.turn.names import TurnPhase
from turnkeeper.turn.state import ModelCall, Slot, TurnState, rounds_of


class Standing(NamedTuple):
    """Where a run stands: the turn's state, and what only the events before it tell."""

    state: TurnState
    identity: RunIdentity
    sequence: int
    """Of the last event that the state includes."""
    invocation_id: str | None
    attempt: int
    """Of that model call, counted from zero."""
    prepared: r.ContextPrepared | None
    """What the model is shown, where that is not the conversation."""
    read: Reader


def slot_result(slot: Slot | None, request: ModelToolRequest, read: Reader) -> ModelToolResult | None:
    """What is recorded of a call: its result, or that its outcome is unknown; None where it has not come to an end."""
    request_id = request.id or ""
    if slot is not None and slot.open_question:
        return ModelToolResult(
            request_id=request_id,
            name=request.name,
            outcome=Outcome.INDETERMINATE,
            output=UNKNOWN_TEXT,
            error_kind="effect_outcome_unknown",
        )
    if slot is None or slot.result is None:
        return None
    return read.result(slot.result, request)


def context_state(state: TurnState, identity: RunIdentity, read: Reader) -> InvocationContextState:
    """What a provider holds of the conversation: the last answer that said so counts (2.3 A)."""
    begun_with = identity.begun_with
    current = InvocationContextState() if begun_with is None else begun_with.context_state
    for round_ in rounds_of(state):
        following = read.response(round_).next_context_state
        if following is not None:
            current = following
        elif current.portability is Portability.PORTABLE:
            current = InvocationContextState()
    return current


def accepted_answers(state: TurnState, identity: RunIdentity) -> int:
    """Model answers that were accepted, also before the turn was imported."""
    begun_with, here = identity.begun_with, len(rounds_of(state))
    if begun_with is None:
        return here
    return begun_with.completed_model_iterations + here - (here > 0 and was_held(state, begun_with))


def _unchanged_since(state: TurnState, begun_with: EngineCheckpoint | None) -> EngineCheckpoint | None:
    """The checkpoint that a turn was imported from, where it comes next to ask the model, or nothing, just as there."""
    changed = state.round is not None or state.model is not None or state.policy_round >= 0
    if begun_with is None or changed:
        return None
    return begun_with if begun_with.resume_same_iteration or state.first_round > begun_with.iteration else None


def canonical_messages(state: TurnState, read: Reader) -> list[Message]:
    """The conversation as a checkpoint has it: with a final answer as soon as it is accepted, and no unfinished tool round."""
    messages = read.messages(state)
    round_ = state.round
    if round_ is not None and state.phase is TurnPhase.ASSISTANT_RESERVED and not round_.calls:
        messages += assistant_messages(read.response(round_), round_.index)
    return messages


def stable_prefix(state: TurnState, identity: RunIdentity, read: Reader) -> int:
    """How many messages from the front a provider may have cached: those that the turn was begun with."""
    if state.stable_prefix is not None:
        return state.stable_prefix
    if identity.begun_with is not None:
        return identity.begun_with.stable_prefix_messages
    return read.count_at_first(state)


def imported_call(state: TurnState, identity: RunIdentity) -> ModelReconciliationState | None:
    """The model call in doubt that the turn was imported with, for as long as that is the turn's last one; as it was imported."""
    began = identity.begun_with
    return None if began is None or state.round is not None or state.model_calls != 1 else began.model_reconciliation


def snapshot_of(standing: Standing, iteration: int) -> ModelInvocationContextSnapshot:
    """What the model is asked in the round that is decided next (1.5)."""
    state, identity, invocation = standing.state, standing.identity, standing.invocation_id or ""
    imported = imported_call(state, identity)
    if imported is not None:
        return imported.request.context
    prepared = standing.prepared
    if prepared is not None:
        tail = [message_from(one, "context") for one in values.thaw(prepared.messages)]
        messages = [*canonical_messages(state, standing.read)[: prepared.keep], *tail]
        made = msgspec.convert({**values.thaw(prepared.rest), "messages": []}, ModelInvocationContextSnapshot)
        return replace(made, messages=messages)
    return ModelInvocationContextSnapshot(
        id=f"context:{invocation}",
        session_id=identity.session_id or "",
        turn_id=state.trace_id,
        invocation_id=invocation,
        iteration=iteration,
        messages=canonical_messages(state, standing.read),
        stable_prefix_messages=stable_prefix(state, identity, standing.read),
        context_state=context_state(state, identity, standing.read),
    )


def model_reconciliation(standing: Standing) -> ModelReconciliationState | None:
    """The model call of which nobody knows what became, with exactly what it was asked (1.8)."""
    model = standing.state.model
    if model is None or not model.unknown:
        return None
    imported = imported_call(standing.state, standing.identity)
    if imported is not None:
        return imported
    return ModelReconciliationState(
        invocation_id=standing.invocation_id or "",
        request=ModelInvocationRequest(context=snapshot_of(standing, model.round_index)),
        failed_attempt=standing.attempt,
        message=model.message,
        metadata=_told_of(model),
    )


def _told_of(model: ModelCall) -> dict[str, Any] | None:
    """What the provider said of the call, and what it calls it: whoever goes on elsewhere can ask for it there."""
    told: dict[str, Any] | None = None if model.metadata is None else values.thaw(model.metadata)
    known = model.reference
    if known is None:
        return told
    return {**(told or {}), "reference": {"provider": known.provider, "kind": known.kind, "id": known.id}}


def checkpoint_of(standing: Standing) -> EngineCheckpoint:
    """The checkpoint of a run where it stands (2.6)."""
    state, identity, read = standing.state, standing.identity, standing.read
    begun_with = identity.begun_with
    completed = [] if begun_with is None else list(begun_with.completed_tool_results)
    held: ModelInvocationResponse | None = None
    pending: list[ModelToolRequest] = []
    for round_ in rounds_of(state):
        held = read.named_response(round_)
        results = [
            slot_result(slot, request, read) for slot, request in zip(round_.slots, held.tool_requests, strict=True)
        ]
        completed += [result for result in results if result is not None]
        pending = [request for request, result in zip(held.tool_requests, results, strict=True) if result is None]
    unknown = model_reconciliation(standing)
    # 5.1, 13: a model call that surely was not answered is made again in its own iteration, with the same messages.
    rewritten = state.policy_round == state.current_round + 1
    again = (state.model is not None and state.model.failed) or rewritten
    undecided = (state.round is None or again) and unknown is None
    asked = again or unknown is not None
    folded = state.phase is not TurnPhase.ASSISTANT_RESERVED
    final = held is not None and not held.tool_requests
    iteration = state.current_round + 1 if asked or state.round is None else state.current_round
    output = None if held is None else held.output
    same = _unchanged_since(state, begun_with)
    if same is not None:
        iteration, undecided, again = same.iteration, same.resume_same_iteration, same.policy_applied_for_iteration
        output, final = same.pending_output, same.final_output_ready
    return EngineCheckpoint(
        id=derived_id("checkpoint", state.trace_id, state.scope, standing.sequence),
        session_id=identity.session_id or "",
        turn_id=state.trace_id,
        run_id=identity.run_id or "",
        parent_run_id=identity.parent_run_id,
        delegation_depth=identity.delegation_depth,
        iteration=iteration,
        last_sequence=standing.sequence,
        messages=canonical_messages(state, standing.read),
        stable_prefix_messages=stable_prefix(state, identity, standing.read),
        inputs=identity.inputs,
        active_invocation_id=standing.invocation_id,
        pending_tool_requests=[] if folded else pending,
        completed_tool_results=completed,
        completed_model_iterations=accepted_answers(state, identity),
        reconciliation_required=unknown is not None or any(not call.closed for call in state.ambiguous),
        model_reconciliation=unknown,
        pending_output=output,
        final_output_ready=final,
        pending_model_response=None if folded or final else held,
        # 5.2, 1: before the first decision, whoever resumes calls the model of the same iteration.
        resume_same_iteration=undecided,
        policy_applied_for_iteration=again and unknown is None,
        context_state=context_state(state, identity, standing.read),
        metadata=_metadata(state, identity, read),
    )


def _metadata(state: TurnState, identity: RunIdentity, read: Reader) -> dict[str, Any] | None:
    """The host's own, as imported, and the tokens that were used (5.1, 7), if anything says so."""
    kept = dict((identity.begun_with and identity.begun_with.metadata) or {})
    usage = usage_of(state, identity, read)
    if usage != NOTHING:
        kept[METADATA_KEY] = {"usage": to_builtins(usage)}
    return kept or None
