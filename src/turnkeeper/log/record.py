"""Records, positions, heads and guards: the nouns of a log, as every store speaks them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Record(NamedTuple):
    """One entry of a log: its sequence, the store's time of its append (milliseconds), and its opaque body."""

    seq: int
    at: int
    body: bytes


class Position(NamedTuple):
    """How far a reader knows a log: which life of the key (incarnation), and the last sequence in it (LOG-5)."""

    incarnation: bytes
    seq: int


NOWHERE = Position(b"", 0)
"""The position of whoever knows nothing, and the tail of a log that does not exist."""


class Guard(NamedTuple):
    """Instants on the store's clock, in milliseconds, between which an append may happen (LOG-4), both inclusive."""

    not_before: int | None = None
    not_after: int | None = None

    def holds(self, now: int) -> bool:
        """Whether `now` lies in the guard."""
        if self.not_before is not None and now < self.not_before:
            return False
        return self.not_after is None or now <= self.not_after

    def meet(self, other: Guard | None) -> Guard:
        """The guard that holds when both hold."""
        if other is None:
            return self
        lows = [x for x in (self.not_before, other.not_before) if x is not None]
        highs = [x for x in (self.not_after, other.not_after) if x is not None]
        return Guard(max(lows, default=None), min(highs, default=None))


class Head(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The small readable part of a log, for listing and for operators; never the truth (LOG-8).

    A writer gives the first block with an append; the store keeps the second.
    """

    kind: str
    phase: str
    attention: str | None = None
    """Why a person should look, or None."""
    owner: str | None = None
    labels: dict[str, str] = {}
    ttl_ms: int = 0
    """How long the log is kept after its last append; 0 means for ever (LOG-9)."""
    keep_until: int = 0
    """An instant before which the log is never dropped, whatever its age (LOG-9)."""

    key: str = ""
    tail: int = 0
    size: int = 0
    """Bytes of all bodies appended."""
    created: int = 0
    updated: int = 0

    @property
    def expires(self) -> int | None:
        """When retention lets the log go, or None for never."""
        return max(self.updated + self.ttl_ms, self.keep_until) if self.ttl_ms else None


class HeadQuery(NamedTuple):
    """Which heads to list: every field that is not None must match."""

    kind: str | None = None
    phase: str | None = None
    attention: bool | None = None
    prefix: str = ""
    """Only keys that start with this text."""
    updated_before: int | None = None


class Tail(NamedTuple):
    """Records behind a position, where the log ends, and the store's time.

    `restart` is set when the records do not continue the asked position: the key lives another life, or the
    asked part was compacted away. Fold them from the empty state.
    """

    position: Position
    records: list[Record]
    now: int
    restart: bool


class Appended(NamedTuple):
    """The append is durable: the log's new position, and the time stamped on its records."""

    position: Position
    at: int


class Behind(NamedTuple):
    """Nothing was written: the writer did not know the tail. Here is what it missed (LOG-2)."""

    tail: Tail


class GuardFailed(NamedTuple):
    """Nothing was written: the writer knows the tail, and the guard does not hold at the store's time (LOG-4)."""

    now: int
