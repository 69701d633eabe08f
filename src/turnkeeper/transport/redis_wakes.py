"""Waiting for a queue in Redis to change: one blocking read for each shard and event loop, shared by all who wait there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, cast

from turnkeeper.stores.redis.server import Server

_LONGEST: Final = 2.0
"""Seconds of a blocking read at the most; less where the store's timeout is short. Who waits looks anew at least as often."""
_PAUSE: Final = 0.25
"""Seconds until a server that cannot be read from is tried again."""


class Wakes:
    """Tells the tasks of one event loop of changes. Reads only while somebody waits."""

    def __init__(self, server: Server, keys: Sequence[bytes]) -> None:
        """
        Args:
            keys: the stream of each shard that gets an entry when there is a reason to look.
        """
        self._server = server
        self._keys = keys
        self._latest = [b"0-0"] * len(keys)
        self._closed = False
        self._waiting = 0
        self._signal = asyncio.Event()
        """Set, and replaced, when a shard has changed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = [False] * len(keys)

    async def wait(self, seconds: float, seen: Sequence[bytes]) -> None:
        """Wait until a shard has changed since `seen`, `seconds` at the most, and never longer than a lost change is missed."""
        for shard, latest in enumerate(seen):
            self._latest[shard] = max(self._latest[shard], latest, key=_order)
        self._waiting += 1
        try:
            async with asyncio.timeout(min(seconds, _LONGEST)):
                while not self._closed and not self._has_changed(seen):
                    signal = self._signal
                    for shard in range(len(self._keys)):
                        self._read_on(shard)
                    await signal.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Let everybody look, and end the reading."""
        self._closed = True
        self._signal.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _has_changed(self, seen: Sequence[bytes]) -> bool:
        return any(_order(latest) > _order(old) for latest, old in zip(self._latest, seen, strict=True))

    def _read_on(self, shard: int) -> None:
        if not self._reading[shard]:
            self._reading[shard] = True
            task = asyncio.ensure_future(self._read(shard))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, shard: int) -> None:
        key = self._keys[shard]
        block = round(min(_LONGEST, self._server.settings.timeout / 2) * 1000)
        try:
            while self._waiting:
                command = ("XREAD", "COUNT", 1, "BLOCK", max(1, block), "STREAMS", key, self._latest[shard])
                reply = await self._server.watch(key, *command)
                if reply is None:
                    await asyncio.sleep(_PAUSE)
                elif reply:
                    # RESP2 gives pairs, RESP3 a mapping.
                    entries: Any = cast("Any", reply)[key] if isinstance(reply, dict) else reply[0][1]
                    self._latest[shard] = entries[-1][0]
                    self._signal.set()
                    self._signal = asyncio.Event()
        finally:
            # Without a pause from the last look at who waits: who comes now starts another task.
            self._reading[shard] = False


def _order(entry: bytes) -> tuple[int, int]:
    """Ids of a stream, in their order."""
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
