"""Leases of a turn's model call and of its reply, rule by rule (journal.md T2, T5; flows.md, adapter contract)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.model.desk import LEASE, NOON, Desk, commit, in_phase, reserve
from turnkeeper.errors import TurnCheckpointBusy, TurnCheckpointError
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import ProviderReference
from turnkeeper.turn.names import Resolution, TurnPhase

P = TurnPhase
LIVE = NOON + LEASE - 1
OVER = NOON + LEASE


# --- model calls ---------------------------------------------------------------------------------------------


def calling() -> tuple[Desk, str]:
    """`a` calls the model for round 0."""
    desk = in_phase(P.STARTED)
    desk.put(c.StartModel(0, "a", LEASE))
    assert desk.state.model is not None
    return desk, desk.state.model.invocation_id


def test_one_live_caller() -> None:
    """Another owner is BUSY while the call lives, is told by whom and until when, and takes over behind the lease."""
    desk, first = calling()
    desk.now = LIVE
    with pytest.raises(TurnCheckpointBusy) as busy:
        desk.put(c.StartModel(0, "b", LEASE))
    assert (busy.value.owner, busy.value.until) == ("a", OVER)
    desk.now = OVER
    desk.put(c.StartModel(0, "b", LEASE))
    assert desk.guard is not None
    assert desk.guard.not_before == OVER
    assert desk.state.model is not None
    assert desk.state.model.invocation_id != first, "attempts have idempotency keys of their own"
    for late in (c.RenewModel(first, "a", LEASE), c.FailModel(first, "a", "refused")):
        with pytest.raises(TurnCheckpointBusy):
            desk.put(late)


def test_renewal() -> None:
    """Only its owner renews, and only in time."""
    desk, call = calling()
    desk.now = LIVE
    desk.put(c.RenewModel(call, "a", LEASE))
    assert desk.guard is not None
    assert desk.guard.not_after == LIVE
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.RenewModel(call, "b", LEASE))
    desk.now = LIVE + LEASE
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.RenewModel(call, "a", LEASE))


def test_what_its_provider_calls_it() -> None:
    """It is kept from the renewal that brings it on, also behind the doubt; and only a live owner brings it."""
    desk, call = calling()
    assert desk.state.model is not None
    assert desk.state.model.reference is None
    known = ProviderReference("openai", "response", "resp_1")
    desk.put(c.RenewModel(call, "a", LEASE, known))
    desk.put(c.RenewModel(call, "a", LEASE))
    desk.now = OVER
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.RenewModel(call, "a", LEASE, ProviderReference("openai", "response", "resp_2")))
    desk.put(c.FailModel(call, "b", "its owner is dead", unknown=True))
    assert desk.state.model.reference == known
    desk.put(c.ResolveModel(call, Resolution.DID_NOT_HAPPEN, "look-up", "cancelled there"), c.StartModel(0, "b", LEASE))
    assert desk.state.model.reference is None, "the next attempt is another call"


def test_failed_call_is_free_at_once() -> None:
    """A call that surely brought nothing need not be waited for; telling it twice changes nothing (T1.4)."""
    desk, call = calling()
    desk.put(c.FailModel(call, "a", "refused"))
    desk.put(c.FailModel(call, "a", "refused"))
    assert desk.written == ()
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.RenewModel(call, "a", LEASE))
    desk.put(c.StartModel(0, "b", LEASE))
    assert desk.state.attempts == 2


def test_decision_ends_the_call() -> None:
    """T2 `reserve_assistant`, T5: first writer wins, also behind a lease that is over; then the model is not called."""
    desk, call = calling()
    desk.now = OVER
    desk.put(reserve(0))
    assert desk.state.model is None
    for command in (c.RenewModel(call, "a", LEASE), c.FailModel(call, "a", "x"), c.StartModel(0, "b", LEASE)):
        with pytest.raises(TurnCheckpointError):
            desk.put(command)
    desk.put(commit(0), c.StartModel(1, "b", LEASE))
    assert desk.state.attempts == 1, "attempts are counted by round"


@pytest.mark.parametrize("index", [-1, 1, 2])
def test_model_call_of_another_round(index: int) -> None:
    """The model is called for the round that comes next, for no other."""
    with pytest.raises(TurnCheckpointError):
        in_phase(P.STARTED).put(c.StartModel(index, "a", LEASE))


# --- the reply -----------------------------------------------------------------------------------------------


def sending() -> Desk:
    """`a` reserved the reply and sends it."""
    desk = in_phase(P.FINAL_MODEL_SAVED)
    desk.put(c.ReserveDelivery("key", "text", None, "a", LEASE))
    return desk


def doubted(by: str) -> Desk:
    """The reply's outcome is unknown."""
    desk = sending()
    desk.now = LIVE if by == "a" else OVER
    desk.put(c.DoubtDelivery(by, "a timeout"))
    return desk


def not_sent() -> Desk:
    """`a` knows that it did not send the reply."""
    desk = sending()
    desk.put(c.ResolveDelivery(None, "a", "connection refused"))
    return desk


CLAIMS: list[tuple[Callable[[], Desk], int, str, bool]] = [
    (sending, LIVE, "a", True),
    (sending, LIVE, "b", False),
    (sending, OVER, "b", True),
    (not_sent, LIVE, "b", True),
]


@pytest.mark.parametrize(("desk", "at", "who", "taken"), CLAIMS)
def test_claim_of_the_reply(desk: Callable[[], Desk], at: int, who: str, taken: bool) -> None:
    """One live sender; behind its lease or its "not sent", another may take over."""
    turn = desk()
    turn.now = at
    if not taken:
        with pytest.raises(TurnCheckpointBusy) as busy:
            turn.put(c.ClaimDelivery(who, LEASE))
        assert (busy.value.owner, busy.value.until) == ("a", OVER)
        return
    turn.put(c.ClaimDelivery(who, LEASE))
    assert turn.state.delivery is not None
    assert (turn.state.delivery.owner, turn.state.delivery.lease_end) == (who, at + LEASE)
    with pytest.raises(TurnCheckpointBusy):
        turn.put(c.ClaimDelivery("c", LEASE))


def test_doubt() -> None:
    """The sender says at any time that it cannot know; others only behind its lease; once is enough."""
    desk = sending()
    with pytest.raises(TurnCheckpointBusy):
        desk.put(c.DoubtDelivery("b", "it is slow"))
    for by in "ab":
        desk = doubted(by)
        assert desk.state.attention == "unknown_delivery"
        assert desk.phase is P.DELIVERY_RESERVED, "field case 24: the question stays open"
        desk.put(c.DoubtDelivery("b", "again"))
        assert desk.written == ()


def test_doubt_where_nothing_was_sent() -> None:
    """What surely was not sent, and nobody sends, is not in doubt."""
    desk = not_sent()
    desk.put(c.DoubtDelivery("b", "its sender is gone"))
    assert desk.written == ()
    assert desk.state.attention is None


def test_resolve() -> None:
    """A doubt is settled with who and why: found, or surely not sent; what is not in doubt is not settled."""
    desk = doubted("b")
    desk.put(c.ResolveDelivery("message 9", "operator", "saw it"))
    (record,) = desk.written
    assert record == r.Delivered("message 9", "operator", "saw it")
    assert (desk.phase, desk.state.sent_message_id, desk.state.attention) == (P.DELIVERED, "message 9", None)
    desk = doubted("a")
    desk.put(c.ResolveDelivery(None, "operator", "looked"))
    assert desk.written == (r.DeliveryResolved("operator", "looked"),)
    assert desk.phase is P.DELIVERY_RESERVED
    for turn in (sending(), desk):
        with pytest.raises(TurnCheckpointError, match="nothing to resolve"):
            turn.put(c.ResolveDelivery(None, "operator", "looked"))


@pytest.mark.parametrize("by", ["a", "b"])
@pytest.mark.parametrize("at", [LIVE, OVER, OVER + LEASE])
def test_reply_in_doubt_is_not_taken_over(by: str, at: int) -> None:
    """flows.md, ambiguity 23: no automatic resend; also for who saw it before it was in doubt. Resolved, it may be."""
    desk = doubted(by)
    desk.now = max(at, desk.now)
    for who in "abc":
        with pytest.raises(TurnCheckpointError, match="resolve that first"):
            desk.put(c.ClaimDelivery(who, LEASE))
    desk.put(c.ResolveDelivery(None, "c", "looked"), c.ClaimDelivery("c", LEASE))
    assert desk.state.delivery is not None
    assert (desk.state.delivery.owner, desk.state.delivery.lease_end) == ("c", desk.now + LEASE)


def test_sender_that_finds_out_late() -> None:
    """T2 `mark_delivered`: whoever knows the message id says so, under the reserved key, also in doubt."""
    desk = doubted("b")
    desk.put(c.MarkDelivered("key", "message 1"))
    assert (desk.phase, desk.state.attention) == (P.DELIVERED, None)
