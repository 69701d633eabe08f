"""Field case 13: the stream vanished with its group. The group is made anew, without a hot loop or a double."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import pytest

from tests.cases.streams import GROUP, STREAM, Worker, errors_told, pending, worker
from tests.servers.redis import Monitor, RedisServer

pytestmark = pytest.mark.anyio

MOST_ERRORS = 5
"""NOGROUP errors that a worker may meet."""


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The tests' server, empty."""
    redis_server.flush()
    redis_server.run("CONFIG", "RESETSTAT")
    return redis_server


class Journal:
    """What a journal would know: which messages were done; and how often each was handled."""

    def __init__(self) -> None:
        self.handled: Counter[bytes] = Counter()
        self.known = 0
        self.done = asyncio.Event()

    async def work(self, worker: Worker, last: bytes) -> None:
        """Handle what comes and is not done yet, until `last` is."""
        while not self.done.is_set():
            for delivery in await worker.queue.consume(worker.name, wait_seconds=0.5):
                if delivery.body in self.handled:
                    self.known += 1
                else:
                    self.handled[delivery.body] += 1
                await worker.queue.acknowledge(delivery)
                if delivery.body == last:
                    self.done.set()


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_stream_is_deleted_while_workers_wait(redis: RedisServer, workers: int) -> None:
    """TR-10: m0 comes again and is known; m1 to m3 are handled once; few errors, few commands, whatever else goes on."""
    async with worker(redis, "w0") as one, worker(redis, "w1") as other, worker(redis, "front") as front:
        journal = Journal()
        await front.queue.publish("c", b"m0")
        await journal.work(one, b"m0")
        journal.done.clear()
        with Monitor(redis) as monitor:
            async with anyio.create_task_group() as group:
                for each in (one, other)[:workers]:
                    group.start_soon(journal.work, each, b"m3")
                await front.queue.depth()
                redis.run("DEL", STREAM)
                for body in (b"m0", b"m1", b"m2", b"m3"):
                    await front.queue.publish("c", body)
            commands = [words[0] for by_script, words in monitor.seen() if not by_script]
        assert journal.handled == Counter([b"m0", b"m1", b"m2", b"m3"])
        assert journal.known == 1
        assert errors_told(redis, "NOGROUP") <= MOST_ERRORS * workers
        assert errors_told(redis, "BUSYGROUP") == 0
        assert len(commands) < 100
        assert one.lost_number + other.lost_number == 0, "nothing was in it that was not done"
        assert pending(redis) == 0
        assert len(one.lost) + len(other.lost) == 1, "the one who made the group anew says so"


async def test_deleted_between_claim_and_acknowledgement(redis: RedisServer) -> None:
    """TR-10, TR-4: who held an entry acknowledges it; the producer's own retry is known; what waited is missed."""
    async with worker(redis, "w0") as one, worker(redis, "w1") as other:
        await one.queue.publish("c", b"m1")
        await one.queue.publish("c", b"waits")
        (held,) = await one.queue.consume("w0")
        redis.run("DEL", STREAM)
        await one.queue.publish("c", b"m1")
        assert await one.queue.acknowledge(held)
        (again,) = await other.queue.consume("w1", count=5)
        assert (again.body, again.attempt) == (b"m1", 1)
        assert again.id != held.id
        assert await other.queue.acknowledge(again)
        assert other.lost_number == 1
        assert pending(redis) == 0


async def test_deleted_and_the_holder_dies(redis: RedisServer) -> None:
    """TR-10: what went with the stream, and whose holder says nothing more, is missed by its id when its lease is over."""
    async with worker(redis, "w0") as one, worker(redis, "w1") as other:
        entry = await one.queue.publish("c", b"m1")
        await one.queue.consume("w0", lease_seconds=0.2)
        redis.run("DEL", STREAM)
        assert await other.queue.consume("w1", wait_seconds=1) == []
        assert other.lost_ids == [entry]


async def test_the_group_is_destroyed(redis: RedisServer) -> None:
    """TR-10, TR-2: what is held stays with its holder; what waits is handed out; attempts go on where they were."""
    async with worker(redis, "w0") as one, worker(redis, "w1") as other:
        for body in (b"held", b"left", b"waits"):
            await one.queue.publish("c", body)
        (held,) = await one.queue.consume("w0", lease_seconds=30)
        (left,) = await one.queue.consume("w0", lease_seconds=0.1)
        redis.run("XGROUP", "DESTROY", STREAM, GROUP)
        assert await one.queue.extend(held, 30)
        found = await other.queue.consume("w1", count=5)
        if len(found) == 1:
            found += await other.queue.consume("w1", count=5, wait_seconds=5)
        assert {(delivery.body, delivery.attempt) for delivery in found} == {(b"left", 2), (b"waits", 1)}
        assert not await one.queue.acknowledge(left)
        assert await one.queue.acknowledge(held)
        for delivery in found:
            assert await other.queue.acknowledge(delivery)
        assert await one.queue.consume("w0", count=5) == []
        assert pending(redis) == 0
        assert [lost.number for lost in (*one.lost, *other.lost)] == [0]
