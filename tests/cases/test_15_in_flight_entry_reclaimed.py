"""Field case 15: a turn longer than the lease stays with its worker; an entry that changed hands is settled by the new ones."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from tests.cases.streams import GROUP, STREAM, in_stream, pending, worker
from tests.servers.redis import RedisServer, wait_until
from tests.transport.support import place_named
from turnkeeper.transport.protocol import Depth, Transport
from turnkeeper.transport.redis_streams import Finished
from turnkeeper.turn.lifecycle import project
from turnkeeper.turn.names import TurnPhase

pytestmark = pytest.mark.anyio

LEASE = 0.4
TOOL = 5 * LEASE
"""How long the turn's tool takes."""


class Ledger:
    """How often the tool ran, and what became of it."""

    def __init__(self) -> None:
        self.began = 0
        self.acknowledged: list[bool] = []
        self.done = anyio.Event()


async def works(queue: Transport, name: str, ledger: Ledger) -> None:
    """A worker that takes what it can get, and keeps it fresh while its tool runs."""
    while not ledger.done.is_set():
        for delivery in await queue.consume(name, wait_seconds=LEASE / 2, lease_seconds=LEASE):
            ledger.began += 1
            ends = anyio.current_time() + TOOL
            while anyio.current_time() < ends:
                await anyio.sleep(LEASE / 4)
                assert await queue.extend(delivery, LEASE)
            ledger.acknowledged.append(await queue.acknowledge(delivery))
            ledger.done.set()


@pytest.mark.parametrize("workers", ["two workers", "one worker with two loops"])
@pytest.mark.parametrize("name", ["sqlite file", "postgres", "redis"])
async def test_a_tool_longer_than_the_lease(
    name: str, workers: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """TR-2: whoever else looks for entries, the one that is kept fresh comes to nobody, not even to its own worker again."""
    async with place_named(name, request, tmp_path_factory.mktemp("queue")) as place:
        one = await place.open()
        other = await place.open() if workers == "two workers" else one
        await one.publish("conversation", b"x")
        ledger = Ledger()
        async with anyio.create_task_group() as group:
            group.start_soon(works, one, "w0", ledger)
            group.start_soon(works, other, "w1" if other is not one else "w0", ledger)
        assert (ledger.began, ledger.acknowledged) == (1, [True])
        assert await one.depth() == Depth(0, 0, 0, 0)
        assert place.lost == []


async def test_claimed_by_hand_before_the_acknowledgement(redis_server: RedisServer) -> None:
    """TR-4, T4: an entry that was claimed for another worker is not settled from under it, and is not added to the stream again;
    the other one finds the turn done, and settles entry, lifecycle and index together."""
    redis = redis_server
    redis.flush()
    async with worker(redis, "w0") as one, worker(redis, "w1") as other:
        entry = await one.queue.publish("conversation", b"x")
        (held,) = await one.queue.consume("w0", lease_seconds=LEASE)
        lifecycle = one.queue.lifecycle("conversation")
        await project(lifecycle, "turn", TurnPhase.DELIVERED)
        redis.run("XCLAIM", STREAM, GROUP, "w1", 0, in_stream(redis)[entry])
        assert await one.queue.finish(held, "turn") is Finished.REFUSED
        assert not await one.queue.acknowledge(held)
        assert not await one.queue.retry_later(held, delay=0, reason="no")
        assert await lifecycle.stage("turn") == "DELIVERED"
        assert [active.trace_id for active in await one.queue.active()] == ["turn"]
        assert redis.run("XLEN", STREAM) == pending(redis) == 1

        (taken,) = await other.queue.consume("w1", wait_seconds=10)
        assert (taken.id, taken.attempt) == (entry, 2)
        assert await other.queue.finish(taken, "turn") is Finished.DONE
        assert await lifecycle.stage("turn") == "COMPLETED"
        assert await one.queue.active() == []
        assert redis.run("XLEN", STREAM) == pending(redis) == 0
        assert one.lost == other.lost == []


async def test_kept_fresh_for_the_tools_of_others(redis_server: RedisServer) -> None:
    """TR-2: an extended entry looks as fresh as it is in the pending list, for who goes by its idle time."""
    redis_server.flush()
    async with worker(redis_server, "w0") as one:
        await one.queue.publish("conversation", b"x")
        (held,) = await one.queue.consume("w0")
        wait_until(lambda: _pending_entry(redis_server)[2] >= 50, "the entry is idle")
        asked = time.monotonic()
        assert await one.queue.extend(held, 30)
        _, consumer, idle, times = _pending_entry(redis_server)
        assert (consumer, times) == (b"w0", 1)
        assert idle <= (time.monotonic() - asked) * 1000 + 1


def _pending_entry(redis: RedisServer) -> list[Any]:
    """The first entry of the pending list: id, consumer, idle time in milliseconds, times delivered."""
    script = "return redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1)[1]"
    return redis.run("EVAL", script, 1, STREAM, GROUP)
