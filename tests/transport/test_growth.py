"""What a queue leaves behind on its server: nothing that grows with those who ever used it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.redis import RedisServer
from tests.transport.support import place_named, take_one
from turnkeeper.transport import redis_streams

pytestmark = pytest.mark.anyio

STREAM = "tk:{default-0}:stream"


def names(server: RedisServer) -> list[bytes]:
    """Consumers that the group knows."""
    told: list[list[bytes]] = server.run("XINFO", "CONSUMERS", STREAM, "workers")
    return [consumer[1] for consumer in told]


async def test_consumers_that_are_gone_are_forgotten(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is a consumer of its own; who holds something is known as long as it does."""
    monkeypatch.setattr(redis_streams, "_FORGET_CONSUMERS", 0)
    async with place_named("redis", request, tmp_path) as place:
        queue = await place.open()
        await queue.publish("k")
        held = await take_one(queue, "holder", lease=3600)
        for number in range(50):
            await queue.publish("k")
            assert await queue.acknowledge(await take_one(queue, f"worker {number}"))
        assert len(names(redis_server)) > 50
        await queue.advance_clock(601_000)
        await queue.publish("k")
        last = await take_one(queue, "last")
        assert sorted(names(redis_server)) == [b"holder", b"last"]
        assert await queue.acknowledge(held)
        assert await queue.acknowledge(last)
        assert place.lost == []
