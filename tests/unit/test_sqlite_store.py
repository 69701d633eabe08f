"""What only the SQLite store can show: group commit, its threads, its clock, and the transaction that tools get."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from tests.cases.gate import Gate
from tests.conformance.support import HEAD, append, whole
from turnkeeper.errors import StoreClosed
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Position
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

NOON = 1_900_000_000_000


class Clock:
    """A host's clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> int:
        """The time."""
        return self.now


@pytest.fixture
async def memory() -> AsyncIterator[SqliteStore]:
    """A store for statements that need no file."""
    async with await SqliteStore.open(":memory:") as store:
        yield store


# --- the host's clock ------------------------------------------------------------------------------------------


async def test_guards_hold_at_both_ends(tmp_path: Path) -> None:
    """LOG-4: both instants belong to the guard; one millisecond outside of either does not."""
    clock = Clock()
    async with await SqliteStore.open(tmp_path / "turns.db", clock=clock) as store:
        for key, guard, holds in (
            ("a", Guard(not_before=NOON), True),
            ("b", Guard(not_before=NOON + 1), False),
            ("c", Guard(not_after=NOON), True),
            ("d", Guard(not_after=NOON - 1), False),
            ("e", Guard(NOON, NOON), True),
            ("f", Guard(NOON + 1, NOON - 1), False),
            ("g", Guard(), True),
        ):
            outcome = await store.append(key, [b"x"], expected=NOWHERE, head=HEAD, guard=guard)
            assert outcome == (GuardFailed(NOON) if not holds else Appended(outcome[0], NOON)), key  # pyright: ignore[reportArgumentType]
            assert isinstance(outcome, Appended if holds else GuardFailed)


async def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """LOG-3: within a log the time never goes back: it goes on from the last record, for every process on the file."""
    clock = Clock()
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, clock=clock) as store:
        position = await append(store, "k", b"1")
        clock.now -= 3_600_000
        assert (await store.read("k")).now == NOON
        position = await append(store, "k", b"2", expected=position)
        assert [record.at for record in (await store.read("k")).records] == [NOON, NOON]
        clock.now += 500
        await append(store, "k", b"3", expected=position)
        assert [record.at for record in (await store.read("k")).records] == [NOON, NOON, NOON + 500]
        async with await SqliteStore.open(path, clock=clock) as other:
            assert (await other.read("k")).now == NOON + 500
            assert (await other.read("nothing")).now == NOON + 500


@pytest.mark.parametrize(
    ("guard", "holds"),
    [
        (Guard(not_after=NOON - 1), False),
        (Guard(not_after=NOON), True),
        (Guard(not_before=NOON), True),
        (Guard(not_before=NOON + 1), False),
        (Guard(NOON, NOON), True),
    ],
)
async def test_guards_while_the_clock_is_set_back(tmp_path: Path, guard: Guard, holds: bool) -> None:
    """LOG-4: judged on the log's time, which has not gone back: no lease is revived, and none is waited for in vain."""
    clock = Clock()
    async with await SqliteStore.open(tmp_path / "turns.db", clock=clock) as store:
        position = await append(store, "k", b"1")
        clock.now -= 3_600_000
        behind = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD, guard=guard)
        assert isinstance(behind, Behind)
        assert behind.tail.now == NOON
        outcome = await store.append("k", [b"2"], expected=position, head=HEAD, guard=guard)
        if holds:
            assert isinstance(outcome, Appended)
            assert outcome.at == NOON
        else:
            assert outcome == GuardFailed(NOON)
        assert len(await whole(store, "k")) == 1 + holds


# --- group commit ----------------------------------------------------------------------------------------------


async def _group(store: SqliteStore, gate: Gate, *calls: Any) -> list[Any]:
    """Let calls share one commit: they are asked for while the writer is held in another."""
    gate.armed = True
    first = asyncio.ensure_future(append(store, "first", b"x"))
    await anyio.to_thread.run_sync(gate.entered.wait, 30)
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    gate.release.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_callers_share_a_commit(tmp_path: Path) -> None:
    """LOG-1: twenty appends asked for at once are in by one commit, counted by the pages of the WAL."""
    gate = Gate()
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, clock=gate) as store:
        wal = path.with_name("turns.db-wal")
        before = wal.stat().st_size
        await append(store, "alone", b"x")
        alone = wal.stat().st_size - before
        before = wal.stat().st_size
        outcomes = await _group(store, gate, *(append(store, f"k{n}", b"x") for n in range(20)))
        assert all(isinstance(outcome, Position) for outcome in outcomes)
        assert wal.stat().st_size - before < 21 * alone / 3
        for number in range(20):
            assert await whole(store, f"k{number}") == [(1, b"x")]


async def test_each_caller_of_a_commit_has_its_own_outcome(tmp_path: Path) -> None:
    """LOG-1, LOG-2, LOG-4: refusals, errors and successes of one commit do not touch each other."""
    gate = Gate()

    def fails(transaction: Any) -> int:
        transaction.execute("CREATE TABLE never (x)")
        raise LookupError("no")

    def wrong(transaction: Any) -> int:
        transaction.execute("CREATE TABLE never (x)")
        return transaction.execute("INSERT OR ROLLBACK INTO never VALUES (1, 2, 3)")[0][0]

    def gives_up(transaction: Any) -> int:
        transaction.execute("CREATE TABLE never (x UNIQUE)")
        transaction.execute("INSERT INTO never VALUES (1)")
        return transaction.execute("INSERT OR ROLLBACK INTO never VALUES (1)")[0][0]

    async with await SqliteStore.open(tmp_path / "turns.db", clock=gate) as store:
        position = await append(store, "known", b"1")
        outcomes = await _group(
            store,
            gate,
            append(store, "a", b"1"),
            store.append("known", [b"x"], expected=NOWHERE, head=HEAD),
            store.append("known", [b"x"], expected=position, head=HEAD, guard=Guard(not_after=1)),
            store.append_with("b", fails, lambda _: [b"x"], expected=NOWHERE, head=HEAD),
            append(store, "c", b"1"),
            store.append_with("d", wrong, lambda _: [b"x"], expected=NOWHERE, head=HEAD),
            store.append_with("e", gives_up, lambda _: [b"x"], expected=NOWHERE, head=HEAD),
            store.erase("nothing"),
            append(store, "f", b"1"),
        )
        kinds: list[type] = [type(outcome) for outcome in outcomes]
        assert kinds[:5] == [Position, Behind, GuardFailed, LookupError, Position]
        assert issubclass(kinds[5], sqlite3.Error)
        assert kinds[6:] == [sqlite3.IntegrityError, bool, Position]
        assert [head.key async for head in store.heads()] == ["a", "c", "f", "first", "known"]
        assert await whole(store, "known") == [(1, b"1")]


async def test_a_dependent_pair_in_one_commit(tmp_path: Path) -> None:
    """LOG-2: two appends at one tail in one commit: the first is in, the second is told of it, stamp and all."""
    gate = Gate()
    async with await SqliteStore.open(tmp_path / "turns.db", clock=gate) as store:
        first, second = await _group(
            store,
            gate,
            store.append("k", [b"1"], expected=NOWHERE, head=HEAD),
            store.append("k", [b"2"], expected=NOWHERE, head=HEAD),
        )
        assert isinstance(second, Behind)
        assert second.tail.position == first.position
        assert [record.body for record in second.tail.records] == [b"1"]


# --- closing ---------------------------------------------------------------------------------------------------


async def test_a_closed_store(tmp_path: Path) -> None:
    """Every call says so; closing again is nothing; the file is whole, without a WAL beside it."""
    store = await SqliteStore.open(tmp_path / "turns.db")
    await append(store, "k", b"1")
    await store.close()
    await store.close()
    for call in (store.read("k"), append(store, "k", b"2"), store.erase("k"), store.advance_clock(1)):
        with pytest.raises(StoreClosed):
            await call
    with pytest.raises(StoreClosed):
        _ = [head async for head in store.heads()]
    assert os.listdir(tmp_path) == ["turns.db"]


async def test_nobody_waits_for_ever_behind_a_close(tmp_path: Path) -> None:
    """Calls that race with a close from other threads are done or told StoreClosed, each of them."""
    store = await SqliteStore.open(tmp_path / "turns.db")
    outcomes: list[Any] = []
    under_way = threading.Event()

    def caller(name: int) -> None:
        async def calls() -> None:
            for number in range(50):
                try:
                    outcomes.append(await store.append(f"{name} {number}", [b"x"], expected=NOWHERE, head=HEAD))
                except StoreClosed as e:
                    outcomes.append(e)
                if len(outcomes) >= 20:
                    under_way.set()

        asyncio.run(asyncio.wait_for(calls(), 30))

    async with anyio.create_task_group() as group:
        for name in range(4):
            group.start_soon(anyio.to_thread.run_sync, caller, name)
        await anyio.to_thread.run_sync(under_way.wait, 30)
        await store.close()
    assert len(outcomes) == 200
    done = sum(isinstance(outcome, Appended) for outcome in outcomes)
    assert done >= 20
    async with await SqliteStore.open(tmp_path / "turns.db") as again:
        assert len([head async for head in again.heads()]) == done


async def test_space_is_handed_back(tmp_path: Path) -> None:
    """`tidy` makes the file as small as what is in it, also beside a store that works."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path) as store:
        for number in range(30):
            await append(store, f"k{number}", random.Random(number).randbytes(50_000))
        await store.tidy()
        large = path.stat().st_size
        for number in range(29):
            await store.erase(f"k{number}")
        await store.tidy()
        assert path.stat().st_size < large / 10
        assert path.with_name("turns.db-wal").stat().st_size == 0
        await append(store, "more", b"x")
        assert [head.key async for head in store.heads()] == ["k29", "more"]


# --- the transaction of a tool ---------------------------------------------------------------------------------


async def _run(store: SqliteStore, *statements: str, key: str = "tool") -> Any:
    """Run statements as one effect; what the last one gives."""

    def effect(transaction: Any) -> Any:
        return [transaction.execute(statement) for statement in statements][-1]

    known = (await store.read(key)).position
    outcome = await store.append_with(key, effect, lambda _: [b"x"], expected=known, head=HEAD)
    assert not isinstance(outcome, Behind | GuardFailed)
    return outcome[0]


REFUSED = [
    "COMMIT",
    "END",
    "ROLLBACK",
    "BEGIN",
    "SAVEPOINT mine",
    "RELEASE one",
    "ROLLBACK TO one",
    "PRAGMA user_version = 9",
    "PRAGMA writable_schema = ON",
    "PRAGMA synchronous = OFF",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "VACUUM",
    "DELETE FROM head",
    "DELETE FROM main.record",
    'DELETE FROM "RECORD"',
    "INSERT INTO record (log, seq, at, body) VALUES (?1, ?1, ?1, ?1)",
    "INSERT OR REPLACE INTO meta VALUES ('clock_offset_ms', 5)",
    "UPDATE head SET tail = 9",
    "UPDATE meta SET value = value + 1",
    "DROP TABLE meta",
    "DROP INDEX record_log_seq",
    "ALTER TABLE head ADD COLUMN mine",
    "ALTER TABLE record RENAME TO old",
    "ALTER TABLE head RENAME COLUMN tail TO length",
    "CREATE INDEX mine_on_head ON head (phase)",
    "CREATE TRIGGER mine AFTER INSERT ON record BEGIN DELETE FROM orders; END",
    "CREATE TEMP TABLE head (key, incarnation, tail)",
    "CREATE TEMP VIEW record AS SELECT 1",
    "CREATE TEMP TRIGGER mine AFTER INSERT ON main.record BEGIN SELECT 1; END",
    "WITH doomed AS (SELECT id FROM head) DELETE FROM head WHERE id IN doomed",
    "INSERT INTO orders_to_head VALUES (1)",
]


@pytest.mark.parametrize("statement", REFUSED)
async def test_statements_that_a_tool_may_not_run(memory: SqliteStore, statement: str) -> None:
    """Nothing that ends or outlives the transaction, nothing on the store's own tables; the tool gets SQLite's refusal."""
    await _run(
        memory,
        "CREATE TABLE orders (x)",
        "CREATE VIEW orders_to_head AS SELECT 1 AS x",
        "CREATE TRIGGER through INSTEAD OF INSERT ON orders_to_head BEGIN SELECT 1; END",
        key="setup",
    )
    if "orders_to_head" in statement:
        # The trigger itself would be refused where it is made; made by another program, it is refused where it fires.
        with pytest.raises(sqlite3.DatabaseError):
            await _run(
                memory,
                "DROP TRIGGER through",
                "CREATE TRIGGER through INSTEAD OF INSERT ON orders_to_head BEGIN DELETE FROM head; END",
                statement,
            )
    else:
        with pytest.raises(sqlite3.Error):
            await _run(memory, "INSERT INTO orders VALUES (1)", statement)
    assert await _run(memory, "SELECT count(*) FROM orders", key="look") == [(0,)]
    assert await whole(memory, "tool") == []
    assert await whole(memory, "setup") == [(1, b"x")]
    assert await _run(memory, "SELECT value FROM meta", key="look") == [(0,)]
    assert await _run(memory, "SELECT count(*) FROM sqlite_temp_schema", key="look") == [(0,)]
    await append(memory, "after", b"1")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE receipts (id INTEGER PRIMARY KEY, head TEXT, record TEXT, meta TEXT)",
        "INSERT INTO orders (head, meta) VALUES ('a', 'b')",
        "UPDATE orders SET head = 'x', record = 'y'",
        "DELETE FROM orders WHERE meta IS NULL",
        "CREATE INDEX orders_head ON orders (head)",
        "CREATE TRIGGER orders_log AFTER INSERT ON orders BEGIN UPDATE orders SET meta = 'new'; END",
        "ALTER TABLE orders ADD COLUMN note",
        "ALTER TABLE orders RENAME COLUMN head TO headline",
        "DROP TABLE orders",
        "SELECT key, tail FROM head JOIN record ON log = head.id",
    ],
)
async def test_statements_that_a_tool_may_run(memory: SqliteStore, statement: str) -> None:
    """Everything on tables of its own, whatever their columns are called; and reading the store's."""
    await _run(memory, "CREATE TABLE orders (head, record, meta)", "INSERT INTO orders VALUES (1, 2, 3)", key="setup")
    await _run(memory, statement)
    assert await whole(memory, "tool") == [(1, b"x")]


async def test_parameters_and_rows(memory: SqliteStore) -> None:
    """Values as parameters, by place and by name; rows come back."""

    def effect(transaction: Any) -> Any:
        transaction.execute("CREATE TABLE orders (a, b)")
        transaction.execute("INSERT INTO orders VALUES (?, ?)", (1, "one"))
        transaction.execute("INSERT INTO orders VALUES (:a, :b)", {"a": 2, "b": b"two"})
        return transaction.execute("SELECT * FROM orders ORDER BY a")

    outcome = await memory.append_with("k", effect, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    assert outcome[0] == [(1, "one"), (2, b"two")]


async def test_the_transaction_is_over_when_the_tool_ends(memory: SqliteStore) -> None:
    """A tool that keeps it gets an error, whether it ended well or not."""
    kept: list[Any] = []

    def keeps(transaction: Any) -> int:
        kept.append(transaction)
        return 1

    def keeps_and_fails(transaction: Any) -> int:
        kept.append(transaction)
        raise LookupError

    await memory.append_with("k", keeps, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    with pytest.raises(LookupError):
        await memory.append_with("l", keeps_and_fails, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    for transaction in kept:
        with pytest.raises(sqlite3.ProgrammingError, match="over"):
            transaction.execute("SELECT 1")


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("INSERT INTO orders VALUES (1)", sqlite3.IntegrityError),
        ("SELECT * FROM no_such_table", sqlite3.OperationalError),
        ("SELEKT 1", sqlite3.OperationalError),
        ("SELECT 1; SELECT 2", sqlite3.Error),
        ("COMMIT", sqlite3.DatabaseError),
    ],
)
async def test_a_tools_own_mistakes_come_back_to_it(
    memory: SqliteStore, statement: str, error: type[sqlite3.Error]
) -> None:
    """They are SQLite's errors, not the store's: the store works, and a constraint is an answer that a tool may want."""
    await _run(memory, "CREATE TABLE orders (x UNIQUE)", "INSERT INTO orders VALUES (1)", key="setup")
    with pytest.raises(error):
        await _run(memory, statement)

    def handles(transaction: Any) -> str:
        try:
            transaction.execute(statement)
        except sqlite3.Error:
            transaction.execute("INSERT INTO orders VALUES (2)")
        return "handled"

    outcome = await memory.append_with("handled", handles, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    assert outcome[0] == "handled"
    assert await _run(memory, "SELECT x FROM orders ORDER BY x", key="look") == [(1,), (2,)]


async def test_a_tool_that_swallows_the_end_of_its_transaction(memory: SqliteStore) -> None:
    """Field case 22: once SQLite has rolled back by itself, what the tool runs next must not be stored on its own."""
    await _run(memory, "CREATE TABLE orders (x UNIQUE)", "INSERT INTO orders VALUES (1)", key="setup")

    def swallows(transaction: Any) -> int:
        transaction.execute("INSERT INTO orders VALUES (2)")
        for statement in ("INSERT OR ROLLBACK INTO orders VALUES (1)", "INSERT INTO orders VALUES (3)"):
            try:
                transaction.execute(statement)
            except sqlite3.Error:
                continue
        return 1

    with pytest.raises(sqlite3.IntegrityError):
        await memory.append_with("k", swallows, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    assert await _run(memory, "SELECT x FROM orders", key="look") == [(1,)]
    assert await whole(memory, "k") == []
