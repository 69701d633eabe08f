"""Leases that are taken from an owner that is known to be dead: what ends, what is refused, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.model.conversations_hand import LEASE as HELD
from tests.model.conversations_hand import Hand
from tests.model.desk import CHARGE, LEASE, MAIL, NOON, Desk, begin, claim, complete, in_phase, reserved, with_slot
from turnkeeper.conversation import commands as cc
from turnkeeper.conversation import records as cr
from turnkeeper.conversation.decide import LOST
from turnkeeper.errors import ConversationError, OwnerAlive, TurnCheckpointBusy, TurnCheckpointConflict
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.leases import leases
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState, TurnPhase

A = ToolCallAction
S = ToolCallState
SILENT = NOON + LEASE // 2
"""From here on, an owner that renews at a third of its lease has missed it."""


def release(owner: str = "a", *, force: bool = False) -> c.ReleaseLeases:
    """Somebody says that it is dead."""
    return c.ReleaseLeases(owner, "ann", "its machine is gone", force)


def calling() -> Desk:
    """`a` calls the model."""
    desk = in_phase(TurnPhase.STARTED)
    desk.put(c.StartModel(0, "a", LEASE))
    return desk


def sending() -> Desk:
    """`a` sends the reply."""
    desk = in_phase(TurnPhase.FINAL_MODEL_SAVED)
    desk.put(c.ReserveDelivery("key", "text", None, "a", LEASE))
    return desk


HOLDING: dict[str, Callable[[], Desk]] = {
    "model call": calling,
    "claim of a tool call": lambda: with_slot(S.CLAIMED),
    "tool call": lambda: with_slot(S.EXECUTING),
    "reply": sending,
}


@pytest.mark.parametrize(("what", "desk"), HOLDING.items(), ids=HOLDING.keys())
def test_a_silent_owner_loses_what_it_holds(what: str, desk: Callable[[], Desk]) -> None:
    """Not before it has missed a renewal, on the store's clock; then at once, and by whose word is kept."""
    turn = desk()
    assert [lease.what for lease in leases(turn.state, turn.now)] == [what]
    turn.now = SILENT - 1
    with pytest.raises(OwnerAlive) as alive:
        turn.put(release())
    assert (alive.value.owner, alive.value.left_ms) == ("a", 1)
    turn.now = SILENT
    turn.put(release())
    assert turn.guard is not None
    assert turn.guard.not_before == SILENT
    assert turn.written == (r.LeasesReleased("a", "ann", "its machine is gone"),)
    assert list(leases(turn.state, turn.now)) == []
    assert turn.state.owner is None
    with pytest.raises(TurnCheckpointConflict, match="holds no lease"):
        turn.put(release())


@pytest.mark.parametrize("desk", HOLDING.values(), ids=HOLDING.keys())
def test_whoever_insists_need_not_wait(desk: Callable[[], Desk]) -> None:
    """With `force`, also from an owner that was heard of just now; it says nothing of the time then."""
    turn = desk()
    turn.put(release(force=True))
    assert turn.guard is None
    assert list(leases(turn.state, turn.now)) == []


def test_a_renewal_is_a_sign_of_life() -> None:
    """The time counts from the last renewal, and from its length."""
    desk = with_slot(S.EXECUTING)
    desk.now = SILENT
    desk.ask(c.RenewTool(0, 0, "a", 1, 10 * LEASE))
    desk.now = SILENT + 5 * LEASE - 1
    with pytest.raises(OwnerAlive):
        desk.put(release())
    desk.now += 1
    desk.put(release())


def test_only_that_owner_loses_and_only_what_is_open() -> None:
    """Two runs at one round: the other's call lives on, and what is done stays done."""
    desk = reserved(CHARGE, MAIL, CHARGE)
    desk.put(claim("a", begin=True), claim("b", slot_index=1, call=MAIL, begin=True))
    desk.put(claim("a", slot_index=2, begin=True), complete("a", slot_index=2))
    done = desk.slot(2)
    with pytest.raises(TurnCheckpointConflict, match="holds no lease"):
        desk.put(release("c", force=True))
    desk.put(release("a", force=True))
    assert [(lease.owner, lease.slot) for lease in leases(desk.state, desk.now)] == [("b", (0, 1))]
    assert desk.slot(2).result == done.result
    assert desk.ask(claim("a", slot_index=2)).action is A.CACHED


# --- what the old owner may still write, and what its successor finds (T3, T5) -----------------------------------


def test_before_the_barrier_it_is_fenced_off() -> None:
    """A claim is taken over under the next fence, and its old owner can begin nothing."""
    desk = with_slot(S.CLAIMED)
    desk.put(release(force=True))
    assert desk.ask(begin("a")).action is A.LEASE_EXPIRED
    taken = desk.ask(claim("b"))
    assert (taken.action, taken.fence) == (A.RECLAIMED, 2)
    assert desk.ask(begin("a")).action is A.STALE_OWNER


def test_behind_the_barrier_nothing_is_repeated() -> None:
    """The next run finds it ambiguous, as behind any lease: nobody knows whether it happened, and a late result is evidence."""
    desk = with_slot(S.EXECUTING)
    desk.put(release(force=True))
    assert desk.ask(c.RenewTool(0, 0, "a", 1, LEASE)).action is A.LEASE_EXPIRED
    assert desk.ask(c.AbandonTool(0, 0, "a", 1)).action is A.LEASE_EXPIRED
    assert desk.ask(claim("b")).action is A.AMBIGUOUS
    assert desk.ask(complete("a")).action is A.AMBIGUOUS
    assert desk.slot().evidence is not None


def test_a_result_that_comes_first_is_the_proof() -> None:
    """Its owner was alive after all, and nobody has touched the call since: its result is accepted, and marked late."""
    desk = with_slot(S.EXECUTING)
    desk.put(release(force=True))
    assert desk.ask(complete("a")).action is A.COMPLETED
    assert desk.slot().late


def test_what_may_run_again_runs_again() -> None:
    """Replay safe: the next owner gets the next fence."""
    desk = with_slot(S.EXECUTING, replay_safe=True)
    desk.put(release(force=True))
    assert desk.ask(claim("b", replay_safe=True)).action is A.RECLAIMED
    assert desk.ask(complete("a")).action is A.STALE_OWNER


def test_a_model_call_is_taken_over() -> None:
    """At once; its old owner cannot renew it."""
    desk = calling()
    assert desk.state.model is not None
    first = desk.state.model.invocation_id
    desk.put(release(force=True))
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.RenewModel(first, "a", LEASE))
    desk.put(c.StartModel(0, "b", LEASE))
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.FailModel(first, "a", "refused"))


def test_a_reply_is_doubted_and_not_sent_again_by_itself() -> None:
    """On a channel without keys or a look-up it may be out."""
    desk = sending()
    desk.put(release(force=True))
    desk.put(c.DoubtDelivery("b", "its sender is dead"))
    assert desk.state.attention == "unknown_delivery"
    desk.put(c.ResolveDelivery(None, "ann", "not in the chat", sender="a"), c.ClaimDelivery("b", LEASE))


NOTHING_TO_TAKE: dict[str, Callable[[], Desk]] = {
    "done": lambda: with_slot(S.COMPLETED),
    "in doubt": lambda: with_slot(S.AMBIGUOUS),
    "closed": lambda: in_phase(TurnPhase.COMPLETED, CHARGE),
}


@pytest.mark.parametrize("desk", NOTHING_TO_TAKE.values(), ids=NOTHING_TO_TAKE.keys())
def test_what_nobody_holds_is_not_taken(desk: Callable[[], Desk]) -> None:
    """Nobody waits for it, and a log that is over gets no records."""
    with pytest.raises(TurnCheckpointConflict, match="holds no lease"):
        desk().put(release(force=True))


def test_not_taken_again_from_who_gave_it_back() -> None:
    """A call that surely did not happen is held by nobody."""
    desk = with_slot(S.AMBIGUOUS)
    desk.ask(c.ResolveTool(0, 0, Resolution.DID_NOT_HAPPEN, "ann", "looked"))
    assert desk.slot().state is S.CLAIMED
    with pytest.raises(TurnCheckpointConflict):
        desk.put(release(force=True))


# --- conversations (R1, R3) --------------------------------------------------------------------------------------


def take(owner: str = "a", *, force: bool = False) -> cc.TakeAway:
    """Somebody says that its owner is dead."""
    return cc.TakeAway(owner, "ann", "its machine is gone", force)


def owned() -> Hand:
    """`a` has message 1 in hand."""
    hand = Hand()
    hand.receive(1)
    assert hand.claim(1, "start").what == "work"
    return hand


def test_a_conversation_is_taken_from_a_silent_owner() -> None:
    """R1: the lease counts from its last write; what it writes later is refused (R3), and the next owner's fence is higher."""
    hand = owned()
    old = hand.mine
    hand.now += HELD // 2 - 1
    with pytest.raises(OwnerAlive):
        hand.ask(take())
    hand.now += 1
    hand.ask(take())
    assert hand.records == [cr.Released("a", "ann", "its machine is gone")]
    assert hand.ask(cc.Renew(*old, HELD)) == [LOST]
    assert hand.ask(cc.Settle(*old, 1, "handled")) == [LOST]
    assert hand.claim(1, "start", owner="b").what == "work"
    assert hand.mine == ("b", old[1] + 1)


def test_what_it_was_sending_is_in_doubt() -> None:
    """O3: it may be out, so the next owner has to find out before it sends that again."""
    hand = owned()
    assert hand.begin(1, 0).what == "begun"
    hand.ask(take(force=True))
    hand.claim(1, "start", owner="b")
    assert hand.begin(1, 0).what == "in_doubt"


def test_a_conversation_that_nobody_holds_is_not_taken() -> None:
    """Neither from another owner than the present one, nor behind the lease."""
    hand = owned()
    with pytest.raises(ConversationError, match="does not own it"):
        hand.ask(take("b", force=True))
    hand.now += HELD
    with pytest.raises(ConversationError, match="does not own it"):
        hand.ask(take(force=True))


def test_a_message_that_waits_is_tried_now() -> None:
    """J5: what was put back is not waited for, and its attempts are counted anew; in hand, or dropped, it is not."""
    hand = owned()
    with pytest.raises(ConversationError, match="does not wait"):
        hand.ask(cc.ResolveMessage(1, False, "ann", "in hand"))
    hand.ask(cc.ReturnMessage(*hand.mine, 1, "ValueError", 60_000))
    assert hand.claim(1, "start").what == "later"
    with pytest.raises(ConversationError, match="not quarantined"):
        hand.ask(cc.ResolveMessage(1, True, "ann", "only what is set aside is dropped"))
    hand.ask(cc.ResolveMessage(1, False, "ann", "the bug is fixed"))
    again = hand.claim(1, "start")
    assert again.what == "work"
    assert hand.state.inbound[0].attempts == 1
