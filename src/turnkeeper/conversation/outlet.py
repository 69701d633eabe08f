"""Bringing a conversation's messages out: each once, under one key, or in doubt and then never again by itself."""

from __future__ import annotations

from typing import Final, NamedTuple

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.channel import Channel, NotSent, Refused, SendOutcome, Sent, Unknown, look_up, send_on
from turnkeeper.conversation.identity import send_key
from turnkeeper.conversation.message import Content, chunks, keep_content, kept_content
from turnkeeper.conversation.observing import message_send
from turnkeeper.conversation.outbox import SendAnswer
from turnkeeper.conversation.pen import Pen
from turnkeeper.conversation.state import Send, SendKey, SendState
from turnkeeper.engine.outcomes import DidNotHappen, Happened
from turnkeeper.errors import MessageNotDelivered, MessageRefused
from turnkeeper.observe.logs import logger

log = logger(__name__)

_TRIES: Final = 4
_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 30.0
"""Seconds that a channel may ask for within one attempt at a message; beyond, the message is put back."""


class Outcome(NamedTuple):
    """What became of a message: its id in the channel, or None where it may be out and nobody knows (AMBIGUOUS)."""

    message_id: str | None
    watermark: int


class Outlet:
    """The outbox of one owner."""

    def __init__(self, pen: Pen, channel: Channel) -> None:
        self._pen = pen
        self._channel = channel

    async def send(self, record: int, sequence: int, content: Content, *, watermark: bool, soon: bool) -> Outcome:
        """Send under the key (record, sequence), in as many parts as the channel needs.

        Args:
            watermark: messages that are in the journal by now are no answers to it.
            soon: that it is out is written at once; else with what is written next.

        Raises:
            MessageRefused: the channel refuses it for good.
            MessageNotDelivered: it surely is not out, and trying did not help.
            OutboxConflict: another content has this key.
            OwnershipLost: another replica owns the conversation.
        """
        parts = chunks(content.text, self._channel.max_length)
        outcome = Outcome("", 0)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            piece = replace(content, text=part) if last else Content(text=part, data=content.data)
            outcome = await self._send_one(SendKey(record, sequence, number), piece, watermark=watermark)
        if soon:
            self._pen.flush_soon()
        return outcome

    async def _send_one(self, key: SendKey, content: Content, *, watermark: bool) -> Outcome:
        frame, fingerprint = keep_content(content)
        begin = c.BeginSend(self._pen.owner, self._pen.fence, key, frame, fingerprint, watermark)
        pause = _PAUSE
        for attempt in range(_TRIES):
            (answer,) = await self._pen.write(begin)
            settled = await self._proceed(key, content, begin, answer)
            if isinstance(settled, Outcome):
                return settled
            pause = max(settled or 0.0, pause)
            if attempt == _TRIES - 1 or pause > _LONGEST_PAUSE:
                break
            await self._pen.flush()
            await anyio.sleep(pause)
            pause *= 2
        await self._pen.flush()
        raise MessageNotDelivered(self._pen.handle.conversation_id, tuple(key), pause)

    async def _proceed(
        self, key: SendKey, content: Content, begin: c.BeginSend, answer: SendAnswer
    ) -> Outcome | float | None:
        """The outcome; or how long to wait before the next attempt, where one makes sense."""
        match answer.what:
            case "known":
                assert answer.send is not None
                return self._known(answer.send)
            case "later":
                assert answer.send is not None
                return max((answer.send.not_before - self._pen.handle.log.now()) / 1000, 0.01)
            case "held":
                return None
            case "in_doubt":
                return await self._in_doubt(key, content, begin, "its sender stopped in the middle of the send")
            case "begun":
                return await self._send_now(key, content, begin)

    async def settle_rest(self) -> None:
        """Find out about sends that were begun for this message and that its step, run again, did not ask for (J4).

        Raises:
            OwnershipLost: another replica owns the conversation.
        """
        open_ones = [one for one in self._pen.handle.state.sends if not one.settled]
        for send in open_ones:
            if self._pen.has_settled(send.key):
                continue
            reason = "its step ran again without it"
            if send.state is SendState.RETRY:
                self._pen.defer(self._settled(send.key, "refused", reason=reason))
                continue
            begin = c.BeginSend(self._pen.owner, self._pen.fence, send.key, send.content, send.fingerprint)
            outcome: Outcome | float | None = None
            try:
                for _ in range(_TRIES):
                    outcome = await self._in_doubt(send.key, kept_content(send.content), begin, reason)
                    if isinstance(outcome, Outcome):
                        break
            except MessageRefused:
                continue  # it is written
            if not isinstance(outcome, Outcome):
                self._pen.defer(self._settled(send.key, "unknown", reason=reason))

    def _known(self, send: Send) -> Outcome:
        if send.state is SendState.DEAD:
            raise MessageRefused(self._pen.handle.conversation_id, tuple(send.key), send.reason)
        return Outcome(send.message_id if send.state is SendState.SENT else None, send.watermark)

    def _public_key(self, key: SendKey) -> str:
        state = self._pen.handle.state
        return send_key(state.conversation_id, state.seed, key)

    async def _put_out(self, key: SendKey, content: Content) -> SendOutcome:
        # Whose lease ended while this was written has lost the conversation, and sends nothing any more.
        await anyio.lowlevel.checkpoint_if_cancelled()
        handle, public_key = self._pen.handle, self._public_key(key)
        if handle.telemetry is None:
            return await send_on(self._channel, handle.conversation_id, public_key, content)
        with message_send(handle.telemetry, handle.conversation_id, public_key, content) as ended:
            outcome = await send_on(self._channel, handle.conversation_id, public_key, content)
            ended(outcome)
            return outcome

    async def _send_now(self, key: SendKey, content: Content, begin: c.BeginSend) -> Outcome | float | None:
        outcome = await self._put_out(key, content)
        match outcome:
            case Unknown(reason):
                return await self._in_doubt(key, content, begin, reason)
            case NotSent(proof):
                return self._postponed(key, proof, 0.0)
            case Refused(reason, float() | int() as retry_after):
                return self._postponed(key, reason, retry_after)
            case Sent() | Refused():
                return await self._certain(key, outcome)

    async def _certain(self, key: SendKey, outcome: Sent | Refused) -> Outcome:
        """It is out, or refused for good: so it is however often it was tried."""
        if isinstance(outcome, Refused):
            await self._pen.write(self._settled(key, "refused", reason=outcome.reason))
            raise MessageRefused(self._pen.handle.conversation_id, tuple(key), outcome.reason)
        self._pen.defer(self._settled(key, "sent", message_id=outcome.message_id))
        send = next((one for one in self._pen.handle.state.sends if one.key == key), None)
        return Outcome(outcome.message_id, 0 if send is None else send.watermark)

    async def _in_doubt(
        self, key: SendKey, content: Content, begin: c.BeginSend, reason: str
    ) -> Outcome | float | None:
        """It may be out: the channel's policy (flows.md, adapter contract, 1 to 3)."""
        handle = self._pen.handle
        send = next(one for one in handle.state.sends if one.key == key)
        again = False
        if (handle.log.now() - send.at) / 1000 < self._channel.dedup_window:
            again = True
        else:
            match await look_up(self._channel, handle.conversation_id, self._public_key(key)):
                case Happened(message_id, evidence):
                    self._pen.defer(
                        self._settled(key, "sent", message_id=str(message_id), reason=evidence, who="look-up")
                    )
                    return Outcome(str(message_id), send.watermark)
                case DidNotHappen():
                    again = True
                case _:
                    pass
        if not again:
            log.error("conversation %s: message %s may be out: %s", handle.conversation_id, tuple(key), reason)
            self._pen.defer(self._settled(key, "unknown", reason=reason))
            return Outcome(None, send.watermark)
        (answer,) = await self._pen.write(replace(begin, again=True))
        if answer.what != "begun":
            return await self._proceed(key, content, begin, answer)
        outcome = await self._put_out(key, content)
        match outcome:
            case Sent() | Refused(_, None):
                return await self._certain(key, outcome)
            case Refused(_, retry_after):
                return retry_after
            case _:
                # Tried again from the top: a further doubt is looked into as this one was, and that this attempt did not
                # come through says nothing of the one before.
                return None

    def _postponed(self, key: SendKey, reason: str, seconds: float) -> float:
        not_before = self._pen.handle.log.now() + round(seconds * 1000)
        self._pen.defer(self._settled(key, "postponed", reason=reason, not_before=not_before))
        return seconds

    def _settled(self, key: SendKey, outcome: str, **more: object) -> c.SettleSend:
        return c.SettleSend(self._pen.owner, self._pen.fence, key, outcome, **more)  # pyright: ignore[reportArgumentType]
