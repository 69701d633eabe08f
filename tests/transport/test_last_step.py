"""The last step of a turn in Redis: acknowledge, COMPLETED, out of the active index: one script, all of it or nothing (T4)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.servers.redis import Monitor, RedisCluster, RedisServer
from tests.transport.support import take_one
from turnkeeper import errors
from turnkeeper.stores.redis import RedisStore
from turnkeeper.transport.protocol import Depth
from turnkeeper.transport.redis_streams import Finished, RedisTransport
from turnkeeper.turn.lifecycle import STAGES, project
from turnkeeper.turn.names import TurnPhase

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["redis", "redis cluster"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[RedisTransport]:
    """An empty queue."""
    fixture = "redis_server" if request.param == "redis" else "redis_cluster"
    server: RedisServer | RedisCluster = request.getfixturevalue(fixture)
    server.flush()
    async with await RedisStore.open(server.url()) as store:
        queue = await RedisTransport.open(store)
        yield queue
        await queue.close()


async def test_the_whole_life_of_a_trace(queue: RedisTransport) -> None:
    """T4: each stage behind its predecessor; active from the first stage to the last step, which does all three."""
    for number in range(6):  # on several shards of a cluster
        key, trace = f"conversation {number}", f"trace {number}"
        await queue.publish(key)
        held = await take_one(queue)
        lifecycle = queue.lifecycle(key)
        assert not await lifecycle.advance(trace, "PROCESSING", "ANSWERED")
        await project(lifecycle, trace, TurnPhase.STARTED)
        assert [active.trace_id for active in await queue.active()] == [trace]
        await project(lifecycle, trace, TurnPhase.COMPLETED)
        assert await lifecycle.stage(trace) == "DELIVERED"
        assert [active.trace_id for active in await queue.active()] == [trace]
        assert await queue.finish(held, trace) is Finished.DONE
        assert await lifecycle.stage(trace) == "COMPLETED"
        assert await queue.active() == []
        assert await queue.depth() == Depth(0, 0, 0, 0)
        assert await queue.finish(held, trace) is Finished.GONE


@pytest.mark.parametrize("stage", [None, *STAGES[:-1]])
async def test_not_before_it_was_delivered(queue: RedisTransport, stage: str | None) -> None:
    """T4: with any stage but DELIVERED recorded nothing of it happens, and the delivery stays with its holder."""
    await queue.publish("c")
    held = await take_one(queue)
    lifecycle = queue.lifecycle("c")
    predecessor = None
    for each in STAGES[: STAGES.index(stage) + 1] if stage else ():
        assert await lifecycle.advance("t", predecessor, each)
        predecessor = each
    assert await queue.finish(held, "t") is Finished.NOT_DELIVERED
    assert await lifecycle.stage("t") == stage
    assert [active.trace_id for active in await queue.active()] == ["t"] * (stage is not None)
    assert await queue.acknowledge(held)


async def test_not_by_who_does_not_hold_it(queue: RedisTransport) -> None:
    """T4, TR-4: whose lease is over changes neither the stage nor the index; the next holder finishes."""
    await queue.publish("c")
    old = await take_one(queue, "a", lease=10)
    await project(queue.lifecycle("c"), "t", TurnPhase.DELIVERED)
    await queue.advance_clock(10_100)
    assert await queue.finish(old, "t") is Finished.REFUSED
    new = await take_one(queue, "b")
    assert await queue.finish(old, "t") is Finished.REFUSED
    assert await queue.lifecycle("c").stage("t") == "DELIVERED"
    assert len(await queue.active()) == 1
    assert await queue.finish(new, "t") is Finished.DONE


@pytest.mark.parametrize("end", ["FAILED", "QUARANTINED"])
async def test_ends_without_a_reply(queue: RedisTransport, end: str) -> None:
    """T4: a turn that failed leaves the index as well, from any stage; it is never COMPLETED afterwards."""
    await queue.publish("c")
    held = await take_one(queue)
    await project(queue.lifecycle("c"), "t", TurnPhase.STARTED)
    assert await queue.finish(held, "t", stage=end) is Finished.DONE
    assert await queue.active() == []
    await queue.publish("c")
    again = await take_one(queue)
    assert await queue.finish(again, "t") is Finished.NOT_DELIVERED
    assert await queue.finish(again, "t", stage=end) is Finished.DONE
    assert await queue.lifecycle("c").stage("t") == end
    with pytest.raises(errors.InvalidInput, match="stage"):
        await queue.finish(again, "t", stage="DELIVERED")


async def test_it_is_one_command(redis_server: RedisServer) -> None:
    """T4: nothing can come in between, as the server gets one script."""
    redis_server.flush()
    async with await RedisStore.open(redis_server.url()) as store:
        queue = await RedisTransport.open(store)
        await _commands_of_finishing(queue, redis_server)  # the server need not know the script yet
        assert await _commands_of_finishing(queue, redis_server) == [b"EVALSHA"]
        await queue.close()


async def _commands_of_finishing(queue: RedisTransport, redis: RedisServer) -> list[bytes]:
    await queue.publish("c")
    held = await take_one(queue)
    await project(queue.lifecycle("c"), "t", TurnPhase.DELIVERED)
    with Monitor(redis) as monitor:
        assert await queue.finish(held, "t") is Finished.DONE
        return [words[0] for by_script, words in monitor.seen() if not by_script]


async def test_another_number_of_shards(redis_server: RedisServer) -> None:
    """A process that would look for entries elsewhere than the others is refused."""
    redis_server.flush()
    async with await RedisStore.open(redis_server.url()) as store:
        await RedisTransport.open(store, shards=3)
        with pytest.raises(errors.StoreUnsuitable, match="3 shards, not 1"):
            await RedisTransport.open(store)
