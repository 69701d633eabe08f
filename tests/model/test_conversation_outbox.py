"""The rules of the outbox and of the inbound journal (flows.md, F3 O1 to O4, F2 J1 to J5), rule by rule."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.model.conversations_hand import LEASE, LOST, START, Hand
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import Claimed, Receipt
from turnkeeper.conversation.state import SendKey, SendState, find_send
from turnkeeper.errors import ConversationError, OutboxConflict


def at_work() -> Hand:
    """Message 1 is claimed, and begins a flow."""
    hand = Hand()
    hand.receive(1)
    hand.claim(1, "start")
    return hand


# --- the outbox (F3) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("sent", SendState.SENT), ("refused", SendState.DEAD), ("unknown", SendState.AMBIGUOUS)],
)
def test_o1_a_settled_send_is_known(outcome: str, state: SendState) -> None:
    """O1: same key, same content: it is not sent again, and its stored outcome is given back."""
    hand = at_work()
    hand.begin(1, 0)
    hand.settle_send(1, 0, outcome)
    answer = hand.begin(1, 0)
    assert (answer.what, hand.records) == ("known", [])
    assert answer.send is not None
    assert answer.send.state is state
    assert answer.send.message_id == ("id" if outcome == "sent" else "")


def test_o1_a_send_under_way_is_in_doubt() -> None:
    """O1: what was begun and not settled may be out; it is begun again only where that is known to be harmless."""
    hand = at_work()
    hand.begin(1, 0)
    hand.now += LEASE
    hand.claim(1, owner="b")
    assert (hand.begin(1, 0).what, hand.records) == ("in_doubt", [])
    assert hand.begin(1, 0, again=True).what == "begun"
    send = find_send(hand.state, SendKey(1, 0))
    assert send is not None
    assert (send.state, send.fence) == (SendState.SENDING, 2)


def test_o1_a_send_of_a_live_owner_is_left_to_him() -> None:
    """O1, R1: nobody but the owner begins or settles anything, and he does not begin behind the end of his lease."""
    hand = at_work()
    begin = c.BeginSend("b", hand.state.fence, SendKey(1, 0), b"", "")
    assert hand.ask(begin) == [LOST]
    hand.begin(1, 0)
    hand.now += LEASE
    assert hand.ask(c.BeginSend(*hand.mine, SendKey(1, 1), b"", "")) == [LOST]
    assert hand.settle_send(1, 0).what == "known", "what it has sent it may still say"
    assert hand.state.sends[0].state is SendState.SENT


@pytest.mark.parametrize("state", ["SENDING", "SENT", "RETRY", "DEAD", "AMBIGUOUS"])
def test_o2_other_content_is_a_conflict(state: str) -> None:
    """O2: same key, different content: nothing is sent, and nothing of the append is in."""
    hand = at_work()
    hand.begin(1, 0)
    outcomes = {"SENT": "sent", "RETRY": "postponed", "DEAD": "refused", "AMBIGUOUS": "unknown"}
    if state in outcomes:
        hand.settle_send(1, 0, outcomes[state])
    before = hand.state
    for again in (False, True):
        with pytest.raises(OutboxConflict):
            hand.begin(1, 0, "something else", again=again)
    assert hand.state == before


def test_o3_a_send_that_is_not_out_holds_the_later_ones() -> None:
    """O3: sends go out in the order of their keys; one to be tried again holds the rest, until it is settled."""
    hand = at_work()
    hand.begin(1, 0)
    hand.settle_send(1, 0, "postponed", not_before=hand.now + 10)
    held = hand.begin(1, 1)
    assert (held.what, held.send) == ("held", hand.state.sends[0])
    assert hand.begin(1, 0).what == "later"
    hand.now += 10
    assert hand.begin(1, 0).what == "begun"
    assert hand.begin(1, 1).what == "held", "also while it is under way"
    hand.settle_send(1, 0, "refused")
    assert hand.begin(1, 1).what == "begun"


def test_o4_chunks_have_their_own_keys() -> None:
    """O4: a failure in the middle goes on at the first chunk that is not out."""
    hand = at_work()
    for chunk in (0, 1):
        key = SendKey(1, 0, chunk)
        hand.ask(c.BeginSend(*hand.mine, key, b"part", f"part {chunk}"), c.SettleSend(*hand.mine, key, "sent", "id"))
    again = [c.BeginSend(*hand.mine, SendKey(1, 0, chunk), b"part", f"part {chunk}") for chunk in range(3)]
    assert [answer.what for answer in hand.ask(*again)] == ["known", "known", "begun"]


@pytest.mark.parametrize("first", ["sent", "refused", "unknown"])
def test_the_first_word_about_a_send_counts(first: str) -> None:
    """Invariants 8 and 12: what became of a send is not changed by a later word of its owner."""
    hand = at_work()
    hand.begin(1, 0)
    hand.settle_send(1, 0, first)
    for outcome in ("refused", "unknown", "postponed", "sent"):
        hand.settle_send(1, 0, outcome, reason="no")
        assert hand.records == []


def test_ambiguous_is_left_with_an_entry_only() -> None:
    """Invariant 12: somebody settles it, by name and reason; nothing else that is asked does, and only once."""
    hand = at_work()
    hand.begin(1, 0)
    hand.settle_send(1, 0, "unknown")
    hand.begin(1, 0, again=True)
    assert hand.state.sends[0].state is SendState.AMBIGUOUS
    hand.ask(c.EndFlow(*hand.mine, 1, "done"), c.Settle(*hand.mine, 1, "handled"))
    assert hand.state.attention == "unknown_send"
    resolve = c.ResolveSend(SendKey(1, 0), True, "ann", "it is in the chat", "id")
    hand.ask(resolve)
    assert hand.records == [r.SendResolved(SendKey(1, 0), True, "ann", "it is in the chat", "id")]
    with pytest.raises(ConversationError):
        hand.ask(resolve)


# --- the inbound journal (F2) ------------------------------------------------------------------------------------


def test_j1_a_duplicate_is_acknowledged_and_ignored() -> None:
    """J1: of a pending, of a claimed and of a done message."""
    hand = Hand()
    assert hand.receive(7) == Receipt(1, duplicate=False)
    for _ in ("pending", "claimed", "done"):
        assert hand.receive(7).duplicate
        assert hand.records == []
        if hand.state.head is not None:
            if hand.state.owner:
                hand.ask(c.Settle(*hand.mine, 1, "handled"))
            else:
                hand.claim(1, "start", start=None)
    assert (hand.state.received, hand.state.settled) == (1, 1)


def test_j2_only_the_first_unsettled_message_is_claimed() -> None:
    """J2: numbers are dense; who is about another message is told to look again."""
    hand = Hand()
    assert [hand.receive(number).number for number in (5, 3, 9)] == [1, 2, 3]
    for about in (2, 3, 4):
        assert hand.claim(about).what == "changed"
        assert hand.records == []
    assert hand.claim(1, "start").what == "work"


def test_j2_a_message_that_waits_holds_the_later_ones() -> None:
    """J2: put back for later, it is still the first."""
    hand = at_work()
    hand.receive(2)
    hand.ask(c.ReturnMessage(*hand.mine, 1, "busy", 500))
    assert hand.claim(1).what == "later"
    assert hand.claim(2).what == "changed"
    hand.now += 500
    assert hand.claim(1).mode == "resume"


def test_j3_every_write_of_an_owner_carries_the_fence() -> None:
    """J3, invariant 6: whoever lost the conversation writes nothing, whatever it is, and alone or with others."""
    hand = at_work()
    old = hand.mine
    hand.now += LEASE
    hand.claim(1, owner="b")
    row = hand.row
    for command in (
        c.Renew(*old, LEASE),
        c.BeginSend(*old, SendKey(1, 0), b"", ""),
        c.SettleSend(*old, SendKey(1, 0), "sent"),
        c.KeepAnswer(*old, 1, b""),
        c.KeepValue(*old, "x", b""),
        c.SetRow(*old, row),
        c.SetTimer(*old, "t", b""),
        c.CancelTimer(*old, "t"),
        c.EndFlow(*old, 1, "done"),
        c.Settle(*old, 1, "handled"),
        c.Supersede(*old, 1, 2),
        c.Steer(*old, 1, 2),
        c.ReturnMessage(*old, 1, "", 0),
        c.Release(*old),
    ):
        for owner in (command, replace(command, owner="b")):
            for asked in ((owner,), (c.Renew(*hand.mine, LEASE), owner)):
                assert hand.ask(*asked) == [LOST]
                assert hand.records == []


@pytest.mark.parametrize("outcome", [None, "postponed"])
def test_j4_not_done_before_its_sends_are_settled(outcome: str | None) -> None:
    """J4: a message is DONE only when every send that it caused is SENT, DEAD or AMBIGUOUS."""
    hand = at_work()
    hand.begin(1, 0)
    if outcome is not None:
        hand.settle_send(1, 0, outcome)
    for command in (c.Settle(*hand.mine, 1, "handled"), c.Supersede(*hand.mine, 1, 2)):
        with pytest.raises(ConversationError):
            hand.ask(c.EndFlow(*hand.mine, 1, "done"), command)
    assert hand.row.ended is None
    hand.settle_send(1, 0, "unknown")
    hand.ask(c.EndFlow(*hand.mine, 1, "done"), c.Settle(*hand.mine, 1, "handled"))
    assert hand.state.settled == 1


def test_j4_also_sends_that_count_on_from_an_earlier_message() -> None:
    """J4, invariant 11: a step that runs again sends under its old cause; nothing is left SENDING behind it."""
    hand = Hand()
    hand.parked(first_wait=True, parked=False, cause=(1, 1))
    hand.receive(2)
    hand.claim(2, live=hand.row.revision)
    hand.begin(1, 1)
    with pytest.raises(ConversationError):
        hand.ask(c.Settle(*hand.mine, 2, "parked"))


def fail(hand: Hand, times: int, **more: Any) -> Claimed:
    """Message 1 fails that often, and is claimed once more."""
    for _ in range(times):
        assert hand.claim(1, "start", most=times, **more).what == "work"
        hand.ask(c.ReturnMessage(*hand.mine, 1, "ValueError", 0))
    return hand.claim(1, "start", most=times, **more)


def test_j5_a_quarantined_message_holds_its_conversation() -> None:
    """J5: by default; it is kept, reported, and goes on, or not, when somebody says so."""
    hand = Hand()
    hand.receive(1)
    hand.receive(2)
    assert fail(hand, 3).what == "moved_on"
    assert hand.state.owner == ""
    assert hand.state.attention == "quarantined"
    assert (hand.claim(1).what, hand.claim(2).what) == ("held", "held")
    hand.ask(c.ResolveMessage(1, False, "ann", "fixed"))
    assert hand.claim(1).what == "work"
    with pytest.raises(ConversationError):
        hand.ask(c.ResolveMessage(1, True, "ann", "not quarantined any more"))


def test_j5_a_quarantined_message_is_skipped_on_wish() -> None:
    """J5: `on_poison="skip"` drops it with an entry, and the next one is handled."""
    hand = Hand()
    hand.receive(1)
    hand.receive(2)
    assert fail(hand, 2, on_poison="skip").what == "moved_on"
    assert [type(record) for record in hand.records][-3:] == [r.Quarantined, r.Dropped, r.Released]
    assert hand.claim(2).what == "work"


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("postponed", [False, True])
def test_j5_what_a_dropped_message_has_begun_holds_nothing(skip: bool, postponed: bool) -> None:
    """J5, O3, invariant 11: its open sends are given up as unknown, or as not sent; later messages are not held by them."""
    hand = Hand()
    hand.receive(1)
    hand.receive(2)
    hand.claim(1, "start", most=1)
    hand.begin(1, 0)
    if postponed:
        hand.settle_send(1, 0, "postponed")
    hand.now += LEASE
    assert hand.claim(1, owner="b", most=1, on_poison="skip" if skip else "hold").what == "moved_on"
    if not skip:
        hand.ask(c.ResolveMessage(1, True, "ann", "never mind"))
    assert [send.state for send in hand.state.sends] == [SendState.DEAD if postponed else SendState.AMBIGUOUS]
    hand.claim(2)
    assert hand.begin(2, 0).what == "begun"


def test_attempts_are_counted_until_it_gets_on() -> None:
    """F2: an attempt is a claim; progress begins the count anew; waiting for somebody is none."""
    hand = Hand()
    hand.receive(1)
    for _ in range(2):
        hand.claim(1, "start")
        hand.ask(c.ReturnMessage(*hand.mine, 1, "", 0))
    hand.claim(1, "start")
    head = hand.state.head
    assert head is not None
    assert head.attempts == 3
    hand.send(1, 0)
    head = hand.state.head
    assert head is not None
    assert head.attempts == 1
    hand.ask(c.ReturnMessage(*hand.mine, 1, "waits", 0, counts=False))
    head = hand.state.head
    assert head is not None
    assert head.attempts == 0


def test_a_process_that_dies_under_one_name_runs_out_of_attempts() -> None:
    """F2: claims under the same fence count, too: a message that kills its process at once is set aside in the end."""
    hand = Hand()
    hand.receive(1)
    whats = [hand.claim(1, "start", most=3).what for _ in range(4)]
    assert whats == ["work", "work", "work", "moved_on"]
    assert hand.state.attention == "quarantined"


def test_r1_nobody_takes_over_from_a_live_owner() -> None:
    """R1: busy until its lease is over; every write renews that; then the fence grows."""
    hand = at_work()
    hand.now += LEASE - 1
    busy = hand.claim(1, owner="b")
    assert (busy.what, busy.until) == ("busy", hand.now + 1)
    hand.ask(c.KeepValue(*hand.mine, "x", b""))
    hand.now += LEASE - 1
    assert hand.claim(1, owner="b").what == "busy"
    hand.now += 1
    assert hand.claim(1, owner="b").fence == 2


def test_messages_are_steered_and_come_back() -> None:
    """J2: what is handed to a running turn is nobody's first message; what does not get into it is handled by itself."""
    hand = at_work()
    hand.receive(2)
    hand.receive(3)
    assert hand.ask(c.Steer(*hand.mine, 1, 3)) == [(2, 3)]
    assert hand.ask(c.Steer(*hand.mine, 1, 3)) == [()]
    head = hand.state.head
    assert head is not None
    assert head.number == 1
    hand.ask(c.Settle(*hand.mine, 2, "steered"), c.EndFlow(*hand.mine, 1, "done"), c.Settle(*hand.mine, 1, "handled"))
    assert [(one.number, one.steered_into) for one in hand.state.inbound] == [(3, 0)]


def test_a_superseded_message_reaches_the_one_that_supersedes_it() -> None:
    """J2: never a loss: also where something else is between the two, which is handled first."""
    hand = at_work()
    hand.receive(2, "edit")
    hand.receive(3)
    hand.ask(c.EndFlow(*hand.mine, 1, "superseded"), c.Supersede(*hand.mine, 1, 3))
    hand.claim(2, "unasked", start=None)
    hand.ask(c.Settle(*hand.mine, 2, "unasked: edit"))
    hand.claim(3, "start", start=START)
    assert [one.number for one in hand.row.earlier] == [1]
    hand.ask(c.EndFlow(*hand.mine, 3, "done"), c.Settle(*hand.mine, 3, "handled"))
    assert hand.state.superseded == ()


def test_nothing_is_kept_where_there_is_no_flow() -> None:
    """F1: a value has no place without a flow's row; that is said, and nothing breaks."""
    hand = at_work()
    hand.ask(c.DeleteRow())
    for command in (c.KeepValue(*hand.mine, "x", b""), c.KeepAnswer(*hand.mine, 1, b"")):
        with pytest.raises(ConversationError):
            hand.ask(command)


def test_a_timer_fires_once_and_not_before_its_time() -> None:
    """F2: it becomes a message when it is due by the store's clock, and is gone then."""
    hand = at_work()
    assert hand.ask(c.SetTimer(*hand.mine, "t", b"time", after_ms=50)) == [hand.now + 50]
    fire = c.FireTimer("t", b"timer event.")
    assert hand.ask(fire) == [None]
    hand.now += 50
    assert hand.ask(fire) == [Receipt(2, duplicate=False)]
    assert hand.ask(fire) == [None]
    assert hand.state.timers == ()
