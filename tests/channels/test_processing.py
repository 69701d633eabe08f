"""Handling in the process that took the messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.channels.gate import Gate, so
from tests.conversation.driving import state_of
from tests.conversation.platform import NotSent, Platform
from tests.engine.support import until
from turnkeeper.channels.processing import InProcess, tell
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message
from turnkeeper.errors import FlowUnknown
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

NEVER = 10_000.0


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    """An empty one."""
    async with await SqliteStore.open(":memory:") as store:
        yield store


class Slow:
    """A bot that waits in the middle of each message."""

    def __init__(self) -> None:
        self.platform = Platform()
        self.going = 0
        self.most = 0
        self.go_on = anyio.Event()
        self.flow = Flow("slow")

        @self.flow.step
        async def only(c: FlowContext) -> None:
            self.going += 1
            self.most = max(self.most, self.going)
            try:
                await self.go_on.wait()
            finally:
                self.going -= 1
            await c.send(c.message.text)

        assert only.__name__ == self.flow.first_step


async def test_what_comes_while_a_conversation_is_handled_is_handled_too(store: SqliteStore) -> None:
    """Also what comes at the very end, of which the store is not asked."""
    slow = Slow()
    async with Conversations(store, [slow.flow], slow.platform) as bot, InProcess(bot, poll_seconds=NEVER) as here:
        for number in range(5):
            await bot.receive("c", Message(event_id=str(number), text=str(number)))
            here.soon("c")
            if not number:
                await until(lambda: so(lambda: slow.going == 1))
        slow.go_on.set()
        await until(lambda: so(lambda: len(slow.platform.seen) == 5))
    assert slow.platform.texts() == list("01234")


async def test_so_many_at_once(store: SqliteStore) -> None:
    slow = Slow()
    async with (
        Conversations(store, [slow.flow], slow.platform) as bot,
        InProcess(bot, at_once=2, poll_seconds=NEVER) as here,
    ):
        for number in range(6):
            await bot.receive(f"c{number}", Message(event_id="1", text="x"))
            here.soon(f"c{number}")
        await until(lambda: so(lambda: slow.going == 2))
        slow.go_on.set()
        await until(lambda: so(lambda: len(slow.platform.seen) == 6))
    assert slow.most == 2


async def test_it_is_left_in_the_middle(store: SqliteStore) -> None:
    """What is under way is put back at once, for whoever comes next."""
    slow = Slow()
    async with Conversations(store, [slow.flow], slow.platform, lease_seconds=3600) as bot, InProcess(bot) as here:
        await bot.receive("c", Message(event_id="1", text="x"))
        here.soon("c")
        await until(lambda: so(lambda: slow.going == 1))
    assert slow.going == 0
    slow.go_on.set()
    async with Conversations(store, [slow.flow], slow.platform) as bot, InProcess(bot, poll_seconds=0.01):
        await until(lambda: so(lambda: len(slow.platform.seen) == 1))
    assert (await state_of(store, "c")).head is None


async def test_what_has_to_wait_is_found_again(store: SqliteStore) -> None:
    slow = Slow()
    slow.go_on.set()
    slow.platform.fault = lambda _: NotSent("no route")
    async with Conversations(store, [slow.flow], slow.platform) as bot, InProcess(bot, poll_seconds=0.01) as here:
        await bot.receive("c", Message(event_id="1", text="x"))
        here.soon("c")
        await until(lambda: so(lambda: len(slow.platform.calls) >= 4))
        slow.platform.fault = None
        await store.advance_clock(120_000)
        await until(lambda: so(lambda: len(slow.platform.seen) == 1))


async def test_a_failure_ends_nothing(store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(store, is_open=True)
    slow = Slow()
    slow.go_on.set()
    async with Conversations(gate, [slow.flow], slow.platform) as bot, InProcess(bot, poll_seconds=0.01) as here:
        await bot.receive("c", Message(event_id="1", text="x"))
        gate.fails = True
        here.soon("c")
        await until(lambda: so(lambda: "cannot be gone on with now" in caplog.text))
        gate.fails = False
        await until(lambda: so(lambda: len(slow.platform.seen) == 1))


async def test_what_cannot_be_gone_on_with_is_tried_ever_rarer(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every look into the store: a flow that is gone would fill the log."""
    tried = looks = 0
    pending = Conversations.pending

    async def fails(bot: Conversations, conversation_id: str) -> Any:
        nonlocal tried
        tried += 1
        raise FlowUnknown(conversation_id, "gone", 1)

    async def counted(bot: Conversations) -> list[str]:
        nonlocal looks
        looks += 1
        return await pending(bot)

    monkeypatch.setattr(Conversations, "process", fails)
    monkeypatch.setattr(Conversations, "pending", counted)
    async with Conversations(store, [Slow().flow], Platform()) as bot, InProcess(bot, poll_seconds=0.001):
        await bot.receive("c", Message(event_id="1", text="hello"))
        await until(lambda: so(lambda: looks > 100 and tried > 1))
    assert tried < looks / 10


async def test_nobody_is_there(store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
    """An application without its lifespan, say: it is told, and not lost."""
    async with Conversations(store, [Slow().flow], Platform()) as bot:
        here = InProcess(bot)
        assert not here.running
        here.soon("c")
        assert "handles none now" in caplog.text
        async with here:
            assert here.running


async def test_telling_fails(caplog: pytest.LogCaptureFixture) -> None:
    def broken(conversation_id: str) -> None:
        raise LookupError(conversation_id)

    async def broken_later(conversation_id: str) -> None:
        raise LookupError(conversation_id)

    for hook in (broken, broken_later):
        caplog.clear()
        await tell(hook, "the conversation")
        assert "LookupError: the conversation" in caplog.text
