"""The bare floors: the least that a durable step can cost from asyncio on each store, as its driver offers it."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncGenerator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, cast

import psycopg
from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode

from bench.measured import Floor

# --- SQLite ------------------------------------------------------------------------------------------------------


class SqliteFloor(Floor):
    """One committed insert for each step: stdlib sqlite3 in one worker thread, WAL, synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = wal")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE step (id INTEGER PRIMARY KEY, turn INTEGER NOT NULL, body BLOB NOT NULL)"
        )

    def _insert(self, turn: int, body: bytes) -> None:
        self._connection.execute("INSERT INTO step (turn, body) VALUES (?, ?)", (turn, body))

    async def step(self, turn: int, number: int, body: bytes) -> None:
        """See `Floor`."""
        await self._loop.run_in_executor(self._executor, self._insert, turn, body)

    def close(self) -> None:
        """Let go of thread and file."""
        self._executor.shutdown()
        self._connection.close()


@asynccontextmanager
async def sqlite_floor(path: Path) -> AsyncGenerator[Floor]:
    """The floor in a new file."""
    floor = SqliteFloor(path)
    try:
        yield floor
    finally:
        floor.close()


# --- Redis -------------------------------------------------------------------------------------------------------

SCRIPT: Final = "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
"""The least script that writes a step's bytes into a turn's hash; servers must have it, as they have ours."""
_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


class _Client(Protocol):
    """What a client of one server and one of a cluster have in common, as far as it is used."""

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: str | int | bytes) -> Awaitable[Any]: ...


class RedisFloor(Floor):
    """One EVALSHA for each step, with redis-py; a turn is one hash, and in a cluster it lies on one node."""

    def __init__(self, client: _Client, connections: int) -> None:
        self._client = client
        # The client's own pool that makes others wait costs more than this (measured: 15 percent of a step).
        self._room = asyncio.Semaphore(connections)

    async def step(self, turn: int, number: int, body: bytes) -> None:
        """See `Floor`."""
        async with self._room:
            await self._client.evalsha(_SHA, 1, f"floor:{{{turn}}}", number, body)


@asynccontextmanager
async def redis_floor(url: str, connections: int) -> AsyncGenerator[Floor]:
    """The floor on one server."""
    client = Redis.from_pool(cast("Any", ConnectionPool).from_url(url, max_connections=connections))
    try:
        yield RedisFloor(client, connections)
    finally:
        await client.aclose()


@asynccontextmanager
async def cluster_floor(ports: list[int], connections: int) -> AsyncGenerator[Floor]:
    """The floor on a cluster; as ours, it has one limit for the connections to all nodes together."""
    nodes = [ClusterNode("127.0.0.1", port) for port in ports]
    async with RedisCluster(startup_nodes=nodes, max_connections=connections) as client:
        yield RedisFloor(client, connections)


# --- PostgreSQL --------------------------------------------------------------------------------------------------

_TABLE: Final = b"""
CREATE TABLE IF NOT EXISTS public.step (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, turn bigint NOT NULL, body bytea NOT NULL
)
"""
_INSERT: Final = b"INSERT INTO public.step (turn, body) VALUES ($1, $2)"

_Connection = psycopg.AsyncConnection[tuple[Any, ...]]


class PostgresFloor(Floor):
    """One committed insert for each step: psycopg in autocommit, prepared; the connection that was used last comes first."""

    def __init__(self, connections: list[_Connection]) -> None:
        self._free: asyncio.LifoQueue[_Connection] = asyncio.LifoQueue()
        for connection in connections:
            self._free.put_nowait(connection)

    async def step(self, turn: int, number: int, body: bytes) -> None:
        """See `Floor`."""
        connection = await self._free.get()
        try:
            await connection.execute(_INSERT, (turn, body), prepare=True)
        finally:
            self._free.put_nowait(connection)


@asynccontextmanager
async def postgres_floor(url: str, connections: int) -> AsyncGenerator[Floor]:
    """The floor in a table of its own, in the store's database."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(
                await psycopg.AsyncConnection.connect(url, autocommit=True, cursor_factory=psycopg.AsyncRawCursor)
            )
            for _ in range(connections)
        ]
        await made[0].execute(_TABLE)
        yield PostgresFloor(made)
