"""Field case 12: entries that were deleted or trimmed while somebody held them are reported as lost, and hold up nobody."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cases.streams import GROUP, STREAM, in_stream, pending, worker
from tests.conftest import shared_json
from tests.servers.redis import Monitor, RedisServer
from turnkeeper.transport.redis_streams import Active
from turnkeeper.turn.lifecycle import project
from turnkeeper.turn.names import TurnPhase

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/12-reclaim-of-deleted-stream-entries.json")
EXPECTED = CASE["expected"]
LEASE = 0.2


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The tests' server, empty."""
    redis_server.flush()
    return redis_server


def numbers(entries: list[str], ids: list[str]) -> list[str]:
    """Ids of entries as the data file numbers them: 1-0 for the first."""
    return [f"{entries.index(entry) + 1}-0" for entry in ids]


def delete_some(redis: RedisServer, sids: list[str]) -> None:
    """The commands of the data file behind the reading: XDEL of the second and third, XTRIM of the first."""
    redis.run("XDEL", STREAM, *sids[1:3])
    redis.run("XTRIM", STREAM, "MINID", sids[1])


@pytest.mark.parametrize("restarted", [False, True], ids=["another worker", "the same, restarted"])
async def test_deleted_while_held(redis: RedisServer, restarted: bool) -> None:
    """TR-10, TR-3: B, or A under its old name, handles what is left once each; what is gone is reported by id, and nothing of it
    starts a turn; the turn of a lost entry is still in the list of active ones."""
    async with worker(redis, "A") as dies:
        entries = [await dies.queue.publish("conversation", b"n %d" % number) for number in range(1, 6)]
        held = await dies.queue.consume("A", count=5, lease_seconds=LEASE)
        await project(dies.queue.lifecycle("conversation"), "turn of 2", TurnPhase.STARTED)
    sids = in_stream(redis)
    delete_some(redis, [sids[entry] for entry in entries])

    async with worker(redis, "A" if restarted else "B") as lives:
        handled: list[str] = []
        empty = 0
        while len(handled) < 2 or lives.lost_number < 3:
            for delivery in await lives.queue.consume(lives.name, count=10, wait_seconds=10):
                handled.append(delivery.id)
                empty += not delivery.body
                assert delivery.attempt == 2
                assert await lives.queue.acknowledge(delivery)
        assert numbers(entries, handled) == EXPECTED["processed_once"]
        assert numbers(entries, lives.lost_ids) == EXPECTED["reported_lost"]
        assert empty == EXPECTED["turns_started_with_empty_payload"]
        assert pending(redis) == EXPECTED["xpending_at_end"]
        assert not await lives.queue.acknowledge(held[1])
        assert [active.trace_id for active in await lives.queue.active()] == ["turn of 2"]
        assert isinstance((await lives.queue.active())[0], Active)

        # Back to waiting: a few commands in a second, and no work for the processor.
        began = time.process_time()
        with Monitor(redis) as monitor:
            assert await lives.queue.consume(lives.name, wait_seconds=1) == []
            assert len([words for by_script, words in monitor.seen() if not by_script]) <= 5
        assert time.process_time() - began < 0.1


async def test_read_by_hand_and_deleted(redis: RedisServer) -> None:
    """TR-10: the same where A read the stream with bare commands: what nobody of ours holds is taken over, or reported."""
    async with worker(redis, "B") as lives:
        assert await lives.queue.consume("B") == []  # makes the group
        entries = [await lives.queue.publish("conversation", b"n %d" % number) for number in range(1, 6)]
        sids = [in_stream(redis)[entry] for entry in entries]
        redis.run("XREADGROUP", "GROUP", GROUP, "A", "COUNT", 5, "STREAMS", STREAM, ">")
        delete_some(redis, sids)
        handled: list[str] = []
        deadline = time.monotonic() + 20
        while len(handled) < 2:
            assert time.monotonic() < deadline
            for delivery in await lives.queue.consume("B", count=10, wait_seconds=LEASE, lease_seconds=LEASE):
                handled.append(delivery.id)
                assert delivery.attempt == 2
                assert await lives.queue.acknowledge(delivery)
        assert numbers(entries, handled) == EXPECTED["processed_once"]
        assert lives.lost_ids == sids[:3]
        assert lives.lost_number == 3
        assert pending(redis) == 0


async def test_deleted_before_anybody_read_them(redis: RedisServer) -> None:
    """TR-10: what was trimmed while it waited is missed by its number."""
    async with worker(redis, "B") as lives:
        for number in range(5):
            await lives.queue.publish("conversation", b"n %d" % number)
        redis.run("XTRIM", STREAM, "MAXLEN", 2)
        found = await lives.queue.consume("B", count=10)
        assert [delivery.body for delivery in found] == [b"n 3", b"n 4"]
        assert (lives.lost_ids, lives.lost_number) == ([], 3)
