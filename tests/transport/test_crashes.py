"""Consumers as real processes, killed at random: every entry is handled, none behind its acknowledgement (TR-1, TR-3, TR-5)."""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

import anyio
import pytest

from tests.servers.postgres import Server
from tests.servers.redis import RedisCluster, RedisServer
from tests.transport.crashing import LIMIT, consume
from tests.transport.support import PATIENCE
from turnkeeper.transport.opening import open_transport
from turnkeeper.transport.protocol import Depth, Transport

pytestmark = pytest.mark.anyio

CONSUMERS: Final = 3
ENTRIES: Final = 60
KILLS: Final = 12

_FORKS: Final = mp.get_context("forkserver")
"""Processes that are there in milliseconds, and inherit nothing that was opened."""


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    """The modules of a consumer are loaded once."""
    _FORKS.set_forkserver_preload(["tests.transport.crashing", "turnkeeper.stores.postgres", "turnkeeper.stores.redis"])


@pytest.fixture(params=["sqlite", "postgres", "redis", "redis cluster"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty queue that several processes can use."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/queue.db"
    elif request.param == "postgres":
        postgres: Server = request.getfixturevalue("postgres")
        yield postgres.url(request.getfixturevalue("postgres_database"), pool_size=2)
    else:
        fixture = "redis_server" if request.param == "redis" else "redis_cluster"
        redis: RedisServer | RedisCluster = request.getfixturevalue(fixture)
        redis.flush()
        yield redis.url()


class Crew:
    """Consumers, of which some die."""

    def __init__(self, url: str, ledger: Path) -> None:
        self._arguments = (url, str(ledger))
        self._processes: list[ForkServerProcess] = []

    def start(self) -> None:
        """One more."""
        process = _FORKS.Process(target=consume, args=self._arguments, daemon=True)
        process.start()
        self._processes.append(process)

    def kill(self) -> None:
        """Kill one of them, whatever it is doing."""
        victim = self._processes.pop(random.randrange(len(self._processes)))
        victim.kill()
        victim.join(PATIENCE)
        assert victim.exitcode == -9

    def end(self) -> None:
        """Kill them all."""
        while self._processes:
            self.kill()


async def test_killed_at_random(url: str, tmp_path: Path) -> None:
    """Each entry is handled at least once, never behind an acknowledgement that was confirmed; nothing is left in the end."""
    ledger = tmp_path / "ledger"
    ledger.touch()
    queue = await open_transport(url, max_attempts=LIMIT)
    crew = Crew(url, ledger)
    try:
        for _ in range(CONSUMERS):
            crew.start()
        entries = await _publish_and_kill(queue, crew, ledger)
        deadline = time.monotonic() + 2 * PATIENCE
        while await queue.depth() != Depth(0, 0, 0, 0):
            assert time.monotonic() < deadline, await queue.depth()
            await anyio.sleep(0.05)
    finally:
        crew.end()
    handled: set[str] = set()
    acknowledged: set[str] = set()
    for line in ledger.read_text().splitlines():
        what, entry, key = line.split(" ", 2)
        assert entries[entry] == key
        if what == "handled":
            assert entry not in acknowledged, "it came again behind its acknowledgement"
            handled.add(entry)
        else:
            assert entry not in acknowledged, "it was acknowledged twice"
            acknowledged.add(entry)
    assert handled == set(entries)
    await queue.close()


async def _publish_and_kill(queue: Transport, crew: Crew, ledger: Path) -> dict[str, str]:
    """Publish all entries, and kill a consumer whenever some more lines were written."""
    entries: dict[str, str] = {}
    lines = 0
    for kill in range(KILLS):
        for number in range(ENTRIES // KILLS):
            key = f"conversation {number}"
            entries[await queue.publish(key, b"x", delay=0.1 if number == 4 else 0)] = key
        deadline = time.monotonic() + PATIENCE
        while (written := _lines(ledger)) < lines + random.randrange(1, 8):
            assert time.monotonic() < deadline, f"nothing happens behind kill {kill}"
            await anyio.sleep(0.005)
        lines = written
        crew.kill()
        crew.start()
    return entries


def _lines(ledger: Path) -> int:
    return ledger.read_bytes().count(b"\n")
