"""A set of connections for each event loop and process that uses a store: none is ever used in another (field case 07)."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

from turnkeeper.errors import StoreClosed
from turnkeeper.stores.redis.server import Server
from turnkeeper.stores.redis.settings import Settings


class _Here(NamedTuple):
    """The connections of one event loop, and what closes them when the loop ends."""

    server: Server
    life: AsyncGenerator[None, None]


_PARENTS: Final[list[Any]] = []
"""What a forked child inherited. It must not close it: its parent's event loop is behind it."""


class Loops:
    """Connections by event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._here: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Here] = weakref.WeakKeyDictionary()
        self._closed = False

    async def here(self) -> Server:
        """The connections of the running event loop; makes the object, connects nothing.

        Raises:
            StoreClosed: the store was closed.
        """
        loop = asyncio.get_running_loop()
        if self._process != os.getpid():
            self._forked()
        found = self._here.get(loop)
        if found is not None and not self._closed:
            return found.server
        server = Server(self._settings)
        # Event loops end their generators when they are shut down, and that is when the connections can still be closed.
        life = _until_the_end(server)
        await anext(life)
        with self._lock:
            if self._closed:
                raise StoreClosed(self._settings.where, "the store was closed")
            for ended in [other for other in self._here if other.is_closed()]:
                del self._here[ended]
            return self._here.setdefault(loop, _Here(server, life)).server

    def _forked(self) -> None:
        """Begin anew in a forked child, whose parent goes on with the connections."""
        _PARENTS.append((self._here, self._lock))
        self._here = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._process = os.getpid()

    async def close(self) -> None:
        """Finish what was asked in any event loop that still runs, and close its connections."""
        if self._process != os.getpid():
            self._forked()
        with self._lock:
            self._closed = True
            entries = list(self._here.items())
            self._here.clear()
        for loop, here in entries:
            if loop is asyncio.get_running_loop():
                await here.life.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(here.life.aclose(), loop))


async def _until_the_end(server: Server) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await server.close()
