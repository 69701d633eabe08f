"""Waits for changes of logs in PostgreSQL, and who of them the server knows of."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tests.crew import PATIENCE
from tests.servers.postgres import Server
from turnkeeper.log.record import Position
from turnkeeper.log.store import NotifyingStore

LONG: Final = 10 * PATIENCE
"""A wait that the test would not live to see the end of."""
_ADVISORY: Final = "FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE l.locktype = 'advisory'"
LOCKS: Final = f"SELECT count(*) {_ADVISORY} AND datname = %s"
LISTENERS: Final = f"SELECT count(DISTINCT l.pid) {_ADVISORY}"


def waiting(store: NotifyingStore, key: str, since: Position, timeout: float = LONG) -> asyncio.Task[bool]:
    """A task that waits for a change."""
    return asyncio.ensure_future(store.changed(key, since=since, timeout=timeout))


async def locked(postgres: Server, database: str, count: int) -> None:
    """Wait until so many logs are waited for, as the server sees it."""
    deadline = time.monotonic() + PATIENCE
    while (found := (await asyncio.to_thread(postgres.run, LOCKS, [database]))[0][0]) != count:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)


async def told(task: asyncio.Task[bool]) -> bool:
    """What the wait gave, well before its timeout."""
    async with asyncio.timeout(PATIENCE):
        return await task
