"""An operator's look at conversations, and what only a person can settle in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.evolve import ConversationRules, Retention
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import conversation_key
from turnkeeper.conversation.records import AnyRecord
from turnkeeper.conversation.state import KIND, ConversationState, SendKey
from turnkeeper.errors import InvalidInput
from turnkeeper.log import frames, values
from turnkeeper.log.record import NOWHERE, Head, HeadQuery
from turnkeeper.log.store import Store
from turnkeeper.moving import Receipt, erase_logs
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.turn.state import KIND as TURN

_LABEL = "conversation"


class Entry(NamedTuple):
    """One record of a conversation's log: its number, when it was written, what it says, and its size in bytes."""

    seq: int
    at: int
    record: AnyRecord
    size: int


class ConversationHistory(NamedTuple):
    """The records of a conversation that compaction has left, oldest first, and its state."""

    entries: list[Entry]
    state: ConversationState


def conversations(store: Store, *, attention: bool | None = None) -> AsyncIterator[Head]:
    """The conversations of a store, by key; `labels["conversation"]` names them."""
    return store.heads(HeadQuery(kind=KIND, attention=attention))


async def read_conversation(store: Store, conversation_id: str) -> ConversationHistory | None:
    """A conversation as it is now; None where there is none."""
    key = conversation_key(conversation_id)
    tail = await store.read(key)
    if tail.position == NOWHERE:
        return None
    rules = ConversationRules(Retention())
    state, decoder = rules.initial(), rules.decoder()
    entries: list[Entry] = []
    for seq, at, body in tail.records:
        _, record = decoder.decode(frames.decode(body, where=f"{key} record {seq}"))
        state = rules.evolve(state, record, at)
        entries.append(Entry(seq, at, record, len(body)))
    return ConversationHistory(entries, state)


async def resolve_send(
    store: Store,
    conversation_id: str,
    key: SendKey,
    *,
    message_id: str | None,
    who: str,
    why: str,
    telemetry: Telemetry | None = None,
) -> None:
    """Settle a message that may be out: it is, under `message_id`; or it is not, and is given up (it is never sent late).

    Raises:
        ConversationError: that send is not in doubt.
        InvalidInput: the evidence is missing.
    """
    if not why.strip():
        raise InvalidInput("why", "must say what the evidence is")
    resolved = c.ResolveSend(
        key,
        message_id is not None,
        values.identifier(who, "who"),
        values.text(why, "why"),
        message_id or "",
    )
    await ConversationHandle(store, conversation_id, telemetry=telemetry).ask(resolved)


async def resolve_message(store: Store, conversation_id: str, number: int, *, drop: bool, who: str, why: str) -> None:
    """Let a message be tried again that is quarantined, or waits for its next attempt; or drop a quarantined one.

    Raises:
        ConversationError: that message is not quarantined, and does not wait.
        InvalidInput: the reason is missing.
    """
    if not why.strip():
        raise InvalidInput("why", "must say why")
    resolved = c.ResolveMessage(number, drop, values.identifier(who, "who"), values.text(why, "why"))
    await ConversationHandle(store, conversation_id).ask(resolved)


async def release(
    store: Store, conversation_id: str, *, who: str, why: str, owner: str | None = None, force: bool = False
) -> str:
    """Take a conversation from an owner that is known to be dead, so that another one need not wait for the end of its lease.

    What the old owner writes from then on is refused; what it was sending is in doubt, and looked up by who comes next.

    Args:
        owner: whose; may be left out, for whoever owns it now.
        force: also where the owner was heard of less than half a lease ago.

    Returns:
        Whose it was.

    Raises:
        ConversationError: that owner does not own it.
        OwnerAlive: its owner was heard of just now.
        InvalidInput: the reason is missing.
    """
    if not why.strip():
        raise InvalidInput("why", "must say how it is known that the owner is dead")
    handle = ConversationHandle(store, conversation_id)
    whose = owner or (await handle.read()).owner or "nobody"
    await handle.ask(c.TakeAway(whose, values.identifier(who, "who"), values.text(why, "why"), force))
    return whose


async def erase_conversation(store: Store, conversation_id: str) -> Receipt:
    """Erase a conversation with the turns that its steps ran, and give a receipt. It cannot be undone."""
    turns = [head.key async for head in store.heads(HeadQuery(kind=TURN)) if head.labels.get(_LABEL) == conversation_id]
    key = conversation_key(conversation_id)
    # The conversation first: whoever is at it stops, and begins no turn behind our back.
    receipts = [await erase_logs(store, one) for one in (key, *turns)]
    erased = [log for receipt in receipts for log in receipt.erased]
    return Receipt(key, receipts[-1].at, erased, sum(receipt.left for receipt in receipts))
