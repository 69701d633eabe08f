"""Sending a turn's reply: once, under one key, or in doubt and then never again by itself (flows.md, adapter contract)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from turnkeeper.engine.journal import Journal
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.engine.observing import reply_send
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp, awaited, classify
from turnkeeper.engine.ports import Reply, ReplyPort
from turnkeeper.errors import TurnCheckpointError
from turnkeeper.observe.logs import logger
from turnkeeper.turn import commands as c
from turnkeeper.turn.decide import disputes
from turnkeeper.turn.identity import reply_key
from turnkeeper.turn.state import Delivery, TurnState, final_text

log = logger(__name__)

_TRIES: Final = 3
_PAUSE: Final = 0.2


class DeliveryStopped(Exception):
    """The reply cannot be sent by itself any more.

    Attributes:
        kind: why, as an error kind.
        unknown: it may have been sent; else it surely was not.
    """

    def __init__(self, kind: str, message: str, *, unknown: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.unknown = unknown


def key_of(journal: Journal) -> str:
    """The key of the turn's reply."""
    return reply_key(journal.turn.trace_hash, journal.turn.scope)


async def deliver(journal: Journal, leases: LeaseKeeper, port: ReplyPort) -> None:
    """Bring the reserved reply out. At the end the turn is DELIVERED and COMPLETED.

    Raises:
        DeliveryStopped: it was refused, could not be sent, or may have been sent.
        TurnCheckpointBusy: another worker is sending it.
        TurnCheckpointConflict: another worker has taken it over meanwhile.
    """
    delivery = _delivery(journal.state)
    if delivery.unknown and port.find is None:
        raise DeliveryStopped("reply_outcome_unknown", "the reply may have been sent; settle it first", unknown=True)
    if delivery.unknown or delivery.not_sent or delivery.owner != journal.owner:
        await _take_over(journal, port)
    if journal.state.sent_message_id is None:
        await _send(journal, leases, port)


def _delivery(state: TurnState) -> Delivery:
    assert state.delivery is not None
    return state.delivery


def _reply(state: TurnState, trace_id: str) -> Reply:
    text = final_text(state)
    assert text is not None
    return Reply(_delivery(state).key, text, trace_id)


async def _take_over(journal: Journal, port: ReplyPort) -> None:
    """Become the sender of a reply that somebody else reserved. A send that may be out is looked up first."""
    before = _delivery(journal.state)
    if not before.unknown:
        # Also waits for his lease to end: while he lives, he may be sending.
        # And only of what was looked at: whoever claimed and died meanwhile may have sent.
        await journal.ask(_claim(journal), while_true=lambda state: state.delivery == before)
        if before.not_sent or port.keyed:
            return
    looked_at = _delivery(journal.state)
    surely_not = await _find_out(journal, port, "its sender stopped in the middle of the send")
    if surely_not is not None:
        settle = [c.ResolveDelivery(None, journal.owner, surely_not.evidence)] if before.unknown else []
        await journal.ask(*settle, _claim(journal), while_true=_owned_by(looked_at.owner))


def _claim(journal: Journal) -> c.ClaimDelivery:
    return c.ClaimDelivery(journal.owner, journal.lease_ms)


def _owned_by(owner: str) -> Callable[[TurnState], bool]:
    """Nobody has taken the reply over since, so nobody else can have sent it."""
    return lambda state: state.delivery is not None and state.delivery.owner == owner


async def _find_out(journal: Journal, port: ReplyPort, reason: str) -> DidNotHappen | None:
    """Look an unknown send up. None where it was found, and is recorded."""
    found: LookedUp | None = None
    if port.find is not None:
        try:
            found = await awaited(port.find(_reply(journal.state, journal.turn.trace_id)))
        except Exception:
            log.exception("looking for the reply of turn %s failed", journal.turn.trace_id)
    if isinstance(found, DidNotHappen):
        return found
    if isinstance(found, Happened):
        await _record(journal, str(found.result))
        return None
    await journal.ask(c.DoubtDelivery(journal.owner, reason))
    raise DeliveryStopped("reply_outcome_unknown", f"the reply may have been sent: {reason}", unknown=True)


async def _record(journal: Journal, message_id: str) -> None:
    delivered = c.MarkDelivered(_delivery(journal.state).key, message_id)
    await journal.ask(delivered, c.MarkCompleted())
    if journal.state.sent_message_id != message_id:
        log.error("the reply of turn %s may have been sent twice", journal.turn.trace_id)
        await journal.turn.put(lambda state, _: disputes(state, delivered))  # both ids are kept (T2 `mark_delivered`)


async def _send_once(journal: Journal, leases: LeaseKeeper, port: ReplyPort, reply: Reply) -> str:
    async def renew() -> bool:
        try:
            await journal.ask(_claim(journal), while_true=_owned_by(journal.owner))
        except TurnCheckpointError:
            return False
        return True

    def lost() -> None:
        """A send cannot be called back. Whoever took it over looks it up, or sends it under the same key."""

    with leases.holding(f"turn {reply.turn_id!r} reply", renew, lost, since=journal.asked_at):
        telemetry = journal.turn.telemetry
        if telemetry is None:
            return await awaited(port.send(reply))
        with reply_send(telemetry, journal.turn, reply) as sent:
            message_id = await awaited(port.send(reply))
            sent(message_id)
            return message_id


async def _send(journal: Journal, leases: LeaseKeeper, port: ReplyPort) -> None:
    reply = _reply(journal.state, journal.turn.trace_id)
    pause = _PAUSE
    for attempt in range(1, _TRIES + 1):
        if leases.is_old(journal.asked_at):
            # The store took its time: another worker may take us for dead before the send has begun.
            await journal.ask(_claim(journal), while_true=_owned_by(journal.owner))
        try:
            message_id = await _send_once(journal, leases, port, reply)
        except Exception as e:
            kind = classify(e)
            reason = f"{type(e).__name__}: {e}"
            if kind == "unknown" and not port.keyed:
                if await _find_out(journal, port, reason) is None:
                    return
                kind = "not sent"
            if kind == "refused":
                settled = c.ResolveDelivery(None, journal.owner, f"refused: {reason}")
                await journal.ask(settled, while_true=_owned_by(journal.owner))
                raise DeliveryStopped("reply_refused", reason, unknown=False) from e
            if attempt == _TRIES and kind == "not sent":
                settled = c.ResolveDelivery(None, journal.owner, f"not sent: {reason}")
                await journal.ask(settled, while_true=_owned_by(journal.owner))
                raise DeliveryStopped("reply_not_sent", reason, unknown=False) from e
            if attempt == _TRIES:
                await journal.ask(c.DoubtDelivery(journal.owner, reason))
                raise DeliveryStopped("reply_outcome_unknown", reason, unknown=True) from e
            log.warning("the reply of turn %s was not sent, will try again: %s", reply.turn_id, reason)
            await anyio.sleep(pause)
            pause *= 2
            await journal.ask(_claim(journal), while_true=_owned_by(journal.owner))
        else:
            await _record(journal, message_id)
            return
