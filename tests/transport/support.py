"""What the tests of transports share: queues by name, with clocks that can be moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, cast

import anyio
import pytest

from tests.conftest import opened
from turnkeeper.log.store import Store
from turnkeeper.transport.opening import transport_in
from turnkeeper.transport.protocol import MAX_ATTEMPTS, Delivery, Lost, Transport

PLACES = ("sqlite file", "postgres", "redis", "redis resp3", "redis cluster")
"""Where a queue has to behave the same."""
PATIENCE = 30.0
"""Seconds until something that does not happen fails the test."""


class ClockedTransport(Transport, Protocol):
    """A transport whose clock a test can move on."""

    queue: str

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the clock forward."""
        ...


class Place:
    """A store with queues in it. Everything opened in it has the same clock."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lost: list[Lost] = []
        self._opened: list[ClockedTransport] = []

    async def open(self, queue: str = "default", max_attempts: int = MAX_ATTEMPTS) -> ClockedTransport:
        """A queue, as a process of its own would open it."""
        transport = await transport_in(self.store, queue, max_attempts=max_attempts, on_lost=self.lost.append)
        found = cast("ClockedTransport", transport)
        self._opened.append(found)
        return found

    async def close(self) -> None:
        """Close all that were opened."""
        for transport in self._opened:
            await transport.close()


@asynccontextmanager
async def place_named(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Place]:
    """An empty place of that name."""
    async with opened(name, request, tmp_path) as store:
        place = Place(store)
        try:
            yield place
        finally:
            await place.close()


async def take(transport: Transport, consumer: str = "a", count: int = 1, lease: float = 30.0) -> list[Delivery]:
    """What can be had now."""
    return await transport.consume(consumer, count=count, lease_seconds=lease)


async def take_one(transport: Transport, consumer: str = "a", lease: float = 30.0) -> Delivery:
    """The one entry that can be had now."""
    (delivery,) = await take(transport, consumer, 1, lease)
    return delivery


async def drain(transport: Transport, consumer: str = "a") -> list[bytes]:
    """Take and acknowledge all that can be had now, one by one; the bodies in their order."""
    bodies: list[bytes] = []
    while found := await take(transport, consumer):
        bodies += [delivery.body for delivery in found]
        for delivery in found:
            assert await transport.acknowledge(delivery)
    return bodies


async def waiting(transport: Transport) -> asyncio.Task[list[Delivery]]:
    """A consumer that waits. A few round trips of ours later it has most probably looked, and found nothing."""
    task = asyncio.ensure_future(transport.consume("waits", wait_seconds=PATIENCE))
    for _ in range(5):
        await transport.depth()
    assert not task.done()
    return task


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Look again and again until it holds; fails after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not await holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain until {what}"
        await anyio.sleep(0.01)
