"""The rules of a turn's phases (journal.md T2), pure; commands on slots go to `slots.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnkeeper.errors import TurnCheckpointBusy, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.identity import invocation_id, trace_hash
from turnkeeper.turn.leases import decide_release
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.permissions import decide_permission
from turnkeeper.turn.slots import SlotAnswer, decide_slot
from turnkeeper.turn.state import ModelCall, Round, TurnState, final_model, find_round, references

TurnDecision = Decision[r.AnyRecord, SlotAnswer | None]
"""Commands on slots are answered with what became of the slot, all others with None: the state tells."""

_NOTHING: TurnDecision = Decision(None)
_KNOWN: TurnDecision = Decision(None, final=True)
_Phase = TurnPhase
_WENT_ON = (
    ToolCallAction.BEGUN,
    ToolCallAction.COMPLETED,
    ToolCallAction.ACQUIRED,
    ToolCallAction.RECLAIMED,
    ToolCallAction.RENEWED,
    ToolCallAction.ABANDONED,
    ToolCallAction.CACHED,
)
"""Answers behind which a fused sequence of commands goes on."""
_BEFORE_DELIVERY = frozenset(
    {_Phase.STARTED, _Phase.ASSISTANT_RESERVED, _Phase.ROUND_COMMITTED, _Phase.FINAL_MODEL_SAVED}
)


def decide(state: TurnState, command: c.Command, now: int) -> TurnDecision:
    """Decide one command.

    Raises:
        TurnCheckpointError: the turn is missing, finished, or in another phase.
        TurnCheckpointConflict: it holds different canonical input.
        TurnCheckpointBusy: another live owner is at it.
        OwnerAlive: leases are to be taken from an owner that was heard of just now.
    """
    if isinstance(command, c.RequestPermission | c.ResolvePermission):
        return decide_permission(state, command, now)  # pyright: ignore[reportReturnType]  # as below
    if isinstance(command, c.SlotCommand):
        return decide_slot(state, command, now)  # pyright: ignore[reportReturnType]  # Decision is invariant in its answer
    if isinstance(command, c.Start):
        return _start(state, command, now)
    if state.phase is None:
        raise TurnCheckpointError(f"{type(command).__name__}: the turn was never started, or its log was erased")
    match command:
        case c.ReserveAssistant():
            return _reserve_assistant(state, command)
        case c.CommitRound():
            return _commit_round(state, command)
        case c.SaveFinalModel():
            return _save_final_model(state, command)
        case c.MarkCompleted():
            return _mark_completed(state, command)
        case c.ApplyPolicy() | c.PrepareContext():
            return _prepare(state, command)
        case c.StopRun():
            return _stop_run(state, command)
        case c.ReleaseLeases():
            return decide_release(state, command, now)  # pyright: ignore[reportReturnType]  # as above
        case c.StartModel() | c.RenewModel() | c.FailModel() | c.ResolveModel():
            return _decide_model(state, command, now)
        case _:
            return _decide_delivery(state, command, now)


def decide_all(
    state: TurnState, commands: Sequence[c.Command], now: int
) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
    """Decide commands one behind the other, for one append: what lies between two effects is one durable write.

    Stops behind the first slot command that does not let its caller go on; the answers end with that one. (A doubt that was
    asked for does: nothing more is done to its slot.)

    Raises:
        TurnCheckpointError: a command is refused; nothing of the sequence is appended.
    """
    answers: list[SlotAnswer | None] = []
    records: list[r.AnyRecord] = []
    guard: Guard | None = None
    final = True
    pending: tuple[r.AnyRecord, ...] = ()
    for command in commands:
        for record in pending:
            state = evolve(state, record, now)
        decision = decide(state, command, now)
        pending = decision.records
        records += pending
        answers.append(decision.answer)
        final = final and decision.final
        if decision.guard is not None:
            guard = decision.guard.meet(guard)
        doubted = isinstance(command, c.DoubtTool) and decision.records
        if decision.answer is not None and decision.answer.action not in _WENT_ON and not doubted:
            break
    return Decision(tuple(answers), tuple(records), guard, final)


def _where(state: TurnState) -> str:
    return f"turn {state.trace_id!r} ({state.scope})"


def _not_now(state: TurnState, what: str) -> TurnCheckpointError:
    phase = None if state.phase is None else state.phase.value
    return TurnCheckpointError(f"{_where(state)} is {phase} in round {state.current_round}: {what}")


def _start(state: TurnState, command: c.Start, now: int) -> TurnDecision:
    if state.phase is not None:
        if state.input_fingerprint != command.input_fingerprint:
            raise TurnCheckpointConflict(
                f"{_where(state)} was started with another input: give a new message a new trace id"
            )
        return _KNOWN
    guard = None
    if command.proof_deadline:
        if now > command.proof_deadline:
            raise TurnCheckpointError(
                f"turn {command.trace_id!r}: the proof deadline has passed, so a missing log does not prove that nothing "
                "happened; it is not started"
            )
        guard = Guard(not_after=command.proof_deadline)
    record = r.Started(
        command.trace_id,
        command.scope,
        command.messages,
        command.tool_names,
        command.runtime,
        command.input_fingerprint,
        command.proof_deadline,
        command.labels,
        command.engine,
        command.first_round,
    )
    return Decision(None, (record,), guard)


def _next_round(state: TurnState, round_index: int, what: str) -> None:
    """Check that `round_index` is the round that the model decides next."""
    open_phases = (_Phase.STARTED, _Phase.ROUND_COMMITTED)
    if state.phase not in open_phases or round_index != state.current_round + 1:
        raise _not_now(state, f"{what} of round {round_index} is out of order")


def _reserve_assistant(state: TurnState, command: c.ReserveAssistant) -> TurnDecision:
    if find_round(state, command.round_index) is not None:
        return _KNOWN
    _next_round(state, command.round_index, "a decision")
    return Decision(None, (r.AssistantReserved(command.round_index, command.response, command.calls),))


def _undecided(round_: Round, *, allow_ambiguous: bool) -> list[int]:
    """Slots that a commit has to wait for: not terminal, or ambiguous and nobody has decided what the model is told."""
    return [
        index
        for index, slot in enumerate(round_.slots)
        if slot is None
        or slot.state not in (ToolCallState.COMPLETED, ToolCallState.AMBIGUOUS)
        or (slot.open_question and not allow_ambiguous)
    ]


def _commit_round(state: TurnState, command: c.CommitRound) -> TurnDecision:
    committed = state.transcript and state.transcript.round
    if committed and 0 <= command.round_index <= committed.index and not state.completed:
        return _KNOWN
    round_ = state.round
    if state.phase is not _Phase.ASSISTANT_RESERVED or round_ is None or command.round_index != round_.index:
        raise _not_now(state, f"committing round {command.round_index} is out of order")
    undecided = _undecided(round_, allow_ambiguous=command.allow_ambiguous)
    if undecided:
        raise _not_now(state, f"slots {undecided} have no result yet; complete or resolve them first")
    record = r.RoundCommitted(
        command.round_index,
        command.keep,
        references(round_).freeze(command.messages, "messages"),
        None if command.runtime == state.runtime else command.runtime,
    )
    return Decision(None, (record,))


def _save_final_model(state: TurnState, command: c.SaveFinalModel) -> TurnDecision:
    if state.final_model is not None:
        return _KNOWN
    undecided = state.phase is _Phase.ASSISTANT_RESERVED and state.round is not None and state.round.calls
    if state.phase not in (_Phase.STARTED, _Phase.ASSISTANT_RESERVED, _Phase.ROUND_COMMITTED) or undecided:
        raise _not_now(state, "the final content cannot be saved; commit the round first")
    content = references(state.round, results=False).freeze_text(command.content, "content")
    return Decision(None, (r.FinalModelSaved(content),))


def _mark_completed(state: TurnState, command: c.MarkCompleted) -> TurnDecision:
    if state.completed:
        return _KNOWN
    silent = command.allow_no_output and state.phase in _BEFORE_DELIVERY
    if state.phase is not _Phase.DELIVERED and not silent:
        raise _not_now(state, "it cannot be closed before its reply is delivered")
    if state.phase is _Phase.ASSISTANT_RESERVED and state.round is not None:
        undecided = _undecided(state.round, allow_ambiguous=True)
        if undecided:
            raise _not_now(state, f"it cannot be closed while slots {undecided} are not terminal")
    return Decision(None, (r.Completed(no_output=state.phase is not _Phase.DELIVERED),))


def _prepare(state: TurnState, command: c.ApplyPolicy | c.PrepareContext) -> TurnDecision:
    _next_round(state, command.round_index, "what precedes a model call")
    if isinstance(command, c.PrepareContext):
        return Decision(None, (r.ContextPrepared(command.round_index, command.keep, command.messages, command.rest),))
    if state.policy_round == command.round_index:
        return _KNOWN  # the first one counts, as everywhere
    record = r.PolicyApplied(
        command.round_index, command.keep, command.messages, command.stable_prefix, command.metadata
    )
    return Decision(None, (record,))


def _stop_run(state: TurnState, command: c.StopRun) -> TurnDecision:
    stop = state.stop
    told = stop is not None and (stop.status, stop.error_kind) == (command.status, command.error_kind)
    if state.completed or (told and stop is not None and stop.revision == state.revision):
        return _KNOWN  # nothing has happened since the same was told
    return Decision(None, (r.RunStopped(command.owner, command.status, command.error_kind, command.message),))


# --- model calls ---------------------------------------------------------------------------------------------


def _decide_model(
    state: TurnState, command: c.StartModel | c.RenewModel | c.FailModel | c.ResolveModel, now: int
) -> TurnDecision:
    call = state.model
    if isinstance(command, c.StartModel):
        return _start_model(state, command, now)
    if isinstance(command, c.ResolveModel):
        return _resolve_model(state, command)
    if isinstance(command, c.FailModel) and command.unknown and call is not None and call.owner != command.owner:
        return _doubt_model(state, command, call, now)
    if call is None or call.invocation_id != command.invocation_id or call.owner != command.owner:
        raise TurnCheckpointBusy(f"{_where(state)} model call {command.invocation_id}", call and call.owner)
    if state.phase not in (_Phase.STARTED, _Phase.ROUND_COMMITTED):
        raise _not_now(state, f"model call {command.invocation_id} is over")
    if isinstance(command, c.FailModel):
        if call.failed or call.unknown:
            return _NOTHING
        record = r.ModelFailed(command.invocation_id, command.message, command.unknown, command.metadata)
        return Decision(None, (record,))
    if now >= call.lease_end:
        raise TurnCheckpointBusy(f"{_where(state)} model call {command.invocation_id}", None)
    guard = Guard(not_after=call.lease_end - 1)
    return Decision(None, (r.ModelRenewed(command.invocation_id, command.lease_ms, command.reference),), guard)


def _doubt_model(state: TurnState, command: c.FailModel, call: ModelCall, now: int) -> TurnDecision:
    """The call's owner is gone: nobody knows what became of it."""
    if call.invocation_id != command.invocation_id or call.failed or call.unknown:
        return _NOTHING
    if now < call.lease_end:
        raise TurnCheckpointBusy(f"{_where(state)} model call {call.invocation_id}", call.owner, call.lease_end)
    record = r.ModelFailed(command.invocation_id, command.message, unknown=True, owner=command.owner)
    return Decision(None, (record,), Guard(not_before=call.lease_end))


def _resolve_model(state: TurnState, command: c.ResolveModel) -> TurnDecision:
    call = state.model
    where = f"{_where(state)} model call {command.invocation_id}"
    if call is None or call.invocation_id != command.invocation_id or not call.unknown:
        raise TurnCheckpointConflict(f"{where} is not in doubt: there is nothing to resolve")
    if command.resolution is Resolution.UNKNOWN:
        raise TurnCheckpointError(f"{where}: a model call was answered or not; the turn cannot go on without knowing")
    return Decision(None, (r.ModelResolved(command.invocation_id, command.resolution, command.who, command.why),))


def _start_model(state: TurnState, command: c.StartModel, now: int) -> TurnDecision:
    _next_round(state, command.round_index, "a model call")
    call = state.model
    guard = None
    if call is not None and call.unknown:
        raise _not_now(state, f"the model call {call.invocation_id} may have been answered: resolve that first")
    if call is not None and not call.failed and call.owner != command.owner:
        if now < call.lease_end:
            raise TurnCheckpointBusy(f"{_where(state)} model call {call.invocation_id}", call.owner, call.lease_end)
        guard = Guard(not_before=call.lease_end)
    invocation = model_invocation_id(state, command.round_index)
    return Decision(None, (r.ModelStarted(command.round_index, invocation, command.owner, command.lease_ms),), guard)


def model_invocation_id(state: TurnState, round_index: int) -> str:
    """The id of the model call that this state's next `StartModel` makes."""
    return invocation_id(trace_hash(state.trace_id), state.scope, round_index, state.attempts)


# --- delivery ------------------------------------------------------------------------------------------------


def _decide_delivery(state: TurnState, command: c.Command, now: int) -> TurnDecision:
    match command:
        case c.ReserveDelivery():
            return _reserve_delivery(state, command)
        case c.MarkDelivered():
            return _mark_delivered(state, command)
        case _:
            pass
    delivery = state.delivery
    if delivery is None or state.phase is not _Phase.DELIVERY_RESERVED:
        raise _not_now(state, "there is no reply under way")
    live = now < delivery.lease_end
    match command:
        case c.ClaimDelivery():
            if delivery.unknown:
                # Who asked may have seen it before it was in doubt; sending it now could be the second time.
                raise _not_now(state, "the reply may have been sent: resolve that first")
            if live and delivery.owner != command.owner:
                raise TurnCheckpointBusy(f"{_where(state)} reply", delivery.owner, delivery.lease_end)
            guard = None if live else Guard(not_before=delivery.lease_end)
            return Decision(None, (r.DeliveryClaimed(command.owner, command.lease_ms),), guard)
        case c.DoubtDelivery():
            if delivery.unknown or delivery.not_sent:
                return _NOTHING  # known already, or nobody is sending it and there is nothing to doubt
            if live and delivery.owner != command.owner:
                raise TurnCheckpointBusy(f"{_where(state)} reply", delivery.owner, delivery.lease_end)
            guard = None if delivery.owner == command.owner else Guard(not_before=delivery.lease_end)
            return Decision(None, (r.DeliveryUnknown(command.reason),), guard)
        case c.ResolveDelivery():
            if command.sender is not None and command.sender != delivery.owner:
                raise TurnCheckpointConflict(
                    f"{_where(state)}: its reply was sent again since, by {delivery.owner}, and the evidence is about the "
                    f"send of {command.sender}"
                )
            if not delivery.unknown and not (live and delivery.owner == command.who):
                raise _not_now(state, "the reply's outcome is not in doubt: there is nothing to resolve")
            if command.message_id is None:
                return Decision(None, (r.DeliveryResolved(command.who, command.why),))
            return Decision(None, (r.Delivered(command.message_id, command.who, command.why),))
        case _:
            raise AssertionError(f"no rule for {command!r}")


def _reserve_delivery(state: TurnState, command: c.ReserveDelivery) -> TurnDecision:
    if state.delivery is not None:
        if state.delivery.key != command.key:
            raise TurnCheckpointConflict(
                f"{_where(state)} has its reply reserved under the key {state.delivery.key!r}, not {command.key!r}"
            )
        return _KNOWN
    if state.phase is not _Phase.FINAL_MODEL_SAVED:
        raise _not_now(state, "a reply can be reserved only once the final content is saved")
    text: Any = None if command.text == final_model(state) else values.freeze(command.text, "text")
    record = r.DeliveryReserved(command.key, text, command.delivery, command.owner, command.lease_ms)
    return Decision(None, (record,))


def _mark_delivered(state: TurnState, command: c.MarkDelivered) -> TurnDecision:
    delivery = state.delivery
    if delivery is None:
        raise _not_now(state, "no reply was reserved")
    if delivery.key != command.key:
        raise TurnCheckpointConflict(
            f"{_where(state)} has its reply reserved under {delivery.key!r}, not {command.key!r}"
        )
    if state.phase is _Phase.DELIVERY_RESERVED:
        return Decision(None, (r.Delivered(command.message_id),))
    return _KNOWN


def disputes(state: TurnState, command: c.MarkDelivered) -> TurnDecision:
    """Keep a second message id of a delivered reply for audit, before its conflict is told (T2 `mark_delivered`)."""
    known = (state.sent_message_id, *state.disputed_message_ids)
    if state.sent_message_id is None or command.message_id in known:
        return _KNOWN
    return Decision(None, (r.DeliveryDisputed(command.message_id),))
