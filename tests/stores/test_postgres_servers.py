"""PostgreSQL servers that go away, come back, cannot be written, or have no room (LOG-1, LOG-6)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import pytest

from tests.conformance.support import HEAD, append, listed, whole
from tests.conformance.tally import adding, tally_log
from tests.servers.postgres import PATIENCE, Server, server
from turnkeeper import errors
from turnkeeper.log.record import Position
from turnkeeper.stores.postgres import PostgresStore

pytestmark = pytest.mark.anyio


async def test_a_crash_of_the_server_loses_nothing(database: str, postgres: Server) -> None:
    """LOG-1: eight writers while the server crashes and comes back, twice: whatever was confirmed is there, once, in order."""
    url = postgres.url(database)
    confirmed: dict[str, list[str]] = {f"k{number}": [] for number in range(8)}
    stopping = asyncio.Event()

    async def write(store: PostgresStore, key: str) -> None:
        log = tally_log(store, key)
        while not stopping.is_set():
            entry = f"{key}:{len(confirmed[key])}"
            # What is not known is asked again: the entry's name tells a repeat.
            with contextlib.suppress(errors.StoreUnavailable):
                await log.ask(adding(1, entry))
                confirmed[key].append(entry)

    async with await PostgresStore.open(url + "?busy_timeout=20") as store:
        writers = [asyncio.ensure_future(write(store, key)) for key in confirmed]
        for how in (signal.SIGQUIT, signal.SIGINT):
            goal = sum(map(len, confirmed.values())) + 40
            while sum(map(len, confirmed.values())) < goal:
                done, _ = await asyncio.wait(writers, timeout=0.01, return_when=asyncio.FIRST_EXCEPTION)
                for writer in done:
                    writer.result()
            await asyncio.to_thread(postgres.stop, how)
            await asyncio.to_thread(postgres.start)
        stopping.set()
        await asyncio.gather(*writers)
        for key, entries in confirmed.items():
            state = await tally_log(store, key).read()
            assert list(state.by) == entries
            assert [seq for seq, _ in await whole(store, key)] == list(range(1, len(entries) + 1))


async def test_a_server_that_stays_away(database: str, postgres: Server) -> None:
    """Nothing is sent to a server that cannot be reached: told in time, nothing applied, and healed when it is back."""
    async with await PostgresStore.open(postgres.url(database, busy_timeout=0.3)) as store:
        position = await append(store, "k", b"0")
        await asyncio.to_thread(postgres.stop, signal.SIGINT)
        try:
            began = time.monotonic()
            for call in (append(store, "k", b"1", expected=position), store.read("k"), store.tidy()):
                with pytest.raises(errors.StoreUnavailable) as raised:
                    await call
                assert raised.value.applied is False
            assert time.monotonic() - began < PATIENCE
        finally:
            await asyncio.to_thread(postgres.start)
        assert await whole(store, "k") == [(1, b"0")]
        await append(store, "k", b"1", expected=position)


async def test_a_replica(postgres: Server, database: str) -> None:
    """A replica can be read; whatever writes is refused as read-only, typed, and it says so to operators."""
    async with await PostgresStore.open(postgres.url(database)) as primary:
        position = await append(primary, "k", b"1")
        with server() as made:
            made.copy(postgres)
            made.start()
            async with await PostgresStore.open(made.url(database)) as replica:
                assert await whole(replica, "k") == [(1, b"1")]
                assert [head.key for head in await listed(replica)] == ["k"]
                await refuses_writes(replica, position)
                assert ("writable", "a replica", False) in [promise[:3] for promise in await replica.promises()]


async def test_a_database_that_is_set_read_only(postgres: Server, database: str) -> None:
    """As a replica: read, not written; the schema cannot be made on it either."""
    postgres.run(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with pytest.raises(errors.StoreReadOnly):
        await PostgresStore.open(postgres.url(database))
    postgres.run(f"ALTER DATABASE {database} RESET ALL")
    async with await PostgresStore.open(postgres.url(database)) as store:
        position = await append(store, "k", b"1")
    postgres.run(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    async with await PostgresStore.open(postgres.url(database)) as store:
        assert await whole(store, "k") == [(1, b"1")]
        await refuses_writes(store, position)
        assert ("writable", "set read-only", False) in [promise[:3] for promise in await store.promises()]


async def refuses_writes(store: PostgresStore, position: Position) -> None:
    """Every write of `store` raises StoreReadOnly."""
    writes = [
        append(store, "k", b"2", expected=position),
        append(store, "new", b"2"),
        store.erase("k"),
        store.append_with("k", lambda _: 0, lambda _: [b"x"], expected=position, head=HEAD),
    ]
    for write in writes:
        with pytest.raises(errors.StoreReadOnly) as raised:
            await write
        assert raised.value.applied is False


async def test_a_full_disk(postgres: Server, database: str) -> None:
    """LOG-1: the server reports a full disk in the middle of an append: StoreFull, nothing changed, neighbours told alike."""
    async with await PostgresStore.open(postgres.url(database, pool_size=1)) as store:
        position = await append(store, "k", b"1")
        before = await listed(store)
        full = "BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END"
        postgres.run(f"CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $${full}$$", database=database)
        trigger = "CREATE TRIGGER t BEFORE INSERT ON turnkeeper.record FOR EACH ROW WHEN (NEW.body = 'big') "
        postgres.run(trigger + "EXECUTE FUNCTION full_disk()", database=database)
        calls = [append(store, "k", b"small", b"big", expected=position), append(store, "l", b"big")]
        neighbours = [append(store, f"n{number}", b"x") for number in range(5)]
        answers = await asyncio.gather(*calls, *neighbours, return_exceptions=True)
        assert [type(answer) for answer in answers] == [errors.StoreFull] * 2 + [Position] * 5
        assert [head for head in await listed(store) if head.key == "k"] == before
        assert await whole(store, "l") == []
        await append(store, "k", b"2", expected=position)


async def test_a_server_with_few_connections(postgres: Server, database: str) -> None:
    """A store gets by with the connections that the server grants; one that gets none says busy."""
    postgres.run("CREATE ROLE few LOGIN CONNECTION LIMIT 2")
    postgres.run(f"GRANT ALL ON DATABASE {database} TO few")
    try:
        async with await PostgresStore.open(postgres.url(database, user="few", pool_size=8)) as store:
            await asyncio.gather(*(append(store, f"k{number}", b"x") for number in range(100)))
            found = await asyncio.gather(*(whole(store, f"k{number}") for number in range(100)))
            assert found == [[(1, b"x")]] * 100
            with pytest.raises(errors.StoreBusy, match="too many connections") as raised:
                await PostgresStore.open(postgres.url(database, user="few"))
            assert raised.value.applied is False
    finally:
        postgres.run("REASSIGN OWNED BY few TO postgres", database=database)
        postgres.run("DROP OWNED BY few", database=database)
        postgres.run("DROP ROLE few")
