"""What goes wrong between a process and Redis: cut, slow and refused connections, cancelled calls (LOG-1, LOG-6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conformance.support import HEAD, append, bodies, listed, whole
from tests.conformance.tally import adding, tally_log
from tests.servers.proxy import Proxy, When
from tests.servers.redis import Monitor, RedisServer, server, wait_until
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended, Behind
from turnkeeper.stores.redis import RedisLifecycle, RedisStore
from turnkeeper.turn.identity import trace_hash
from turnkeeper.turn_checkpoint import ToolCallAction, TurnCheckpointSession

pytestmark = pytest.mark.anyio

WHENS: tuple[When, When] = ("before", "after")


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The tests' server, empty."""
    redis_server.flush()
    return redis_server


@asynccontextmanager
async def proxied(redis: RedisServer, query: str = "") -> AsyncGenerator[tuple[RedisStore, Proxy]]:
    """A store with one connection, which goes through a proxy."""
    async with Proxy(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?connections=1{'&' * bool(query)}{query}"
        async with await RedisStore.open(url) as store:
            # A server that does not know a script yet asks for it: that must not be what is cut.
            await append(store, "warm", b"x")
            await store.read("warm")
            await store.erase("warm")
            yield store, proxy


# --- lost answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("first", [True, False], ids=["creating", "appending"])
async def test_a_cut_append_is_in_or_not(redis: RedisServer, when: When, first: bool) -> None:
    """LOG-6: cut before the server took it, or after: the append is not sent again, the error says unknown, a read tells."""
    async with proxied(redis) as (store, proxy):
        expected = NOWHERE if first else await append(store, "k", b"0")
        with Monitor(redis) as monitor:
            proxy.cut_next(when)
            with pytest.raises(errors.StoreUnavailable) as raised:
                await store.append("k", [b"a", b"b"], expected=expected, head=HEAD)
            assert raised.value.applied is None
            sent = [words for by_script, words in monitor.seen() if not by_script and words[0].startswith(b"EVAL")]
        assert len(sent) == (when == "after")
        found = bodies(await store.read("k", after=expected))
        assert found == ([b"a", b"b"] if when == "after" else [])


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("first", [True, False], ids=["creating", "appending"])
async def test_a_log_finds_out(redis: RedisServer, when: When, first: bool) -> None:
    """LOG-6: through the shell a lost answer is no loss: what was asked is in once, and the caller gets its answer."""
    async with proxied(redis) as (store, proxy):
        log = tally_log(store)
        if not first:
            await log.ask(adding(1))
        await store.read("tally")
        proxy.cut_next(when)
        assert await log.ask(adding(10)) == "added"
        assert (await tally_log(store).read()).total == (10 if first else 11)
        assert [head.key for head in await listed(store)] == ([] if first and when == "after" else ["tally"])
        await log.ask(adding(100))
        assert [head.key for head in await listed(store)] == ["tally"]


@pytest.mark.parametrize("when", WHENS)
async def test_a_barrier_whose_answer_was_lost(redis: RedisServer, when: When) -> None:
    """T3 `begin_tool`: through a cut connection it still authorises, once: the log knows its own append."""
    async with proxied(redis) as (store, proxy):
        session = TurnCheckpointSession(store, "t-1")
        await session.start([{"role": "user", "content": "pay"}])
        await session.reserve_assistant(0, {"tool_calls": [{"id": "c", "name": "pay", "arguments": "{}"}]})
        operation = session.logical_operation_id(0, 0)
        claimed = await session.claim_tool(0, 0, "c", "pay", "{}", operation, owner_token="w")
        proxy.cut_next(when)
        assert (await session.begin_tool(0, 0, "w", claimed.fence)).should_begin
        again = await session.begin_tool(0, 0, "w", claimed.fence)
        assert again.action is ToolCallAction.ALREADY_EXECUTING
        assert not again.should_begin


async def test_an_append_that_arrives_late(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOG-6: given up as lost, looked for and not found, then delivered after all: it is in once, and known as one's own."""
    direct = await RedisStore.open(redis.url())
    async with direct, proxied(redis, "timeout=0.2") as (store, proxy):
        log = tally_log(store)
        await log.ask(adding(1))
        late = proxy.hold_next()
        read, write = store.read, store.append
        looked: list[int] = []

        async def look(*args: Any, **kwargs: Any) -> Any:
            tail = await read(*args, **kwargs)
            looked.append(len(tail.records))
            return tail

        async def write_late(*args: Any, **kwargs: Any) -> Any:
            if looked:
                # Between the look that did not find it and the next append, the network delivers it.
                late.set()
                await asyncio.to_thread(
                    wait_until, lambda: redis.run("HGET", "tk:tally", "tail") == b"2", "it is delivered"
                )
            return await write(*args, **kwargs)

        monkeypatch.setattr(store, "read", look)
        monkeypatch.setattr(store, "append", write_late)
        # No name: a decider that cannot tell a repeat, so only the append's id keeps it from being in twice.
        assert await log.ask(adding(10)) == "added"
        assert looked == [0]
        assert log.cached.total == 11
        assert (await tally_log(direct).read()).total == 11
        assert log.appends == 2


@pytest.mark.parametrize("when", WHENS)
async def test_what_may_be_repeated_is_repeated(redis: RedisServer, when: When) -> None:
    """Reads, listings and the lifecycle go again by themselves when a connection is cut: the caller sees nothing of it."""
    async with proxied(redis) as (store, proxy):
        await append(store, "k", b"1")
        lifecycle = RedisLifecycle(store, trace_hash)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: whole(store, "k"),
            lambda: listed(store),
            store.promises,
            lambda: lifecycle.advance("t", None, "PROCESSING"),
            lambda: lifecycle.stage("t"),
        ]
        for call in calls:
            expected = await call()
            proxy.cut_next(when)
            if call == store.promises:
                with pytest.raises(errors.StoreUnavailable):
                    await call()
            else:
                assert await call() == expected


@pytest.mark.parametrize("when", WHENS)
async def test_a_cut_erasure(redis: RedisServer, when: When) -> None:
    """LOG-6: an erasure whose answer was lost says so; a repeat tells what there is left to erase."""
    async with proxied(redis) as (store, proxy):
        await append(store, "k", b"1")
        proxy.cut_next(when)
        with pytest.raises(errors.StoreUnavailable) as raised:
            await store.erase("k")
        assert raised.value.applied is None
        assert await store.erase("k") is (when == "before")
        assert await listed(store) == []


async def test_a_server_that_does_not_answer(redis: RedisServer) -> None:
    """LOG-6: an answer that takes longer than the timeout counts as lost; a read is tried for as long as patience lasts."""
    async with await RedisStore.open(redis.url("timeout=0.2&patience=0.5&connections=1")) as store:
        position = await append(store, "k", b"1")
        redis.pause()
        try:
            began = time.monotonic()
            with pytest.raises(errors.StoreUnavailable) as raised:
                await store.append("k", [b"2"], expected=position, head=HEAD)
            assert raised.value.applied is None
            assert 0.2 <= time.monotonic() - began < 3
            with pytest.raises(errors.StoreUnavailable):
                await store.read("k")
            assert time.monotonic() - began < 6
        finally:
            redis.resume()
        # What reached the server before its pause is done in its order: a read behind it tells.
        tail = await store.read("k", after=position)
        assert bodies(tail) in ([b"2"], [])
        await append(store, "k", b"3", expected=tail.position)


# --- connections that are refused, or went away ----------------------------------------------------------------


async def test_a_server_that_comes_back(redis_server: RedisServer) -> None:
    """A refused connection was surely not used: the call waits for the server, as long as patience lasts."""
    with server() as mine:
        async with await RedisStore.open(mine.url("patience=20")) as store:
            await append(store, "k", b"1")
            await asyncio.to_thread(mine.kill)
            waiting = asyncio.ensure_future(append(store, "l", b"2"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await asyncio.to_thread(mine.start)
            await waiting
            assert await whole(store, "l") == [(1, b"2")]


async def test_a_server_that_stays_away() -> None:
    """LOG-6: behind patience a typed error that says: nothing was changed."""
    with server() as mine:
        async with await RedisStore.open(mine.url("patience=0.2")) as store:
            await asyncio.to_thread(mine.kill)
            for call in (lambda: append(store, "k", b"1"), lambda: store.read("k"), lambda: store.erase("k")):
                began = time.monotonic()
                with pytest.raises(errors.StoreUnavailable) as raised:
                    await call()
                assert raised.value.applied is False
                assert 0.2 <= time.monotonic() - began < 5


def keep_busy(seconds: float) -> None:
    """Let the event loop do nothing else, as a tool that blocks does."""
    time.sleep(seconds)


async def test_idle_connections_that_the_server_closed(redis: RedisServer) -> None:
    """A connection that was closed while idle is noticed before it is used, also behind a busy event loop: no answer is lost."""
    async with await RedisStore.open(redis.url()) as store:
        positions = await asyncio.gather(*(append(store, f"k{number}", b"1") for number in range(8)))
        redis.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        keep_busy(0.1)
        for number, position in enumerate(positions):
            await append(store, f"k{number}", b"2", expected=position)


# --- cancelled calls -------------------------------------------------------------------------------------------


async def test_no_reply_is_left_on_a_connection(redis: RedisServer) -> None:
    """LOG-6: hundreds of calls cancelled at any moment, on few connections: each later answer is that of its own question."""
    async with await RedisStore.open(redis.url("connections=3")) as store:
        positions = {f"k{number}": await append(store, f"k{number}", b"%d" % number) for number in range(20)}
        for steps in range(12):
            tasks: list[asyncio.Task[Any]] = []
            for key, position in positions.items():
                tasks.append(asyncio.ensure_future(store.read(key)))
                tasks.append(asyncio.ensure_future(store.append(key, [b"x" * steps], expected=position, head=HEAD)))
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in tasks[steps % 2 :: 2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number, key in enumerate(positions):
                tail = await store.read(key)
                assert tail.records[0].body == b"%d" % number
                positions[key] = tail.position
        assert redis.info("clients")["connected_clients"] <= 3 + 2


async def test_a_cancelled_append_goes_to_its_end(redis: RedisServer) -> None:
    """LOG-6: what had gone out when the caller was cancelled is waited for by the next read, so that it tells for good."""
    async with proxied(redis) as (store, proxy):
        position = await append(store, "k", b"1")
        late = proxy.hold_next()
        task = asyncio.ensure_future(store.append("k", [b"2"], expected=position, head=HEAD))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reading = asyncio.ensure_future(store.read("k", after=position))
        await asyncio.sleep(0.05)
        assert not reading.done()
        late.set()
        assert bodies(await reading) == [b"2"]
        assert proxy.made == 1


async def test_a_cancelled_append_that_had_not_gone_out(redis: RedisServer) -> None:
    """LOG-6: cancelled while a large command was still being sent: the rest is never sent, so it is never executed."""
    async with proxied(redis, "connections=2") as (store, proxy):
        position = await append(store, "k", b"1")
        held = proxy.hold_next()  # behind the system's buffers the client has to wait
        task = asyncio.ensure_future(store.append("k", [b"2" * 30_000_000], expected=position, head=HEAD))
        await asyncio.sleep(0.2)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.set()
        assert await whole(store, "k") == [(1, b"1")]
        await append(store, "k", b"3", expected=position)
        assert await whole(store, "k") == [(1, b"1"), (2, b"3")]


async def test_closing_waits_for_what_is_under_way(redis: RedisServer) -> None:
    """A closed store has finished what cancelled callers left, and refuses what comes then."""
    async with proxied(redis) as (store, proxy):
        position = await append(store, "k", b"1")
        late = proxy.hold_next()
        task = asyncio.ensure_future(store.append("k", [b"2"], expected=position, head=HEAD))
        await asyncio.sleep(0.05)
        task.cancel()
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        late.set()
        await closing
        with pytest.raises(errors.StoreClosed):
            await store.read("k")
    async with await RedisStore.open(redis.url()) as other:
        assert bodies(await other.read("k")) == [b"1", b"2"]


async def test_many_more_callers_than_connections(redis: RedisServer) -> None:
    """Callers wait for a connection; nobody is refused, and the server sees no more than were allowed."""
    async with await RedisStore.open(redis.url("connections=2")) as store:
        outcomes = await asyncio.gather(
            *(
                store.append(f"k{n % 50}", [b"x"], expected=NOWHERE, head=replace(HEAD, phase=str(n)))
                for n in range(300)
            )
        )
        assert sum(isinstance(outcome, Appended) for outcome in outcomes) == 50
        assert all(isinstance(outcome, Appended | Behind) for outcome in outcomes)
        assert redis.info("clients")["connected_clients"] <= 2 + 2
