"""A store that records what is durably written through it: how often, and which bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, TypeVar

from bench.drivers import Driver
from bench.measured import opened
from bench.workload import Turn
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Tail
from turnkeeper.log.store import Promise, Store, TransactionalStore

T = TypeVar("T")

IN_MEMORY: Final = "sqlite:///:memory:"
"""Where to record when only the bytes matter: they are the same on every store, and here they come soonest."""
_AT_ONCE: Final = 32
_HEAD: Final = Head(kind="turn", phase="replayed")


class RecordingStore:
    """Passes everything on to another store, and keeps the bodies of every append that was made, by key."""

    def __init__(self, store: Store) -> None:
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


class RecordingTransactionalStore(RecordingStore):
    """The same on a store that takes effects into its transaction, so that the engine finds it able to."""

    def __init__(self, store: Store, transactional: TransactionalStore) -> None:
        super().__init__(store)
        self._transactional = transactional

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

        outcome = await self._transactional.append_with(key, effect, keep, expected=expected, head=head, guard=guard)
        if not isinstance(outcome, Behind | GuardFailed):
            self._record(key, bodies)
        return outcome


def recording(store: Store) -> RecordingStore:
    """A recording store on `store` that can do what it can."""
    return RecordingTransactionalStore(store, store) if isinstance(store, TransactionalStore) else RecordingStore(store)


async def record(url: str, driver: Driver, turns: list[Turn]) -> list[list[bytes]]:
    """Drive `turns` on the empty store of a URL, unmeasured: the durable writes of each."""
    async with opened(url) as store:
        recordings = [recording(store) for _ in turns]
        for first in range(0, len(turns), _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, len(turns)))
            await asyncio.gather(*(driver.run(recordings[number], turns[number]) for number in some))
    return [[body for bodies in one.written.values() for body in bodies] for one in recordings]


async def replay(store: Store, key: str, bodies: list[bytes]) -> None:
    """Append what was recorded, one behind the other: what a store costs without a turn's rules above it."""
    position = NOWHERE
    for body in bodies:
        outcome = await store.append(key, [body], expected=position, head=_HEAD)
        assert isinstance(outcome, Appended), outcome
        position = outcome.position
