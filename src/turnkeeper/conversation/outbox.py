"""The rules of a conversation's sends (flows.md F3, O1 to O4): pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.state import ConversationState, Send, SendState, find_send
from turnkeeper.errors import OutboxConflict
from turnkeeper.log.decision import Decision


class SendAnswer(NamedTuple):
    """What became of the wish to send.

    begun: send it now. known: it is settled, see `send`. in_doubt: it may be out, find out. later: not yet.
    held: an earlier message of the conversation is not out yet.
    """

    what: Literal["begun", "known", "in_doubt", "later", "held"]
    send: Send | None = None


def begin_send(state: ConversationState, command: c.BeginSend, now: int) -> Decision[r.AnyRecord, SendAnswer]:
    """O1 to O3.

    Raises:
        OutboxConflict: another content was sent, or is to be, under this key.
    """
    send = find_send(state, command.key)
    if send is None:
        held = next((one for one in state.sends if not one.settled and one.key < command.key), None)
        if held is not None:
            return Decision(SendAnswer("held", held))
        watermark = state.received if command.watermark else 0
        return _begun(command, watermark)
    if send.fingerprint != command.fingerprint:
        raise OutboxConflict(state.conversation_id, tuple(command.key))
    if send.settled:
        return Decision(SendAnswer("known", send), final=True)
    if send.state is SendState.RETRY:
        if now < send.not_before:
            return Decision(SendAnswer("later", send))
        return _begun(command, send.watermark)
    if command.again:
        return _begun(command, send.watermark)
    return Decision(SendAnswer("in_doubt", send))


def _begun(command: c.BeginSend, watermark: int) -> Decision[r.AnyRecord, SendAnswer]:
    record = r.SendBegun(command.key, command.content, command.fingerprint, command.fence, watermark)
    return Decision(SendAnswer("begun"), (record,))


def settle_send(state: ConversationState, command: c.SettleSend) -> Decision[r.AnyRecord, SendAnswer]:
    """What a send came to; the first word counts."""
    send = find_send(state, command.key)
    if send is None or send.settled:
        return Decision(SendAnswer("known", send))
    record: r.AnyRecord
    match command.outcome:
        case "sent":
            record = r.Sent(command.key, command.message_id, command.who, command.reason)
        case "postponed":
            record = r.SendPostponed(command.key, command.reason, command.not_before)
        case "refused":
            record = r.SendRefused(command.key, command.reason)
        case "unknown":
            record = r.SendUnknown(command.key, command.reason)
    return Decision(SendAnswer("known"), (record,))
