"""What a store under measure is, and what its floor is; imports no store, so that little is in the memory that is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from turnkeeper.log.store import Store
from turnkeeper.stores.opening import open_store


class Floor(ABC):
    """One durable write of the same bytes for each of ours, without a rule, a head or an index."""

    @abstractmethod
    async def step(self, turn: int, number: int, body: bytes) -> None:
        """Write one step's bytes, durably."""

    async def turn(self, number: int, bodies: list[bytes]) -> None:
        """Every step of one turn, one behind the other."""
        for place, body in enumerate(bodies):
            await self.step(number, place, body)


class Measured(ABC):
    """A store under measure, and whatever server it needs."""

    name: str
    least_throughput: float = 1.0
    """Times the floor's, with most turns at once: the target."""

    def __init__(self) -> None:
        self.url = ""
        """Of the store that was made last."""

    @abstractmethod
    async def empty(self) -> str:
        """Make an empty store, and let go of the one before it; its URL."""

    @abstractmethod
    def floor(self) -> AbstractAsyncContextManager[Floor]:
        """The floor, beside the store that was made last."""

    @abstractmethod
    async def _used(self) -> int: ...

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Store]:
        """An empty store, open within the block."""
        async with opened(await self.empty()) as store:
            yield store

    async def used(self) -> int:
        """Bytes that the store takes, with everything that belongs to it; nobody may have it open."""
        async with opened(self.url) as store:  # makes its tables, where they are not there yet
            await store.tidy()
        return await self._used()


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[Store]:
    """The store of a URL, closed behind the block."""
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()
