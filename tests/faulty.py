"""A store between a caller and a real one that loses answers: errors and cancellations before or after the real call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from turnkeeper.errors import StoreUnavailable
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Tail
from turnkeeper.log.store import Promise, Store, TransactionalStore

T = TypeVar("T")
When = Literal["before", "after"]


class Fault(NamedTuple):
    """What goes wrong at one call: before the store got it, or after the store did it and before the caller knows."""

    when: When
    error: BaseException | None = None
    """None cancels the calling task."""


def unavailable(when: When) -> Fault:
    """The connection is cut."""
    return Fault(when, StoreUnavailable("faulty", f"connection cut {when} the call"))


def cancelled(when: When) -> Fault:
    """The caller is cancelled."""
    return Fault(when)


class FaultyStore:
    """Hands every call on to `inner`, and lets the planned ones go wrong. Keeps the names of the calls it saw."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.at: dict[int, Fault] = {}
        """Faults by the number of the call, from 1 behind the last `plan`."""

    def plan(self, *faults: Fault | None) -> None:
        """The next calls go wrong like this, in order; None lets one pass."""
        self.calls.clear()
        self.at = {number: fault for number, fault in enumerate(faults, 1) if fault is not None}

    async def _through(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(name)
        fault = self.at.get(len(self.calls))
        if fault is not None and fault.when == "before":
            await _break(fault)
        result = await call()
        if fault is not None:
            await _break(fault)
        return result

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
        return await self._through(
            "append",
            lambda: self.inner.append(
                key, records, expected=expected, head=head, guard=guard, compact_through=compact_through
            ),
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
        assert isinstance(inner, TransactionalStore)
        return await self._through(
            "append_with",
            lambda: inner.append_with(key, effect, records, expected=expected, head=head, guard=guard),
        )

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        return await self._through("read", lambda: self.inner.read(key, after=after))

    def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `Store`."""
        return self.inner.heads(query)

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `Store`."""
        return await self._through("erase", lambda: self.inner.erase(key, unchanged_since=unchanged_since))

    async def tidy(self) -> None:
        """See `Store`."""
        await self.inner.tidy()

    async def promises(self) -> list[Promise]:
        """See `Store`."""
        return await self.inner.promises()

    async def close(self) -> None:
        """See `Store`."""
        await self.inner.close()


async def _break(fault: Fault) -> None:
    if fault.error is not None:
        raise fault.error
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    raise AssertionError("a cancelled task goes no further")
