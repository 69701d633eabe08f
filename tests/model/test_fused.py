"""Commands that are put together (`decide_all`), and the proof deadline (journal.md T1.7)."""

from __future__ import annotations

import pytest

from tests.model.desk import (
    CHARGE,
    LEASE,
    MAIL,
    NOON,
    Desk,
    begin,
    claim,
    commit,
    complete,
    reserve,
    reserved,
    start,
    with_slot,
)
from turnkeeper.errors import TurnCheckpointError
from turnkeeper.log.record import Guard
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.evolve import TurnRules
from turnkeeper.turn.names import ToolCallAction, ToolCallState, TurnPhase

A = ToolCallAction
S = ToolCallState
DEADLINE = NOON + 50


# --- one append for what lies between two effects ------------------------------------------------------------


def test_each_command_sees_those_before_it() -> None:
    """A completion, the commit, and the next round's first begin are one append."""
    desk = with_slot(S.EXECUTING)
    done, _, _, begun = desk.put(complete(), commit(0), reserve(1, MAIL), claim(round_index=1, call=MAIL, begin=True))
    assert done is not None
    assert begun is not None
    assert (done.action, begun.action) == (A.COMPLETED, A.BEGUN)
    assert [type(record) for record in desk.written] == [
        r.ToolCompleted,
        r.RoundCommitted,
        r.AssistantReserved,
        r.ToolBegun,
    ]


@pytest.mark.parametrize(
    ("stored", "owner", "action"),
    [
        (S.EXECUTING, "b", A.STALE_OWNER),
        (S.AMBIGUOUS, "a", A.AMBIGUOUS),
        (S.CLAIMED, "a", A.INVALID_STATE),
        (None, "a", A.MISSING),
    ],
)
def test_stops_behind_an_answer_that_does_not_let_go_on(
    stored: ToolCallState | None, owner: str, action: ToolCallAction
) -> None:
    """The answers end with the refusing one; what stood before it is in, what stands behind it is not."""
    desk = with_slot(stored)
    answers = desk.put(complete(owner, result={"ok": False}), commit(0), reserve(1))
    assert [answer and answer.action for answer in answers] == [action]
    assert desk.phase is TurnPhase.ASSISTANT_RESERVED


def test_prefix_is_appended() -> None:
    """A busy second slot does not keep the first one's completion out."""
    desk = reserved(CHARGE, MAIL, MAIL)
    desk.put(claim(begin=True), claim("b", slot_index=1, call=MAIL, begin=True))
    answers = desk.put(
        complete(), claim("a", slot_index=1, call=MAIL, begin=True), claim("a", slot_index=2, call=MAIL, begin=True)
    )
    assert [answer and answer.action for answer in answers] == [A.COMPLETED, A.BUSY]
    assert [type(record) for record in desk.written] == [r.ToolCompleted]


def test_repeats_let_go_on() -> None:
    """CACHED, COMPLETED and commands of the turn that are known already go on: a repeated sequence comes to its end."""
    desk = with_slot(S.COMPLETED)
    answers = desk.put(reserve(0, CHARGE), complete(), commit(0), commit(0))
    assert [answer and answer.action for answer in answers] == [None, A.CACHED, None, None]
    assert [type(record) for record in desk.written] == [r.RoundCommitted]


def test_refusal_of_the_turn_takes_all_back() -> None:
    """A refused command of the turn raises, and nothing of the sequence is appended."""
    desk = with_slot(S.EXECUTING)
    before = desk.state
    with pytest.raises(TurnCheckpointError):
        desk.put(complete(), commit(0), commit(1))
    assert desk.state == before


def test_guards_meet() -> None:
    """LOG-4: the append happens only while every command's guard holds."""
    desk = reserved(CHARGE, MAIL)
    desk.put(claim())
    desk.now += 10
    desk.put(claim(slot_index=1, call=MAIL))
    desk.now = NOON + LEASE + 5  # the first lease is over, the second is not
    desk.put(claim("b"), begin("a", slot_index=1))
    assert desk.guard == Guard(not_before=NOON + LEASE, not_after=NOON + 10 + LEASE - 1)


def test_final_only_if_all_are() -> None:
    """An answer may come from what a worker knows only if no record can change any part of it."""
    completed = with_slot(S.COMPLETED).state
    assert decide_all(completed, [claim("b")], NOON).final
    assert decide_all(completed, [reserve(0), complete()], NOON).final
    assert not decide_all(completed, [claim("b"), claim(slot_index=1)], NOON).final
    assert not decide_all(with_slot(S.AMBIGUOUS).state, [claim("b")], NOON).final


# --- T1.7 ----------------------------------------------------------------------------------------------------


def test_start_behind_the_proof_deadline() -> None:
    """T1.7 b, ambiguity 10: a missing log does not prove any more that nothing happened; at the deadline it still does."""
    desk = Desk()
    desk.now = DEADLINE
    desk.put(start(deadline=DEADLINE))
    assert desk.guard == Guard(not_after=DEADLINE)
    desk.now = DEADLINE + 1
    desk.put(start(deadline=DEADLINE))
    assert desk.written == (), "a turn that is there is there"
    late = Desk()
    late.now = DEADLINE + 1
    with pytest.raises(TurnCheckpointError, match="proof deadline"):
        late.put(start(deadline=DEADLINE))
    late.put(start(deadline=0))


def test_begin_behind_the_proof_deadline() -> None:
    """T1.7 b: `begin_tool` is refused, though its lease is live."""
    desk = with_slot(S.CLAIMED, deadline=DEADLINE)
    desk.now = DEADLINE + 1
    assert desk.ask(begin()).action is A.LEASE_EXPIRED
    assert desk.slot().state is S.CLAIMED
    desk.now = DEADLINE
    assert desk.ask(begin()).action is A.BEGUN
    assert desk.guard == Guard(not_after=DEADLINE)


@pytest.mark.parametrize("stored", [None, S.CLAIMED])
def test_claim_that_begins_behind_the_proof_deadline(stored: ToolCallState | None) -> None:
    """T1.7 b: nor where claim and begin are one append; a plain claim crosses no barrier."""
    desk = with_slot(stored, deadline=DEADLINE)
    desk.now = DEADLINE + 1
    assert desk.ask(claim(begin=True)).action is A.LEASE_EXPIRED
    assert desk.written == ()
    assert desk.ask(claim()).action is A.ACQUIRED
    desk = with_slot(stored, deadline=DEADLINE)
    desk.now = DEADLINE
    assert desk.ask(claim(begin=True)).action is A.BEGUN
    assert desk.guard is not None
    assert desk.guard.not_after == DEADLINE


def test_replay_behind_the_proof_deadline() -> None:
    """T1.7 b: nor is a replay-safe slot run again; what is COMPLETED or in doubt is told as ever."""
    desk = with_slot(S.EXECUTING, replay_safe=True, deadline=DEADLINE)
    desk.now = NOON + LEASE
    assert desk.ask(claim("b", replay_safe=True, begin=True)).action is A.LEASE_EXPIRED
    for state, action in ((S.COMPLETED, A.CACHED), (S.AMBIGUOUS, A.AMBIGUOUS), (S.EXECUTING, A.AMBIGUOUS)):
        desk = with_slot(state, deadline=DEADLINE)
        desk.now = NOON + LEASE
        assert desk.ask(claim("b", begin=True)).action is action


def test_proof_is_kept_until_its_deadline() -> None:
    """T1.7 a, T1.6: kept for the time to live after the last change, and never less than until the deadline."""
    desk = with_slot(S.CLAIMED, deadline=DEADLINE)
    head = TurnRules(ttl_ms=10).head(desk.state)
    assert (head.ttl_ms, head.keep_until) == (10, DEADLINE)
    desk.put(start(deadline=DEADLINE + 1000))
    assert desk.state.proof_deadline == DEADLINE, "the first writer's"
