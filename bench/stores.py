"""The stores that are measured, each with its floor; servers are the bench's own, on free ports of the loopback address."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
)
from itertools import count
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from tests.servers import postgres, redis

from bench.floor import SCRIPT, cluster_floor, postgres_floor, redis_floor, sqlite_floor
from bench.measured import Floor, Measured
from bench.scratch import scratch
from turnkeeper.stores.postgres.address import parse as parse_postgres
from turnkeeper.stores.redis.settings import parse as parse_redis

_AS_THE_TESTS: Final = {"appendonly": "yes", "appendfsync": "always"}
"""Redis flushes every write to the disk before it answers: only that is as durable as the others."""
_AS_INSTALLED: Final = {
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "max_connections": "100",
    "shared_buffers": "128MB",
}
"""PostgreSQL's own defaults, where the tests' server has others to be faster."""


class NotInstalled(Exception):
    """A store cannot be measured, as its server is not there."""


class Sqlite(Measured):
    """A file in a scratch folder. What it uses is the size of that file."""

    name = "sqlite"
    least_throughput = 3.0  # a group commit serves many turns, where the floor commits each step

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._numbers: Iterator[int] = count(1)
        self._number = 0

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._number}.db"

    async def empty(self) -> str:
        """See `Measured`."""
        for left in self._folder.glob(f"*-{self._number}.db*"):
            left.unlink()
        self._number = next(self._numbers)
        self.url = str(self._path("turns"))
        return self.url

    def floor(self) -> AbstractAsyncContextManager[Floor]:
        """See `Measured`."""
        return sqlite_floor(self._path("floor"))

    async def _used(self) -> int:
        return (await anyio.Path(self._path("turns")).stat()).st_size


class Redis(Measured):
    """One server. What it uses is the server's memory, with the floor's hashes if there are any."""

    name = "redis"

    def __init__(self, server: redis.RedisServer) -> None:
        super().__init__()
        self._server = server
        self.url = server.url()

    async def empty(self) -> str:
        """See `Measured`."""
        self._server.flush()
        return self.url

    def floor(self) -> AbstractAsyncContextManager[Floor]:
        """See `Measured`."""
        self._server.run("SCRIPT", "LOAD", SCRIPT)
        return redis_floor(self.url, parse_redis(self.url).connections)

    async def _used(self) -> int:
        return _memory(self._server)


class RedisCluster(Measured):
    """A cluster of three masters. What it uses is their memory together."""

    name = "redis-cluster"

    def __init__(self, cluster: redis.RedisCluster) -> None:
        super().__init__()
        self._cluster = cluster
        self.url = cluster.url()

    async def empty(self) -> str:
        """See `Measured`."""
        self._cluster.flush()
        return self.url

    def floor(self) -> AbstractAsyncContextManager[Floor]:
        """See `Measured`."""
        for node in self._cluster.nodes:
            node.run("SCRIPT", "LOAD", SCRIPT)
        return cluster_floor([node.port for node in self._cluster.nodes], parse_redis(self.url).connections)

    async def _used(self) -> int:
        return sum(map(_memory, self._cluster.nodes))


class Postgres(Measured):
    """A database of a server. What it uses is the size of the database, with free space and what its tables' updates left."""

    name = "postgres"

    def __init__(self, server: postgres.Server) -> None:
        super().__init__()
        self._server = server
        self._database = ""

    async def empty(self) -> str:
        """See `Measured`."""
        before, self._database = self._database, self._server.database()
        if before:
            self._server.drop(before)
        self.url = self._server.url(self._database)
        return self.url

    def floor(self) -> AbstractAsyncContextManager[Floor]:
        """See `Measured`."""
        return postgres_floor(self.url, parse_postgres(self.url).pool_size)

    async def _used(self) -> int:
        ((size,),) = self._server.run("SELECT pg_database_size(%s)", [self._database])
        return size


def _memory(server: redis.RedisServer) -> int:
    return int(server.info("memory")["used_memory"])


# --- servers -----------------------------------------------------------------------------------------------------


@contextmanager
def _sqlite() -> Generator[Measured]:
    with scratch() as folder:
        yield Sqlite(folder)


@contextmanager
def _redis() -> Generator[Measured]:
    with redis.server(**_AS_THE_TESTS) as server:
        yield Redis(server)


@contextmanager
def _redis_cluster() -> Generator[Measured]:
    with redis.cluster() as cluster:
        for node in cluster.nodes:
            for name, value in reversed(_AS_THE_TESTS.items()):
                node.run("CONFIG", "SET", name, value)
        for node in cluster.nodes:
            # Until the file is there, nothing is flushed to it.
            redis.wait_until(lambda node=node: _logs(node), "a node of the cluster writes its log")
        yield RedisCluster(cluster)


def _logs(node: redis.RedisServer) -> bool:
    state: dict[str, Any] = node.info("persistence")
    return state["aof_enabled"] == 1 and not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])


@contextmanager
def _postgres() -> Generator[Measured]:
    with postgres.server(**_AS_INSTALLED) as server:
        server.initialise()
        server.start()
        yield Postgres(server)


_STORES: Final[dict[str, Callable[[], AbstractContextManager[Measured]]]] = {
    Sqlite.name: _sqlite,
    Redis.name: _redis,
    RedisCluster.name: _redis_cluster,
    Postgres.name: _postgres,
}
NAMES: Final = tuple(_STORES)
"""Every store that can be measured."""


@contextmanager
def under_measure(name: str) -> Generator[Measured]:
    """A store of that name; its servers run within the block.

    Raises:
        NotInstalled: there is no such server on this machine.
    """
    with ExitStack() as stack:
        try:
            measured = stack.enter_context(_STORES[name]())
        except (pytest.skip.Exception, pytest.fail.Exception) as missing:  # how the tests say it
            raise NotInstalled(str(missing)) from None
        yield measured
