"""A channel as a turn's port for replies."""

from __future__ import annotations

from turnkeeper.conversation.channel import Channel, FindingChannel, NotSent, Refused, Sent, Unknown, send_on
from turnkeeper.conversation.message import Content
from turnkeeper.engine import outcomes
from turnkeeper.engine.outcomes import EffectRefused, LookedUp, OutcomeUnknown
from turnkeeper.engine.ports import Reply, ReplyPort


def reply_port(channel: Channel, conversation_id: str) -> ReplyPort:
    """Send a turn's reply to a conversation of a channel, for `keeper.run(..., reply=reply_port(...))`.

    A turn has one reply under one key: what is too long for one message of the channel is refused. A channel with a
    `dedup_window` counts as keyed: run a turn that was left in the middle of its send again before the window is over.
    """

    async def send(reply: Reply) -> str:
        if channel.max_length is not None and len(reply.text) > channel.max_length:
            raise EffectRefused(
                f"the reply has {len(reply.text)} characters, and the channel takes {channel.max_length}"
            )
        outcome = await send_on(channel, conversation_id, reply.key, Content(text=reply.text))
        match outcome:
            case Sent(message_id):
                return message_id
            case Refused(reason, None):
                raise EffectRefused(reason)
            case Refused(reason, retry_after):
                raise outcomes.NotSent(f"{reason}; the channel asks to wait {retry_after} s")
            case NotSent(proof):
                raise outcomes.NotSent(proof)
            case Unknown(reason):
                raise OutcomeUnknown(reason)

    if not isinstance(channel, FindingChannel):
        return ReplyPort(send, keyed=channel.dedup_window > 0)
    finding = channel

    async def find(reply: Reply) -> LookedUp:
        return await finding.find(conversation_id, reply.key)

    return ReplyPort(send, keyed=channel.dedup_window > 0, find=find)
