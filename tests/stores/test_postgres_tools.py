"""Transactional tools on PostgreSQL: an effect and its records are both in, or neither, whatever happens in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from tests.conformance.support import HEAD, append, whole
from tests.servers.postgres import Server
from tests.servers.proxy import Proxy, When
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended, Behind, GuardFailed, Position
from turnkeeper.stores.postgres import PostgresStore
from turnkeeper.stores.postgres.transaction import Transaction

pytestmark = pytest.mark.anyio

Outcome = tuple[object, Appended] | Behind | GuardFailed


@pytest.fixture
async def store(postgres: Server, database: str) -> AsyncIterator[PostgresStore]:
    """A store beside a table for the tools' effects."""
    postgres.run("CREATE TABLE ledger (entry integer UNIQUE DEFERRABLE INITIALLY DEFERRED)", database=database)
    async with await PostgresStore.open(postgres.url(database, pool_size=2)) as opened:
        yield opened


async def run(store: PostgresStore, effect: Callable[[Transaction], object], expected: Position = NOWHERE) -> Outcome:
    """Append to the log `k` with an effect."""
    return await store.append_with("k", effect, lambda _: [b"done"], expected=expected, head=HEAD)


def entries(postgres: Server, database: str) -> list[int]:
    """What effects left in the table."""
    return [row[0] for row in postgres.run("SELECT entry FROM ledger ORDER BY entry", database=database)]


def insert(number: int) -> Callable[[Transaction], int]:
    """An effect."""

    def effect(transaction: Transaction) -> int:
        transaction.execute("INSERT INTO ledger VALUES (%s)", [number])
        return number

    return effect


async def test_statements_and_their_rows(postgres: Server, database: str, store: PostgresStore) -> None:
    """Parameters by place and by name, rows of any type, statements without rows, percent signs without parameters."""

    def effect(transaction: Transaction) -> list[Any]:
        transaction.execute("CREATE TYPE mood AS ENUM ('well')")
        return [
            transaction.execute("INSERT INTO ledger VALUES (%s), (%s)", (1, 2)),
            transaction.execute("INSERT INTO ledger VALUES (%(n)s) RETURNING entry, 'x'::text, NULL", {"n": 3}),
            transaction.execute(
                "SELECT 'a%' LIKE 'a%', '{1,2}'::int[], 'well'::mood, '\\x00ff'::bytea, 1.5::numeric::text"
            ),
            transaction.execute("SELECT FROM ledger"),
            transaction.execute("SET LOCAL statement_timeout = '20s'"),
            transaction.execute("/* a comment */ -- another\n SELECT tail FROM turnkeeper.head"),
        ]

    outcome = await run(store, effect)
    assert not isinstance(outcome, Behind | GuardFailed)
    assert outcome[0] == [[], [(3, "x", None)], [(True, [1, 2], "well", b"\x00\xff", "1.5")], [(), (), ()], [], [(0,)]]
    assert entries(postgres, database) == [1, 2, 3]
    assert await whole(store, "k") == [(1, b"done")]


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        "commit",
        "END",
        "ROLLBACK",
        "abort",
        "BEGIN",
        "START TRANSACTION",
        "SAVEPOINT a",
        "RELEASE a",
        "PREPARE TRANSACTION 'a'",
        "PREPARE a AS SELECT 1",
        "SET search_path = public",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "RESET ALL",
        "DISCARD ALL",
        "LISTEN a",
        "/* a */ COMMIT",
        "/* /* nested */ x */ COMMIT",
        "-- a\nCOMMIT",
        "-- a\r\n;; /**/ COMMIT",
        "\t\nCOMMIT AND CHAIN",
        "INSERT INTO ledger VALUES (2); COMMIT",
        "SELECT 1; COMMIT; BEGIN",
        "DO $$ BEGIN COMMIT; END $$",
    ],
)
async def test_a_tool_cannot_end_the_transaction(
    postgres: Server, database: str, store: PostgresStore, statement: str
) -> None:
    """LOG-1: refused however it is written, and everything that the tool did is undone, though it swallows the error."""

    def effect(transaction: Transaction) -> None:
        transaction.execute("INSERT INTO ledger VALUES (1)")
        transaction.execute(statement)

    def swallows(transaction: Transaction) -> None:
        try:
            effect(transaction)
        except psycopg.Error:
            raise LookupError("the tool goes on, and fails of something else") from None

    with pytest.raises(psycopg.Error):
        await run(store, effect)
    with pytest.raises(LookupError):
        await run(store, swallows)
    assert entries(postgres, database) == []
    assert await whole(store, "k") == []


async def test_a_swallowed_error_comes_up_again(postgres: Server, database: str, store: PostgresStore) -> None:
    """An error of PostgreSQL spoils the transaction: a tool that swallows it is not taken for one that succeeded."""

    def effect(transaction: Transaction) -> str:
        transaction.execute("INSERT INTO ledger VALUES (1)")
        for _ in range(2):
            with pytest.raises(psycopg.errors.UndefinedTable):
                transaction.execute("INSERT INTO no_such_table VALUES (1)")
        return "fine"

    with pytest.raises(psycopg.errors.UndefinedTable):
        await run(store, effect)
    assert entries(postgres, database) == []
    assert await whole(store, "k") == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE turnkeeper.head SET phase = 'mine'",
        "DELETE FROM turnkeeper.record",
        "INSERT INTO turnkeeper.meta VALUES ('mine', 1)",
        "SELECT * FROM turnkeeper.append_v1('l', 'x', 0, true, '', '', NULL, NULL, '{}', 0, 0, NULL, NULL, 0, 0, '{}', 1, true)",
    ],
)
async def test_tables_of_the_store_are_not_the_tools(
    postgres: Server, database: str, store: PostgresStore, statement: str
) -> None:
    """A tool that writes to the store's tables is undone as a whole; the next tool on the connection is not blamed."""
    position = await append(store, "k", b"1")

    def effect(transaction: Transaction) -> None:
        transaction.execute("INSERT INTO ledger VALUES (1)")
        transaction.execute(statement)

    with pytest.raises(errors.TurnkeeperError, match="tables of Turnkeeper"):
        await run(store, effect, position)
    assert entries(postgres, database) == []
    assert await whole(store, "k") == [(1, b"1")]
    assert not isinstance(await run(store, insert(2), position), Behind | GuardFailed)


async def test_a_constraint_that_is_checked_at_the_end(postgres: Server, database: str, store: PostgresStore) -> None:
    """The COMMIT itself fails for the tool's sake: its error, not the store's, and nothing happened."""
    first = await run(store, insert(1))
    assert not isinstance(first, Behind | GuardFailed)
    with pytest.raises(psycopg.errors.UniqueViolation):
        await run(store, insert(1), first[1].position)
    assert entries(postgres, database) == [1]
    assert await whole(store, "k") == [(1, b"done")]


async def test_after_the_tool_nothing_runs(store: PostgresStore) -> None:
    """A transaction that a tool kept is of no use to it afterwards."""
    kept: list[Transaction] = []
    await run(store, kept.append)
    with pytest.raises(psycopg.ProgrammingError, match="over"):
        kept[0].execute("SELECT 1")


async def test_a_tool_that_meets_a_lock(postgres: Server, database: str) -> None:
    """A row that another session holds: StoreBusy after the busy timeout, undone; it may be tried again."""
    postgres.run("CREATE TABLE stock AS SELECT 5 AS pieces", database=database)
    async with await PostgresStore.open(postgres.url(database, busy_timeout=0.3)) as store:

        def effect(transaction: Transaction) -> None:
            transaction.execute("UPDATE stock SET pieces = pieces - 1")

        with psycopg.connect(postgres.url(database)) as other:
            other.execute("UPDATE stock SET pieces = 0")
            with pytest.raises(errors.StoreBusy) as raised:
                await run(store, effect)
            assert raised.value.applied is False
            other.rollback()
        assert not isinstance(await run(store, effect), Behind | GuardFailed)
    assert postgres.run("SELECT pieces FROM stock", database=database) == [(4,)]


async def test_more_tools_than_places(postgres: Server, database: str, store: PostgresStore) -> None:
    """Twelve tools on two connections: all get their turn; appends of others are not held up by tools that take long."""
    going, enough = threading.Semaphore(0), threading.Event()

    def slow(number: int) -> Callable[[Transaction], None]:
        def effect(transaction: Transaction) -> None:
            going.release()
            assert enough.wait(20)
            transaction.execute("INSERT INTO ledger VALUES (%s)", [number])

        return effect

    calls = [
        asyncio.ensure_future(
            store.append_with(f"t{number}", slow(number), lambda _: [b"x"], expected=NOWHERE, head=HEAD)
        )
        for number in range(12)
    ]
    for _ in range(2):
        assert await asyncio.to_thread(going.acquire, True, 20)
    await asyncio.gather(*(append(store, f"k{number}", b"x") for number in range(30)))
    enough.set()
    await asyncio.gather(*calls)
    assert entries(postgres, database) == list(range(12))
    connected = postgres.run("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database])
    assert connected[0][0] <= 4


async def test_no_place_for_a_tool(postgres: Server, database: str) -> None:
    """While tools hold all places for longer than the busy timeout, the next is told so, and has not run."""
    going, enough = threading.Event(), threading.Event()

    def slow(_: Transaction) -> None:
        going.set()
        assert enough.wait(20)

    async with await PostgresStore.open(postgres.url(database, pool_size=1, busy_timeout=0.2)) as store:
        first = asyncio.ensure_future(run(store, slow))
        await asyncio.to_thread(going.wait, 20)
        with pytest.raises(errors.StoreBusy) as raised:
            await store.append_with("other", insert(1), lambda _: [b"x"], expected=NOWHERE, head=HEAD)
        assert raised.value.applied is False
        enough.set()
        assert not isinstance(await first, Behind | GuardFailed)


async def test_a_cancelled_caller_is_told_when_it_is_settled(
    postgres: Server, database: str, store: PostgresStore
) -> None:
    """LOG-6: a thread cannot be cancelled: the caller gets its CancelledError once effect and append are both in."""
    going, enough = threading.Event(), threading.Event()

    def effect(transaction: Transaction) -> None:
        going.set()
        assert enough.wait(20)
        transaction.execute("INSERT INTO ledger VALUES (1)")

    call = asyncio.ensure_future(run(store, effect))
    await asyncio.to_thread(going.wait, 20)
    call.cancel()
    done, _ = await asyncio.wait([call], timeout=0.05)
    assert not done
    enough.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (entries(postgres, database), await whole(store, "k")) == ([1], [(1, b"done")])


async def test_closing_waits_for_tools(postgres: Server, database: str, store: PostgresStore) -> None:
    """A store that is closed lets running tools finish, starts no others, and leaves no connection."""
    going, enough = threading.Event(), threading.Event()

    def effect(transaction: Transaction) -> None:
        going.set()
        assert enough.wait(20)
        transaction.execute("INSERT INTO ledger VALUES (1)")

    call = asyncio.ensure_future(run(store, effect))
    await asyncio.to_thread(going.wait, 20)
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    with pytest.raises(errors.StoreClosed):
        await run(store, insert(2))
    enough.set()
    assert not isinstance(await call, Behind | GuardFailed)
    await closing
    assert entries(postgres, database) == [1]
    assert postgres.run("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database]) == [(0,)]


async def test_a_session_that_is_terminated_under_a_tool(postgres: Server, database: str, store: PostgresStore) -> None:
    """LOG-6: the session ends before the COMMIT: surely undone, also where the tool swallows the error; the next one works."""

    def kill(transaction: Transaction) -> None:
        ((pid,),) = transaction.execute("INSERT INTO ledger VALUES (1) RETURNING pg_backend_pid()")
        postgres.run("SELECT pg_terminate_backend(%s, 10000)", [pid])

    def raises(transaction: Transaction) -> None:
        kill(transaction)
        transaction.execute("INSERT INTO ledger VALUES (2)")

    def swallows(transaction: Transaction) -> str:
        kill(transaction)
        with pytest.raises(psycopg.OperationalError):
            transaction.execute("INSERT INTO ledger VALUES (2)")
        return "fine"

    for effect in (kill, raises, swallows):
        with pytest.raises(errors.StoreUnavailable) as raised:
            await run(store, effect)
        assert raised.value.applied is False
        assert entries(postgres, database) == []
        assert await whole(store, "k") == []
    assert not isinstance(await run(store, insert(3)), Behind | GuardFailed)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_cut_at_the_commit(postgres: Server, database: str, store: PostgresStore, when: When) -> None:
    """LOG-6: the connection is cut under the COMMIT: not known, and effect and records are both in or both not."""
    async with Proxy(postgres.port) as proxy:
        url = postgres.url(database, sslmode="disable").replace(f":{postgres.port}/", f":{proxy.port}/")
        async with await PostgresStore.open(url) as cut:

            def effect(transaction: Transaction) -> None:
                transaction.execute("INSERT INTO ledger VALUES (%s)", [1])
                proxy.cut_next(None, None, when)  # the count of writes, the append, the COMMIT

            with pytest.raises(errors.StoreUnavailable) as raised:
                await run(cut, effect)
            assert raised.value.applied is None
    found = (entries(postgres, database), await whole(store, "k"))
    assert found == (([1], [(1, b"done")]) if when == "after" else ([], []))
