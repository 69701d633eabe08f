"""Reminders of a step that runs again: each call counts once (C10)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conversation.driving import replica, state_of
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


async def test_fired_reminder_does_not_fire_again(store: SqliteStore) -> None:
    """It fires while the step waits; the step then runs again, twice, by other processes."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.remind("later", "Do not forget.", after=60)
        await c.ask("A?")
        await c.ask("B?")

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
        await store.advance_clock(61_000)
        await person.bot.process("c")
    for text in ("a", "b"):
        async with replica(store, flow, platform) as person:
            await person.says(text)
            await person.bot.process("c")
    assert platform.texts() == ["A?", "Do not forget.", "B?"]
    assert (await state_of(store)).timers == ()


async def test_each_call_counts_once(store: SqliteStore) -> None:
    """Set, cancelled and set again in one step: it stays set when the step runs again."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.remind("later", "First.", after=60)
        await c.forget("later")
        await c.ask("A?")
        await c.remind("later", "Second.", after=60)
        await c.ask("B?")
        await c.ask("C?")

    platform = Platform()
    for text in ("go", "a", "b"):
        async with replica(store, flow, platform) as person:
            await person.says(text)
    async with replica(store, flow, platform) as person:
        await store.advance_clock(61_000)
        await person.bot.process("c")
    assert platform.texts() == ["A?", "B?", "C?", "Second."]


async def test_counts_from_the_call(store: SqliteStore) -> None:
    """A message that was taken long before it was handled does not make its reminder come at once."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.remind("later", "Do not forget.", after=60)

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.writes("go")
        await store.advance_clock(3_600_000)
        await person.bot.process("c")
        await person.bot.process("c")
        assert platform.texts() == []
        await store.advance_clock(61_000)
        await person.bot.process("c")
    assert platform.texts() == ["Do not forget."]
