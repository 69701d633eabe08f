"""What the field cases of Redis Streams share: a queue, its stream's raw keys, and a look at its pending list."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tests.servers.redis import RedisServer
from turnkeeper.stores.redis import RedisStore
from turnkeeper.transport.protocol import Lost
from turnkeeper.transport.redis_streams import RedisTransport

STREAM = "tk:{default-0}:stream"
GROUP = "workers"


class Worker:
    """A consumer with connections of its own, and what it reported as lost."""

    def __init__(self, name: str, queue: RedisTransport, lost: list[Lost]) -> None:
        self.name = name
        self.queue = queue
        self.lost = lost

    @property
    def lost_ids(self) -> list[str]:
        """Ids of entries that were reported as lost."""
        return sorted(entry for lost in self.lost for entry in lost.ids)

    @property
    def lost_number(self) -> int:
        """How many entries were reported as lost."""
        return sum(lost.number or 0 for lost in self.lost)


@asynccontextmanager
async def worker(redis: RedisServer, name: str, max_attempts: int = 5) -> AsyncGenerator[Worker]:
    """A worker on a server."""
    lost: list[Lost] = []
    async with await RedisStore.open(redis.url()) as store:
        queue = await RedisTransport.open(store, max_attempts=max_attempts, on_lost=lost.append)
        try:
            yield Worker(name, queue, lost)
        finally:
            await queue.close()


def pending(redis: RedisServer) -> int:
    """How many entries the group's pending list has."""
    return int(redis.run("XPENDING", STREAM, GROUP)["pending"])


def in_stream(redis: RedisServer) -> dict[str, str]:
    """The entries that are in the stream: their ids there, by their ids in the queue."""
    found: list[tuple[bytes, dict[bytes, bytes]]] = redis.run("XRANGE", STREAM, "-", "+")
    return {fields[b"id"].decode(): sid.decode() for sid, fields in found}


def errors_told(redis: RedisServer, code: str) -> int:
    """How many errors of a kind the server has answered, to clients and to scripts."""
    stats: dict[str, Any] = redis.info("errorstats")
    found = stats.get(f"errorstat_{code}")
    return int(found["count"]) if found else 0
