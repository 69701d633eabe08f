"""A tool's effect in the store's transaction: SQL of its own on a connection of its own, and nothing that would end it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import psycopg
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus

from turnkeeper.errors import StoreBusy, StoreClosed, StoreUnavailable, TurnkeeperError
from turnkeeper.log.record import Appended, Behind, Guard, GuardFailed, Head, Position
from turnkeeper.stores.postgres import failures
from turnkeeper.stores.postgres.address import Address
from turnkeeper.stores.postgres.lanes import has_rows, usable
from turnkeeper.stores.postgres.statements import ADAPTERS, Row, Statements, append, outcome

T = TypeVar("T")

_REPEATS: Final = 5
"""How often the log's lock is asked for again where the server undid that for the sake of others."""
_ENDS_OR_OUTLIVES: Final = frozenset(
    {
        *("abort", "begin", "commit", "end", "prepare", "release", "rollback", "savepoint", "start"),
        *("deallocate", "discard", "listen", "reset", "set", "unlisten"),
    }
)
"""First words of statements that would end the transaction, or that would outlive it on the store's connection."""
_WITHIN: Final = frozenset({"local", "constraints"})
"""Second words of a SET that ends with the transaction."""
_WORD: Final = re.compile("[a-z]+")


class Effect(NamedTuple, Generic[T]):
    """A transactional append: see `turnkeeper.log.store.TransactionalStore.append_with`."""

    key: str
    run: Callable[[Transaction], T]
    records: Callable[[T], Sequence[bytes]]
    expected: Position
    head: Head
    guard: Guard | None


class Transaction:
    """SQL inside the store's transaction. Valid only while the tool runs; statements of its own, no COMMIT.

    Tables of the tool live in the same database, in whatever schema the user's search path says. Those of Turnkeeper can be
    read, not written. An error of PostgreSQL spoils the whole transaction: what a tool swallows comes up again at its end.
    """

    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._connection: psycopg.Connection[Row] | None = connection
        self._spoiled: psycopg.Error | None = None

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Run one statement, and give its rows; parameters are written `%s` or `%(name)s`.

        Raises:
            psycopg.Error: as PostgreSQL says; statements that end the transaction or outlive it are refused.
        """
        if self._connection is None:
            raise psycopg.ProgrammingError("the transaction of this tool is over")
        self.check()
        _refuse(sql)
        try:
            if not parameters:
                # Without parameters psycopg would run several statements of one string, a COMMIT among them.
                self._parse(self._connection, sql)
            cursor = psycopg.Cursor(self._connection)
            cursor.execute(sql.encode(), parameters or None)
            return cursor.fetchall() if has_rows(cursor.pgresult) else []
        except psycopg.Error as e:
            if self._connection.info.transaction_status != TransactionStatus.INTRANS:
                self._spoiled = e
            raise

    @staticmethod
    def _parse(connection: psycopg.Connection[Row], sql: str) -> None:
        parsed = connection.pgconn.prepare(b"", sql.encode())
        if connection.pgconn.status == ConnStatus.BAD:
            raise psycopg.OperationalError("the server closed the connection")
        if parsed.status != ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(parsed)

    def check(self) -> None:
        """Raise the error that spoiled the transaction, where one did: nothing of it can be kept."""
        if self._spoiled is not None:
            raise self._spoiled

    def end(self) -> None:
        """Let nothing more run."""
        self._connection = None


class Bench:
    """Where transactional tools of one event loop run: threads, each with a connection while it works."""

    def __init__(self, address: Address, statements: Statements) -> None:
        self._address = address
        self._statements = statements
        self._places = asyncio.Semaphore(address.pool_size)
        self._threads = anyio.CapacityLimiter(address.pool_size)
        self._running: set[asyncio.Task[Any]] = set()
        self._idle: list[psycopg.Connection[Row]] = []
        self._closed = False

    async def append_with(self, effect: Effect[T]) -> tuple[T, Appended] | Behind | GuardFailed:
        """Run an effect and append with it.

        A thread cannot be cancelled: once it has begun, a cancelled caller is told so only when effect and append are both in
        or both undone (LOG-6); one that is cancelled a second time leaves them to themselves.

        Raises:
            StoreError: with `applied` None, it may have been committed.
            BaseException: what the effect raised. Nothing has happened.
        """
        try:
            async with asyncio.timeout(self._address.busy_timeout):
                await self._places.acquire()
        except TimeoutError:
            raise StoreBusy(
                self._address.where, f"{self._address.pool_size} transactional tools were running"
            ) from None
        if self._closed:
            self._places.release()
            raise StoreClosed(self._address.where, "the store was closed")
        work = asyncio.ensure_future(anyio.to_thread.run_sync(self._work, effect, limiter=self._threads))
        self._running.add(work)
        work.add_done_callback(self._done)
        try:
            done, error = await asyncio.shield(work)
        except asyncio.CancelledError:
            if not work.done():
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([work])
            raise
        if error is not None:
            raise error
        assert done is not None
        return done

    def _done(self, work: asyncio.Task[Any]) -> None:
        self._running.discard(work)
        self._places.release()

    async def close(self) -> None:
        """Wait for the tools that run, then close the connections."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the connections."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    # --- in a thread -----------------------------------------------------------------------------------------

    def _work(
        self, effect: Effect[T]
    ) -> tuple[tuple[T, Appended] | Behind | GuardFailed, None] | tuple[None, BaseException]:
        """What came of it, or the error: returned, as some exceptions mean something else to threads and event loops."""
        where = self._address.where
        try:
            connection = self._connection()
        except psycopg.Error as e:
            return None, failures.not_connected(e, where)
        try:
            return self._transact(connection, effect), None
        except (psycopg.Error, UnicodeEncodeError) as e:
            ours = failures.typed(e, where)
            if isinstance(ours, StoreUnavailable):
                # Before the COMMIT: a server that loses the connection undoes the transaction.
                ours.applied = False
            return None, ours
        except _Told as e:
            return None, e.error
        except BaseException as e:
            return None, e
        finally:
            if self._undone(connection) and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()

    def _connection(self) -> psycopg.Connection[Row]:
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if usable(connection):
                    return connection
                connection.close()
        return psycopg.connect(
            self._address.conninfo,
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,
            context=ADAPTERS,
        )

    @staticmethod
    def _undone(connection: psycopg.Connection[Row]) -> bool:
        """Whether the connection can be used further, with no transaction open."""
        try:
            if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                connection.execute(b"ROLLBACK")
        except psycopg.Error:
            return False
        return usable(connection)

    def _transact(
        self, connection: psycopg.Connection[Row], effect: Effect[T]
    ) -> tuple[T, Appended] | Behind | GuardFailed:
        expected, patience, where = effect.expected, self._address.patience_ms, self._address.where
        # An append of no records: it takes the lock, and makes the log where there is none.
        lock = append(effect.key, (), expected, effect.head, effect.guard, 0, patience)._replace(wait=True)
        locked = outcome(self._lock(connection, lock), expected, where)
        if not isinstance(locked, Appended):
            return locked
        writes = _ask(connection, self._statements.writes)
        result = _run(connection, effect.run)
        bodies = effect.records(result)
        if _ask(connection, self._statements.writes) != writes:
            raise TurnkeeperError("a transactional tool wrote to tables of Turnkeeper; it was undone as a whole")
        last = append(effect.key, bodies, locked.position, effect.head, None, 0, patience)
        rows = _ask(
            connection, self._statements.append, last._replace(create=False, incarnation=locked.position.incarnation)
        )
        appended = outcome(rows, locked.position, where)
        assert isinstance(appended, Appended), "the log is locked"
        self._commit(connection)
        return result, appended

    def _lock(self, connection: psycopg.Connection[Row], lock: Sequence[Any]) -> list[Row]:
        for repeat in range(_REPEATS):
            _ask(connection, b"BEGIN ISOLATION LEVEL READ COMMITTED")
            try:
                return _ask(connection, self._statements.append, lock)
            except psycopg.Error as e:
                if not failures.transient(e) or repeat == _REPEATS - 1:
                    raise
                _ask(connection, b"ROLLBACK")
        raise AssertionError("the last repeat returns or raises")

    def _commit(self, connection: psycopg.Connection[Row]) -> None:
        try:
            _ask(connection, b"COMMIT")
        except psycopg.Error as e:
            if failures.of_the_store(e):
                raise _Told(failures.typed(e, self._address.where)) from e
            raise _Told(e) from e  # a constraint of the tool's tables that is checked at the end


class _Told(Exception):
    """Carries an error past the handling of others, as it is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _ask(connection: psycopg.Connection[Row], text: bytes, parameters: Sequence[Any] = ()) -> list[Row]:
    cursor = connection.cursor(binary=True)
    cursor.execute(text, parameters)
    return cursor.fetchall() if has_rows(cursor.pgresult) else []


def _run(connection: psycopg.Connection[Row], effect: Callable[[Transaction], T]) -> T:
    transaction = Transaction(connection)
    try:
        result = effect(transaction)
        transaction.check()
    except psycopg.Error as e:
        if failures.of_the_store(e):
            raise
        raise _Told(e) from e
    finally:
        transaction.end()
    return result


def _refuse(sql: str) -> None:
    first, second = _first_words(sql)
    if first in _ENDS_OR_OUTLIVES and not (first == "set" and second in _WITHIN):
        raise psycopg.ProgrammingError(
            f"{first.upper()} is not for a transactional tool: the transaction is the store's"
        )


def _first_words(sql: str) -> tuple[str, str]:
    """The first two words behind white space, comments (nested ones too) and empty statements."""
    place = depth = 0
    while place < len(sql):
        two = sql[place : place + 2]
        if two == "/*":
            depth += 1
            place += 2
        elif two == "*/" and depth:
            depth -= 1
            place += 2
        elif depth or sql[place].isspace() or sql[place] == ";":
            place += 1
        elif two == "--":
            end = sql.find("\n", place)
            place = len(sql) if end < 0 else end
        else:
            break
    words = _WORD.findall(sql[place : place + 200].lower())
    return (*words, "", "")[0], (*words, "", "")[1]
