"""Many writers, loops, threads, processes and a pooler on one PostgreSQL store (LOG-2, LOG-3, field cases 07 and 20)."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.support import HEAD, append, bodies, contend, listed, whole
from tests.conformance.tally import adding, tally_log
from tests.crew import PATIENCE, SPAWN, crew
from tests.servers.pgbouncer import pgbouncer
from tests.servers.postgres import Server
from tests.servers.proxy import Proxy
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended, Behind, Head, HeadQuery, Position
from turnkeeper.moving import copy_logs
from turnkeeper.stores.postgres import PostgresStore
from turnkeeper.stores.sqlite import SqliteStore

ISOLATION = ["read committed", "repeatable read", "serializable"]


# --- writers ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("isolation", ISOLATION)
async def test_sixteen_writers_on_one_key(postgres: Server, database: str, isolation: str) -> None:
    """LOG-2, LOG-5: sixteen tasks of four stores on one key: every accepted append has a sequence of its own, none is lost.

    Whatever isolation level the database's owner has set for everybody.
    """
    postgres.run(f"ALTER DATABASE {database} SET default_transaction_isolation = '{isolation}'")
    url = postgres.url(database)
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(await PostgresStore.open(url)) for _ in range(4)]
        accepted = await asyncio.gather(*(contend(stores[n % 4], "k", str(n), 10) for n in range(16)))
        together = sorted(pair for pairs in accepted for pair in pairs)
        assert [seq for seq, _ in together] == list(range(1, 161))
        assert await whole(stores[0], "k") == together
        stamps = [record.at for record in (await stores[0].read("k")).records]
        assert stamps == sorted(stamps)


@pytest.mark.anyio
@pytest.mark.parametrize("isolation", ISOLATION)
async def test_stores_that_make_and_erase_the_same_logs(postgres: Server, database: str, isolation: str) -> None:
    """LOG-5: logs made, written and erased by four stores at once, in statements of many: no deadlock, no orphaned record."""
    postgres.run(f"ALTER DATABASE {database} SET default_transaction_isolation = '{isolation}'")
    stores = [await PostgresStore.open(postgres.url(database, pool_size=2)) for _ in range(4)]
    keys = [f"k{number}" for number in range(12)]
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = %s"
    before = postgres.run(deadlocks, [database])

    async def work(store: PostgresStore, key: str) -> None:
        for _ in range(4):
            outcome = await store.append(key, [b"x", b"y"], expected=NOWHERE, head=HEAD)
            if isinstance(outcome, Appended):
                await store.append(key, [b"z"], expected=outcome.position, head=HEAD, compact_through=1)
            await store.erase(key)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            *(
                work(store, keys[(place * 5 + number) % 12])
                for number, store in enumerate(stores)
                for place in range(12)
            )
        )
    for key in keys:
        await stores[0].erase(key)
    assert postgres.run("SELECT count(*) FROM turnkeeper.record", database=database) == [(0,)]
    for store in stores:
        await store.close()
    # Sessions that are over have told what they met.
    assert postgres.run(deadlocks, [database]) == before


@pytest.mark.anyio
async def test_an_append_is_one_exchange(postgres: Server, database: str) -> None:
    """One statement for an append, in one exchange with the server; the answer of who is behind comes in the same one."""
    async with Proxy(postgres.port) as proxy:
        url = postgres.url(database, sslmode="disable").replace(f":{postgres.port}/", f":{proxy.port}/")
        async with await PostgresStore.open(url) as store:
            sent = proxy.sent
            position = await append(store, "k", b"0", b"more")
            assert proxy.sent - sent == 1
            for _ in range(20):
                outcome = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD)
                assert isinstance(outcome, Behind)
                assert len(outcome.tail.records) == position.seq
                position = await append(store, "k", b"more", expected=position)
            # psycopg prepares what comes again and again: once for each of the two forms.
            assert proxy.sent - sent <= 1 + 2 * 20 + 2


@pytest.mark.anyio
async def test_many_appends_share_a_statement(postgres: Server, database: str) -> None:
    """Sixty-four appends at once are fewer transactions than appends, whatever becomes of each of them."""
    async with await PostgresStore.open(postgres.url(database, pool_size=2)) as store:
        known = await append(store, "k", b"0")
        await append(store, "k", b"1", expected=known)
        count = "SELECT count(*) FROM (SELECT DISTINCT xmin::text FROM turnkeeper.record) AS transactions"
        ((before,),) = postgres.run(count, database=database)
        calls = [append(store, f"k{number:02}", b"%d" % number) for number in range(64)]
        behind = [store.append("k", [b"x"], expected=known, head=HEAD) for _ in range(5)]
        *positions, last = await asyncio.gather(*calls, asyncio.gather(*behind))
        assert all(isinstance(outcome, Behind) and bodies(outcome.tail) == [b"1"] for outcome in last)
        assert len(positions) == 64
        for number in range(64):
            assert await whole(store, f"k{number:02}") == [(1, b"%d" % number)]
        ((after,),) = postgres.run(count, database=database)
        assert after - before <= 8


# --- time ------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("first_is_a_read", [True, False])
async def test_a_servers_clock_that_was_set_back(postgres: Server, database: str, first_is_a_read: bool) -> None:
    """LOG-3, case 20: set back by two hours, the store's clock goes on from where the log stands, and not twice as far."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        positions = [await append(store, f"k{number}", b"1") for number in range(10)]
        before = (await store.read("k0")).records[0].at
        # For the store it is the same whether the server's clock goes back or its offset does.
        await store.advance_clock(-7_200_000)
        assert (await store.read("none")).now < before
        if first_is_a_read:
            assert (await store.read("k0")).now >= before
            assert (await store.read("none")).now >= before
        await asyncio.gather(*(append(store, f"k{n}", b"2", expected=positions[n]) for n in range(10)))
        for number in range(10):
            first, second = (await store.read(f"k{number}")).records
            assert first.at <= second.at < before + 60_000
        assert before <= (await store.read("none")).now < before + 60_000
        assert [promise.holds for promise in await store.promises() if promise.name == "clock"] == [True]
        await store.advance_clock(7_200_000)
        assert [promise.holds for promise in await store.promises() if promise.name == "clock"] == [False]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("setting", "promise"),
    [("synchronous_commit = off", "durable"), ("default_transaction_read_only = on", "writable")],
)
async def test_promises_that_do_not_hold(postgres: Server, database: str, setting: str, promise: str) -> None:
    """LOG-1: what the server's settings take away is told to operators, with what to do about it."""
    await PostgresStore.migrate(postgres.url(database))
    postgres.run(f"ALTER DATABASE {database} SET {setting}")
    async with await PostgresStore.open(postgres.url(database)) as store:
        broken = {found.name: found for found in await store.promises() if not found.holds}
    # The tests' server itself runs without fsync.
    assert promise in broken
    assert broken[promise].advice
    assert "fsync=off" in broken["durable"].found


# --- listing ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("last", ["a", "\ud7ff", "\uffff", "\U0010ffff", "\U0010ffff" * 3, "%", "\\"])
async def test_prefixes_at_the_ends_of_unicode(postgres: Server, database: str, last: str) -> None:
    """LOG-8: a prefix whose last character has no next one in Unicode; keys in the order of their code points."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        keys = ["", "k", "k\ue000", "l", "\U0010ffff", "k" + last, f"k{last}a", f"k{last}\U0010ffff"]
        keys = sorted({key for key in keys if key})
        await asyncio.gather(*(append(store, key, b"x") for key in keys))
        for prefix in ("k" + last, last, "k", ""):
            found = [head.key for head in await listed(store, HeadQuery(prefix=prefix))]
            assert found == [key for key in keys if key.startswith(prefix)]


@pytest.mark.anyio
async def test_a_log_that_lost_its_end(postgres: Server, database: str) -> None:
    """A failover to a replica that was not waited for: who knew more than there is must not go on from it."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        position = await append(store, "k", b"1", b"2", b"3")
        postgres.run("UPDATE turnkeeper.head SET tail = 2", database=database)
        postgres.run("DELETE FROM turnkeeper.record WHERE seq = 3", database=database)
        with pytest.raises(errors.StoreRolledBack):
            await store.read("k", after=position)
        with pytest.raises(errors.StoreRolledBack) as raised:
            await append(store, "k", b"4", expected=position)
        assert raised.value.applied is False
        assert await whole(store, "k") == [(1, b"1"), (2, b"2")]


@pytest.mark.anyio
async def test_logs_move_between_stores(postgres: Server, database: str, tmp_path: Path) -> None:
    """Copied from SQLite to PostgreSQL and back: positions, times, bodies, heads; a log that is there already is left alone."""
    async with (
        await SqliteStore.open(tmp_path / "one.db") as source,
        await PostgresStore.open(postgres.url(database)) as there,
        await SqliteStore.open(tmp_path / "two.db") as back,
    ):
        for number in range(20):
            head = Head(
                kind="turn", phase="OPEN", attention="x", owner="w", labels={"a": "\x00"}, ttl_ms=5, keep_until=7
            )
            position = await append(source, f"k{number}", *[os.urandom(number) for _ in range(number + 1)], head=head)
            if number % 3 == 0:
                await append(source, f"k{number}", b"snapshot", expected=position, compact_through=position.seq)
        assert (await copy_logs(source, there)).copied == 20
        assert (await copy_logs(source, there)).already_there == 20
        assert (await copy_logs(there, back)).verified == 20
        assert await listed(source) == await listed(there) == await listed(back)
        tail = await there.read("k7")
        assert await append(there, "k7", b"on", expected=tail.position) == tail.position._replace(
            seq=tail.position.seq + 1
        )


# --- loops, threads, forks (field case 07) ---------------------------------------------------------------------


async def _step(store: PostgresStore, name: str, count: int = 1) -> None:
    log = tally_log(store)
    for number in range(count):
        await log.ask(adding(1, f"{name}:{number}"))

        def effect(_: object) -> int:
            return 1

        outcome = await store.append_with(
            f"tool {name}:{number}", effect, lambda _: [b"x"], expected=NOWHERE, head=HEAD
        )
        assert not isinstance(outcome, Behind)


async def _total(url: str) -> tuple[int, int]:
    async with await PostgresStore.open(url) as store:
        state = await tally_log(store).read()
        return state.total, len(await listed(store, HeadQuery(prefix="tool")))


def _connected(postgres: Server, database: str) -> int:
    return postgres.run("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database])[0][0]


def test_one_loop_after_another(postgres: Server, database: str) -> None:
    """A store is used in one loop after another, each of which is over: it works, and what they leave is let go of."""
    url = postgres.url(database)
    store = asyncio.run(PostgresStore.open(url))
    for number in range(4):
        asyncio.run(_step(store, str(number)))
        assert _connected(postgres, database) <= 4
    asyncio.run(store.close())
    assert asyncio.run(_total(url)) == (4, 4)


def test_loops_of_several_threads_at_once(postgres: Server, database: str) -> None:
    """Loops in four threads share a store at once; it is closed from one more, while they still run."""
    url = postgres.url(database)
    store = asyncio.run(PostgresStore.open(url))
    working, closed = threading.Barrier(5), threading.Event()
    failed: list[BaseException] = []

    async def main(number: int) -> None:
        await _step(store, str(number), 10)
        await asyncio.to_thread(working.wait, PATIENCE)
        assert await asyncio.to_thread(closed.wait, PATIENCE)
        with pytest.raises(errors.StoreClosed):
            await store.read("k")

    def run(number: int) -> None:
        try:
            asyncio.run(main(number))
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    working.wait(PATIENCE)
    asyncio.run(store.close())
    assert _connected(postgres, database) == 0
    closed.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert failed == []
    assert asyncio.run(_total(url)) == (40, 40)


def test_forked_children(postgres: Server, database: str) -> None:
    """A store that was opened before a fork works in parent and children at once; nobody's connection is used by two."""
    url = postgres.url(database)
    store = asyncio.run(PostgresStore.open(url))
    asyncio.run(_step(store, "before"))
    with asyncio.Runner() as runner:
        runner.run(_step(store, "parent", 1))  # its connections are open while the children use theirs
        parents = postgres.run("SELECT pid FROM pg_stat_activity WHERE datname = %s", [database])
        assert parents
        children: list[int] = []
        for number in range(4):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    asyncio.run(_step(store, f"child {number}", 10))
                    asyncio.run(store.close())
                    del runner
                    gc.collect()
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        runner.run(_step(store, "parent again", 10))
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
        assert set(parents) <= set(postgres.run("SELECT pid FROM pg_stat_activity WHERE datname = %s", [database]))
        runner.run(_step(store, "parent at last", 5))
        runner.run(store.close())
    assert asyncio.run(_total(url)) == (1 + 1 + 40 + 10 + 5, 1 + 1 + 40 + 10 + 5)


def test_a_loop_that_is_closed_in_the_middle(postgres: Server, database: str) -> None:
    """A loop ends while calls are under way: the store works in the next one, and each call is whole or not at all."""
    url = postgres.url(database)
    store = asyncio.run(PostgresStore.open(url))

    async def leave() -> None:
        for number in range(20):
            asyncio.ensure_future(append(store, f"k{number}", b"a", b"b"))  # noqa: RUF006  # nobody waits for them
        await asyncio.sleep(0.01)

    async def look() -> list[int]:
        found = [len(await whole(store, f"k{number}")) for number in range(20)]
        await store.close()
        return found

    asyncio.run(leave())
    assert set(asyncio.run(look())) <= {0, 2}


# --- processes -------------------------------------------------------------------------------------------------


async def _contend(number: int, url: str, count: int) -> list[tuple[int, bytes]]:
    async with await PostgresStore.open(url) as store:
        return await contend(store, "contended", str(number), count)


def test_contending_processes(postgres: Server, database: str) -> None:
    """LOG-2, LOG-5: four processes open an empty database at once and append to one key: no sequence twice, none missing."""
    url = postgres.url(database)
    accepted = sorted(pair for pairs in crew(4, _contend, url, 40) for pair in pairs)
    assert [seq for seq, _ in accepted] == list(range(1, 161))
    rows = postgres.run("SELECT seq, body FROM turnkeeper.record ORDER BY seq", database=database)
    assert [(seq, bytes(body)) for seq, body in rows] == accepted


async def _look_at_clock(number: int, url: str, ready: Any, moved: Any) -> tuple[int, int]:
    async with await PostgresStore.open(url) as store:
        before = (await store.read("k")).now
        ready.wait(PATIENCE)
        if number == 0:
            await store.advance_clock(3_600_000)
        moved.wait(PATIENCE)
        return before, (await store.read("k")).now


def test_the_test_clock_is_everybodys(postgres: Server, database: str) -> None:
    """LOG-3: the store's clock is one for all processes."""
    ready, moved = SPAWN.Barrier(2), SPAWN.Barrier(2)
    for before, behind in crew(2, _look_at_clock, postgres.url(database), ready, moved):
        assert 3_600_000 <= behind - before < 3_700_000


# --- poolers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pooled(postgres: Server, database: str) -> Iterator[str]:
    """The URL of the database through a pooler that changes the session with every transaction."""
    with pgbouncer(postgres, pool_size=3) as port:
        yield postgres.url(database).replace(f":{postgres.port}/", f":{port}/")


@pytest.mark.anyio
async def test_behind_a_transaction_pooler(postgres: Server, database: str, pooled: str) -> None:
    """Everything works where each transaction may get another session: the pooler is noticed, and nothing is prepared."""
    async with await PostgresStore.open(pooled + "?pool_size=8") as store:
        assert ("pooler", True) in [(p.name, p.found.startswith("in between")) for p in await store.promises()]
        stores = [await PostgresStore.open(pooled) for _ in range(3)]
        await asyncio.gather(*(contend(store, "k", str(n), 15) for n, store in enumerate([store, *stores])))
        for other in stores:
            await asyncio.gather(*(_step(other, f"{id(other)}:{number}", 4) for number in range(4)))
        assert len(await whole(store, "k")) == 60
        await store.tidy()
        assert await store.erase("k")
        cancelled = [asyncio.ensure_future(append(store, f"c{number}", b"x", b"y")) for number in range(30)]
        await asyncio.sleep(0)
        for call in cancelled[::2]:
            call.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        assert {len(await whole(store, f"c{number}")) for number in range(30)} <= {0, 2}
        for other in stores:
            await other.close()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND state LIKE 'idle in%%'"
    assert postgres.run(sessions, [database]) == [(0,)]
    assert await _total(pooled) == (48, 48)


@pytest.mark.anyio
async def test_a_pooler_that_was_not_noticed(postgres: Server, database: str, pooled: str) -> None:
    """A session without the statement that was prepared in another one: nothing is prepared any more, and no call fails."""
    async with (
        await PostgresStore.open(pooled + "?pooler=0&pool_size=3") as one,
        await PostgresStore.open(pooled + "?pooler=0&pool_size=3") as other,
    ):
        await asyncio.gather(*(store.read(f"k{number}") for store in (one, other) for number in range(6)))
        await asyncio.gather(contend(one, "k0", "one", 20), contend(other, "k1", "other", 20))
        for key in ("k0", "k1"):
            assert len(await whole(one, key)) == len(await whole(other, key)) == 20


@pytest.mark.anyio
async def test_migrating_behind_a_pooler(postgres: Server, database: str, pooled: str) -> None:
    """Four open an empty database through the pooler at once; the migrators' lock is the transaction's."""
    stores = await asyncio.gather(*(PostgresStore.open(pooled) for _ in range(4)))
    for store in stores:
        await append(store, f"k{id(store)}", b"x")
        await store.close()
    assert postgres.run("SELECT count(*) FROM turnkeeper.head", database=database) == [(4,)]
    assert postgres.run("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]


@pytest.mark.anyio
async def test_a_position_is_worth_the_same_through_a_pooler(postgres: Server, database: str, pooled: str) -> None:
    """Processes with and without the pooler share a store."""
    async with (
        await PostgresStore.open(postgres.url(database)) as direct,
        await PostgresStore.open(pooled) as through,
    ):
        position: Position = await append(direct, "k", b"1")
        position = await append(through, "k", b"2", expected=position)
        await append(direct, "k", b"3", expected=position)
        assert await whole(through, "k") == [(1, b"1"), (2, b"2"), (3, b"3")]
