"""A queue in a SQLite file: one table beside the store's, for the processes of one machine."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeVar

import msgspec

from turnkeeper.errors import StoreUnavailable
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.transport.base import BaseTransport, Settled, Taken
from turnkeeper.transport.protocol import (
    HISTORY,
    LEASE_ENDED,
    LIMIT_REACHED,
    MAX_ATTEMPTS,
    DeadLetter,
    Delivery,
    Depth,
    Failure,
    OnLost,
)

T = TypeVar("T")

_POLLS: Final = (0.02, 0.25)
"""Seconds between two looks at what other processes published: at first, and at the most."""
_PROMOTED: Final = 500
"""Entries that become ready in one step at the most: of those that were delayed, and of those that were left."""

# `place` is the order in which entries are handed out. It is taken from one counter when an entry becomes ready, so it follows
# the order of publication, and what was delayed or retried stands behind what was ready before. `due` is when a delayed entry
# becomes ready, when a held one's lease ends, or since when a dead one is dead. `reason` is why an entry is dead, or
# `LEASE_ENDED` where a ready one was left by its consumer.
_SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS queue_entry (
    id INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    key TEXT NOT NULL,
    body BLOB NOT NULL,
    state TEXT NOT NULL,
    place INTEGER NOT NULL,
    due INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    consumer TEXT NOT NULL,
    published INTEGER NOT NULL,
    reason TEXT NOT NULL,
    history TEXT NOT NULL
)""",
    "CREATE INDEX IF NOT EXISTS queue_entry_ready ON queue_entry (queue, place) WHERE state = 'ready'",
    "CREATE INDEX IF NOT EXISTS queue_entry_due ON queue_entry (queue, state, due) WHERE state <> 'ready'",
    # Beside the table and not from it: an id is never given twice, also where the table was emptied.
    "INSERT INTO meta VALUES ('queue_places', 0) ON CONFLICT (name) DO NOTHING",
)
_PLACE: Final = "UPDATE meta SET value = value + 1 WHERE name = 'queue_places' RETURNING value"
_HELD: Final = "SELECT id, key, body, attempt, fence, consumer, published, reason, history, place FROM queue_entry "
_ROW_PLACE: Final = 9

_histories: Final = msgspec.json.Decoder(tuple[Failure, ...])


class SqliteTransport(BaseTransport):
    """A queue in the file of a `SqliteStore`; several processes of one machine may share it.

    Durable means what it means for the store: fsynced when `publish` returns. Time is the host's wall clock: where it is set
    back, leases last longer by as much, and where it jumps forward they end early.

    A consumer that waits is woken at once by who publishes through the same object, and looks a few times a second for what
    other processes published.
    """

    def __init__(
        self,
        store: SqliteStore,
        queue: str = "default",
        *,
        max_attempts: int = MAX_ATTEMPTS,
        on_lost: OnLost | None = None,
        closes: bool = False,
    ) -> None:
        """Use `open`. See `BaseTransport`; `closes` tells to close the store with the transport."""
        super().__init__(queue, store.path, max_attempts, on_lost)
        self._store = store
        self._closes = closes
        self._bells: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        """Who waits in this process."""

    @classmethod
    async def open(
        cls,
        store: SqliteStore,
        queue: str = "default",
        *,
        max_attempts: int = MAX_ATTEMPTS,
        on_lost: OnLost | None = None,
        closes: bool = False,
    ) -> SqliteTransport:
        """The queue of that name in a store's file; makes the table where there is none.

        Raises:
            StoreError: the file cannot be written.
            InvalidInput: the name or the limit cannot be.
        """
        transport = cls(store, queue, max_attempts=max_attempts, on_lost=on_lost, closes=closes)
        await store.write(_make)
        return transport

    async def _publish(self, key: str, body: bytes, delay_ms: int) -> str:
        place = await self._write(partial(_publish, self.queue, key, body, delay_ms))
        self._ring()
        return str(place)

    async def _take(self, consumer: str, count: int, lease_ms: int) -> Taken:
        return await self._write(partial(_take, self.queue, consumer, count, lease_ms, self.max_attempts))

    async def _wait(self, seconds: float, seen: tuple[bytes, ...]) -> None:
        loop = asyncio.get_running_loop()
        bell = asyncio.Event()
        deadline = loop.time() + seconds
        pause = _POLLS[0]
        self._bells.add((loop, bell))
        try:
            # The first look comes behind the bell: what is published from now on rings it, what was before is seen.
            while not self._closed and not await self._store.look(partial(_is_ready, self.queue)):
                left = deadline - loop.time()
                if left <= 0:
                    return
                try:
                    async with asyncio.timeout(min(left, pause)):
                        await bell.wait()
                        return
                except TimeoutError:
                    pause = min(pause * 1.5, _POLLS[1])
        except StoreUnavailable:
            return  # the table may be gone: who takes makes it anew, and tells
        finally:
            self._bells.discard((loop, bell))

    async def _extend(self, delivery: Delivery, lease_ms: int) -> Settled:
        return await self._settle(delivery, partial(_extend, lease_ms))

    async def _acknowledge(self, delivery: Delivery) -> Settled:
        return await self._settle(delivery, _acknowledge)

    async def _retry(self, delivery: Delivery, delay_ms: int, reason: str) -> Settled:
        settled = await self._settle(delivery, partial(_retry, delay_ms, reason, self.max_attempts))
        self._ring()
        return settled

    async def _release(self, delivery: Delivery, delay_ms: int) -> Settled:
        settled = await self._settle(delivery, partial(_release, delay_ms))
        self._ring()
        return settled

    async def _kill(self, delivery: Delivery, reason: str) -> Settled:
        return await self._settle(delivery, partial(_kill, reason))

    async def _letters(self, after: str, limit: int) -> list[DeadLetter]:
        return await self._write(partial(_letters, self.queue, _number(after), limit), looks=True)

    async def revive(self, entry: str) -> bool:
        """See `Transport.revive`."""
        revived = await self._write(partial(_revive, self.queue, _number(entry)))
        self._ring()
        return revived

    async def discard(self, entry: str) -> bool:
        """See `Transport.discard`."""
        return await self._write(partial(_discard, self.queue, _number(entry)))

    async def depth(self) -> Depth:
        """See `Transport.depth`."""
        return await self._write(partial(_depth, self.queue), looks=True)

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the clock forward, for everybody who uses the file: the test clock."""
        self._held.clear()
        await self._store.advance_clock(milliseconds)
        self._ring()

    async def _close(self) -> None:
        self._ring()
        if self._closes:
            await self._store.close()

    async def _settle(self, delivery: Delivery, work: Callable[[Delivery, sqlite3.Connection, int], None]) -> Settled:
        return await self._write(partial(_settle, self.queue, delivery, work))

    async def _write(self, work: Callable[[sqlite3.Connection, int], T], *, looks: bool = False) -> T:
        """Run `work`; where the table was dropped, make it anew, say so, and go on (TR-10)."""
        run = self._store.look if looks else self._store.write
        try:
            return await run(work)
        except StoreUnavailable as e:
            if "no such table: queue_entry" not in str(e.__cause__):
                raise
        await self._store.write(_make)
        self._report([], None, "the queue's table was gone; it was made anew")
        return await run(work)

    def _ring(self) -> None:
        """Wake who waits in this process."""
        for loop, bell in list(self._bells):
            try:
                loop.call_soon_threadsafe(bell.set)
            except RuntimeError:  # that loop is closed, and nobody waits in it
                self._bells.discard((loop, bell))


def _make(connection: sqlite3.Connection, now: int) -> None:
    for statement in _SCHEMA:
        connection.execute(statement)


def _place(connection: sqlite3.Connection) -> int:
    return connection.execute(_PLACE).fetchone()[0]


def _publish(queue: str, key: str, body: bytes, delay_ms: int, connection: sqlite3.Connection, now: int) -> int:
    place = _place(connection)
    connection.execute(
        "INSERT INTO queue_entry VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, '', ?, '', '[]')",
        (place, queue, key, body, "delayed" if delay_ms else "ready", place, now + delay_ms, now),
    )
    return place


# --- handing out -----------------------------------------------------------------------------------------------


def _take(
    queue: str, consumer: str, count: int, lease_ms: int, limit: int, connection: sqlite3.Connection, now: int
) -> Taken:
    _promote(queue, limit, connection, now)
    deliveries: list[Delivery] = []
    # What was left by its consumer may kill this one too: one of those is enough for a call, at its place.
    select = _HELD + "WHERE queue = ? AND state = 'ready' AND reason "
    ready = connection.execute(select + "= '' ORDER BY place LIMIT ?", (queue, count)).fetchall()
    ready += connection.execute(select + "<> '' ORDER BY place LIMIT 1", (queue,)).fetchall()
    for row in sorted(ready, key=itemgetter(_ROW_PLACE))[:count]:
        number, attempt, history = row[0], row[3], row[8]
        if attempt >= limit:  # which was lowered
            _bury(number, LIMIT_REACHED, history, connection, now)
        else:
            deliveries.append(_hand(row, consumer, lease_ms, connection, now))
    if deliveries:
        return Taken(deliveries, None)
    due = _first_due(queue, connection)
    return Taken([], None if due is None else max(0, due - now))


def _promote(queue: str, limit: int, connection: sqlite3.Connection, now: int) -> None:
    """Make ready what was delayed until now, and what its consumer left: behind what is ready."""
    due = connection.execute(
        "SELECT id FROM queue_entry WHERE queue = ? AND state = 'delayed' AND due <= ? ORDER BY due, id LIMIT ?",
        (queue, now, _PROMOTED),
    ).fetchall()
    connection.executemany(
        "UPDATE queue_entry SET state = 'ready', place = ? WHERE id = ?",
        [(_place(connection), number) for (number,) in due],
    )
    left = connection.execute(
        _HELD + "WHERE queue = ? AND state = 'held' AND due <= ? ORDER BY due, id LIMIT ?", (queue, now, _PROMOTED)
    ).fetchall()
    for number, _, _, attempt, _, holder, _, _, history, _ in left:
        told = _with(history, Failure(now, attempt, holder, LEASE_ENDED))
        if attempt >= limit:
            _bury(number, LIMIT_REACHED, told, connection, now)
        else:
            connection.execute(
                "UPDATE queue_entry SET state = 'ready', place = ?, reason = ?, history = ? WHERE id = ?",
                (_place(connection), LEASE_ENDED, told, number),
            )


def _hand(row: Sequence[Any], consumer: str, lease_ms: int, connection: sqlite3.Connection, now: int) -> Delivery:
    number, key, body, attempt, fence, _, published, *_ = row
    connection.execute(
        "UPDATE queue_entry SET state = 'held', due = ?, attempt = ?, fence = ?, consumer = ?, reason = '' WHERE id = ?",
        (now + lease_ms, attempt + 1, fence + 1, consumer, number),
    )
    return Delivery(str(number), key, body, attempt + 1, consumer, fence + 1, published)


def _first_due(queue: str, connection: sqlite3.Connection) -> int | None:
    # The minimum of each state is one look into the index; that of both together is not.
    found = [
        connection.execute("SELECT min(due) FROM queue_entry WHERE queue = ? AND state = ?", (queue, state)).fetchone()[
            0
        ]
        for state in ("delayed", "held")
    ]
    return min((due for due in found if due is not None), default=None)


def _is_ready(queue: str, connection: sqlite3.Connection, now: int) -> bool:
    """Whether there is something to take."""
    due = _first_due(queue, connection)
    if due is not None and due <= now:
        return True
    found = connection.execute("SELECT 1 FROM queue_entry WHERE queue = ? AND state = 'ready' LIMIT 1", (queue,))
    return found.fetchone() is not None


# --- settling --------------------------------------------------------------------------------------------------


def _settle(
    queue: str,
    delivery: Delivery,
    work: Callable[[Delivery, sqlite3.Connection, int], None],
    connection: sqlite3.Connection,
    now: int,
) -> Settled:
    found = connection.execute(
        "SELECT state, fence, due FROM queue_entry WHERE id = ? AND queue = ?", (_number(delivery.id), queue)
    ).fetchone()
    if found is None:
        return Settled.GONE
    state, fence, due = found
    if state != "held" or fence != delivery.fence or due <= now:
        return Settled.REFUSED
    work(delivery, connection, now)
    return Settled.DONE


def _extend(lease_ms: int, delivery: Delivery, connection: sqlite3.Connection, now: int) -> None:
    connection.execute("UPDATE queue_entry SET due = ? WHERE id = ?", (now + lease_ms, int(delivery.id)))


def _acknowledge(delivery: Delivery, connection: sqlite3.Connection, now: int) -> None:
    connection.execute("DELETE FROM queue_entry WHERE id = ?", (int(delivery.id),))


def _retry(
    delay_ms: int, reason: str, limit: int, delivery: Delivery, connection: sqlite3.Connection, now: int
) -> None:
    if delivery.attempt >= limit:
        return _kill(reason, delivery, connection, now)
    told = _told(reason, delivery, connection, now)
    place = _place(connection)
    state = "delayed" if delay_ms else "ready"
    connection.execute(
        "UPDATE queue_entry SET state = ?, place = ?, due = ?, history = ? WHERE id = ?",
        (state, place, now + delay_ms, told, int(delivery.id)),
    )
    return None


def _release(delay_ms: int, delivery: Delivery, connection: sqlite3.Connection, now: int) -> None:
    state = "delayed" if delay_ms else "ready"
    connection.execute(
        "UPDATE queue_entry SET state = ?, due = ?, attempt = attempt - 1 WHERE id = ?",
        (state, now + delay_ms, int(delivery.id)),
    )


def _kill(reason: str, delivery: Delivery, connection: sqlite3.Connection, now: int) -> None:
    _bury(int(delivery.id), reason, _told(reason, delivery, connection, now), connection, now)


def _bury(number: int, reason: str, history: str, connection: sqlite3.Connection, now: int) -> None:
    connection.execute(
        "UPDATE queue_entry SET state = 'dead', due = ?, reason = ?, history = ? WHERE id = ?",
        (now, reason, history, number),
    )


def _told(reason: str, delivery: Delivery, connection: sqlite3.Connection, now: int) -> str:
    row = connection.execute("SELECT history FROM queue_entry WHERE id = ?", (int(delivery.id),)).fetchone()
    return _with(row[0], Failure(now, delivery.attempt, delivery.consumer, reason))


def _with(history: str, failure: Failure) -> str:
    return msgspec.json.encode((*_histories.decode(history), failure)[-HISTORY:]).decode()


# --- looking ---------------------------------------------------------------------------------------------------


def _letters(queue: str, after: int, limit: int, connection: sqlite3.Connection, now: int) -> list[DeadLetter]:
    rows = connection.execute(
        "SELECT id, key, body, published, attempt, reason, history, due FROM queue_entry "
        "WHERE queue = ? AND state = 'dead' AND id > ? ORDER BY id LIMIT ?",
        (queue, after, limit),
    )
    return [
        DeadLetter(str(number), key, body, published, attempts, reason, _histories.decode(history), died)
        for number, key, body, published, attempts, reason, history, died in rows
    ]


def _revive(queue: str, number: int, connection: sqlite3.Connection, now: int) -> bool:
    changed = connection.execute(
        "UPDATE queue_entry SET state = 'ready', place = ?, attempt = 0, reason = '' "
        "WHERE id = ? AND queue = ? AND state = 'dead'",
        (_place(connection), number, queue),
    )
    return changed.rowcount > 0


def _discard(queue: str, number: int, connection: sqlite3.Connection, now: int) -> bool:
    changed = connection.execute(
        "DELETE FROM queue_entry WHERE id = ? AND queue = ? AND state = 'dead'", (number, queue)
    )
    return changed.rowcount > 0


def _depth(queue: str, connection: sqlite3.Connection, now: int) -> Depth:
    row = connection.execute(
        "SELECT count(*) FILTER (WHERE state = 'ready' OR state IN ('delayed', 'held') AND due <= ?1), "
        "count(*) FILTER (WHERE state = 'delayed' AND due > ?1), count(*) FILTER (WHERE state = 'held' AND due > ?1), "
        "count(*) FILTER (WHERE state = 'dead') FROM queue_entry WHERE queue = ?2",
        (now, queue),
    ).fetchone()
    return Depth(*row)


def _number(entry: str) -> int:
    """The number that an id stands for; one that no entry has where it is not ours."""
    return int(entry) if entry.isascii() and entry.isdecimal() and len(entry) < 19 else -1
