"""What must hold for every accepted append, whoever wrote it: checked on the state before, the records, and the state after.

Written from journal.md (T2, T3) and the invariants of flows.md, without a look at how the rules do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.model.world import Appending, Broken
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import ToolCall
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.state import Slot, Transcript, TurnState, final_model, final_text, thaw_messages

_P = TurnPhase
_S = ToolCallState

PHASE_MOVES: Final = frozenset(
    {
        (None, _P.STARTED),
        (_P.STARTED, _P.ASSISTANT_RESERVED),
        (_P.ROUND_COMMITTED, _P.ASSISTANT_RESERVED),
        (_P.ASSISTANT_RESERVED, _P.ROUND_COMMITTED),
        (_P.STARTED, _P.FINAL_MODEL_SAVED),
        (_P.ASSISTANT_RESERVED, _P.FINAL_MODEL_SAVED),
        (_P.ROUND_COMMITTED, _P.FINAL_MODEL_SAVED),
        (_P.FINAL_MODEL_SAVED, _P.DELIVERY_RESERVED),
        (_P.DELIVERY_RESERVED, _P.DELIVERED),
        (_P.DELIVERED, _P.COMPLETED),
        # with allow_no_output
        (_P.STARTED, _P.COMPLETED),
        (_P.ASSISTANT_RESERVED, _P.COMPLETED),
        (_P.ROUND_COMMITTED, _P.COMPLETED),
        (_P.FINAL_MODEL_SAVED, _P.COMPLETED),
    }
)
"""T2's table: from which phase to which, by one record."""

SLOT_MOVES: Final = frozenset(
    {
        (None, _S.CLAIMED),
        (None, _S.EXECUTING),  # claim and begin in one append
        (_S.CLAIMED, _S.CLAIMED),
        (_S.CLAIMED, _S.EXECUTING),
        (_S.EXECUTING, _S.EXECUTING),
        (_S.EXECUTING, _S.CLAIMED),
        (_S.EXECUTING, _S.COMPLETED),
        (_S.EXECUTING, _S.AMBIGUOUS),
        (_S.COMPLETED, _S.COMPLETED),
        (_S.AMBIGUOUS, _S.AMBIGUOUS),
        (_S.AMBIGUOUS, _S.COMPLETED),
        (_S.AMBIGUOUS, _S.CLAIMED),
    }
)
"""T3: from which slot state to which, by one record."""


def slots_of(state: TurnState) -> Iterator[tuple[tuple[int, int], Slot]]:
    """The slots that were ever claimed, by (round, index)."""
    round_ = state.round
    while round_ is not None:
        for index, slot in enumerate(round_.slots):
            if slot is not None:
                yield (round_.index, index), slot
        round_ = round_.previous


def audit(a: Appending) -> None:
    """All audits of one accepted append."""
    audit_revision(a)
    audit_phase(a)
    audit_canonical(a)
    audit_slots(a)
    audit_fence(a)
    audit_barrier(a)


def audit_revision(a: Appending) -> None:
    """T1.4, invariant 5: the revision grows by one with each record."""
    if a.after.revision != a.before.revision + len(a.verdict.records):
        raise Broken("revision strictly increases", a)


def audit_phase(a: Appending) -> None:
    """T2: phases move as in the table, and a finished turn stays finished."""
    before, after = a.before, a.after
    if (
        before.phase is not after.phase
        and len(a.verdict.records) == 1
        and (before.phase, after.phase) not in PHASE_MOVES
    ):
        raise Broken("phases move as in T2's table", (before.phase, after.phase))
    if before.completed and not after.completed:
        raise Broken("a finished turn stays finished", a.ask)
    if before.completed and not all(isinstance(x, _AFTER_THE_END) for x in a.verdict.records):
        raise Broken("nothing but evidence is written behind COMPLETED", a.verdict.records)
    if after.current_round < before.current_round:
        raise Broken("the current round never goes back", a)


_AFTER_THE_END: Final = (r.ToolEvidence, r.ToolResolved, r.DeliveryDisputed)


def audit_canonical(a: Appending) -> None:
    """Invariant 8, T2's repeat rules: what is canonical never changes."""
    before, after = a.before, a.after
    if before.phase is not None and _origin(before) != _origin(after):
        raise Broken("the canonical input never changes", a)
    if before.round is not None and [d for d in _decisions(after) if d[0] <= before.current_round] != _decisions(
        before
    ):
        raise Broken("a reserved decision never changes", a)
    if before.final_model is not None and final_model(before) != final_model(after):
        raise Broken("the final content never changes", a)
    if before.delivery is not None and _reply(before) != _reply(after):
        raise Broken("the reserved reply never changes", a)
    if before.sent_message_id is not None and before.sent_message_id != after.sent_message_id:
        raise Broken("the message id of the reply never changes", a)
    if before.phase is not None and _committed(before) == _committed(after):
        if thaw_messages(before.transcript) != thaw_messages(after.transcript):
            raise Broken("the canonical transcript never changes", a)
        if before.runtime != after.runtime:
            raise Broken("the committed runtime never changes", a)


def _origin(state: TurnState) -> tuple[object, ...]:
    first = state.transcript
    while first is not None and first.previous is not None:
        first = first.previous
    return state.trace_id, state.scope, state.input_fingerprint, state.tool_names, state.proof_deadline, first


def _decisions(state: TurnState) -> list[tuple[int, bytes, object]]:
    decisions: list[tuple[int, bytes, object]] = []
    round_ = state.round
    while round_ is not None:
        decisions.append((round_.index, round_.response, round_.calls))
        round_ = round_.previous
    return decisions


def _committed(state: TurnState) -> int:
    count = 0
    transcript: Transcript | None = state.transcript
    while transcript is not None:
        count += 1
        transcript = transcript.previous
    return count


def _reply(state: TurnState) -> tuple[object, ...]:
    assert state.delivery is not None
    return state.delivery.key, final_text(state), state.delivery.presentation


def audit_slots(a: Appending) -> None:
    """T3: slot states move as in the table; a result stays; AMBIGUOUS is left only through an audited record."""
    after = dict(slots_of(a.after))
    records = a.verdict.records
    for where, slot in slots_of(a.before):
        now = after.get(where)
        if now is None:
            raise Broken("a slot never vanishes", where)
        if len(records) == 1 and (slot.state, now.state) not in SLOT_MOVES:
            raise Broken("slot states move as in T3", (slot.state, now.state))
        if slot.state is _S.COMPLETED and (now.state, now.result) != (slot.state, slot.result):
            raise Broken("a COMPLETED result never changes", a)
        resolved = any(isinstance(x, r.ToolResolved) and (x.round_index, x.slot_index) == where for x in records)
        if slot.state is _S.AMBIGUOUS and now.state is not _S.AMBIGUOUS and not resolved:
            raise Broken("AMBIGUOUS is never left without an audit record", a)
        if now.replay_safe and not slot.replay_safe:
            raise Broken("replay_safe is only ever lowered", a)


def audit_fence(a: Appending) -> None:
    """Invariant 6: the fence grows with every change of owner, and a write with an old one is not accepted."""
    after = dict(slots_of(a.after))
    for where, slot in slots_of(a.before):
        now = after[where]
        if now.fence < slot.fence:
            raise Broken("a fence never goes back", (slot, now))
        if now.owner != slot.owner and now.fence <= slot.fence:
            raise Broken("the fence grows at each change of owner", (slot, now))
    before = dict(slots_of(a.before))
    evidence = any(isinstance(x, r.ToolEvidence | r.ToolAmbiguous) for x in a.verdict.records)
    for command, answer in zip(a.ask.commands, a.verdict.answers, strict=False):
        if not isinstance(command, c.BeginTool | c.RenewTool | c.AbandonTool | c.CompleteTool | c.DoubtTool):
            continue
        assert answer is not None
        wrote = answer.action in _WROTE or (answer.action is ToolCallAction.AMBIGUOUS and evidence)
        slot = before.get((command.round_index, command.slot_index))
        if wrote and (slot is None or (slot.owner, slot.fence) != (command.owner, command.fence)):
            raise Broken("no write with an old fence is accepted", (command, slot))


_WROTE: Final = frozenset(
    {ToolCallAction.BEGUN, ToolCallAction.RENEWED, ToolCallAction.ABANDONED, ToolCallAction.COMPLETED}
)


def audit_barrier(a: Appending) -> None:
    """T3, invariant 2: BEGUN is told exactly where the barrier was crossed, and an unsafe slot crosses it once.

    Once until it is resolved as not having happened, or abandoned: both make it CLAIMED again with a record of their own.
    """
    begun = [x for x in a.verdict.records if isinstance(x, r.ToolBegun)]
    told = [x for x in a.verdict.answers if x is not None and x.action is ToolCallAction.BEGUN]
    if len(begun) != len(told):
        raise Broken("BEGUN is told exactly where the barrier was crossed", a)
    before = dict(slots_of(a.before))
    for record in begun:
        slot = before.get((record.round_index, record.slot_index))
        if slot is not None and not slot.replay_safe and slot.state is not _S.CLAIMED:
            raise Broken("an unsafe slot is begun from CLAIMED alone", (slot, record))
    _audit_trap(a)
    after = dict(slots_of(a.after))
    for where, slot in before.items():
        if slot.state is _S.CLAIMED or after[where].state is not _S.CLAIMED or slot.replay_safe:
            continue
        if not any(_frees(x, where) for x in a.verdict.records):
            raise Broken("an unsafe slot is freed behind its barrier only by abandoning or resolving", a)


def _audit_trap(a: Appending) -> None:
    """T3, "Trap worth a test of its own": no call is made again in a later round while it is in doubt, unless asked to."""
    before, in_doubt = dict(slots_of(a.before)), set[tuple[int, ToolCall]]()
    round_ = a.before.round
    while round_ is not None:
        for call, slot in zip(round_.calls, round_.slots, strict=True):
            if slot is not None and slot.state is _S.AMBIGUOUS:
                in_doubt.add((round_.index, call))
        round_ = round_.previous
    for command in a.ask.commands:
        if isinstance(command, c.ClaimTool) and not command.repeat_ambiguous:
            new = (command.round_index, command.slot_index) not in before
            if new and any(index < command.round_index and call == command.call for index, call in in_doubt):
                raise Broken("a call in doubt is not made again in a later round", command)


def _frees(record: r.AnyRecord, where: tuple[int, int]) -> bool:
    if not isinstance(record, r.ToolAbandoned | r.ToolResolved) or (record.round_index, record.slot_index) != where:
        return False
    return isinstance(record, r.ToolAbandoned) or record.resolution is Resolution.DID_NOT_HAPPEN
