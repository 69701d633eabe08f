"""A store that records what is durably written through it: how often, and which bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from bench.drivers import Driver
from bench.scratch import scratch
from bench.workload import Turn
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Tail
from turnkeeper.log.store import Promise
from turnkeeper.stores.sqlite import SqliteStore

T = TypeVar("T")

_AT_ONCE: Final = 32


class RecordingStore:
    """Passes everything on to a SQLite store, and keeps the bodies of every append that was made, by key."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.written: dict[str, list[bytes]] = {}
        """For each log, the bytes of each durable write in order."""

    def _record(self, key: str, bodies: Sequence[bytes]) -> None:
        self.written.setdefault(key, []).append(b"".join(bodies))

    async def append(
        self,
        key: str,
        records: Sequence[bytes],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
        compact_through: int = 0,
    ) -> Appended | Behind | GuardFailed:
        """Append, and record it."""
        outcome = await self._store.append(
            key, records, expected=expected, head=head, guard=guard, compact_through=compact_through
        )
        if isinstance(outcome, Appended):
            self._record(key, records)
        return outcome

    async def append_with(
        self,
        key: str,
        effect: Callable[[Any], T],
        records: Callable[[T], Sequence[bytes]],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
    ) -> tuple[T, Appended] | Behind | GuardFailed:
        """Append with an effect, and record it."""
        bodies: list[bytes] = []

        def keep(result: T) -> list[bytes]:
            bodies[:] = records(result)
            return bodies

        outcome = await self._store.append_with(key, effect, keep, expected=expected, head=head, guard=guard)
        if not isinstance(outcome, Behind | GuardFailed):
            self._record(key, bodies)
        return outcome

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """Read."""
        return await self._store.read(key, after=after)

    def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """List."""
        return self._store.heads(query)

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """Erase."""
        return await self._store.erase(key, unchanged_since=unchanged_since)

    async def tidy(self) -> None:
        """Tidy."""
        await self._store.tidy()

    async def promises(self) -> list[Promise]:
        """What the store promises."""
        return await self._store.promises()

    async def close(self) -> None:
        """Close."""
        await self._store.close()


async def record(driver: Driver, turns: list[Turn]) -> list[list[bytes]]:
    """Drive `turns`, unmeasured: the durable writes of each."""
    with scratch() as folder:
        async with await SqliteStore.open(folder / "turns.db") as store:
            recordings = [RecordingStore(store) for _ in turns]
            for first in range(0, len(turns), _AT_ONCE):
                some = range(first, min(first + _AT_ONCE, len(turns)))
                await asyncio.gather(*(driver.run(recordings[number], turns[number]) for number in some))
    return [[body for bodies in recording.written.values() for body in bodies] for recording in recordings]


async def stored_in_file(driver: Driver, turns: list[Turn]) -> int:
    """Bytes by which a SQLite file grows when it takes in `turns`."""
    with scratch() as folder:
        path = folder / "turns.db"
        before = await _size(path)
        async with await SqliteStore.open(path) as store:
            for turn in turns:
                await driver.run(store, turn)
        return await _size(path) - before


async def _size(path: Path) -> int:
    async with await SqliteStore.open(path) as store:
        await store.tidy()
    return (await anyio.Path(path).stat()).st_size
