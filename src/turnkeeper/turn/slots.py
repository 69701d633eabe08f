"""The rules of tool slots (journal.md T3), pure: who may run an effect, and when nobody may."""

from __future__ import annotations

from typing import assert_never

import msgspec

from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import operation_id, trace_hash
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.permissions import is_allowed
from turnkeeper.turn.state import Slot, TurnState, find_round, find_slot, permission_of


class SlotAnswer(msgspec.Struct, frozen=True, gc=False):
    """What a slot command was answered, with the slot as it stands then."""

    action: ToolCallAction
    slot: Slot | None = None
    owner: str | None = None
    """Who holds the slot after the command, where that differs from `slot`."""
    fence: int = 0
    lease_end: int | None = None
    blocked_by: tuple[int, int] | None = None
    """The ambiguous slot of an earlier round that made the same call."""


SlotDecision = Decision[r.AnyRecord, SlotAnswer]
_State = ToolCallState
_Action = ToolCallAction


def decide_slot(state: TurnState, command: c.SlotCommand, now: int) -> SlotDecision:
    """Decide a command on one tool slot.

    Raises:
        TurnCheckpointError: only from `ResolveTool`, which is an operator's; all others answer with an action.
    """
    if state.phase is None:
        return _refuse(_Action.MISSING)
    slot = find_slot(state, command.round_index, command.slot_index)
    match command:
        case c.ClaimTool():
            return _claim(state, command, slot, now)
        case c.ResolveTool():
            return _resolve(state, command, slot)
        case _:
            pass
    if slot is None:
        return _refuse(_Action.MISSING)
    match command:
        case c.CompleteTool():
            return _complete(state, command, slot, now)
        case c.BeginTool():
            return _begin(state, command, slot, now)
        case c.RenewTool():
            return _renew(state, command, slot, now)
        case c.AbandonTool():
            return _abandon(state, command, slot, now)
        case c.DoubtTool():
            return _doubt(command, slot)
        case _:
            raise AssertionError(f"no rule for {command!r}")


def _refuse(action: ToolCallAction, slot: Slot | None = None, *, final: bool = False) -> SlotDecision:
    owner, fence = (None, 0) if slot is None else (slot.owner, slot.fence)
    lease_end = None if slot is None else slot.lease_end
    return Decision(SlotAnswer(action, slot, owner, fence, lease_end), final=final)


def _claim(state: TurnState, command: c.ClaimTool, slot: Slot | None, now: int) -> SlotDecision:
    # A finished slot of an earlier round, or of a finished turn, still answers with its result (T3 `claim_tool` 2).
    done = slot is not None and slot.state is _State.COMPLETED
    active = state.phase is TurnPhase.ASSISTANT_RESERVED and command.round_index == state.current_round
    if not active and not done:
        return _refuse(_Action.INVALID_STATE, slot)
    round_ = find_round(state, command.round_index)
    expected = operation_id(trace_hash(state.trace_id), state.scope, command.round_index, command.slot_index)
    if (
        round_ is None
        or not 0 <= command.slot_index < len(round_.calls)
        or command.operation_id != expected
        or command.call != round_.calls[command.slot_index]
    ):
        return _refuse(_Action.CONFLICT, slot)
    if slot is None:
        blocking = None if command.repeat_ambiguous else _same_call_in_doubt(state, command)
        if blocking is not None:
            return Decision(SlotAnswer(_Action.AMBIGUOUS, blocked_by=blocking))
        guard = None
        if command.needs_permission:
            permission = permission_of(round_, command.slot_index)
            if permission is None or not is_allowed(permission, now):
                return _refuse(_Action.INVALID_STATE)
            guard = Guard(not_after=permission.valid_until - 1) if permission.valid_until else None
        return _own(state, command, None, now, _Action.ACQUIRED, 1, command.replay_safe, guard)
    return _claim_again(state, command, slot, now)


def _same_call_in_doubt(state: TurnState, command: c.ClaimTool) -> tuple[int, int] | None:
    """The ambiguous slot of an earlier round that this call would repeat ("Trap worth a test of its own")."""
    wanted = (command.call.tool_name, command.call.arguments_fingerprint)
    for doubt in state.ambiguous:
        if doubt.round_index < command.round_index and (doubt.tool_name, doubt.arguments_fingerprint) == wanted:
            return doubt.round_index, doubt.slot_index
    return None


def _claim_again(state: TurnState, command: c.ClaimTool, slot: Slot, now: int) -> SlotDecision:
    """The table of T3 `claim_tool` 4, for slots that were claimed before."""
    replay_safe = slot.replay_safe and command.replay_safe
    live = now < slot.lease_end
    mine = command.owner == slot.owner
    match slot.state:
        case _State.COMPLETED:
            return _refuse(_Action.CACHED, slot, final=True)
        case _State.AMBIGUOUS:
            return _refuse(_Action.AMBIGUOUS, slot)
        case _State.CLAIMED if live and mine:
            guard = Guard(not_after=slot.lease_end - 1)
            return _own(state, command, slot, now, _Action.ACQUIRED, slot.fence, replay_safe, guard)
        case _State.EXECUTING if live and mine:
            return _refuse(_Action.ALREADY_EXECUTING, slot)
        case _State.CLAIMED | _State.EXECUTING if live:
            return _refuse(_Action.BUSY, slot)
        case _State.EXECUTING if not replay_safe:
            record = r.ToolAmbiguous(command.round_index, command.slot_index, owner="" if mine else command.owner)
            ambiguous = msgspec.structs.replace(slot, state=_State.AMBIGUOUS)
            answer = SlotAnswer(_Action.AMBIGUOUS, ambiguous, slot.owner, slot.fence, slot.lease_end)
            return Decision(answer, (record,), Guard(not_before=slot.lease_end))
        case _State.CLAIMED | _State.EXECUTING:
            guard = Guard(not_before=slot.lease_end)
            return _own(state, command, slot, now, _Action.RECLAIMED, slot.fence + 1, replay_safe, guard)
        case _:
            assert_never(slot.state)


def _own(
    state: TurnState,
    command: c.ClaimTool,
    slot: Slot | None,
    now: int,
    action: ToolCallAction,
    fence: int,
    replay_safe: bool,
    guard: Guard | None = None,
) -> SlotDecision:
    if command.execution_lease_ms is not None and state.proof_deadline:
        # T1.7: no effect on a proof that may be gone, also where claim and begin are one.
        if now > state.proof_deadline:
            return _refuse(_Action.LEASE_EXPIRED, slot)
        guard = Guard(not_after=state.proof_deadline).meet(guard)
    here = (command.round_index, command.slot_index, command.owner, fence)
    if command.execution_lease_ms is None:
        record = r.ToolClaimed(*here, command.claim_lease_ms, replay_safe)
        after = _State.CLAIMED
    else:
        record = r.ToolBegun(*here, command.execution_lease_ms, replay_safe, command.refused)
        after = _State.EXECUTING
        action = _Action.BEGUN
    owned = Slot(after, command.owner, fence, 0, replay_safe)
    return Decision(SlotAnswer(action, owned, command.owner, fence), (record,), guard)


def _begin(state: TurnState, command: c.BeginTool, slot: Slot, now: int) -> SlotDecision:
    if slot.state is _State.COMPLETED:
        return _refuse(_Action.CACHED, slot, final=True)
    if slot.state is _State.AMBIGUOUS:
        return _refuse(_Action.AMBIGUOUS, slot)
    if (command.owner, command.fence) != (slot.owner, slot.fence):
        return _refuse(_Action.STALE_OWNER, slot)
    if slot.state is _State.EXECUTING:
        return _refuse(_Action.ALREADY_EXECUTING, slot)
    last = slot.lease_end - 1
    if state.proof_deadline:
        last = min(last, state.proof_deadline)  # T1.7: no effect on a proof that may be gone
    if now > last:
        return _refuse(_Action.LEASE_EXPIRED, slot)
    record = r.ToolBegun(
        command.round_index, command.slot_index, slot.owner, slot.fence, command.lease_ms, slot.replay_safe
    )
    begun = msgspec.structs.replace(slot, state=_State.EXECUTING)
    return Decision(SlotAnswer(_Action.BEGUN, begun, slot.owner, slot.fence), (record,), Guard(not_after=last))


def _executing(command: c.RenewTool | c.AbandonTool, slot: Slot, now: int) -> SlotDecision | None:
    """Why a command of the live executing owner is refused, or None."""
    if slot.state is _State.COMPLETED:
        return _refuse(_Action.CACHED, slot, final=True)
    if slot.state is _State.AMBIGUOUS:
        return _refuse(_Action.AMBIGUOUS, slot)
    if (command.owner, command.fence) != (slot.owner, slot.fence):
        return _refuse(_Action.STALE_OWNER, slot)
    if slot.state is _State.CLAIMED:
        return _refuse(_Action.INVALID_STATE, slot)
    return _refuse(_Action.LEASE_EXPIRED, slot) if now >= slot.lease_end else None


def _renew(state: TurnState, command: c.RenewTool, slot: Slot, now: int) -> SlotDecision:
    refusal = _executing(command, slot, now)
    if refusal is not None:
        return refusal
    record = r.ToolRenewed(command.round_index, command.slot_index, command.lease_ms)
    answer = SlotAnswer(_Action.RENEWED, slot, slot.owner, slot.fence)
    return Decision(answer, (record,), Guard(not_after=slot.lease_end - 1))


def _abandon(state: TurnState, command: c.AbandonTool, slot: Slot, now: int) -> SlotDecision:
    refusal = _executing(command, slot, now)
    if refusal is not None:
        return refusal
    record = r.ToolAbandoned(command.round_index, command.slot_index)
    claimed = msgspec.structs.replace(slot, state=_State.CLAIMED)
    answer = SlotAnswer(_Action.ABANDONED, claimed, slot.owner, slot.fence)
    return Decision(answer, (record,), Guard(not_after=slot.lease_end - 1))


def _complete(state: TurnState, command: c.CompleteTool, slot: Slot, now: int) -> SlotDecision:
    if slot.state is _State.COMPLETED:
        action = _Action.CACHED if values.same_frames(slot.result, command.result) else _Action.CONFLICT
        return _refuse(action, slot, final=True)
    if (command.owner, command.fence) != (slot.owner, slot.fence):
        return _refuse(_Action.STALE_OWNER, slot)
    here = (command.round_index, command.slot_index)
    if slot.state is _State.AMBIGUOUS:
        known = values.same_frames(slot.evidence, command.result)
        record = r.ToolEvidence(*here, command.owner, command.fence, command.result)
        answer = SlotAnswer(_Action.AMBIGUOUS, slot, slot.owner, slot.fence)
        return Decision(answer, () if known else (record,))
    if slot.state is _State.CLAIMED:
        return _refuse(_Action.INVALID_STATE, slot)
    late = now >= slot.lease_end
    # A late completion is accepted while nobody has changed the slot: it is the only proof of the outcome.
    guard = Guard(not_before=slot.lease_end) if late else Guard(not_after=slot.lease_end - 1)
    done = msgspec.structs.replace(slot, state=_State.COMPLETED, result=command.result, late=late)
    answer = SlotAnswer(_Action.COMPLETED, done, slot.owner, slot.fence)
    return Decision(answer, (r.ToolCompleted(*here, command.result, late),), guard)


def _doubt(command: c.DoubtTool, slot: Slot) -> SlotDecision:
    if slot.state is _State.COMPLETED:
        return _refuse(_Action.CACHED, slot, final=True)
    if slot.state is _State.AMBIGUOUS:
        return _refuse(_Action.AMBIGUOUS, slot)
    if (command.owner, command.fence) != (slot.owner, slot.fence):
        return _refuse(_Action.STALE_OWNER, slot)
    if slot.state is _State.CLAIMED:
        return _refuse(_Action.INVALID_STATE, slot)
    ambiguous = msgspec.structs.replace(slot, state=_State.AMBIGUOUS)
    answer = SlotAnswer(_Action.AMBIGUOUS, ambiguous, slot.owner, slot.fence, slot.lease_end)
    return Decision(answer, (r.ToolAmbiguous(command.round_index, command.slot_index, command.reason),))


def _resolve(state: TurnState, command: c.ResolveTool, slot: Slot | None) -> SlotDecision:
    where = f"turn {state.trace_id!r} round {command.round_index} slot {command.slot_index}"
    if slot is None:
        raise TurnCheckpointError(f"{where} was never claimed: there is nothing to resolve")
    if command.fence is not None and command.fence != slot.fence:
        raise TurnCheckpointConflict(
            f"{where} has run again since: the evidence is about fence {command.fence}, it now has fence {slot.fence}"
        )
    if slot.state is not _State.AMBIGUOUS:
        same = command.resolution is Resolution.HAPPENED and values.same_frames(slot.result, command.result)
        if same and slot.resolution is Resolution.HAPPENED:
            return _refuse(_Action.CACHED, slot, final=True)
        raise TurnCheckpointConflict(f"{where} is {slot.state.value}, not AMBIGUOUS: there is nothing to resolve")
    if slot.resolution is command.resolution and values.same_frames(slot.result, command.result):
        return _refuse(_Action.AMBIGUOUS, slot)
    record = r.ToolResolved(
        command.round_index, command.slot_index, command.resolution, command.who, command.why, command.result
    )
    match command.resolution:
        case Resolution.HAPPENED:
            action, after = _Action.COMPLETED, _State.COMPLETED
        case Resolution.DID_NOT_HAPPEN:
            active = state.phase is TurnPhase.ASSISTANT_RESERVED and command.round_index == state.current_round
            if not active:
                raise TurnCheckpointError(f"{where} belongs to a round that is over: it cannot run again")
            action, after = _Action.ABANDONED, _State.CLAIMED
        case Resolution.UNKNOWN:
            action, after = _Action.AMBIGUOUS, _State.AMBIGUOUS
    resolved = msgspec.structs.replace(slot, state=after, result=command.result, resolution=command.resolution)
    return Decision(SlotAnswer(action, resolved, slot.owner, slot.fence), (record,))
