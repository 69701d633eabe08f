"""Waiting for another worker's append: woken by the server, and by looking again where it cannot wake anybody (LOG-10)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from tests.conformance.support import HEAD, append
from tests.crew import PATIENCE, SPAWN, Crew
from tests.engine.wrapped import WrappedStore
from tests.servers.pgbouncer import pgbouncer
from tests.servers.postgres import Server
from tests.servers.proxy import Proxy
from tests.stores.postgres_waiting import LISTENERS, LOCKS, LONG, locked, told, waiting
from turnkeeper import Agent, Keeper, ScriptedModel, Tool, TurnResult
from turnkeeper.log.record import NOWHERE, Position, Tail
from turnkeeper.models.scripted import calls
from turnkeeper.moving import copy_logs
from turnkeeper.stores.postgres import PostgresStore, listener, schema
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_luck(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # used by its name
    """Whoever is to be told does not find out by looking: nobody looks again within the test's time."""
    monkeypatch.setattr(listener, "_POLL", LONG)


@pytest.fixture
async def store(postgres: Server, database: str) -> AsyncIterator[PostgresStore]:
    """A store."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        yield store


@pytest.fixture
async def other(postgres: Server, store: PostgresStore, database: str) -> AsyncIterator[PostgresStore]:
    """The same store as another process has it."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        yield store


# --- being told ------------------------------------------------------------------------------------------------


async def _append_when_told(_number: int, url: str, go: threading.Event) -> None:
    async with await PostgresStore.open(url) as store:
        position = (await store.read("k")).position
        await asyncio.to_thread(go.wait, PATIENCE)
        await append(store, "k", b"2", expected=position)


async def test_woken_by_another_process(postgres: Server, database: str, store: PostgresStore) -> None:
    """LOG-10: another process's append ends the wait, which holds no transaction open meanwhile."""
    position = await append(store, "k", b"1")
    go = SPAWN.Event()
    process = Crew(1, _append_when_told, postgres.url(database), go)
    process.start()
    wait = waiting(store, "k", position)
    await locked(postgres, database, 1)
    in_transaction = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND xact_start IS NOT NULL"
    assert postgres.run(in_transaction, [database]) == [(0,)]
    go.set()
    assert await told(wait)
    await asyncio.to_thread(process.bring)


async def test_woken_by_whatever_changes_a_log(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore
) -> None:
    """LOG-10: a log is made, grows, grows with a tool's effect, is erased, is restored: each ends a wait."""
    position = NOWHERE

    async def created() -> None:
        await append(other, "k", b"1")

    async def appended() -> None:
        await append(other, "k", b"2", expected=position)

    async def with_an_effect() -> None:
        await other.append_with("k", lambda _: 0, lambda _: [b"3"], expected=position, head=HEAD)

    async def erased() -> None:
        assert await other.erase("k")

    async def restored() -> None:
        async with await SqliteStore.open(":memory:") as source:
            await append(source, "k", b"1")
            await copy_logs(source, other)

    for change in (created, appended, with_an_effect, erased, restored):
        wait = waiting(store, "k", position)
        await locked(postgres, database, 1)
        await change()
        assert await told(wait), change
        position = (await store.read("k")).position
        await locked(postgres, database, 0)


async def test_at_once_where_the_log_is_ahead(postgres: Server, database: str, store: PostgresStore) -> None:
    """LOG-10: what happened before the wait is told at once, and without a connection of its own."""
    first = await append(store, "k", b"1")
    await append(store, "k", b"2", expected=first)
    assert await told(waiting(store, "k", first))
    assert await told(waiting(store, "k", NOWHERE))
    assert await told(waiting(store, "none", first))
    await locked(postgres, database, 0)
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
    assert postgres.run(sessions, [database]) == [(1,)]


async def test_nothing_happens(postgres: Server, database: str, store: PostgresStore) -> None:
    """LOG-10: a wait ends at its timeout, quietly, also for a log that is not there; nothing of it is left."""
    position = await append(store, "k", b"1")
    for key, since in (("k", position), ("none", NOWHERE)):
        for timeout in (0, 0.2):
            began = time.monotonic()
            assert not await told(waiting(store, key, since, timeout))
            assert time.monotonic() - began >= timeout
    await locked(postgres, database, 0)


async def test_other_logs_and_stores_wake_nobody(
    postgres: Server, database: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: who waits is told of its log in its store; others, and those of another store in the database, are not."""
    heard: list[str] = []
    really = listener.Listener._hear  # pyright: ignore[reportPrivateUsage]

    def hear(self: listener.Listener, payload: str) -> None:
        heard.append(payload)
        really(self, payload)

    monkeypatch.setattr(listener.Listener, "_hear", hear)
    position = await append(store, "k", b"1")
    wait = waiting(store, "k", position)
    longest = "s" * 63  # the schema's name does not fit into a channel's together with anything
    async with await PostgresStore.open(postgres.url(database, schema=longest)) as beside:
        theirs = await append(beside, "k", b"1")
        waits_beside = waiting(beside, "k", theirs)
        await locked(postgres, database, 2)
        elsewhere = await append(store, "l", b"1")
        await append(store, "l", b"2", expected=elsewhere)
        assert heard == []  # nobody waits for that one, so nobody was notified
        await append(beside, "k", b"2", expected=theirs)
        assert await told(waits_beside)
        assert len(heard) == 1
        assert not wait.done()
    await append(store, "k", b"2", expected=position)
    assert await told(wait)
    assert len(set(heard)) == 2


async def test_a_hundred_waits_share_a_connection(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore
) -> None:
    """LOG-10: a hundred logs are waited for, twice each, on one connection; `pool_size` is for the others as before."""
    keys = [f"k{number}" for number in range(100)]
    positions = await asyncio.gather(*(append(store, key, b"1") for key in keys))
    waits = [waiting(store, key, at) for key, at in zip(keys, positions, strict=True) for _ in range(2)]
    await locked(postgres, database, 100)
    assert postgres.run(LISTENERS) == [(1,)]
    await asyncio.gather(*(append(other, key, b"2", expected=at) for key, at in zip(keys, positions, strict=True)))
    assert await asyncio.gather(*map(told, waits)) == [True] * 200
    await locked(postgres, database, 0)


async def test_more_waits_than_locks(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: the server's table of locks is not filled: whoever comes later polls, until there is room."""
    monkeypatch.setattr(listener, "_MOST", 3)
    monkeypatch.setattr(listener, "_POLL", 0.01)
    keys = [f"k{number}" for number in range(8)]
    positions = [await append(store, key, b"1") for key in keys]
    waits = [waiting(store, key, at) for key, at in zip(keys, positions, strict=True)]
    await locked(postgres, database, 3)
    for key, at, wait in reversed(list(zip(keys, positions, waits, strict=True))):
        await append(other, key, b"2", expected=at)
        assert await told(wait)
    await locked(postgres, database, 0)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_no_change_falls_between_the_look_and_the_wait(postgres: Server, database: str, isolation: str) -> None:
    """LOG-10: waits that begin at any moment of another's append, whose transaction may have begun long before, all end."""
    postgres.run(f"ALTER DATABASE {database} SET default_transaction_isolation = '{isolation}'")
    url = postgres.url(database)
    async with await PostgresStore.open(url) as store, await PostgresStore.open(url) as other:
        position = await append(store, "k", b"0")
        for number in range(150):
            write = asyncio.ensure_future(append(other, "k", b"x", expected=position))
            await asyncio.sleep(number % 15 / 5000)
            wait = waiting(store, "k", position)
            position = await write
            assert await told(wait)


async def test_an_append_under_way_is_waited_for(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore
) -> None:
    """LOG-10: a wait that begins while an append is in and not yet committed is refused the lock, and told all the same."""
    position = await append(store, "k", b"1")
    slow = "BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END"
    postgres.run(f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ {slow} $$", database=database)
    commit = "CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON turnkeeper.head DEFERRABLE INITIALLY DEFERRED "
    postgres.run(commit + "FOR EACH ROW EXECUTE FUNCTION slow()", database=database)
    with psycopg.connect(postgres.url(database)) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(4711)")
        write = asyncio.ensure_future(append(other, "k", b"2", expected=position))
        await locked(postgres, database, 3)  # the holder's, the log's, and the one that is waited for
        wait = waiting(store, "k", position)
        sent = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND query LIKE '%%waiters_lock%%' AND state = 'idle'"
        deadline = time.monotonic() + PATIENCE
        while (await asyncio.to_thread(postgres.run, sent, [database])) == [(0,)]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not wait.done()
    await write
    assert await told(wait)


async def test_a_process_of_the_release_before(
    postgres: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: processes that know nothing of waits go on while the schema is migrated, and then wake who waits."""
    url = postgres.url(database)
    with monkeypatch.context() as before:
        oldest = schema.migrations()[:1]
        before.setattr(schema, "migrations", lambda: oldest)
        old = await PostgresStore.open(url)
    position = await append(old, "k", b"0")
    migration = asyncio.ensure_future(PostgresStore.migrate(url))
    migrated = 0
    while not migration.done() or migrated < 3:
        migrated += migration.done()
        position = await append(old, "k", b"x", expected=position)
    assert (await migration).before == 1
    async with await PostgresStore.open(url) as new:
        wait = waiting(new, "k", position)
        await locked(postgres, database, 1)
        await append(old, "k", b"last", expected=position)
        assert await told(wait)
    await old.close()


# --- trouble ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def proxied(postgres: Server, database: str) -> AsyncGenerator[tuple[PostgresStore, Proxy]]:
    async with Proxy(postgres.port) as proxy:
        url = postgres.url(database, sslmode="disable").replace(f":{postgres.port}/", f":{proxy.port}/")
        async with await PostgresStore.open(url) as store:
            yield store, proxy


async def test_a_cut_connection(postgres: Server, database: str) -> None:
    """LOG-10: the connection is cut and the log changes before it is made again: who waits looks, and learns of it."""
    async with proxied(postgres, database) as (store, proxy), await PostgresStore.open(postgres.url(database)) as other:
        position = await append(store, "k", b"1")
        wait = waiting(store, "k", position)
        await locked(postgres, database, 1)
        proxy.cut()
        await append(other, "k", b"2", expected=position)
        assert await told(wait)
        position = (await store.read("k")).position
        wait = waiting(store, "k", position)
        await locked(postgres, database, 1)
        await append(other, "k", b"3", expected=position)
        assert await told(wait)


async def test_a_terminated_backend(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore
) -> None:
    """LOG-10: sessions that listened are terminated, again and again: the wait outlives them, and is told of the next change."""
    position = await append(store, "k", b"1")
    wait = waiting(store, "k", position)
    ended: set[int] = set()
    for _ in range(3):
        await locked(postgres, database, 1)
        ((pid, _),) = postgres.run(
            "SELECT pid, pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND database = "
            "(SELECT oid FROM pg_database WHERE datname = %s)",
            [database],
        )
        ended.add(pid)
    assert len(ended) == 3
    await locked(postgres, database, 1)
    assert not wait.done()
    await append(other, "k", b"2", expected=position)
    assert await told(wait)


async def test_a_connection_that_does_not_come_back(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: a listening session that is lost and cannot be made again: who trusted in it polls from then on."""
    position = await append(store, "k", b"1")
    wait = waiting(store, "k", position)
    await locked(postgres, database, 1)
    monkeypatch.setattr(listener, "_POLL", 0.01)

    async def refused(*_: object, **__: object) -> None:
        raise psycopg.OperationalError("refused")

    monkeypatch.setattr(listener, "connect", refused)
    postgres.run("SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'")
    await append(other, "k", b"2", expected=position)
    assert await told(wait)


async def test_no_connection_to_be_had(
    postgres: Server, database: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: where the server grants none for listening, who waits polls, and the pool is used as ever."""
    monkeypatch.setattr(listener, "_POLL", 0.01)
    position = await append(store, "k", b"1")
    postgres.run("CREATE ROLE few LOGIN CONNECTION LIMIT 1")
    try:
        postgres.run("GRANT USAGE ON SCHEMA turnkeeper TO few", database=database)
        postgres.run("GRANT ALL ON ALL TABLES IN SCHEMA turnkeeper TO few", database=database)
        async with await PostgresStore.open(postgres.url(database, user="few", pool_size=1)) as few:
            wait = waiting(few, "k", position)
            await append(few, "l", b"1")
            await append(store, "k", b"2", expected=position)
            assert await told(wait)
    finally:
        postgres.run("DROP OWNED BY few", database=database)
        postgres.run("DROP ROLE few")


@pytest.mark.parametrize("options", ["", "?pooler=0"], ids=["noticed", "not noticed"])
async def test_behind_a_transaction_pooler(
    postgres: Server, database: str, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """LOG-10: no session is ours behind a pooler: no lock is left in one, nobody listens, and who waits polls."""
    monkeypatch.setattr(listener, "_POLL", 0.01)
    with pgbouncer(postgres, pool_size=2) as port:
        through = postgres.url(database).replace(f":{postgres.port}/", f":{port}/")
        async with await PostgresStore.open(through + options) as store:
            position = await append(store, "k", b"1")
            wait = waiting(store, "k", position)
            looks: set[str] = set()
            deadline = time.monotonic() + PATIENCE
            while len(looks) < 3:
                assert time.monotonic() < deadline
                query = "SELECT query_start::text FROM pg_stat_activity WHERE query LIKE '%%tail_v1%%' AND datname = %s"
                looks.update(at for (at,) in await asyncio.to_thread(postgres.run, query, [database]))
            assert postgres.run(LOCKS, [database]) == [(0,)]
            assert not wait.done()
            async with await PostgresStore.open(postgres.url(database)) as direct:
                waits_there = waiting(direct, "k", position)
                await locked(postgres, database, 1)
                await append(store, "k", b"2", expected=position)  # a change through the pooler is told as well
                assert await told(waits_there)
            assert await told(wait)


# --- the engine ------------------------------------------------------------------------------------------------


class Looks(WrappedStore):
    """Counts the reads, and hands waits on."""

    def __init__(self, inner: PostgresStore) -> None:
        super().__init__(inner)
        self._notifying = inner
        self.reads = 0

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        self.reads += 1
        return await super().read(key, after=after)

    async def changed(self, key: str, *, since: Position, timeout: float) -> bool:
        """See `NotifyingStore`."""
        return await self._notifying.changed(key, since=since, timeout=timeout)


async def test_who_waits_for_a_turn_gets_its_result_at_once(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: a second worker reads once for each write of the first, however long that takes and its lease lasts."""
    monkeypatch.setattr("turnkeeper.engine.loop._POLL", LONG)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def act() -> str:
        """Act."""
        begun.set()
        await go_on.wait()
        return "acted"

    def agent() -> Agent:
        return Agent(ScriptedModel([calls(("act", "")), "done"]), [Tool(act)], lease_seconds=LONG)

    looks = Looks(other)
    first, second = Keeper(store), Keeper(looks)
    runs: list[asyncio.Task[TurnResult]] = [asyncio.ensure_future(first.run(agent(), "go", turn_id="t"))]
    await begun.wait()
    runs.append(asyncio.ensure_future(second.run(agent(), "go", turn_id="t")))
    await locked(postgres, database, 1)
    before = looks.reads
    go_on.set()
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*runs)
    assert [(result.status, result.output) for result in results] == [("success", "done")] * 2
    written = (await store.read(first.session("t").key)).position.seq
    assert looks.reads - before <= written
