"""The threads behind a SQLite store: one writer that commits in groups, one reader that never blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from turnkeeper.errors import StoreClosed
from turnkeeper.stores.sqlite.schema import typed

T = TypeVar("T")
Work = Callable[[sqlite3.Connection, int], Any]
"""A step inside a transaction: gets the connection and the store's time in milliseconds."""

_GROUP: Final = 512
"""Most operations in one commit, so that the first of them does not wait for ever."""


class _Operation:
    """One piece of work, and who waits for it."""

    __slots__ = ("error", "future", "loop", "may_fail", "result", "work")

    def __init__(self, work: Work, may_fail: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.may_fail = may_fail
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.result: Any = None
        self.error: BaseException | None = None


class Worker:
    """A thread that owns a connection and runs work on it, one transaction for each group of operations."""

    def __init__(self, where: str, connection: sqlite3.Connection, clock: Callable[[], int], *, writes: bool) -> None:
        self._where = where
        self._connection = connection
        self._clock = clock
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self.cancelled = 0
        """Callers that did not wait for their answer: their work may be under way still."""
        self._thread = threading.Thread(target=self._run, name=f"turnkeeper {where}", daemon=True)
        self._thread.start()

    async def do(self, work: Callable[[sqlite3.Connection, int], T], *, may_fail: bool = False) -> T:
        """Run `work` in a transaction of the thread, and give its result once that is committed.

        A cancelled caller leaves work that has not begun undone, and work that has begun whole (LOG-6).

        Args:
            may_fail: `work` runs code that is not the store's, and may raise when it has written already.

        Raises:
            StoreError: what SQLite said, typed; or what `work` raised. The work is undone.
        """
        operation = _Operation(work, may_fail, asyncio.get_running_loop())
        with self._closing:  # so that nothing is put behind the end of the queue, where nobody would answer it
            if self._closed:
                raise StoreClosed(self._where, "the store was closed")
            self._queue.put(operation)
        try:
            return await operation.future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def close(self) -> None:
        """Finish the work that was asked for, then close the connection. Blocks until then."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            group = [operation]
            stop = False
            while len(group) < _GROUP and not stop:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    stop = True
                else:
                    group.append(following)
            self._commit(group)
            if stop:
                break
        self._connection.close()

    def _commit(self, group: list[_Operation]) -> None:
        group = [operation for operation in group if not operation.future.cancelled()]
        if not group:
            return
        if not self._commit_together(group) and len(group) > 1:
            # The transaction was lost as a whole (to a full disk, say): each one on its own gets its own truth.
            for operation in group:
                operation.result = operation.error = None
                self._commit_together([operation])
        _answer(group)

    def _commit_together(self, group: list[_Operation]) -> bool:
        """Whether every operation has its answer; if not, each has the error that undid the whole transaction."""
        connection = self._connection
        try:
            connection.execute(self._begin)
        except sqlite3.Error as e:
            for operation in group:
                operation.error = typed(e, self._where)
            return True
        try:
            now = self._now()
            for operation in group:
                if operation.may_fail and len(group) > 1:
                    self._one(operation, now)
                else:
                    operation.result = operation.work(connection, now)
            connection.execute("COMMIT")
        except BaseException as e:
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # what went wrong first is what the callers have to know
                    connection.execute("ROLLBACK")
            for operation in group:
                operation.error = self._told(e)
            return False
        return True

    def _one(self, operation: _Operation, now: int) -> None:
        """Run one operation in a savepoint of its own, so that its failure undoes only itself.

        The store's own work has none: it refuses before it writes, and what fails behind that is the file's trouble. (Measured:
        two statements less for each append, and each one lets go of the interpreter and has to get it back.)

        Raises when the whole transaction is gone.
        """
        connection = self._connection
        connection.execute("SAVEPOINT one")
        try:
            operation.result = operation.work(connection, now)
        except BaseException as e:
            if not connection.in_transaction:
                raise  # SQLite rolled everything back by itself
            connection.execute("ROLLBACK TO one")
            operation.error = self._told(e)
        connection.execute("RELEASE one")

    def _told(self, error: BaseException) -> BaseException:
        """The error as the caller gets it."""
        if isinstance(error, sqlite3.Error):
            return typed(error, self._where)
        if isinstance(error, StopIteration):  # a future refuses it, and its caller would wait for ever
            told = RuntimeError("the work raised StopIteration")
            told.__cause__ = error
            return told
        return error

    def _now(self) -> int:
        offset: int = self._connection.execute("SELECT value FROM meta WHERE name = 'clock_offset_ms'").fetchone()[0]
        return self._clock() + offset


def wall_clock() -> int:
    """The host's clock in milliseconds."""
    return time.time_ns() // 1_000_000


def _answer(group: list[_Operation]) -> None:
    """Wake the callers, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for operation in group:
        by_loop.setdefault(operation.loop, []).append(operation)
    for loop, operations in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, operations)
        except RuntimeError:
            # The caller's loop is closed, so nobody waits for the answer; what was committed stays.
            continue


def _resolve(operations: list[_Operation]) -> None:
    for operation in operations:
        if operation.future.done():
            continue
        if operation.error is None:
            operation.future.set_result(operation.result)
        else:
            operation.future.set_exception(operation.error)
