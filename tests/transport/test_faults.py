"""Cut connections, lost answers, restarted servers: what was acknowledged stays away, what was published comes (TR-1 to TR-5)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import pytest

from tests.servers.pgbouncer import pgbouncer
from tests.servers.postgres import Server
from tests.servers.proxy import Proxy, When
from tests.servers.redis import RedisServer, cluster, server
from tests.transport.support import PATIENCE, ClockedTransport, drain, take, take_one, waiting
from turnkeeper import errors
from turnkeeper.stores.postgres import PostgresStore
from turnkeeper.stores.redis import RedisStore
from turnkeeper.transport.opening import open_transport
from turnkeeper.transport.postgres import PostgresTransport
from turnkeeper.transport.protocol import Depth, Transport
from turnkeeper.transport.redis_streams import RedisTransport

pytestmark = pytest.mark.anyio

WHENS: Final[tuple[When, When]] = ("before", "after")
whenever = pytest.mark.parametrize("when", WHENS)


@asynccontextmanager
async def proxied(name: str, request: pytest.FixtureRequest) -> AsyncGenerator[tuple[ClockedTransport, Proxy]]:
    """A queue whose one connection goes through a proxy, and that has done everything once."""
    if name == "postgres":
        postgres: Server = request.getfixturevalue("postgres")
        database: str = request.getfixturevalue("postgres_database")
        async with Proxy(postgres.port) as proxy:
            url = postgres.url(database, pool_size=1).replace(str(postgres.port), str(proxy.port))
            async with await PostgresStore.open(url) as store:
                queue = PostgresTransport(store)
                await _warm(queue)
                yield queue, proxy
                await queue.close()
        return
    redis: RedisServer = request.getfixturevalue("redis_server")
    redis.flush()
    async with Proxy(redis.port) as proxy, _redis_through(proxy) as queue:
        yield queue, proxy


@asynccontextmanager
async def _redis_through(proxy: Proxy) -> AsyncGenerator[ClockedTransport]:
    async with await RedisStore.open(f"redis://127.0.0.1:{proxy.port}/0?connections=1&patience=1") as store:
        queue = await RedisTransport.open(store)
        await _warm(queue)
        yield queue
        await queue.close()


async def _warm(queue: ClockedTransport) -> None:
    """A server that does not know a script or statement yet is told of it now: that must not be what is cut."""
    for _ in range(6):
        await queue.publish("warm")
        held = await take_one(queue)
        await queue.extend(held, 30)
        assert await queue.acknowledge(held)


places = pytest.mark.parametrize("name", ["postgres", "redis"])


@places
@whenever
async def test_a_cut_publication(name: str, when: When, request: pytest.FixtureRequest) -> None:
    """TR-1: it is not sent twice by itself; the error says that it may be in; the queue works on."""
    async with proxied(name, request) as (queue, proxy):
        proxy.cut_next(when)
        with pytest.raises(errors.StoreUnavailable) as raised:
            await queue.publish("k", b"x")
        assert raised.value.applied is None
        assert await drain(queue) == ([b"x"] if when == "after" else [])


@places
@whenever
async def test_a_cut_consumer(name: str, when: When, request: pytest.FixtureRequest) -> None:
    """TR-3: what was handed out to nobody comes again when its lease is over; what was not is there at once."""
    async with proxied(name, request) as (queue, proxy):
        await queue.publish("k", b"x")
        proxy.cut_next(when)
        with pytest.raises(errors.StoreUnavailable):
            await take(queue, lease=10)
        if when == "after":
            assert await take(queue) == []
            await queue.advance_clock(10_100)
        assert (await take_one(queue)).attempt == (2 if when == "after" else 1)


@places
@whenever
async def test_a_cut_acknowledgement(name: str, when: When, request: pytest.FixtureRequest) -> None:
    """TR-5: asked again, it is done; either way the entry does not come again."""
    async with proxied(name, request) as (queue, proxy):
        await queue.publish("k", b"x")
        held = await take_one(queue)
        proxy.cut_next(when)
        with pytest.raises(errors.StoreUnavailable) as raised:
            await queue.acknowledge(held)
        assert raised.value.applied is None
        assert await queue.acknowledge(held) is (when == "before")
        assert await queue.depth() == Depth(0, 0, 0, 0)


@places
async def test_cut_while_it_waits(name: str, request: pytest.FixtureRequest) -> None:
    """TR-11: a consumer whose connections are cut while it waits goes on waiting, and gets what comes."""
    async with proxied(name, request) as (queue, proxy):
        task = await waiting(queue)
        proxy.cut()
        await _persist(queue, b"x")
        with anyio.fail_after(PATIENCE):
            assert [delivery.body for delivery in await task] == [b"x"]


async def _persist(queue: Transport, body: bytes) -> None:
    """Publish, once more where the connection was cut under it."""
    try:
        await queue.publish("k", body)
    except errors.StoreUnavailable:
        await queue.publish("k", body)


async def test_a_part_is_away() -> None:
    """TR-10: a node of a cluster that is away holds up nobody else's entries; its own come when it is there again."""
    settings = {"cluster-require-full-coverage": "no", "appendonly": "yes", "appendfsync": "always"}
    with cluster(node_timeout_ms=15_000, **settings) as servers:
        async with await RedisStore.open(servers.url("timeout=1&patience=1")) as store:
            queue = await RedisTransport.open(store)
            holders = [servers.holder(servers.slot(f"{{default-{shard}}}")) for shard in range(queue.shards)]
            keys = {queue.shard_of(f"k{number}"): f"k{number}" for number in range(100)}
            for shard in range(queue.shards):
                await queue.publish(keys[shard])
            away = servers.nodes[holders[0]]
            away.kill()
            there = {keys[shard] for shard, holder in enumerate(holders) if holder != holders[0]}
            assert 0 < len(there) < len(keys)
            with anyio.fail_after(PATIENCE):
                assert await _keys_of(queue, len(there)) == there
                away.start()
                assert await _keys_of(queue, len(keys) - len(there)) == {keys[shard] for shard in range(4)} - there
            await queue.close()


async def _keys_of(queue: Transport, number: int) -> set[str]:
    """Take and acknowledge so many entries."""
    found: set[str] = set()
    while len(found) < number:
        for delivery in await queue.consume("a", count=10, wait_seconds=5):
            assert await queue.acknowledge(delivery)
            found.add(delivery.key)
    return found


async def test_behind_a_pooler(postgres: Server, postgres_database: str) -> None:
    """TR-11: where a transaction pooler forbids notifications, who waits looks now and then, and gets what comes."""
    with pgbouncer(postgres, pool_size=3) as port:
        url = postgres.url(postgres_database).replace(str(postgres.port), str(port))
        queue, other = await open_transport(url), await open_transport(url)
        task = await waiting(queue)
        await other.publish("k", b"x")
        with anyio.fail_after(5):
            (held,) = await task
        assert held.body == b"x"
        assert await other.acknowledge(held)
        await queue.close()
        await other.close()


async def test_the_server_restarts() -> None:
    """TR-1, TR-3, TR-5, TR-6: with `appendonly yes` and `appendfsync always`, a killed server knows all that it had confirmed; a
    consumer that waits outlives it."""
    with server(appendonly="yes", appendfsync="always") as redis:
        queue = await open_transport(redis.url("patience=20"), max_attempts=3)
        for number in range(6):
            await queue.publish(f"k{number}", b"%d" % number)
        await queue.publish("k", b"delayed", delay=1)
        acknowledged, failed, dead, held = await queue.consume("a", count=4)
        assert await queue.acknowledge(acknowledged)
        assert await queue.retry_later(failed, delay=1, reason="no")
        assert await queue.dead_letter(dead, reason="no")
        redis.kill()
        redis.start()
        assert await queue.extend(held, 3600)
        came: list[tuple[bytes, int]] = []
        with anyio.fail_after(PATIENCE):
            while len(came) < 4:
                for delivery in await queue.consume("b", count=5, wait_seconds=5, lease_seconds=3600):
                    came.append((delivery.body, delivery.attempt))
                    assert await queue.acknowledge(delivery)
        assert sorted(came) == [(b"1", 2), (b"4", 1), (b"5", 1), (b"delayed", 1)]
        assert [letter.body for letter in await queue.dead_letters()] == [b"2"]
        assert await queue.acknowledge(held)
        assert await queue.depth() == Depth(0, 0, 0, 1)

        task = await waiting(queue)
        redis.kill()
        redis.start()
        await _persist(queue, b"behind the restart")
        with anyio.fail_after(PATIENCE):
            assert [delivery.body for delivery in await task] == [b"behind the restart"]
        await queue.close()
