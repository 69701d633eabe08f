"""`Conversations.work`: a worker that finds what is pending by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from tests.conversation.driving import state_of
from tests.conversation.platform import Platform
from tests.engine.wrapped import WrappedStore
from turnkeeper.conversation.channel import NotSent
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message
from turnkeeper.errors import StoreUnavailable
from turnkeeper.log.record import Head, HeadQuery
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


def greeting() -> Flow:
    """Says hello, and ends."""
    flow = Flow("greeting")

    @flow.step
    async def greet(c: FlowContext) -> None:
        await c.send("Hello.")

    assert greet.__name__ == flow.first_step
    return flow


async def worked_until_quiet(store: SqliteStore, bot: Conversations) -> None:
    """Let it work until its only conversation has nothing left."""
    async with bot, anyio.create_task_group() as tasks:

        async def work() -> None:
            await bot.work(poll_seconds=0.01)

        tasks.start_soon(work)
        with anyio.fail_after(20):
            while (await state_of(store)).head is not None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_a_new_worker_finds_a_message_that_was_put_back(tmp_path: Path) -> None:
    """F2, invariant 3: what has to wait is gone on with by a process that knows no other conversation."""
    async with await SqliteStore.open(tmp_path / "turns.db") as store:
        platform = Platform(fault=lambda _: NotSent("no route"))
        async with Conversations(store, [greeting()], platform) as bot:
            done = await bot.handle("c", Message(event_id="1", text="hi"))
        assert done.left == "later"
        platform.fault = None
        await store.advance_clock(120_000)
        await worked_until_quiet(store, Conversations(store, [greeting()], platform))
        assert platform.texts() == ["Hello."]


class Deaf(WrappedStore):
    """Cannot be listed the first two times."""

    def __init__(self, inner: SqliteStore) -> None:
        super().__init__(inner)
        self.asked = 0

    def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `Store`."""
        self.asked += 1
        if self.asked < 3:
            raise StoreUnavailable("the test", "is away")
        return super().heads(query)


async def test_a_store_that_is_away_for_a_while_does_not_end_a_worker(tmp_path: Path) -> None:
    """Invariant 3: it goes on as soon as the store is back."""
    async with await SqliteStore.open(tmp_path / "turns.db") as store:
        platform = Platform()
        deaf = Deaf(store)
        bot = Conversations(deaf, [greeting()], platform)
        await bot.receive("c", Message(event_id="1", text="hi"))
        await worked_until_quiet(store, bot)
        assert deaf.asked > 2
        assert platform.texts() == ["Hello."]
