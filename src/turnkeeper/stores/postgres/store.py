"""Logs in PostgreSQL: one function call for each step, and one home for the connections of each event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import psycopg

from turnkeeper.errors import StoreClosed, StoreMissing, StoreReadOnly
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Record, Tail
from turnkeeper.log.store import Promise
from turnkeeper.stores.postgres import failures, schema, statements
from turnkeeper.stores.postgres.address import Address, parse
from turnkeeper.stores.postgres.lanes import Connection, Lanes, connect
from turnkeeper.stores.postgres.listener import Listener
from turnkeeper.stores.postgres.statements import Row
from turnkeeper.stores.postgres.transaction import Bench, Effect, Transaction

T = TypeVar("T")

_PAGE: Final = 200
"""Heads fetched at a time by a listing."""
_SETTINGS: Final = """
SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes'),
    current_setting('synchronous_standby_names'), pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
    current_setting('server_version'), (SELECT value FROM "{schema}".meta WHERE name = 'clock_offset_ms')
"""


class _Home(NamedTuple):
    """What belongs to one event loop."""

    lanes: Lanes
    bench: Bench
    listener: Listener


class PostgresStore:
    """A store in one schema of a PostgreSQL database.

    Durable means: committed, and flushed by the server as it is set up (`promises` tells). Time is the server's clock,
    read inside each append. Where that clock is set back, the store's goes on from where a log stands (LOG-3).

    Loops, threads and forked children may share the object: each event loop has connections of its own (field case 07).
    Nothing but waiting for a change needs a session, so a transaction pooler may stand in between: who waits then polls.
    """

    def __init__(self, address: Address, *, pooled: bool) -> None:
        """Use `open`."""
        self.address = address
        self._pooled = pooled
        self._statements = statements.Statements(address.schema)
        self._lock = threading.Lock()
        self._homes: dict[asyncio.AbstractEventLoop, _Home] = {}
        self._process = os.getpid()
        self._parents: list[_Home] = []
        """What a forked child inherited. Kept, as whatever ends those connections would end them for the parent as well."""
        self._closed = False

    # --- opening and closing ---------------------------------------------------------------------------------

    @classmethod
    async def open(cls, url: str, *, create: bool = True) -> PostgresStore:
        """Open the store of a URL (see `address.parse`), making its schema if there is none and `create` is set.

        Raises:
            UnknownStoreUrl: the URL cannot be read.
            StoreMissing: the database, or the schema while `create` is not set, is not there.
            StoreOutdated: the schema is older than this process; `migrate` brings it up.
            StoreForeign, StoreVersion, StoreUnsuitable, StoreDenied, StoreReadOnly, StoreBusy, StoreUnavailable: left as it was.
        """
        address = parse(url)
        connection = await _connect(address)
        try:
            pooled = await schema.check_server(connection, address)
            if not await schema.check(connection, address):
                if not create:
                    raise StoreMissing(address.where, "there is no store")
                await schema.migrate(connection, address)
        except psycopg.Error as e:
            await connection.close()
            raise failures.typed(e, address.where) from e
        except BaseException:
            await connection.close()
            raise
        store = cls(address, pooled=pooled if address.pooler is None else address.pooler)
        if not store._pooled:
            connection.prepare_threshold = 5
        store._home().lanes.adopt(connection)
        return store

    @staticmethod
    async def migrate(url: str) -> schema.Migrated:
        """Bring the schema of a URL's store to this version's, or make it. Safe while others do the same.

        Raises:
            UnknownStoreUrl, StoreError: see `open`; nothing was changed.
        """
        address = parse(url)
        connection = await _connect(address)
        try:
            await schema.check_server(connection, address)
            return await schema.migrate(connection, address)
        except psycopg.Error as e:
            raise failures.typed(e, address.where) from e
        finally:
            await connection.close()

    async def __aenter__(self) -> PostgresStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See `turnkeeper.log.store.Store.close`; also for the other event loops that used the store."""
        with self._lock:
            self._closed = True
            homes = self._homes if self._process == os.getpid() else {}
            self._homes = {}
        here = asyncio.get_running_loop()
        for loop, home in homes.items():
            if loop is here:
                await _close(home)
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_close(home), loop))
            else:
                _abandon(home)

    def _home(self) -> _Home:
        """The connections of the running loop."""
        loop = asyncio.get_running_loop()
        home = self._homes.get(loop)
        if home is not None:
            return home
        with self._lock:
            if self._process != os.getpid():
                self._parents += self._homes.values()
                self._homes = {}
                self._process = os.getpid()
            if self._closed:
                raise StoreClosed(self.address.where, "the store was closed")
            for over in [other for other in self._homes if other.is_closed()]:
                _abandon(self._homes.pop(over))
            home = _Home(
                Lanes(self.address, self._statements, prepare=not self._pooled),
                Bench(self.address, self._statements),
                Listener(self.address, self._statements, polls=self._pooled),
            )
            return self._homes.setdefault(loop, home)

    # --- logs ------------------------------------------------------------------------------------------------

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
        assert records, "an append has at least one record"
        assert compact_through <= expected.seq, "only records before the appended ones are compacted"
        asked = statements.append(key, records, expected, head, guard, compact_through, self.address.patience_ms)
        return statements.outcome(await self._home().lanes.append(asked), expected, self.address.where)

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
        """See `turnkeeper.log.store.TransactionalStore.append_with`; `effect` gets a `Transaction`, in a thread of its own."""
        return await self._home().bench.append_with(Effect(key, effect, records, expected, head, guard))

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `turnkeeper.log.store.Store.read`."""
        lanes = self._home().lanes
        await lanes.settle(key)
        parameters = (key, after.incarnation, after.seq, self.address.patience_ms)
        rows = await lanes.ask(self._statements.read, parameters, reads=True)
        tail = statements.tail(rows, after, self.address.where)
        if statements.is_late(rows):
            # So that time goes on also where all that anybody does is look whether a lease is over (field case 20).
            with contextlib.suppress(StoreReadOnly):
                await lanes.ask(self._statements.catch_up, (tail.now, self.address.patience_ms), reads=False)
        return tail

    async def changed(self, key: str, *, since: Position, timeout: float) -> bool:
        """See `turnkeeper.log.store.NotifyingStore.changed`; behind a transaction pooler it polls."""
        home = self._home()

        async def has_moved() -> bool:
            rows = await home.lanes.ask(self._statements.tail, (key, self.address.patience_ms), reads=True)
            return (Position(*rows[0]) if rows else NOWHERE) != since

        return await home.listener.wait(key, has_moved, timeout)

    async def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `turnkeeper.log.store.Store.heads`."""
        last = ""
        while True:
            parameters = statements.heads_parameters(query, last, _PAGE, self.address.patience_ms)
            page = await self._home().lanes.ask(self._statements.heads, parameters, reads=True)
            for row in page:
                yield statements.head(row)
            if len(page) < _PAGE:
                return
            last = page[-1][0]

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `turnkeeper.log.store.Store.erase`."""
        lanes = self._home().lanes
        await lanes.settle(key)
        parameters = (key, unchanged_since, self.address.patience_ms)
        ((erased,),) = await lanes.ask(self._statements.erase, parameters, reads=False)
        return erased

    async def restore(
        self, key: str, records: Sequence[Record], *, position: Position, compacted: int, head: Head
    ) -> bool:
        """See `turnkeeper.log.store.RestoringStore.restore`."""
        parameters = statements.restore_parameters(key, records, position, compacted, head, self.address.patience_ms)
        ((restored,),) = await self._home().lanes.ask(self._statements.restore, parameters, reads=False)
        return restored

    async def tidy(self) -> None:
        """See `turnkeeper.log.store.Store.tidy`; space inside the tables is used again, and their empty ends are cut off."""
        await self._home().lanes.ask(self._statements.tidy, reads=False)

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the store's clock forward, for everybody who uses the schema: the test clock."""
        await self._home().lanes.ask(self._statements.advance_clock, (milliseconds,), reads=False)

    async def promises(self) -> list[Promise]:
        """See `turnkeeper.log.store.Store.promises`."""
        text = _SETTINGS.format(schema=self.address.schema).encode()
        (
            (synchronous, fsync, full_pages, standbys, replica, read_only, server, offset),
        ) = await self._home().lanes.ask(text, reads=True)
        return [
            Promise(
                "durable",
                f"committed (synchronous_commit={synchronous}, fsync={fsync})",
                synchronous != "off" and fsync == "on",
                "a crash of the server can lose appends that it had confirmed: set both to on",
            ),
            Promise(
                "full pages", full_pages, full_pages == "on", "a power failure can damage the tables: set it to on"
            ),
            Promise(
                "writable",
                "a replica" if replica else "set read-only" if read_only else "yes",
                not (replica or read_only),
                "connect to the primary (target_session_attrs=read-write), or unset default_transaction_read_only",
            ),
            Promise(
                "failover",
                f"waits for {standbys}" if standbys else "replicas, if there are any, are not waited for",
                True,
                "set synchronous_standby_names, or a failover can lose appends that the primary had confirmed",
            ),
            Promise("server", f"PostgreSQL {server}", True),
            Promise("pooler", "in between; nothing is prepared, waits poll" if self._pooled else "none", True),
            Promise(
                "clock",
                f"the server's, {offset / 1000:+.1f} s",
                abs(offset) < 60_000,
                "the server's clock was set back",
            ),
        ]

    # --- for who keeps tables of its own in the schema -------------------------------------------------------

    async def ask(self, text: bytes, parameters: Sequence[Any] = (), *, reads: bool) -> list[Row]:
        """Run one statement, and give its rows; one that only `reads` is repeated where the connection was lost under it.

        Raises:
            TurnkeeperError: see `failures`; with `applied` None it may have been done.
        """
        return await self._home().lanes.ask(text, parameters, reads=reads)

    async def wait(self, key: str, has_moved: Callable[[], Awaitable[bool]], timeout: float) -> bool:
        """Wait until `has_moved` finds that what is notified under `key` has, at most `timeout` seconds. Whether it has."""
        return await self._home().listener.wait(key, has_moved, timeout)


async def _connect(address: Address) -> Connection:
    try:
        return await connect(address, prepare=False)
    except psycopg.Error as e:
        raise failures.not_connected(e, address.where) from e


async def _close(home: _Home) -> None:
    await home.listener.close()
    await home.lanes.close()
    await home.bench.close()


def _abandon(home: _Home) -> None:
    home.listener.abandon()
    home.lanes.abandon()
    home.bench.abandon()
