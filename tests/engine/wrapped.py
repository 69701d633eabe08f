"""Stores that hand every call on to a real one, and do something around it: count, wait, die."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest

from turnkeeper.errors import StoreBusy
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Tail
from turnkeeper.log.store import Promise, Store, TransactionalStore

T = TypeVar("T")


class WrappedStore:
    """Hands everything on. Subclasses say what happens around a write."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the write."""
        return await write()

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
        """See `Store`."""
        return await self.around(
            lambda: self.inner.append(
                key, records, expected=expected, head=head, guard=guard, compact_through=compact_through
            )
        )

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
        """See `TransactionalStore`."""
        inner = self.inner
        if not isinstance(inner, TransactionalStore):
            pytest.skip(f"{type(inner).__name__} has no transactions for tools")
        return await self.around(
            lambda: inner.append_with(key, effect, records, expected=expected, head=head, guard=guard)
        )

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        return await self.inner.read(key, after=after)

    def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `Store`."""
        return self.inner.heads(query)

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `Store`."""
        return await self.inner.erase(key, unchanged_since=unchanged_since)

    async def tidy(self) -> None:
        """See `Store`."""
        await self.inner.tidy()

    async def promises(self) -> list[Promise]:
        """See `Store`."""
        return await self.inner.promises()

    async def close(self) -> None:
        """See `Store`."""
        await self.inner.close()


class CountingStore(WrappedStore):
    """Counts the writes that became durable."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes = 0

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the write, and count it if it is in."""
        outcome = await write()
        self.writes += not isinstance(outcome, Behind | GuardFailed)
        return outcome


class FailingStore(WrappedStore):
    """Fails at one write, before it is made."""

    error = StoreBusy

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes = 0
        self._fail_at = 0

    def fail_at(self, write: int) -> None:
        """Fail at that write, counted from here; 0 for none."""
        self.writes = 0
        self._fail_at = write

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the write, or fail."""
        self.writes += 1
        if self.writes == self._fail_at:
            raise self.error("the test", "is busy")
        return await write()
