"""Named places at which the demo's supervisor kills a worker: around every durable write and every effect."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Tail
from turnkeeper.log.store import Promise, Store

RECORDS = (
    "started",
    "model_started",
    "assistant_reserved",
    "tool_begun",
    "tool_completed",
    "round_committed",
    "final_model_saved",
    "delivery_reserved",
    "delivered",
)
EFFECTS = ("model call", "effect", "send")
BOUNDARIES = tuple(f"{when} {what}" for when in ("before", "after") for what in (*RECORDS, *EFFECTS))
ANY = "any boundary"
"""Stands for all of them."""


def pick(chance: random.Random) -> str:
    """A boundary, with more weight on those around effects, where a kill is worst."""
    return chance.choice(
        [
            *BOUNDARIES,
            *(f"{when} {what}" for when in ("before", "after") for what in EFFECTS[1:]),
            "before tool_completed",
        ]
    )


class BoundaryStore:
    """A store that tells of every append before it is made and after it is durable."""

    def __init__(self, store: Store, reached: Callable[[str], None]) -> None:
        self._store = store
        self._reached = reached

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
        """See `Store.append`."""
        kinds = [_kind(record) for record in records]
        for kind in kinds:
            self._reached(f"before {kind}")
        outcome = await self._store.append(
            key, records, expected=expected, head=head, guard=guard, compact_through=compact_through
        )
        if isinstance(outcome, Appended):
            for kind in kinds:
                self._reached(f"after {kind}")
        return outcome

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store.read`."""
        return await self._store.read(key, after=after)

    def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `Store.heads`."""
        return self._store.heads(query)

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `Store.erase`."""
        return await self._store.erase(key, unchanged_since=unchanged_since)

    async def tidy(self) -> None:
        """See `Store.tidy`."""
        await self._store.tidy()

    async def promises(self) -> list[Promise]:
        """See `Store.promises`."""
        return await self._store.promises()

    async def close(self) -> None:
        """See `Store.close`."""
        await self._store.close()


def _kind(body: bytes) -> str:
    record: Any = msgspec.msgpack.decode(body[1:])
    return record[1][0]
