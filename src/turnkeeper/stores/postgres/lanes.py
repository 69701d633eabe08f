"""The connections of one event loop: calls wait in queues, lanes serve them, and appends that waited together go together.

A caller only waits for the answer; the statement is run by a lane, a task that no caller can cancel. So a cancelled call
leaves no open transaction, no unread reply and no lock (LOG-6, field case 26): what was not sent yet is left undone, what was
sent is carried through.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from turnkeeper.errors import StoreBusy, StoreClosed, StoreUnavailable
from turnkeeper.stores.postgres import failures
from turnkeeper.stores.postgres.address import Address
from turnkeeper.stores.postgres.statements import ADAPTERS, LOCKED, Append, Row, Statements

Connection = psycopg.AsyncConnection[Row]
Pooled = psycopg.AsyncConnection[Row] | psycopg.Connection[Row]

_GROUP: Final = 64
"""Most appends in one statement."""
_GROUP_BYTES: Final = 1_000_000
"""Bytes of bodies from which on no further append joins a statement."""
_LIFETIME: Final = 3600.0
"""Seconds after which an idle connection is not used again, so that a name that moved to another server is looked up again."""
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.1
"""Seconds before a statement is repeated that the server undid for the sake of others (a deadlock, a serialization failure)."""


async def connect(address: Address, *, prepare: bool) -> Connection:
    """A connection in autocommit mode.

    Raises:
        psycopg.Error: it could not be made.
    """
    return await psycopg.AsyncConnection.connect(
        address.conninfo,
        autocommit=True,
        prepare_threshold=5 if prepare else None,
        cursor_factory=psycopg.AsyncRawCursor,
        context=ADAPTERS,
    )


async def ask(
    connection: Connection, text: bytes, parameters: Sequence[Any] = (), *, prepare: bool | None = None
) -> list[Row]:
    """Run one statement, and give its rows.

    Raises:
        psycopg.Error: as PostgreSQL says.
    """
    cursor = connection.cursor(binary=True)
    await cursor.execute(text, parameters, prepare=prepare)
    return await cursor.fetchall() if has_rows(cursor.pgresult) else []


def has_rows(result: PGresult | None) -> bool:
    """Whether a statement gives rows, be it none; a cursor's `description` would tell it too, at the price of building it."""
    return result is not None and result.status == ExecStatus.TUPLES_OK


def usable(connection: Pooled) -> bool:
    """Whether an idle connection is still there, as far as can be seen without asking the server."""
    pgconn = connection.pgconn
    try:
        pgconn.consume_input()  # the server's last words, if there are any
        pgconn.consume_input()  # the end behind them
    except psycopg.OperationalError:
        return False
    return pgconn.status == ConnStatus.OK and pgconn.transaction_status == TransactionStatus.IDLE


class _Call:
    """What a caller asked for, and where it waits for the answer."""

    __slots__ = ("again", "append", "ended", "future", "parameters", "settled", "taken", "text", "timer", "waits")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        text: bytes,
        parameters: Sequence[Any],
        append: Append | None,
        again: bool,
    ) -> None:
        self.text = text
        self.parameters = parameters
        self.append = append
        self.again = again
        """Whether it only reads, so that it is asked once more when its answer was lost."""
        self.future: asyncio.Future[list[Row]] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.taken = False
        """Whether a lane has it, so that it may be under way."""
        self.waits = False
        """Whether it waits for who holds its log; at first it does not, so as not to hold up those behind it."""
        self.ended = False
        self.settled: asyncio.Event | None = None
        """Where its caller was cancelled while it was under way: set when no more will come of it."""

    def answer(self, rows: list[Row]) -> None:
        if not self.future.done():
            self.future.set_result(rows)
        self.settle()

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
        self.settle()

    def settle(self) -> None:
        self.ended = True
        if self.settled is not None:
            self.settled.set()


class Lanes:
    """At most `pool_size` connections, made when they are needed. Belongs to one event loop."""

    def __init__(self, address: Address, statements: Statements, *, prepare: bool) -> None:
        self._address = address
        self._statements = statements
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._single: deque[_Call] = deque()
        self._together: deque[_Call] = deque()
        self._blocked: deque[_Call] = deque()
        """Appends to logs that others held when they were tried."""
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._serving = 0
        """Lanes that have a connection."""
        self._waiting = 0
        """Lanes that wait for who holds a log."""
        self._idle: list[Connection] = []
        self._born: dict[Connection, float] = {}
        """Every open connection, and when it was made."""
        self._orphans: list[_Call] = []
        """Appends that were under way when their callers were cancelled."""
        self._closed = False

    # --- for callers -----------------------------------------------------------------------------------------

    async def append(self, append: Append) -> list[Row]:
        """Run an append, perhaps in one statement with others.

        Raises:
            TurnkeeperError: see `failures`; with `applied` None the append may be in.
        """
        call = _Call(self._loop, self._statements.append, append, append, again=False)
        return await self._submit(call, self._together)

    async def ask(self, text: bytes, parameters: Sequence[Any] = (), *, reads: bool) -> list[Row]:
        """Run a statement of its own; one that only reads is repeated where the connection was lost under it.

        Raises:
            TurnkeeperError: see `failures`.
        """
        return await self._submit(_Call(self._loop, text, parameters, None, again=reads), self._single)

    async def settle(self, key: str) -> None:
        """Wait for appends to `key` whose callers were cancelled: what is read behind that tells what became of them (LOG-6)."""
        for call in self._orphans:
            if call.settled is not None and call.append is not None and call.append.key == key:
                await call.settled.wait()

    async def close(self) -> None:
        """Carry out what was asked for, then close the connections."""
        self._closed = True
        while tasks := [task for task in self._tasks if task is not None]:
            await asyncio.wait(tasks)
        while self._idle:
            await self._drop(self._idle.pop())

    def abandon(self) -> None:
        """Let go of the connections, where the loop is over and nobody waits for an answer any more."""
        self._closed = True
        for connection in self._born:
            connection.pgconn.finish()
        self._born.clear()
        self._idle.clear()

    def adopt(self, connection: Connection) -> None:
        """Take over a connection that was made in this loop."""
        self._born[connection] = self._loop.time()
        self._idle.append(connection)

    async def _submit(self, call: _Call, queue: deque[_Call]) -> list[Row]:
        if self._closed:
            raise StoreClosed(self._address.where, "the store was closed")
        queue.append(call)
        if len(self._tasks) < self._address.pool_size:
            self._tasks.add(self._loop.create_task(self._lane()))
        else:
            call.timer = self._loop.call_later(self._address.busy_timeout, self._expire, call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if call.taken and not call.ended and call.append is not None:
                call.settled = asyncio.Event()
                self._orphans = [*(other for other in self._orphans if not other.ended), call]
            raise

    def _expire(self, call: _Call) -> None:
        call.fail(StoreBusy(self._address.where, f"all {self._address.pool_size} connections were busy"))

    # --- lanes -----------------------------------------------------------------------------------------------

    def _take(self) -> list[_Call]:
        """The next call, or the next appends, that somebody still waits for."""
        group: list[_Call] = []
        size = 0
        while self._single and not group:
            self._join(group, self._single.popleft())
        if group:
            return group
        while self._together and len(group) < _GROUP and size < _GROUP_BYTES:
            call = self._together.popleft()
            if self._join(group, call) and call.append is not None:
                size += call.append.size
        # One lane is left for the others, whoever waits for a log.
        while self._blocked and not group and self._waiting < max(1, self._address.pool_size - 1):
            self._join(group, self._blocked.popleft())
        # In one order everywhere: two statements that each make two logs do not wait for one another.
        group.sort(key=_key)
        return group

    def _join(self, group: list[_Call], call: _Call) -> bool:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if call.future.done():
            call.settle()
            return False
        call.taken = True
        group.append(call)
        return True

    async def _lane(self) -> None:
        connection: Connection | None = None
        group: list[_Call] = []
        try:
            while group := self._take():
                if connection is None:
                    try:
                        connection = await self._connection()
                    except psycopg.Error as e:
                        if self._serving and failures.full_house(e):
                            self._single.extendleft(reversed(group))  # the lanes that have one will have to do
                            group = []
                            return
                        for call in group:
                            call.fail(failures.not_connected(e, self._address.where))
                        continue
                    self._serving += 1
                waits = group[0].waits
                self._waiting += waits
                try:
                    usable_still = await self._serve(connection, group)
                finally:
                    self._waiting -= waits
                if not usable_still:
                    self._serving -= 1
                    await self._drop(connection)
                    connection = None
        finally:
            # Without a pause from the last look into the queues: who puts a call there now starts another lane.
            self._tasks.discard(asyncio.current_task())
            for call in group:  # only a loop that is being closed ends a lane before its calls were answered
                call.future.cancel()
                call.settle()
            if connection is not None:
                self._serving -= 1
                if self._closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
                    self._born.pop(connection, None)
                    connection.pgconn.finish()
                else:
                    self._idle.append(connection)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if self._loop.time() - self._born[connection] < _LIFETIME and usable(connection):
                return connection
            await self._drop(connection)
        deadline = self._loop.time() + self._address.busy_timeout
        pause = 0.05
        while True:
            try:
                connection = await connect(self._address, prepare=self._prepare)
            except psycopg.Error as e:
                error = failures.not_connected(e, self._address.where)
                # A server that is being restarted, or one that is full, takes connections again soon.
                passes = isinstance(error, StoreUnavailable) or (isinstance(error, StoreBusy) and not self._serving)
                if not passes or self._loop.time() + pause > deadline:
                    raise
            else:
                self._born[connection] = self._loop.time()
                return connection
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _drop(self, connection: Connection) -> None:
        self._born.pop(connection, None)
        await connection.close()

    async def _serve(self, connection: Connection, group: list[_Call]) -> bool:
        """Run the calls and answer them. Whether the connection can be used further."""
        try:
            if len(group) == 1:
                await self._run(connection, group[0])
            else:
                await self._run_together(connection, group)
        except (psycopg.errors.InvalidSqlStatementName, psycopg.errors.DuplicatePreparedStatement):
            # A pooler that was not noticed gave us another session than the one that this statement was prepared in.
            self._prepare = False
            self._single.extend(group)
            return False
        except (psycopg.Error, UnicodeEncodeError) as e:
            return self._failed(connection, group, e)
        except Exception as e:
            for call in group:
                call.fail(e)
            return False
        return True

    def _failed(self, connection: Connection, group: list[_Call], error: psycopg.Error | UnicodeEncodeError) -> bool:
        gone = isinstance(error, psycopg.Error) and failures.lost(error)
        if len(group) > 1 and not gone:
            # One of them, or all, cannot be done; all were undone. Each on its own gets its own truth.
            self._single.extend(group)
        else:
            for call in group:
                if gone and call.again:
                    call.again = False
                    self._single.append(call)
                else:
                    call.fail(failures.typed(error, self._address.where))
        return not gone and usable(connection)

    async def _run(self, connection: Connection, call: _Call) -> None:
        deadline = self._loop.time() + self._address.busy_timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                rows = await ask(connection, call.text, call.parameters)
            except psycopg.Error as e:
                if not failures.transient(e) or self._loop.time() + pause > deadline:
                    raise
                # Not all that were undone together come back together.
                await asyncio.sleep(random.uniform(0, pause))  # noqa: S311  # no secret
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._answer(call, rows)
                return

    async def _run_together(self, connection: Connection, group: list[_Call]) -> None:
        parameters: list[Any] = []
        for call in group:
            parameters += call.parameters
        rows = await ask(connection, self._statements.appends(len(group)), parameters, prepare=False)
        answers: defaultdict[int, list[Row]] = defaultdict(list)
        for row in rows:
            answers[row[0]].append(row[1:])
        for number, call in enumerate(group):
            self._answer(call, answers[number])

    def _answer(self, call: _Call, rows: list[Row]) -> None:
        if call.append is not None and rows[0][0] == LOCKED:
            call.parameters = call.append._replace(wait=True)
            call.waits = True
            self._blocked.append(call)
        else:
            call.answer(rows)


def _key(call: _Call) -> str:
    return call.append.key if call.append is not None else ""
