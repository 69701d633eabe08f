"""Sending a turn's reply: once, under one key, or in doubt and then never again by itself (flows.md, adapter contract)."""

from __future__ import annotations

import logging
from typing import Final

import anyio

from turnkeeper.engine.journal import Journal
from turnkeeper.engine.outcomes import DidNotHappen, Happened, classify
from turnkeeper.engine.ports import Reply, ReplyPort
from turnkeeper.turn import commands as c
from turnkeeper.turn.identity import reply_key
from turnkeeper.turn.state import TurnState, final_text

log = logging.getLogger(__name__)

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


async def deliver(journal: Journal, port: ReplyPort) -> None:
    """Bring the reserved reply out. At the end the turn is DELIVERED and COMPLETED.

    Raises:
        DeliveryStopped: it was refused, could not be sent, or may have been sent.
        TurnCheckpointBusy: another worker is sending it.
    """
    state = journal.state
    assert state.delivery is not None
    if state.delivery.unknown:
        raise DeliveryStopped("reply_outcome_unknown", "the reply may have been sent; settle it first", unknown=True)
    if state.delivery.owner != journal.owner or state.delivery.not_sent:
        crashed = not state.delivery.not_sent
        await _take_over(journal, port, may_be_out=crashed)
        if journal.state.sent_message_id is not None:
            return
    await _send(journal, port)


def _reply(state: TurnState, trace_id: str) -> Reply:
    text = final_text(state)
    assert state.delivery is not None
    assert text is not None
    return Reply(state.delivery.key, text, trace_id)


async def _take_over(journal: Journal, port: ReplyPort, *, may_be_out: bool) -> None:
    """Become the sender of a reply that somebody else reserved. A send of his that may be out is looked up first."""
    if may_be_out and not port.keyed:
        # Also waits for his lease to end: while he lives, he may be sending.
        await journal.ask(c.ClaimDelivery(journal.owner, journal.lease_ms))
        await _find_out(journal, port, "its sender stopped in the middle of the send")
        if journal.state.sent_message_id is not None:
            return
    await journal.ask(c.ClaimDelivery(journal.owner, journal.lease_ms))


async def _find_out(journal: Journal, port: ReplyPort, reason: str) -> None:
    """Look an unknown send up. Returns where it was found (and recorded), or surely did not happen."""
    found = await port.find(_reply(journal.state, journal.turn.trace_id)) if port.find is not None else None
    if isinstance(found, Happened):
        await _record(journal, str(found.result))
    elif not isinstance(found, DidNotHappen):
        await journal.ask(c.DoubtDelivery(journal.owner, reason))
        raise DeliveryStopped("reply_outcome_unknown", f"the reply may have been sent: {reason}", unknown=True)


async def _record(journal: Journal, message_id: str) -> None:
    assert journal.state.delivery is not None
    await journal.ask(c.MarkDelivered(journal.state.delivery.key, message_id), c.MarkCompleted())


async def _send(journal: Journal, port: ReplyPort) -> None:
    reply = _reply(journal.state, journal.turn.trace_id)
    pause = _PAUSE
    for attempt in range(1, _TRIES + 1):
        try:
            message_id = await port.send(reply)
        except Exception as e:
            kind = classify(e)
            reason = f"{type(e).__name__}: {e}"
            if kind == "refused":
                await journal.ask(c.ResolveDelivery(None, journal.owner, f"refused: {reason}"))
                raise DeliveryStopped("reply_refused", reason, unknown=False) from e
            if kind == "unknown" and not port.keyed:
                await _find_out(journal, port, reason)
                if journal.state.sent_message_id is not None:
                    return
            elif attempt == _TRIES and kind == "not sent":
                await journal.ask(c.ResolveDelivery(None, journal.owner, f"not sent: {reason}"))
                raise DeliveryStopped("reply_not_sent", reason, unknown=False) from e
            if attempt == _TRIES:
                await journal.ask(c.DoubtDelivery(journal.owner, reason))
                raise DeliveryStopped("reply_outcome_unknown", reason, unknown=True) from e
            log.warning("the reply of turn %s was not sent, will try again: %s", reply.turn_id, reason)
            await anyio.sleep(pause)
            pause *= 2
            await journal.ask(c.ClaimDelivery(journal.owner, journal.lease_ms))
        else:
            await _record(journal, message_id)
            return
