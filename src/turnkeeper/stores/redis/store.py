"""`RedisStore`: the store protocol on Redis, Redis Cluster and Valkey."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import AsyncIterator, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from turnkeeper.errors import (
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreRolledBack,
    StoreUnavailable,
    StoreVersion,
)
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
from turnkeeper.stores.redis import doctor, scripts, settings
from turnkeeper.stores.redis.index import Index
from turnkeeper.stores.redis.loops import Loops
from turnkeeper.stores.redis.server import Server

VERSION: Final = 1
"""Of a log's hash; the scripts refuse newer ones."""

_HEAD: Final = (
    "tail",
    "kind",
    "phase",
    "attention",
    "owner",
    "labels",
    "ttl_ms",
    "keep_until",
    "size",
    "created",
    "updated",
)
_INDEXED: Final = 100_000
"""Keys of which a process remembers that it has entered them in the index."""

_adapted: weakref.WeakKeyDictionary[object, RedisStore] = weakref.WeakKeyDictionary()


class _Said(IntEnum):
    """What a script's reply starts with; see `lua/log.lua`."""

    DONE = 1
    TAIL = 2
    GUARD_FAILED = 3
    FOREIGN = 4
    NEWER = 5
    ROLLED_BACK = 6


class RedisStore:
    """A store in Redis (6.2 or newer), a Redis Cluster, or Valkey.

    Durable means what the server is configured for; `promises` tells. Time is the server's, read inside the script; a
    log's clock never goes back, also where another server takes over. Each event loop, thread and forked child that uses the
    store has connections of its own.

    What cannot be done now and surely was not done (a server that loads, a cluster without a master, a connection refused)
    is tried again for `patience` seconds. An append whose answer was lost is not: it raises `StoreUnavailable` with
    `applied` None, and a read tells (LOG-6).
    """

    def __init__(self, given: settings.Settings, *, clock_offset_ms: int = 0) -> None:
        """Use `open` or `from_client`.

        Args:
            clock_offset_ms: the test clock: how far this store's time is ahead of the servers'.
        """
        self.settings = given
        self.where = given.where
        self._offset = clock_offset_ms
        self._loops = Loops(given)
        self._index = Index(given.name)
        self._indexed: set[str] = set()

    @classmethod
    async def open(cls, url: str, *, clock_offset_ms: int = 0) -> RedisStore:
        """Open the store of a URL, and make sure that it is there. See `settings.parse` for the URL.

        Raises:
            UnknownStoreUrl: the URL is not understood.
            StoreUnavailable: nobody answers there.
            StoreDenied: user or password is wrong.
            StoreUnsuitable: the server is too old, or is a cluster's node, or is no cluster.
        """
        store = cls(settings.parse(url), clock_offset_ms=clock_offset_ms)
        try:
            await doctor.check(await store.server())
        except BaseException:
            await store.close()
            raise
        return store

    @classmethod
    def from_client(cls, client: object, **options: Any) -> RedisStore:
        """A store on the servers of an existing asyncio client (`Redis`, `RedisCluster`, or one of a sentinel).

        The client's settings are taken, not its connections: those belong to one event loop, may decode replies, and
        repeat a command whose answer was lost. The same client gives the same store. `options` are those of `Settings`.

        Raises:
            InvalidInput: it is no asyncio client of redis-py.
        """
        if options:
            return cls(settings.of_client(client, **options))
        found = _adapted.get(client)
        if found is None:
            found = _adapted[client] = cls(settings.of_client(client))
        return found

    @property
    def clock_offset_ms(self) -> int:
        """How far this store's time is ahead of the servers', in milliseconds: 0 but for tests."""
        return self._offset

    async def server(self) -> Server:
        """The servers, from the running event loop."""
        return await self._loops.here()

    def __repr__(self) -> str:
        return f"RedisStore({self.where!r})"

    async def __aenter__(self) -> RedisStore:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- logs --------------------------------------------------------------------------------------------------

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
        """See `turnkeeper.log.store.Store.append`.

        Raises:
            StoreRolledBack: the log is shorter than `expected`, which this store had confirmed.
        """
        assert records, "an append has at least one record"
        assert compact_through <= expected.seq, "only records before the appended ones are compacted"
        guard = guard or Guard()
        new = secrets.token_bytes(8) if expected == NOWHERE else expected.incarnation
        arguments = (
            expected.incarnation.hex(),
            expected.seq,
            self._offset,
            _optional(guard.not_before),
            _optional(guard.not_after),
            compact_through,
            new.hex(),
            head.kind,
            *_given(head),
            *records,
        )
        reply = await self._append(await self.server(), key, arguments)
        match reply[0]:
            case _Said.DONE:
                return Appended(Position(new, expected.seq + len(records)), reply[1])
            case _Said.GUARD_FAILED:
                return GuardFailed(reply[1])
            case _:
                return Behind(self._tail(key, reply))

    async def _append(self, server: Server, key: str, arguments: Sequence[bytes | str | int]) -> list[Any]:
        name, wait = self._index.key_of(key), self.settings.wait
        if wait:
            server.unconfirmed.add(name)  # whatever becomes of this call
        reply, acknowledged = await server.run(scripts.APPEND, name, *arguments, repeatable=False, wait=wait)
        self._check(key, reply)
        if reply[0] == _Said.DONE:
            await self._enter(server, key)
            if wait:
                self._confirm(server, key, acknowledged)
        return reply

    async def _enter(self, server: Server, key: str) -> None:
        """See that the index has the log: behind its creation, and behind the first append of every process that goes on
        with it, as the one before may have died in between."""
        if key in self._indexed:
            return
        try:
            await self._index.add(server, [key])
        except StoreError:
            return  # the append is in; the index lags, and the next append tries again
        if len(self._indexed) >= _INDEXED:
            self._indexed.clear()
        self._indexed.add(key)

    def _confirm(self, server: Server, key: str, acknowledged: int) -> None:
        """With `wait`: nothing counts, whether appended or read back, until enough replicas have it."""
        wait = self.settings.wait
        if acknowledged < wait:
            reason = f"{key!r} is in on its master, but only {acknowledged} of {wait} replicas have confirmed it"
            raise StoreUnavailable(self.where, reason)
        server.unconfirmed.discard(self._index.key_of(key))

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `turnkeeper.log.store.Store.read`.

        Raises:
            StoreRolledBack: the log is shorter than `after`, which this store had confirmed.
        """
        server = await self.server()
        await server.settled()
        name = self._index.key_of(key)
        confirm = name in server.unconfirmed
        reply, acknowledged = await server.run(
            scripts.READ,
            name,
            after.incarnation.hex(),
            after.seq,
            self._offset,
            int(confirm),
            repeatable=True,
            wait=self.settings.wait if confirm else 0,
        )
        self._check(key, reply)
        if confirm:
            self._confirm(server, key, acknowledged)
        return self._tail(key, reply)

    def _check(self, key: str, reply: list[Any]) -> None:
        match reply[0]:
            case _Said.FOREIGN:
                reason = f"the key of {key!r} is not a log of Turnkeeper's; it was left untouched, give another ?name="
                raise StoreForeign(self.where, reason)
            case _Said.NEWER:
                raise StoreVersion(f"{self.where} {key!r}", reply[1], VERSION)
            case _Said.ROLLED_BACK:
                reason = (
                    f"{key!r} ends at {reply[1]}, before what was confirmed: a failover or a restored copy lost appends"
                )
                raise StoreRolledBack(self.where, reason)
            case _:
                return

    def _tail(self, key: str, reply: list[Any]) -> Tail:
        _, now, life, tail, restart, first, *bodies = reply
        records: list[Record] = []
        for seq, value in enumerate(bodies, first + 1):
            if value is None:
                raise StoreCorrupt(self.where, f"{key!r} has no record {seq}; somebody else has changed it")
            at, _, body = value.partition(b":")
            records.append(Record(seq, int(at), body))
        return Tail(Position(bytes.fromhex(life.decode()), tail), records, now, bool(restart))

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `turnkeeper.log.store.Store.erase`."""
        server, tail = await self.server(), _optional(unchanged_since)
        reply, _ = await server.run(scripts.ERASE, self._index.key_of(key), tail, self._offset, repeatable=False)
        self._check(key, reply)
        if reply[1]:
            self._indexed.discard(key)
            await self._index.drop(server, [key.encode()])
        return bool(reply[1])

    async def restore(
        self, key: str, records: Sequence[Record], *, position: Position, compacted: int, head: Head
    ) -> bool:
        """See `turnkeeper.log.store.RestoringStore.restore`."""
        arguments: list[bytes | str | int] = [
            position.incarnation.hex(),
            position.seq,
            compacted,
            self._offset,
            head.kind,
            head.size,
            head.created,
            head.updated,
            *_given(head),
        ]
        for record in records:
            arguments += record
        server = await self.server()
        reply, _ = await server.run(scripts.RESTORE, self._index.key_of(key), *arguments, repeatable=False)
        self._check(key, reply)
        await self._enter(server, key)
        return bool(reply[1])

    # --- listing -----------------------------------------------------------------------------------------------

    async def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `turnkeeper.log.store.Store.heads`."""
        server = await self.server()
        async for names in self._index.pages(server, query.prefix):
            keys = [self._index.key_of(name.decode()) for name in names]
            found = await server.call_many([(key, ("HMGET", key, *_HEAD)) for key in keys])
            await self._index.sweep(
                server, [name for name, values in zip(names, found, strict=True) if not any(values)]
            )
            for name, values in zip(names, found, strict=True):
                head = _head(name.decode(), values)
                if head is not None and _matches(head, query):
                    yield head

    async def rebuild_index(self) -> int:
        """Enter every log in the index, and drop entries whose log is gone. How many logs there are.

        Walks through all keys of all servers; writers may go on meanwhile.
        """
        server = await self.server()
        found = 0
        async for keys in doctor.scan(server, f"{self.settings.name}:*"):
            versions = await server.call_many([(key, ("HGET", key, "tk")) for key in keys])
            logs = [self._index.log_of(key) for key, version in zip(keys, versions, strict=True) if version]
            await self._index.add(server, logs)
            found += len(logs)
        await self.tidy()
        return found

    async def tidy(self) -> None:
        """See `turnkeeper.log.store.Store.tidy`: drops index entries of logs that have expired."""
        server = await self.server()
        async for names in self._index.pages(server):
            await self._index.sweep(server, names)

    # --- the store itself --------------------------------------------------------------------------------------

    async def advance_clock(self, milliseconds: int) -> None:
        """Move this store's time forward: the test clock. Other stores on the same servers do not see it."""
        self._offset += milliseconds

    async def promises(self) -> list[Promise]:
        """See `turnkeeper.log.store.Store.promises`."""
        return await doctor.promises(await self.server(), self._offset)

    async def close(self) -> None:
        """See `turnkeeper.log.store.Store.close`. Event loops that do not run close their connections when they end."""
        await self._loops.close()


def _optional(number: int | None) -> str | int:
    return "" if number is None else number


def _given(head: Head) -> tuple[bytes | str | int, ...]:
    """What a writer gives with each append, in the order of `GIVEN` in `lua/log.lua`."""
    return (
        head.phase,
        msgspec.json.encode(head.attention),
        msgspec.json.encode(head.owner),
        msgspec.json.encode(head.labels),
        head.ttl_ms,
        head.keep_until,
    )


def _head(key: str, values: Sequence[bytes | None]) -> Head | None:
    """A head from the fields `_HEAD`, or None where there is no whole one."""
    tail, kind, phase, attention, owner, labels, ttl_ms, keep_until, size, created, updated = values
    if tail is None or kind is None or phase is None or labels is None or updated is None:
        return None
    return Head(
        key=key,
        tail=int(tail),
        kind=kind.decode(),
        phase=phase.decode(),
        attention=msgspec.json.decode(attention or b"null"),
        owner=msgspec.json.decode(owner or b"null"),
        labels=msgspec.json.decode(labels),
        ttl_ms=int(ttl_ms or 0),
        keep_until=int(keep_until or 0),
        size=int(size or 0),
        created=int(created or 0),
        updated=int(updated),
    )


def _matches(head: Head, query: HeadQuery) -> bool:
    return (
        (query.kind is None or head.kind == query.kind)
        and (query.phase is None or head.phase == query.phase)
        and (query.attention is None or (head.attention is not None) == query.attention)
        and (query.updated_before is None or head.updated < query.updated_before)
    )
