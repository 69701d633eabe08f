"""A store in this process's memory and event loop: each call takes the same number of turns of the loop, every time.

So a test can cancel a run at its first, second, … turn of the loop, and knows that it has been at all of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Record, Tail
from turnkeeper.log.store import Promise


class InlineStore:
    """Keeps LOG-1 to LOG-6. A cancelled append may have been made or not (LOG-6)."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self._lives: dict[str, bytes] = {}
        self._logs: dict[str, list[Record]] = {}

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the store's clock forward."""
        self.now += milliseconds

    def _tail(self, key: str, after: Position) -> Tail:
        records = self._logs.get(key, [])
        position = Position(self._lives[key], len(records)) if records else NOWHERE
        restart = after.incarnation != position.incarnation
        return Tail(position, records[0 if restart else after.seq :], self.now, restart)

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
        await asyncio.sleep(0)
        outcome: Appended | Behind | GuardFailed
        if self._tail(key, NOWHERE).position != expected:
            outcome = Behind(self._tail(key, expected))
        elif guard is not None and not guard.holds(self.now):
            outcome = GuardFailed(self.now)
        else:
            life = self._lives.setdefault(key, secrets.token_bytes(8))
            log = self._logs.setdefault(key, [])
            log += [Record(seq, self.now, body) for seq, body in enumerate(records, len(log) + 1)]
            outcome = Appended(Position(life, len(log)), self.now)
        await asyncio.sleep(0)
        return outcome

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        await asyncio.sleep(0)
        return self._tail(key, after)

    async def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `Store`. Nobody lists this one."""
        return
        yield

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `Store`."""
        return self._logs.pop(key, None) is not None

    async def tidy(self) -> None:
        """See `Store`."""

    async def promises(self) -> list[Promise]:
        """See `Store`."""
        return []

    async def close(self) -> None:
        """See `Store`."""
