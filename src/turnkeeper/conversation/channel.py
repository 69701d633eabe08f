"""The channel contract: how messages go out, and what can be known of a send whose answer was lost (flows.md, Channels)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from turnkeeper.conversation.message import Content
from turnkeeper.engine.outcomes import LookedUp, awaited, classify
from turnkeeper.observe.logs import logger

log = logger(__name__)

_LONGEST_WAIT: Final = 86_400.0
"""Seconds that a channel may ask to wait; what asks for more is asked again then."""


@dataclass(frozen=True)
class Sent:
    """It is out, under the channel's id."""

    message_id: str


@dataclass(frozen=True)
class Refused:
    """The channel refuses it: for good, or until `retry_after` seconds have passed."""

    reason: str
    retry_after: float | None = None


@dataclass(frozen=True)
class NotSent:
    """It provably did not leave, and may be sent again."""

    proof: str


@dataclass(frozen=True)
class Unknown:
    """It may be out."""

    reason: str


SendOutcome = Sent | Refused | NotSent | Unknown


class Channel(Protocol):
    """Where the messages of a conversation go.

    Attributes:
        dedup_window: seconds for which the channel drops a second send with the same key; 0: it never does.
        max_length: characters that one message may have; None: any.
    """

    dedup_window: float
    max_length: int | None

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """Send, under a key that is the same on every attempt.

        What it raises is classified as `engine.outcomes.classify` does: anything that proves nothing is `Unknown`.
        """
        ...


@runtime_checkable
class FindingChannel(Protocol):
    """A channel whose sent messages can be looked up by their key."""

    async def find(self, conversation_id: str, key: str) -> LookedUp:
        """`Happened(message_id)`; `DidNotHappen`, only where absence is conclusive; or `StillUnknown`."""
        ...


async def send_on(channel: Channel, conversation_id: str, key: str, content: Content) -> SendOutcome:
    """Send, with what the channel raises as an outcome."""
    try:
        outcome = await awaited(channel.send(conversation_id, key, content))
        if isinstance(outcome, Refused) and outcome.retry_after is not None:
            return replace(outcome, retry_after=_bounded(outcome.retry_after))
        return outcome
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"
        match classify(e):
            case "refused":
                return Refused(reason)
            case "not sent":
                return NotSent(reason)
            case "unknown":
                log.warning("conversation %s: whether a message was sent is not known: %s", conversation_id, reason)
                return Unknown(reason)


def _bounded(seconds: float) -> float:
    """A wait that can be reckoned with, whatever the other side has said."""
    return _LONGEST_WAIT if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_WAIT)


async def look_up(channel: Channel, conversation_id: str, key: str) -> LookedUp | None:
    """What the channel can find of a send; None where it has no look-up, or that failed."""
    if not isinstance(channel, FindingChannel):
        return None
    try:
        return await awaited(channel.find(conversation_id, key))
    except Exception:
        log.exception("conversation %s: looking for a sent message failed", conversation_id)
        return None
