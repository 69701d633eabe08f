"""Incoming messages: their size limit, and what is redacted in them before they are kept."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversation.driving import replica, state_of
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message
from turnkeeper.engine.tools import tool
from turnkeeper.errors import ValueTooLarge
from turnkeeper.keeper import Keeper
from turnkeeper.log.keeping import Limits
from turnkeeper.log.record import Record
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


def hide(place: str, text: str) -> str:
    """Secrets are not kept, and it is told where they were."""
    return text.replace("secret", f"[{place}]")


def echo() -> Flow:
    """Says what it is told, and what a tool gives."""

    @tool(replay_safe=True)
    def look_up() -> str:
        """Finds a secret."""
        return "a secret, found"

    flow = Flow("echo")

    @flow.step
    async def say(c: FlowContext) -> None:
        answer = await c.ask("Yes?")
        await c.send(f"You said: {answer}. {await c.do(look_up)}.")

    return flow


async def kept(store: SqliteStore) -> bytes:
    """All bodies of a store."""
    records: list[Record] = []
    async for head in store.heads():
        records += (await store.read(head.key)).records
    return b"".join(record.body for record in records)


async def test_a_message_at_the_limit_and_above() -> None:
    store = await SqliteStore.open(":memory:")

    async def size_of(**options: Any) -> None:
        async with replica(store, echo(), Platform(), **options) as person:
            await person.writes("x" * 1000, event_id="e")

    with pytest.raises(ValueTooLarge, match=r"^message: \d+ bytes are over the limit of 100 bytes$") as e:
        await size_of(limits=Limits(message=100))
    assert [head async for head in store.heads()] == [], "nothing was written"
    with pytest.raises(ValueTooLarge):
        await size_of(limits=Limits(message=e.value.size - 1))
    await size_of(limits=Limits(message=e.value.size))
    assert (await state_of(store)).received == 1
    await store.close()


async def test_what_is_redacted_is_neither_kept_nor_used() -> None:
    """By the step, behind a restart as in the first run, and in the results of its effects; a repeated delivery is still one."""
    store = await SqliteStore.open(":memory:")
    platform = Platform()
    async with replica(store, echo(), platform, redact=hide) as person:
        await person.says("hello", event_id="1")
        await person.writes("my secret", event_id="2", data={"quoted": ["secret"]})
    async with replica(store, echo(), platform, redact=hide) as person:
        assert (await person.says("my secret", event_id="2")).left is None
    assert platform.texts()[-1] == "You said: my [message]. a [result], found."
    assert b"my secret" not in await kept(store)
    assert b"a secret" not in await kept(store)
    await store.close()


async def test_a_keepers_conversations_keep_as_it_does() -> None:
    store = await SqliteStore.open(":memory:")
    keeper = Keeper(store, limits=Limits(message=100), redact=hide)
    async with keeper.conversations([echo()], Platform()) as bot:
        await bot.receive("c", Message(event_id="1", text="my secret"))
        with pytest.raises(ValueTooLarge):
            await bot.receive("c", Message(event_id="2", text="x" * 200))
    assert b"[message]" in await kept(store)
    await store.close()
