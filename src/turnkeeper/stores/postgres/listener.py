"""Waiting for changes of logs: the one connection of an event loop that listens, shared by all who wait there.

For each log that is waited for, the connection holds the advisory lock that has writers notify (`002_notifications.sql`). It is
made for the first who waits, made again where it is lost, and closed a while after the last one went. A task runs it, which no
waiter can cancel. Nobody depends on it: who waits looks before each sleep, and without the lock sleeps for `_POLL` at the most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import psycopg

from turnkeeper.errors import StoreClosed
from turnkeeper.stores.postgres.address import Address
from turnkeeper.stores.postgres.lanes import Connection, ask, connect
from turnkeeper.stores.postgres.statements import Statements

log = logging.getLogger(__name__)

_POLL: Final = 0.5
"""Most seconds between two looks of who cannot be told."""
_REFUSED_PAUSE: Final = 0.02
"""Seconds until a log's lock is tried again, where a transaction that is about to end has it."""
_LINGER: Final = 30.0
"""Seconds that the connection is kept without anybody who waits: who waits once waits again."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 15.0
"""Seconds until the connection is made again, doubled each time; a connection that lived this long starts anew."""
_MOST: Final = 256
"""Logs that one connection has locks of; the server's table of locks is for everybody. Who waits for more logs polls."""


class _Watch:
    """A log that somebody waits for."""

    __slots__ = ("lock", "signal", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.lock: int | None = None
        """The log's advisory lock, while our session has it."""
        self.signal = asyncio.Event()
        """Set, and replaced, when there is a reason to look."""

    def wake(self) -> None:
        self.signal.set()
        self.signal = asyncio.Event()


class Listener:
    """Tells the tasks of one event loop of changes. Makes no connection where `polls` says that a pooler is in between."""

    def __init__(self, address: Address, statements: Statements, *, polls: bool) -> None:
        self._address = address
        self._statements = statements
        self._polls = polls
        self._loop = asyncio.get_running_loop()
        self._watches: dict[str, _Watch] = {}
        self._unneeded: list[int] = []
        """Locks that our session has and nobody needs any more."""
        self._work = asyncio.Event()
        """Set when the task has something to do, or the server has said something."""
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._closed = False

    # --- for callers -----------------------------------------------------------------------------------------

    async def wait(self, key: str, has_moved: Callable[[], Awaitable[bool]], timeout: float) -> bool:
        """Wait until `has_moved` finds that the log has, at most `timeout` seconds. Whether it has.

        Raises:
            StoreClosed: the store was closed meanwhile.
        """
        deadline = self._loop.time() + timeout
        watch = self._watches.setdefault(key, _Watch())
        watch.waiting += 1
        try:
            while True:
                # In this order: what changes behind the look sets the signal that was taken before it.
                signal, told = watch.signal, watch.lock is not None
                if self._closed:
                    raise StoreClosed(self._address.where, "the store was closed")
                if await has_moved():
                    return True
                left = deadline - self._loop.time()
                if left <= 0:
                    return False
                if not told:
                    left = min(left, _POLL)
                    self._ask()
                try:
                    async with asyncio.timeout(left):
                        await signal.wait()
                except TimeoutError:
                    pass
        finally:
            self._leave(key, watch)

    async def close(self) -> None:
        """Let everybody who waits know, and close the connection."""
        self._closed = True
        for watch in self._watches.values():
            watch.wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Let go of the connection, where the loop is over or stands still."""
        self._closed = True
        if not self._loop.is_closed():
            for watch in self._watches.values():
                watch.wake()
            if self._task is not None:
                self._task.cancel()
        if self._connection is not None:
            self._connection.pgconn.finish()

    def _ask(self) -> None:
        if not (self._polls or self._closed):
            self._work.set()
            if self._task is None:
                self._task = self._loop.create_task(self._run())

    def _leave(self, key: str, watch: _Watch) -> None:
        watch.waiting -= 1
        if not watch.waiting:
            del self._watches[key]
            if watch.lock is not None:
                self._unneeded.append(watch.lock)
            self._work.set()

    # --- the task --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while self._watches and not self._polls:
                began = self._loop.time()
                try:
                    self._connection = await connect(self._address, prepare=False)
                    await self._listen(self._connection)
                except psycopg.Error as e:
                    log.info("%s: who waits has to poll for now: %s", self._address.where, e)
                    self._let_go()
                    if self._loop.time() - began > _LONGEST_PAUSE:
                        pause = _FIRST_PAUSE
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            # Without a pause from the last look at who waits: who comes now starts another task.
            self._task = None
            self._let_go()

    def _let_go(self) -> None:
        """Close the connection. The server drops its locks, and who waited looks what was missed."""
        if self._connection is not None:
            self._connection.pgconn.finish()
            self._connection = None
        self._unneeded.clear()
        for watch in self._watches.values():
            if watch.lock is not None:
                watch.lock = None
                watch.wake()

    async def _listen(self, connection: Connection) -> None:
        """Hear what the server says until nobody has waited for a while."""
        ((channel, backend, *_),) = await ask(connection, self._statements.prepare_to_listen)
        if backend != connection.pgconn.backend_pid:
            # A pooler that was not noticed. Its next client gets the session, and what is said to it.
            self._polls = True
            return
        await ask(connection, f'LISTEN "{channel}"'.encode())
        connection.add_notify_handler(lambda notification: self._hear(notification.payload))
        while True:
            self._work.clear()
            refused = await self._exchange_locks(connection)
            # Whoever waits for others than us is heard of as well. It has to be read, or the server keeps it for us.
            connection.pgconn.consume_input()
            while (notification := connection.pgconn.notifies()) is not None:
                self._hear(notification.extra.decode())
            pause = _REFUSED_PAUSE if refused else None if self._watches else _LINGER
            if not await self._sleep(connection.pgconn.socket, pause) and not self._watches:
                return

    async def _sleep(self, socket: int, pause: float | None) -> bool:
        """Whether there is something to do before the pause is over."""
        self._loop.add_reader(socket, self._work.set)
        try:
            async with asyncio.timeout(pause):
                await self._work.wait()
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(socket)
        return True

    async def _exchange_locks(self, connection: Connection) -> bool:
        """Give back what is not needed, take what is. Whether any is to be tried again."""
        if self._unneeded:
            locks, self._unneeded = self._unneeded, []
            await ask(connection, self._statements.unlock, [locks])
        without = [key for key, watch in self._watches.items() if watch.lock is None]
        keys = without[: _MOST - (len(self._watches) - len(without))]
        if not keys:
            return False
        refused = False
        for key, lock, taken in await ask(connection, self._statements.lock, [keys]):
            watch = self._watches.get(key)
            if not taken:
                refused |= watch is not None
            elif watch is None:  # went away meanwhile
                self._unneeded.append(lock)
                self._work.set()
            else:
                watch.lock = lock
                watch.wake()
        return refused

    def _hear(self, payload: str) -> None:
        for watch in self._watches.values():
            if str(watch.lock) == payload:
                watch.wake()
