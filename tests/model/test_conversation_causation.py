"""What a message means for a flow's checkpoint (flows.md, F4, C1 to C9, and F6), rule by rule."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.model.conversations_hand import START, Hand
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import decide_all
from turnkeeper.conversation.state import Answer, Handover, Row
from turnkeeper.errors import FlowCheckpointConflict


def answer(number: int) -> Answer:
    """A message as a step is given it."""
    return Answer(number, "text", b"message %d" % number, 1_000_000)


def test_c1_a_flow_begins_with_its_row() -> None:
    """C1: the row {first step, inbound T, cause (T, 0)} is written with the claim, before any code runs."""
    hand = Hand()
    hand.receive(1)
    claimed = hand.claim(1, "start")
    assert [type(record) for record in hand.records] == [r.Owned, r.RowSet, r.Claimed]
    assert claimed.mode == "begin"
    assert claimed.row == hand.row
    assert (hand.row.step, hand.row.inbound, hand.row.cause, hand.row.answers) == ("first", 1, (1, 0), ())
    assert not hand.row.parked
    assert hand.row.message == answer(1)


def test_c1_where_nothing_begins_nothing_is_written() -> None:
    """C1: a message that begins no flow, where none is under way, leaves no row."""
    hand = Hand()
    hand.receive(1)
    assert hand.claim(1, "start", start=None).mode == "unasked"
    assert hand.state.row is None


def test_c1_a_flow_that_begins_anew_is_another_one() -> None:
    """C1: each message that begins a flow names its run; a restart leaves nothing of the run before."""
    hand = Hand()
    hand.parked(timer="t")
    before = hand.row
    hand.receive(2)
    assert hand.claim(2, "restart").mode == "begin"
    assert hand.row.instance != before.instance
    assert (hand.row.cause, hand.row.timer, hand.row.answers) == ((2, 0), "", ())


def test_c2_the_next_step_counts_from_where_the_last_one_came() -> None:
    """C2: a step's row carries the current causation; its sends go on under the next sequence."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    hand.send(1, 0)
    entered = replace(hand.row, step="second", entry=1, inbound=1, cause=(1, 1), answers=())
    assert hand.ask(c.SetRow(*hand.mine, entered)) == [2]
    assert hand.begin(1, 1, "from the second step").what == "begun"
    assert (hand.row.revision, hand.row.cause, hand.row.parked) == (2, (1, 1), False)


def test_c3_a_replay_runs_the_step_again() -> None:
    """C3: a row that captures the message is not given it again; its step runs from the start, with its cause and answers."""
    hand = Hand()
    hand.parked()
    hand.receive(2)
    hand.claim(2)
    taken = hand.row
    hand.now += 10_000  # its process died
    claimed = hand.claim(2, owner="b")
    assert claimed.mode == "resume"
    assert claimed.row == taken == hand.row
    assert [one.number for one in hand.row.answers] == [2]


def test_c3_a_replay_at_a_parked_row_is_settled() -> None:
    """C3: if the row is parked, there is nothing left to do for the message."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    hand.ask(c.SetRow(*hand.mine, replace(hand.row, parked=True)))
    hand.now += 10_000
    assert hand.claim(1, owner="b").what == "moved_on"
    assert (hand.state.head, hand.state.owner, hand.row.parked) == (None, "", True)


def test_c3_a_replay_at_an_ended_row_is_settled() -> None:
    """C3, C9: what is left of an ended flow's row settles the replay of its last message; no flow begins anew."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    hand.ask(c.EndFlow(*hand.mine, 1, "done"))
    hand.now += 10_000
    assert hand.claim(1, "start", owner="b").what == "moved_on"
    assert (hand.state.head, hand.row.ended) == (None, "done")


@pytest.mark.parametrize("live", [False, True])
def test_c4_the_answer_is_kept_before_any_code_runs(live: bool) -> None:
    """C4: {same step, answer T, inbound T, parked false, cause unchanged} is written with the claim."""
    hand = Hand()
    hand.parked()
    before = hand.row
    hand.receive(2)
    claimed = hand.claim(2, live=before.revision if live else None)
    assert claimed.mode == ("continue" if live else "answer")
    assert claimed.row == hand.row
    assert (hand.row.step, hand.row.inbound, hand.row.parked) == (before.step, 2, False)
    assert hand.row.answers == (answer(2),)
    assert hand.row.cause == before.cause == (1, 0)


def test_c4_a_continuation_of_another_revision_is_not_gone_on_with() -> None:
    """C4, R3: a continuation counts only while the row is the one that it parked with."""
    hand = Hand()
    hand.parked()
    hand.receive(2)
    assert hand.claim(2, live=hand.row.revision - 1).mode == "answer"


def test_c4_all_answers_of_the_step_are_kept() -> None:
    """F4, recommended: each wait's answer is added; in the seed's mode only the first wait's stands."""
    for first_wait, kept in ((False, (answer(2), answer(3))), (True, (answer(3),))):
        hand = Hand()
        hand.parked(first_wait=first_wait)
        hand.receive(2)
        hand.claim(2)
        hand.park(2)
        hand.receive(3)
        hand.claim(3)
        assert hand.row.answers == kept


def test_c5_a_lost_wait_is_woken_and_takes_no_answer() -> None:
    """C5: {same step, inbound T, cause (T, 0), no answer}: the step asks again, and T is not used as an answer."""
    hand = Hand()
    hand.parked(first_wait=True, parked=False, cause=(1, 1))
    hand.receive(2)
    claimed = hand.claim(2)
    assert claimed.mode == "woken"
    assert (hand.row.inbound, hand.row.cause, hand.row.answers) == (2, (2, 0), ())
    assert hand.row.message == answer(2)


def test_c5_a_wait_that_is_alive_is_answered_though_it_is_not_the_first() -> None:
    """C5: with a live continuation the message is the later wait's answer; the seed's mode does not keep it."""
    hand = Hand()
    hand.parked(first_wait=True, parked=False, cause=(1, 1))
    hand.receive(2)
    claimed = hand.claim(2, live=hand.row.revision)
    assert claimed.mode == "continue"
    assert (hand.row.inbound, hand.row.cause, hand.row.answers) == (2, (1, 1), ())


def test_c6_a_rejected_answer_leaves_the_wait() -> None:
    """C6: parked again, answer dropped, inbound T; the next message is the answer, and T is not replayed into it."""
    hand = Hand()
    hand.parked()
    hand.receive(2)
    hand.claim(2)
    hand.send(2, 0, "again, please")
    hand.park(2, answers=())
    hand.receive(3)
    assert hand.claim(3).mode == "answer"
    assert hand.row.answers == (answer(3),)
    assert hand.row.cause == (1, 0)


def test_c7_a_later_wait_that_is_asked_again_has_new_keys() -> None:
    """C7: with the cause moved on, the step that runs again finds its first prompt unsent."""
    hand = Hand()
    hand.parked(first_wait=True, parked=False, cause=(1, 1))
    hand.receive(2)
    hand.claim(2, live=hand.row.revision)
    hand.now += 10_000
    assert hand.claim(2, owner="b").mode == "resume"
    assert hand.begin(*hand.row.cause, "the first question").what == "begun"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("parked", [False, True])
def test_c8_what_came_before_the_prompt_is_no_answer_to_it(live: bool, parked: bool) -> None:
    """C8: a message at or below the watermark is unasked for, whoever holds the continuation; the next one is not."""
    hand = Hand()
    hand.receive(1)
    hand.receive(2)
    hand.claim(1, "start")
    hand.send(1, 0, watermark=True)
    assert hand.state.sends[0].watermark == 2
    hand.park(1, watermark=2, parked=parked)
    at = hand.row.revision if live else None
    row = hand.row
    assert hand.claim(2, live=at).mode == "unasked"
    assert hand.row == row
    hand.ask(c.Settle(*hand.mine, 2, "unasked"))
    hand.receive(3)
    assert hand.claim(3, live=at).mode == ("continue" if live else "answer" if parked else "woken")


def test_c8_a_prompt_that_was_out_keeps_its_watermark() -> None:
    """C8: the watermark is that of the moment when the prompt was first begun."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    hand.begin(1, 0, watermark=True)
    hand.receive(2)
    assert hand.begin(1, 0, watermark=True, again=True).what == "begun"
    hand.settle_send(1, 0)
    known = hand.begin(1, 0, watermark=True).send
    assert known is not None
    assert known.watermark == 1


def test_c9_an_ended_row_stays_until_the_next_flow() -> None:
    """C9: the row of a flow that is over keeps its inbound and its revision, and no state; DONE comes with or behind it."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start", start=replace(START, state=b"data"))
    hand.ask(c.EndFlow(*hand.mine, 1, "done"), c.Settle(*hand.mine, 1, "handled"))
    assert [type(record) for record in hand.records] == [r.RowEnded, r.Done, r.Released]
    assert (hand.row.inbound, hand.row.ended, hand.row.state, hand.row.revision) == (1, "done", b"", 2)
    assert hand.state.flow is None
    hand.receive(2)
    hand.claim(2, "start")
    assert (hand.row.revision, hand.row.ended) == (3, None)


def test_timers_of_other_waits_answer_nothing() -> None:
    """F1: a timer answers the wait that set it; any other that fires is a reminder."""
    hand = Hand()
    hand.parked(timer="mine")
    hand.receive(2)
    hand.claim(2, "unasked")
    for name in ("other", "mine"):
        hand.ask(c.SetTimer(*hand.mine, name, b"time", due=hand.now))
        hand.ask(c.FireTimer(name, name.encode().ljust(12)))
    hand.ask(c.Settle(*hand.mine, 2, "unasked"))
    assert hand.claim(3, "unasked").mode == "reminder"
    hand.ask(c.Settle(*hand.mine, 3, "reminder"))
    assert hand.claim(4, "unasked").mode == "answer"
    assert hand.state.timers == ()


# --- hand-over (F6) ----------------------------------------------------------------------------------------------


def handed_over(kind: str, expires: int = 0) -> Hand:
    """A parked row that another replica has left behind."""
    hand = Hand()
    hand.parked()
    left = Handover(kind, "a", hand.now, hand.now + expires if expires else 0)  # type: ignore[arg-type]
    hand.ask(c.PutRow(replace(hand.row, handover=left), hand.row.revision))
    hand.receive(2)
    return hand


def test_f6_an_ephemeral_row_is_adopted_once() -> None:
    """F6, R2: adoption clears the mark under a condition; whoever wanted the same is told that it is gone."""
    hand = handed_over("ephemeral", 60_000)
    seen = hand.row
    assert hand.claim(2, owner="b").mode == "answer"
    assert hand.row.handover is None
    assert hand.row.answers == (answer(2),)
    with pytest.raises(FlowCheckpointConflict):
        hand.ask(c.PutRow(replace(seen, handover=None), seen.revision))


def test_f6_an_ephemeral_row_that_is_run_again_is_adopted_too() -> None:
    """F6, C3: a replay of the message in the row goes on with it, and the mark is cleared."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    left = Handover("ephemeral", "a", hand.now, hand.now + 60_000)
    hand.ask(c.PutRow(replace(hand.row, handover=left), hand.row.revision), c.Release(*hand.mine))
    assert hand.claim(1, "start", owner="b").mode == "resume"
    assert hand.row.handover is None


def test_f6_an_expired_ephemeral_row_is_absent() -> None:
    """F6: behind its time it is not gone on with; the message begins a flow, and revisions go on."""
    hand = handed_over("ephemeral", 50)
    before = hand.row
    hand.now += 50
    claimed = hand.claim(2, owner="b")
    assert claimed.mode == "begin"
    assert (hand.row.instance != before.instance, hand.row.answers) == (True, ())
    assert hand.row.revision == before.revision + 1


@pytest.mark.parametrize(("passed", "estimate"), [(49, 60), (50, 10)])
def test_f6_whether_it_has_expired_is_the_stores_word(passed: int, estimate: int) -> None:
    """F6, LOG-4: a process whose clock is wrong decides nothing about the mark: its append is under a guard."""
    hand = handed_over("ephemeral", 50)
    claim = c.Claim("b", 1000, 2, "answer", START)
    decision = decide_all(hand.state, [claim], hand.now + estimate)
    assert decision.records
    assert decision.guard is not None
    assert decision.guard.holds(hand.now + estimate)
    assert not decision.guard.holds(hand.now + passed)


@pytest.mark.parametrize("about", [1, 2])
@pytest.mark.parametrize("intent", ["answer", "restart", "unasked", "cancel"])
def test_f6_a_stub_is_never_gone_on_with(about: int, intent: c.Intent) -> None:
    """F6: whatever comes to a stub ends it; no step of it runs."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    if about == 2:
        hand.ask(c.Settle(*hand.mine, 1, "handled"))
        hand.receive(2)
    stub = Handover("stub", "a", hand.now)
    hand.ask(c.PutRow(replace(hand.row, handover=stub), hand.row.revision))
    if hand.state.owner:
        hand.ask(c.Release(*hand.mine))
    assert hand.claim(about, intent, owner="b").mode == "cancel"
    hand.ask(c.EndFlow(*hand.mine, about, "interrupted"), c.Settle(*hand.mine, about, "interrupted"))
    assert (hand.row.ended, hand.row.handover, hand.state.head) == ("interrupted", None, None)


# --- the row under conditions (R2, R3) ---------------------------------------------------------------------------


def test_r2_a_row_is_set_over_the_revision_that_was_read() -> None:
    """R2: it succeeds iff the stored revision equals the expected one; the new row carries the next."""
    hand = Hand()
    row = Row("host", 1, "s")
    assert hand.ask(c.PutRow(row, 0, b"seed", "c")) == [1]
    with pytest.raises(FlowCheckpointConflict):
        hand.ask(c.PutRow(row, 0))
    assert hand.ask(c.PutRow(row, 1)) == [2]
    assert hand.row.revision == 2


def test_r2_a_row_without_revision_is_zero() -> None:
    """R2: absent, and set without a condition, both match 0; a plain set asks nothing."""
    hand = Hand()
    row = Row("host", 1, "s")
    assert hand.ask(c.PutRow(row, seed=b"seed", conversation_id="c")) == [0]
    assert hand.row.revision == 0
    assert hand.ask(c.PutRow(row, 0)) == [2]


def test_r2_deletion_does_not_reset_the_count() -> None:
    """R2 (ABA): a replica that holds an old revision cannot overwrite a new flow's row."""
    hand = Hand()
    row = Row("host", 1, "s")
    hand.ask(c.PutRow(row, 0, b"seed", "c"))
    with pytest.raises(FlowCheckpointConflict):
        hand.ask(c.DeleteRow(7))
    hand.ask(c.DeleteRow(1))
    assert hand.state.row is None
    assert hand.ask(c.PutRow(row, 0)) == [2]
    with pytest.raises(FlowCheckpointConflict):
        hand.ask(c.PutRow(row, 1))


def test_r2_deleting_nothing_writes_nothing() -> None:
    """R2: a row that is not there is deleted without a record."""
    hand = Hand()
    hand.receive(1)
    hand.ask(c.DeleteRow(0), c.DeleteRow())
    assert hand.records == []


def test_r3_an_owner_whose_row_was_changed_by_others_does_not_write() -> None:
    """R3: the owner's row is a conditional write as well, and nothing of its append is in."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    known = hand.row
    hand.ask(c.PutRow(known, known.revision))
    before = hand.state
    with pytest.raises(FlowCheckpointConflict):
        hand.ask(c.KeepValue(*hand.mine, "x", b""), c.SetRow(*hand.mine, known))
    assert hand.state == before
