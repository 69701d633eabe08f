"""The index of heads: which logs there may be, in order of their keys. It lags behind the logs, never leads them (LOG-8).

Sixteen sorted sets, so that a cluster's nodes share them. An entry is a key and nothing else: what a listing tells is read
from the log itself, and an entry whose log is gone is dropped by whoever notices. The sets have no time to live.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from turnkeeper.stores.redis.server import Server

SHARDS: Final = 16
PAGE: Final = 200
"""Heads read at a time by a listing."""

_PART: Final = 50
"""Entries read at a time from one set."""
_SWEEP_EVERY: Final = 16
_SWEPT: Final = 48
"""Of every `_SWEEP_EVERY` entries added, one looks at this many neighbours: three for each new entry keep what is gone below
a third of the index, without anybody listing it."""


class Index:
    """The index of one store."""

    def __init__(self, name: str) -> None:
        self._log_prefix = f"{name}:".encode()
        self._name = f"{name}.heads:"
        self._added = 0

    def key_of(self, log: str) -> bytes:
        """The key of a log's hash."""
        return self._log_prefix + log.encode()

    def log_of(self, key: bytes) -> str:
        """The log whose hash has that key."""
        return key.removeprefix(self._log_prefix).decode()

    def sets(self) -> list[bytes]:
        """The keys of the index."""
        return [f"{self._name}{shard}".encode() for shard in range(SHARDS)]

    def _set_of(self, log: bytes) -> bytes:
        return f"{self._name}{zlib.crc32(log) % SHARDS}".encode()

    async def add(self, server: Server, logs: Iterable[str]) -> None:
        """Enter logs that are there. Safe to repeat."""
        names = [log.encode() for log in logs]
        await server.call_many([(home := self._set_of(name), ("ZADD", home, 0, name)) for name in names])
        before, self._added = self._added, self._added + len(names)
        if names and self._added // _SWEEP_EVERY > before // _SWEEP_EVERY:
            await self._sweep_behind(server, names[-1])

    async def _sweep_behind(self, server: Server, name: bytes) -> None:
        """Drop what is gone among the entries that follow `name`, round from the last to the first."""
        home = self._set_of(name)
        following = await server.call(home, "ZRANGEBYLEX", home, b"(" + name, "+", "LIMIT", 0, _SWEPT)
        if len(following) < _SWEPT:
            rest = _SWEPT - len(following)
            following += await server.call(home, "ZRANGEBYLEX", home, "-", b"(" + name, "LIMIT", 0, rest)
        await self.sweep(server, following)

    async def sweep(self, server: Server, names: Sequence[bytes]) -> int:
        """Drop those of `names` whose log is gone; how many."""
        there = await self._there(server, names)
        return await self.drop(server, [name for name in names if name not in there])

    async def drop(self, server: Server, names: Sequence[bytes]) -> int:
        """Drop entries whose log was found gone; how many were left out in the end."""
        await server.call_many([(home := self._set_of(name), ("ZREM", home, name)) for name in names])
        # A log made meanwhile may have been entered before its entry was dropped here.
        back = await self._there(server, names)
        await self.add(server, [name.decode() for name in back])
        return len(names) - len(back)

    async def _there(self, server: Server, names: Sequence[bytes]) -> set[bytes]:
        keys = [self._log_prefix + name for name in names]
        found = await server.call_many([(key, ("EXISTS", key)) for key in keys])
        return {name for name, exists in zip(names, found, strict=True) if exists}

    async def pages(self, server: Server, prefix: str = "") -> AsyncIterator[list[bytes]]:
        """Entries that start with `prefix`, in order, a page at a time."""
        start = prefix.encode()
        shards = [_Shard(home, b"[" + start if start else b"-") for home in self.sets()]
        end = b"(" + start + b"\xff" if start else b"+"
        page: list[bytes] = []
        while True:
            hungry = [shard for shard in shards if not shard.read and not shard.ended]
            found = await server.call_many(
                [(shard.key, ("ZRANGEBYLEX", shard.key, shard.behind, end, "LIMIT", 0, _PART)) for shard in hungry]
            )
            for shard, names in zip(hungry, found, strict=True):
                shard.take(names)
            while all(shard.read or shard.ended for shard in shards):
                least = min((shard for shard in shards if shard.read), key=lambda shard: shard.read[0], default=None)
                if least is None:
                    if page:
                        yield page
                    return
                page.append(least.read.popleft())
                if len(page) == PAGE:
                    yield page
                    page = []


class _Shard:
    """How far a listing has come in one of the sets."""

    def __init__(self, key: bytes, behind: bytes) -> None:
        self.key = key
        self.behind = behind
        self.read: deque[bytes] = deque()
        self.ended = False

    def take(self, names: list[bytes]) -> None:
        self.read.extend(names)
        self.ended = len(names) < _PART
        if names:
            self.behind = b"(" + names[-1]
