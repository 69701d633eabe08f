"""Logs in a SQLite file: `record(log, seq, at, body)` and `head(…)`, group commit, several processes on one file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec

from turnkeeper.errors import StoreMissing, StoreUnsuitable
from turnkeeper.log.record import (
    NOWHERE,
    Appended,
    Behind,
    Guard,
    GuardFailed,
    Head,
    HeadQuery,
    Position,
    Record,
    Tail,
)
from turnkeeper.log.store import Promise
from turnkeeper.stores.sqlite import schema
from turnkeeper.stores.sqlite.transaction import EffectRaised, Transaction, run_effect
from turnkeeper.stores.sqlite.worker import Worker, wall_clock

T = TypeVar("T")

_json = msgspec.json.Encoder()

_PAGE: Final = 200
"""Heads fetched at a time by a listing."""

_VACUUM: Final = 2000
"""Pages handed back to the system in one transaction: 8 MB."""

# Without RETURNING, which makes SQLite build a table for the row: looking the id up again costs less (measured: an
# append's statements take 20 microseconds instead of 35).
_ADVANCE = (
    "UPDATE head SET tail = tail + ?, phase = ?, attention = ?, owner = ?, labels = ?, ttl_ms = ?, keep_until = ?, "
    "size = size + ?, updated = ? WHERE key = ? AND incarnation = ? AND tail = ? AND updated <= ?"
)
_CREATE = (
    "INSERT INTO head (key, incarnation, tail, compacted, kind, phase, attention, owner, labels, ttl_ms, keep_until, "
    "size, created, updated) VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING"
)
_LOG = "(SELECT id FROM head WHERE key = ?)"
_record: Final[Callable[[Any], Record]] = partial(tuple.__new__, Record)  # pyright: ignore[reportUnknownMemberType]
"""A record from a row, without a call into Python for each (`Record._make` takes three times as long)."""
_RECORD = f"INSERT INTO record (log, seq, at, body) VALUES ({_LOG}, ?, ?, ?)"


class _Workers(NamedTuple):
    """The threads of one process; in memory they are one and the same."""

    writer: Worker
    reader: Worker

    def close(self) -> None:
        """Finish the work that was asked for, and end both. Blocks until then."""
        self.reader.close()
        self.writer.close()


def _start(where: str, connect: Callable[[], sqlite3.Connection], clock: Callable[[], int]) -> _Workers:
    writer = Worker(where, connect(), clock, writes=True)
    if where == ":memory:":
        return _Workers(writer, writer)
    try:
        return _Workers(writer, Worker(where, connect(), clock, writes=False))
    except BaseException:
        writer.close()
        raise


class SqliteStore:
    """A store in one SQLite file (or `:memory:`, for tests and scratch work of one process).

    Durable means: written to the WAL and fsynced (`synchronous=FULL`) before an append returns. Time is the host's
    wall clock; where it is set back, the store's clock goes on from where the log stands (LOG-3), so a lease ends at
    most its own length later. Where it jumps forward, leases end early: an effect then becomes AMBIGUOUS, it is never
    repeated.
    """

    def __init__(self, path: str, start: Callable[[], _Workers], *, journal: str, busy_timeout: float) -> None:
        """Use `open`."""
        self.path = path
        self._start = start
        self._workers = {os.getpid(): start()}
        self._journal = journal
        self._busy_timeout = busy_timeout
        self._settled = 0
        """Cancelled calls of the writer behind which something was read in its queue."""

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = 5.0,
        journal: str = "wal",
        max_bytes: int | None = None,
        clock: Callable[[], int] = wall_clock,
        create: bool = True,
    ) -> SqliteStore:
        """Open `path`, making it if it is not there and `create` is set.

        Args:
            busy_timeout: seconds to wait for other processes' writes before `StoreBusy`.
            journal: `wal`, or `delete` for file systems without shared memory.
            max_bytes: a bound for the file; over it `StoreFull`.
            clock: the host's clock in milliseconds, for tests of clocks that jump.

        Raises:
            StoreMissing: the file is not there, and `create` is not set.
            StoreForeign, StoreVersion, StoreReadOnly, StoreUnsuitable, StoreBusy, StoreCorrupt: left as it was.
        """
        where = os.fspath(path)
        if not create and where != ":memory:" and not await anyio.Path(where).exists():
            raise StoreMissing(where, "there is no such file")
        connect = partial(schema.connect, where, busy_timeout=busy_timeout, journal=journal, max_bytes=max_bytes)
        start = partial(_start, where, connect, clock)
        return await anyio.to_thread.run_sync(partial(cls, where, start, journal=journal, busy_timeout=busy_timeout))

    @property
    def _writer(self) -> Worker:
        return self._here().writer

    @property
    def _reader(self) -> Worker:
        return self._here().reader

    def _here(self) -> _Workers:
        """The threads of this process. A forked child has none of its parent's, and must not touch their connections."""
        found = self._workers.get(os.getpid())
        if found is not None:
            return found
        if self.path == ":memory:":
            raise StoreUnsuitable(self.path, "is the memory of the process that opened it; a forked child needs a file")
        started = self._start()
        found = self._workers.setdefault(os.getpid(), started)
        if found is not started:
            started.close()  # another thread of the child was faster
        return found

    async def __aenter__(self) -> SqliteStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

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
        """See `turnkeeper.log.store.Store.append`."""
        return await self._writer.do(partial(_append, key, records, expected, head, guard, compact_through))

    async def append_with(
        self,
        key: str,
        effect: Callable[[Transaction], T],
        records: Callable[[T], Sequence[bytes]],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
    ) -> tuple[T, Appended] | Behind | GuardFailed:
        """See `turnkeeper.log.store.TransactionalStore.append_with`; `effect` gets a `Transaction`, in the writer thread."""

        def work(connection: sqlite3.Connection, now: int) -> tuple[T, Appended] | Behind | GuardFailed:
            time = _admitted(connection, key, expected, guard, now)
            if not isinstance(time, int):
                return time
            result = run_effect(connection, effect)
            outcome = _append(key, records(result), expected, head, None, 0, connection, time)
            assert isinstance(outcome, Appended)
            return result, outcome

        try:
            return await self._writer.do(work, may_fail=True)
        except EffectRaised as e:
            raise e.error from None

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `turnkeeper.log.store.Store.read`."""
        cancelled = self._writer.cancelled
        if cancelled <= self._settled:
            tail, now = await self._reader.do(partial(_timed_tail, key, after))
            if tail.now > now:
                # The host's clock was set back behind the log: the store's has to go on from there, also where all that
                # anybody does is look whether a lease is over (field case 20, row 4).
                await self._writer.do(partial(_after, key))
            return tail
        # A write whose caller was cancelled may be under way. Behind it in the writer's queue, this read tells for good
        # what became of it (LOG-6); another connection might look just before the commit.
        tail = await self._writer.do(partial(_tail, key, after))
        self._settled = max(self._settled, cancelled)
        return tail

    async def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `turnkeeper.log.store.Store.heads`."""
        last = ""
        while True:
            page = await self._reader.do(partial(_heads, query, last))
            for head in page:
                yield head
            if len(page) < _PAGE:
                return
            last = page[-1].key

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `turnkeeper.log.store.Store.erase`."""
        return await self._writer.do(partial(_erase, key, unchanged_since))

    async def restore(
        self, key: str, records: Sequence[Record], *, position: Position, compacted: int, head: Head
    ) -> bool:
        """See `turnkeeper.log.store.RestoringStore.restore`."""
        return await self._writer.do(partial(_restore, key, records, position, compacted, head))

    async def tidy(self) -> None:
        """See `turnkeeper.log.store.Store.tidy`; the file gets smaller."""

        def checkpoint() -> None:
            connecting = sqlite3.connect(self.path, timeout=self._busy_timeout, isolation_level=None)
            with contextlib.closing(connecting) as connection:
                _vacuum(connection)
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

        if self.path != ":memory:":
            try:
                await anyio.to_thread.run_sync(checkpoint)
            except sqlite3.Error as e:
                raise schema.typed(e, self.path) from e

    # --- for who keeps tables of its own in the file -----------------------------------------------------------

    async def write(self, work: Callable[[sqlite3.Connection, int], T]) -> T:
        """Run `work` in a transaction of the writer, with the connection and the store's time in milliseconds (LOG-6).

        It shares its transaction with appends, so it must not raise once it has written.

        Raises:
            StoreError: nothing was changed.
        """
        return await self._writer.do(work)

    async def look(self, work: Callable[[sqlite3.Connection, int], T]) -> T:
        """Run `work`, which only reads, beside the writer. Raises as `write` does."""
        return await self._reader.do(work)

    @property
    def private(self) -> bool:
        """Whether no other process can reach it."""
        return self.path == ":memory:"

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the store's clock forward, for every process on the file: the test clock."""
        await self._writer.do(lambda connection, _: _advance_clock(connection, milliseconds))

    async def promises(self) -> list[Promise]:
        """See `turnkeeper.log.store.Store.promises`."""
        memory = self.path == ":memory:"
        kind = None if memory else await anyio.to_thread.run_sync(schema.file_system_type, Path(self.path))
        offset = await self._reader.do(lambda connection, now: now - wall_clock())
        return [
            Promise(
                "durable",
                "no, in memory" if memory else "fsynced at each commit (synchronous=FULL)",
                not memory,
            ),
            Promise(
                "journal",
                self._journal,
                self._journal == "wal" or memory,
                "wal lets readers and a writer work at once",
            ),
            Promise(
                "file system",
                kind or "unknown",
                kind not in schema.NETWORK_FILE_SYSTEMS,
                "WAL does not work on network file systems: use a local disk or a server store",
            ),
            Promise("busy timeout", f"{self._busy_timeout:g} s", True),
            Promise(
                "clock",
                f"the host's, {offset / 1000:+.1f} s",
                abs(offset) < 60_000,
                "the host's clock was set back",
            ),
        ]

    async def close(self) -> None:
        """See `turnkeeper.log.store.Store.close`."""
        if os.getpid() in self._workers:
            await anyio.to_thread.run_sync(self._here().close)


def _append(
    key: str,
    records: Sequence[bytes],
    expected: Position,
    head: Head,
    guard: Guard | None,
    compact_through: int,
    connection: sqlite3.Connection,
    now: int,
) -> Appended | Behind | GuardFailed:
    count = len(records)
    assert count, "an append has at least one record"
    assert compact_through <= expected.seq, "only records before the appended ones are compacted"
    readable = (
        head.phase,
        head.attention,
        head.owner,
        _json.encode(head.labels).decode(),
        head.ttl_ms,
        head.keep_until,
        sum(map(len, records)),
    )
    if guard is not None and not guard.holds(now):
        # Looked at first only because it is cheap: a tail that is not the expected one is the better answer (LOG-4).
        time = _admitted(connection, key, expected, guard, now)
        if not isinstance(time, int):
            return time
        return _append(key, records, expected, head, None, compact_through, connection, time)
    if expected == NOWHERE:
        incarnation = os.urandom(8)
        changed = connection.execute(_CREATE, (key, incarnation, count, head.kind, *readable, now, now))
    else:
        incarnation = expected.incarnation
        changed = connection.execute(_ADVANCE, (count, *readable, now, key, incarnation, expected.seq, now))
    if not changed.rowcount:
        time = _admitted(connection, key, expected, guard, now)
        if not isinstance(time, int):
            return time
        # The tail is the expected one, so the host's clock went back behind the log's last record.
        return _append(key, records, expected, head, None, compact_through, connection, time)
    connection.executemany(_RECORD, [(key, seq, now, body) for seq, body in enumerate(records, expected.seq + 1)])
    if compact_through:
        connection.execute(f"DELETE FROM record WHERE log = {_LOG} AND seq <= ?", (key, compact_through))
        connection.execute("UPDATE head SET compacted = max(compacted, ?) WHERE key = ?", (compact_through, key))
    return Appended(Position(incarnation, expected.seq + count), now)


def _admitted(
    connection: sqlite3.Connection, key: str, expected: Position, guard: Guard | None, now: int
) -> int | Behind | GuardFailed:
    """The store's time at which an append may be made, or why it may not."""
    row = connection.execute("SELECT incarnation, tail, updated FROM head WHERE key = ?", (key,)).fetchone()
    tail = NOWHERE if row is None else Position(row[0], row[1])
    if tail != expected:
        return Behind(_tail(key, expected, connection, now))
    time = now if row is None else _after(key, connection, now)
    return time if guard is None or guard.holds(time) else GuardFailed(time)


def _after(key: str, connection: sqlite3.Connection, now: int) -> int:
    """The store's time after its clock was moved on to the log's last record, where the host's was set back behind it."""
    row = connection.execute("SELECT updated FROM head WHERE key = ?", (key,)).fetchone()
    behind = 0 if row is None else row[0] - now
    if behind > 0:
        _advance_clock(connection, behind)
    return now + max(behind, 0)


def _vacuum(connection: sqlite3.Connection) -> None:
    """Hand every free page back, in steps short enough that no writer waits long for one."""
    free: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    while free:
        # A script, because `execute` stops at the first row: behind a single page.
        connection.executescript(f"PRAGMA incremental_vacuum({_VACUUM})")
        left: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
        if left >= free:
            return  # others free pages faster than this, or the file does not give any back
        free = left


def _advance_clock(connection: sqlite3.Connection, milliseconds: int) -> None:
    connection.execute("UPDATE meta SET value = value + ? WHERE name = 'clock_offset_ms'", (milliseconds,))


def _timed_tail(key: str, after: Position, connection: sqlite3.Connection, now: int) -> tuple[Tail, int]:
    """A tail, and the store's time before it was compared with the log's."""
    return _tail(key, after, connection, now), now


def _tail(key: str, after: Position, connection: sqlite3.Connection, now: int) -> Tail:
    row = connection.execute(
        "SELECT id, incarnation, tail, compacted, updated FROM head WHERE key = ?", (key,)
    ).fetchone()
    if row is None:
        return Tail(NOWHERE, [], now, after != NOWHERE)
    log, incarnation, tail, compacted, updated = row
    restart = after.incarnation != incarnation or after.seq < compacted
    rows = connection.execute(
        "SELECT seq, at, body FROM record WHERE log = ? AND seq > ? ORDER BY seq",
        (log, 0 if restart else after.seq),
    )
    return Tail(Position(incarnation, tail), list(map(_record, rows)), max(now, updated), restart)


def _heads(query: HeadQuery, last: str, connection: sqlite3.Connection, now: int) -> list[Head]:
    conditions = ["key > ?"]
    values: list[Any] = [last]
    if query.kind is not None:
        conditions.append("kind = ?")
        values.append(query.kind)
    if query.phase is not None:
        conditions.append("phase = ?")
        values.append(query.phase)
    if query.attention is not None:
        conditions.append("attention IS NOT NULL" if query.attention else "attention IS NULL")
    if query.prefix:
        conditions.append("substr(key, 1, ?) = ?")
        values += [len(query.prefix), query.prefix]
    if query.updated_before is not None:
        conditions.append("updated < ?")
        values.append(query.updated_before)
    rows = connection.execute(
        "SELECT key, tail, kind, phase, attention, owner, labels, ttl_ms, keep_until, size, created, updated FROM head "
        f"WHERE {' AND '.join(conditions)} ORDER BY key LIMIT {_PAGE}",  # conditions are ours
        values,
    )
    return [
        Head(
            key=key,
            tail=tail,
            kind=kind,
            phase=phase,
            attention=attention,
            owner=owner,
            labels=msgspec.json.decode(labels),
            ttl_ms=ttl_ms,
            keep_until=keep_until,
            size=size,
            created=created,
            updated=updated,
        )
        for key, tail, kind, phase, attention, owner, labels, ttl_ms, keep_until, size, created, updated in rows
    ]


def _restore(
    key: str,
    records: Sequence[Record],
    position: Position,
    compacted: int,
    head: Head,
    connection: sqlite3.Connection,
    now: int,
) -> bool:
    labels = _json.encode(head.labels).decode()
    changed = connection.execute(
        "INSERT INTO head (key, incarnation, tail, compacted, kind, phase, attention, owner, labels, ttl_ms, keep_until, "
        "size, created, updated) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
        (
            key,
            position.incarnation,
            position.seq,
            compacted,
            head.kind,
            head.phase,
            head.attention,
            head.owner,
            labels,
            head.ttl_ms,
            head.keep_until,
            head.size,
            head.created,
            head.updated,
        ),
    )
    if not changed.rowcount:
        return False
    connection.executemany(_RECORD, [(key, record.seq, record.at, record.body) for record in records])
    return True


def _erase(key: str, unchanged_since: int | None, connection: sqlite3.Connection, now: int) -> bool:
    row = connection.execute(
        "DELETE FROM head WHERE key = ? AND tail = coalesce(?, tail) RETURNING id", (key, unchanged_since)
    ).fetchone()
    if row is None:
        return False
    connection.execute("DELETE FROM record WHERE log = ?", row)
    return True
