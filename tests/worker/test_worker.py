"""The worker's loop in one process: what it takes, when it looks again, what it survives, and how it stops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conversation.driving import state_of
from tests.conversation.platform import Platform
from tests.engine.wrapped import WrappedStore
from turnkeeper import worker as module
from turnkeeper.conversation.context import FlowContext, TimedOut
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message
from turnkeeper.errors import StoreUnavailable
from turnkeeper.log.record import Head, HeadQuery
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.transport.opening import transport_in
from turnkeeper.transport.protocol import MAX_COUNT, Transport
from turnkeeper.worker import Worker

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """Transports have a conformance suite of their own."""
    async with await SqliteStore.open(tmp_path / "t.db") as store:
        yield store


def echo() -> Flow:
    """Answers; `slow` waits at the gate."""
    flow = Flow("echo")

    @flow.step
    async def answer(c: FlowContext) -> None:
        await c.send(c.message.text)

    return flow


class Scene:
    """A worker that runs, and a front end that takes messages."""

    def __init__(self, store: SqliteStore, transport: Transport, bot: Conversations, worker: Worker) -> None:
        self.store = store
        self.transport = transport
        self.bot = bot
        self.worker = worker
        self._events = 0

    async def says(self, text: str, conversation_id: str = "c") -> None:
        """A front end takes a message."""
        self._events += 1
        await self.bot.receive(conversation_id, Message(event_id=str(self._events), text=text))


@asynccontextmanager
async def working(
    store: SqliteStore, flow: Flow, platform: Platform, *, announces: bool = True, **options: Any
) -> AsyncGenerator[Scene]:
    """A worker that runs within the block, and is told to stop at its end."""
    transport = await transport_in(store)

    async def announce(conversation_id: str) -> None:
        await transport.publish(conversation_id)

    made = Conversations(store, [flow], platform, announce=announce if announces else None)
    async with made as bot, anyio.create_task_group() as tasks:
        worker = Worker(bot, transport, **options)
        tasks.start_soon(worker.run)
        yield Scene(store, transport, bot, worker)
        worker.drain()
    await transport.close()


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition; the test's own timeout bounds it."""
    while not true():  # noqa: ASYNC110  # it is others' state
        await anyio.sleep(0.01)


async def test_messages_are_handled_and_hints_acknowledged(store: SqliteStore) -> None:
    platform = Platform()
    async with working(store, echo(), platform) as scene:
        for number in range(30):
            await scene.says(str(number), f"c{number % 3}")
        await until(lambda: len(platform.seen) == 30)
    for one in range(3):
        assert platform.texts(f"c{one}") == [str(number) for number in range(30) if number % 3 == one]
    assert await scene.transport.depth() == (0, 0, 0, 0)
    assert scene.worker.progress.state == "stopped"
    assert scene.worker.progress.handled == 30


async def test_what_no_hint_tells_of_is_found(store: SqliteStore) -> None:
    platform = Platform()
    async with working(store, echo(), platform, announces=False, sweep_seconds=0.1) as scene:
        await scene.says("hello")
        await until(lambda: bool(platform.seen))
    assert platform.texts() == ["hello"]


async def test_a_message_that_nobody_was_told_of(store: SqliteStore) -> None:
    """J1: whoever took it died before he told of it; it is delivered again, to another one, who tells of it if it is pending."""
    platform = Platform()
    async with working(store, echo(), platform, sweep_seconds=1000) as scene:
        dead = Conversations(store, [echo()], platform)
        await dead.receive("c", Message(event_id="1", text="hello"))
        assert (await scene.bot.receive("c", Message(event_id="1", text="hello"))).duplicate
        await until(lambda: platform.texts() == ["hello"] and not scene.worker.progress.in_hand)
        assert (await scene.bot.receive("c", Message(event_id="1", text="hello"))).duplicate
        assert await scene.transport.depth() == (0, 0, 0, 0), "what is settled is told to nobody"


async def test_a_message_that_nobody_can_be_told_of(store: SqliteStore) -> None:
    """J1: it is acknowledged only if who looks through the store finds it, as an index may lag (LOG-8)."""

    class Lagging(WrappedStore):
        """One that does not list its logs yet."""

        listed = False

        async def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
            """See `Store`."""
            async for head in self.inner.heads(query):
                if self.listed:
                    yield head

    async def away(conversation_id: str) -> None:
        raise StoreUnavailable("the queue", f"is away for {conversation_id}")

    lagging = Lagging(store)
    bot = Conversations(lagging, [echo()], Platform(), announce=away)
    with pytest.raises(StoreUnavailable):
        await bot.receive("c", Message(event_id="1", text="hello"))
    lagging.listed = True
    assert (await bot.receive("c", Message(event_id="1", text="hello"))).duplicate


async def test_a_timer_is_hinted_at(store: SqliteStore) -> None:
    """A wait that runs out needs nobody to look through the store."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        try:
            await c.ask("Yes?", timeout=3600)
        except TimedOut:
            await c.send("Too late.")

    platform = Platform()
    async with working(store, flow, platform, sweep_seconds=1000) as scene:
        await scene.says("go")
        await until(lambda: platform.texts() == ["Yes?"] and not scene.worker.progress.in_hand)
        assert (await scene.transport.depth()).delayed == 1
        await store.advance_clock(3_600_000)
        await until(lambda: platform.texts() == ["Yes?", "Too late."])


async def test_a_timer_that_is_further_off_than_a_queue_can_wait(store: SqliteStore) -> None:
    """It is looked at in between, and does not end the worker."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        try:
            await c.ask("Yes?", timeout=20 * 366 * 86_400)
        except TimedOut:
            await c.send("Too late.")

    platform = Platform()
    async with working(store, flow, platform, sweep_seconds=1000) as scene:
        await scene.says("go")
        await until(lambda: platform.texts() == ["Yes?"] and not scene.worker.progress.in_hand)
        for _ in range(2):
            before = scene.worker.progress.beat
            assert (await scene.transport.depth()).delayed == 1
            await store.advance_clock(31 * 86_400_000)
            await until(lambda: scene.worker.progress.beat > before and not scene.worker.progress.in_hand)  # noqa: B023
        await store.advance_clock(20 * 366 * 86_400_000)
        await until(lambda: platform.texts() == ["Yes?", "Too late."])


async def test_others_have_their_turn(store: SqliteStore) -> None:
    """A conversation that is flooded does not hold up the others."""
    platform = Platform()
    transport = await transport_in(store)
    async with Conversations(store, [echo()], platform) as bot:
        for number in range(40):
            await bot.receive("flood", Message(event_id=str(number), text="x"))
        await bot.receive("other", Message(event_id="o", text="me too"))
        await transport.publish("flood")
        await transport.publish("other")
    async with working(store, echo(), platform, at_once=1, messages_at_a_time=5):
        await until(lambda: len(platform.seen) == 41)
    assert [where for where, _, _ in platform.seen].index("other") == 5


async def test_a_message_that_comes_at_the_last_moment_is_seen(store: SqliteStore) -> None:
    """A hint for a conversation that is in hand makes its worker look once more before it lets go."""
    platform = Platform()
    flow = Flow("f")
    scenes: list[Scene] = []

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send(c.message.text)

    async with working(store, flow, platform, sweep_seconds=1000) as scene:
        scenes.append(scene)
        process = scene.bot.process

        async def late(conversation_id: str, *, at_most: int | None = None) -> Any:
            done = await process(conversation_id, at_most=at_most)
            if platform.texts() == ["one"]:
                await scene.says("two")
                await until(lambda: conversation_id in scene.worker._once_more)  # pyright: ignore[reportPrivateUsage]
            return done

        scene.bot.process = late  # type: ignore[method-assign]
        await scene.says("one")
        await until(lambda: platform.texts() == ["one", "two"])


async def test_draining_finishes_what_is_under_way(store: SqliteStore) -> None:
    flow, entered, gate = gated()
    platform = Platform()
    async with working(store, flow, platform, drain_seconds=60) as scene:
        await scene.says("go")
        await entered.wait()
        scene.worker.drain()
        await scene.says("go", "later")
        await until(lambda: scene.worker.progress.state == "draining")
        gate.set()
    assert platform.texts() == ["done"]
    assert platform.texts("later") == []
    assert (await scene.transport.depth()).ready == 1


async def test_draining_puts_back_what_takes_too_long(store: SqliteStore) -> None:
    """Another worker goes on at once, and not when a lease has ended."""
    entered = anyio.Event()
    flow = Flow("f")
    gate = anyio.Event()

    @flow.step
    async def only(c: FlowContext) -> None:
        entered.set()
        await gate.wait()
        await c.send("done")

    platform = Platform()
    async with working(store, flow, platform, drain_seconds=0.05) as scene:
        await scene.says("go")
        await entered.wait()
    state = await state_of(store)
    assert (state.owner, len(state.inbound), state.inbound[0].attempts) == ("", 1, 0)
    assert (await scene.transport.depth()).ready == 1
    gate.set()
    async with working(store, flow, platform, sweep_seconds=1000):
        with anyio.fail_after(10):
            await until(lambda: platform.texts() == ["done"])


class Away:
    """A transport that is away when it is told to be."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.away = False
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("consume", "publish", "acknowledge", "release", "retry_later", "extend"):
            self.asked += 1
            if self.away:
                raise StoreUnavailable("server", "connection refused", applied=False)
        return getattr(self._transport, name)


async def test_an_outage_is_waited_for(store: SqliteStore) -> None:
    """Bounded attempts with growing pauses, no busy loop, not ready meanwhile, and nothing lost or done twice."""
    platform = Platform()
    away = Away(await transport_in(store))
    away.away = True
    async with Conversations(store, [echo()], platform) as bot, anyio.create_task_group() as tasks:
        worker = Worker(bot, away, sweep_seconds=0.1)  # type: ignore[arg-type]
        tasks.start_soon(worker.run)
        await bot.receive("c", Message(event_id="1", text="hello"))
        await until(lambda: worker.progress.failures >= 4)
        assert worker.progress.state == "waiting"
        assert "StoreUnavailable" in worker.progress.last_error
        asked = away.asked
        await anyio.sleep(0.3)
        assert away.asked - asked < 10
        away.away = False
        await until(lambda: platform.texts() == ["hello"])
        assert worker.progress.state == "ready"
        worker.drain()


def gated() -> tuple[Flow, anyio.Event, anyio.Event]:
    """A flow whose step waits; and events: a step has been entered, and let them go."""
    entered, gate = anyio.Event(), anyio.Event()
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        entered.set()
        await gate.wait()
        await c.send("done")

    return flow, entered, gate


async def test_a_store_that_is_away_from_its_queue(store: SqliteStore, tmp_path: Path) -> None:
    """The queue is somewhere else and is there: the worker is not ready all the same, and does not go round and round."""
    asked = 0
    platform = Platform()
    async with await SqliteStore.open(tmp_path / "queue.db") as other:
        transport = await transport_in(other)
        async with Conversations(store, [echo()], platform) as bot, anyio.create_task_group() as tasks:
            process = bot.process

            async def away(conversation_id: str, *, at_most: int | None = None) -> Any:
                nonlocal asked
                asked += 1
                raise StoreUnavailable("server", "connection refused", applied=False)

            bot.process = away  # type: ignore[method-assign]
            for number in range(100):
                await bot.receive(f"c{number}", Message(event_id="1", text="hello"))
                await transport.publish(f"c{number}")
            worker = Worker(bot, transport, sweep_seconds=1000)
            tasks.start_soon(worker.run)
            await until(lambda: worker.progress.state == "waiting")
            with anyio.move_on_after(2):
                await until(lambda: worker.progress.state == "ready")
            assert worker.progress.state == "waiting"
            assert asked < 50  # the first 16, and then one at a time with growing pauses
            bot.process = process  # type: ignore[method-assign]
            await until(lambda: len(platform.seen) == 100 and worker.progress.state == "ready")
            worker.drain()
        await transport.close()


async def test_a_part_of_the_store_is_away(store: SqliteStore) -> None:
    """A node of a cluster, say: what lies there is tried ever rarer, also while everything else goes well."""
    async with working(store, echo(), Platform(), sweep_seconds=1000) as scene:
        process, tried = scene.bot.process, 0

        async def partly(conversation_id: str, *, at_most: int | None = None) -> Any:
            nonlocal tried
            if conversation_id != "lost":
                return await process(conversation_id, at_most=at_most)
            tried += 1
            raise StoreUnavailable("node", "connection refused", applied=False)

        scene.bot.process = partly  # type: ignore[method-assign]
        await scene.says("hello", "lost")
        with anyio.move_on_after(3):
            while True:
                await scene.says("hello", "there")
                await anyio.sleep(0.02)
        assert scene.worker.progress.handled > 20
        assert 2 <= tried <= 8


async def test_a_conversation_that_cannot_be_gone_on_with(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again and again, and leaves no dead letters behind: its hints say nothing that is worth keeping."""
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.01)
    async with working(store, echo(), Platform(), sweep_seconds=0.05) as scene:

        async def fails(conversation_id: str, *, at_most: int | None = None) -> Any:
            raise ValueError("a bug")

        scene.bot.process = fails  # type: ignore[method-assign]
        await scene.says("hello")
        await until(lambda: scene.worker.progress.failures > 30)
    assert (await scene.transport.depth()).dead == 0


async def test_what_waits_for_its_turn_is_not_hinted_at_again_and_again(store: SqliteStore) -> None:
    """The queue does not grow with every sweep while all that work has their hands full."""
    flow, entered, gate = gated()
    async with working(store, flow, Platform(), at_once=1, sweep_seconds=0.01) as scene:
        for number in range(20):
            await scene.says("go", f"c{number}")
        await entered.wait()
        sweeps, pending = 0, scene.bot.pending

        async def counted() -> list[str]:
            nonlocal sweeps
            sweeps += 1
            return await pending()

        scene.bot.pending = counted  # type: ignore[method-assign]
        await until(lambda: sweeps > 40)
        assert (await scene.transport.depth()).ready <= 20 * 8
        gate.set()
        await until(lambda: scene.worker.progress.handled == 20)


async def test_more_at_once_than_a_queue_hands_out(store: SqliteStore) -> None:
    platform = Platform()
    async with working(store, echo(), platform, at_once=MAX_COUNT + 1) as scene:
        await scene.says("hello")
        await until(lambda: platform.texts() == ["hello"])


async def test_a_worker_with_its_hands_full_is_alive(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is told to stop, and finishes what it has in hand: who looks after it must not kill it then."""
    monkeypatch.setattr(module, "_WAIT", 0.01)
    flow, entered, gate = gated()
    async with working(store, flow, Platform(), at_once=1, drain_seconds=60) as scene:
        progress = scene.worker.progress
        await scene.says("go")
        await entered.wait()
        for state in ("ready", "draining"):
            progress.beat = 0.0
            await until(lambda: progress.beat > 0.0)
            assert progress.state == state
            scene.worker.drain()
            await until(lambda: progress.state == "draining")
        gate.set()
