"""Field case 22: a full disk in the middle of a commit is one typed error; nothing has changed, and a repeat succeeds."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from tests.cases.full_disk import FullDisk, Loss, dump, filling, make_ballast
from tests.cases.gate import Gate
from tests.cases.script import OWNER, STEPS, Script, plain, records
from tests.conformance.support import HEAD, append, whole
from turnkeeper.errors import StoreFull
from turnkeeper.log.record import NOWHERE, Appended, Position
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn_checkpoint import ToolCallState, TurnPhase

pytestmark = pytest.mark.anyio

Call = Callable[[], Awaitable[Any]]
NOISE = random.Random(22).randbytes(30_000).hex()
"""Text that does not get small, so that it needs pages of its own."""


async def refused(call: Call) -> bool:
    """Whether `call` met the full disk: one typed error, whose cause is SQLITE_FULL and not what was tried afterwards."""
    try:
        await call()
    except StoreFull as e:
        cause, applied = e.__cause__, e.applied
    else:
        return False
    assert isinstance(cause, sqlite3.OperationalError)
    assert cause.sqlite_errorcode == sqlite3.SQLITE_FULL
    assert applied is False
    return True


class Disk:
    """A store on a disk that fills up."""

    def __init__(self, path: Path, store: SqliteStore, disk: FullDisk) -> None:
        self.path = path
        self.store = store
        self.disk = disk

    async def each_statement(self, loss: Loss, call: Call) -> list[str]:
        """Let the disk be full at the first, second, ... statement of `call`; each time it has to change nothing.

        The statements that met the full disk. The last call goes through.
        """
        met: list[str] = []
        inode = os.stat(self.path).st_ino
        for number in count(1):
            before = await anyio.to_thread.run_sync(dump, self.path)
            self.disk.fill(number, loss)
            if not await refused(call):
                assert not self.disk.met
                self.disk.free()
                return met
            met.append(self.disk.met)
            assert await anyio.to_thread.run_sync(dump, self.path) == before
            assert os.stat(self.path).st_ino == inode
            self.disk.free()
        raise AssertionError


@pytest.fixture
async def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Disk]:
    """A store on a disk that fills up when it is told to."""
    path = tmp_path / "turns.db"
    with filling(monkeypatch) as disk:
        async with await SqliteStore.open(path) as store:
            make_ballast(path)
            yield Disk(path, store, disk)


LOSSES: tuple[Loss, Loss] = ("transaction", "statement")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", STEPS)
async def test_full_at_each_statement_of_a_mutation(full: Disk, name: str, loss: Loss) -> None:
    """Phase, revision, messages, slots are as before; the same call with the same arguments succeeds; ledger 1."""
    ledger: Counter[str] = Counter()
    script = Script(full.store, ledger)
    answers = await script.steps(STEPS[: STEPS.index(name)])
    snapshot = await script.session.load()
    answer: list[Any] = []

    async def call() -> None:
        answer[:] = [await script.step(name)]

    def checked(record: Call) -> Call:
        async def checked_call() -> None:
            try:
                await record()
            except StoreFull:
                found = await script.session.load()
                assert repr(found) == repr(snapshot)
                assert plain(found) == plain(snapshot)
                if name.startswith("complete"):
                    slot = await script.session.get_tool(0, int(name[-1]))
                    assert slot is not None
                    assert (slot.state, slot.owner_token) == (ToolCallState.EXECUTING, OWNER)
                raise

        return checked_call

    met = await full.each_statement(loss, checked(call))
    assert met[0].startswith("BEGIN")
    assert "COMMIT" in met
    assert any(sql.startswith("INSERT INTO record") for sql in met)

    clean = await SqliteStore.open(":memory:")
    async with clean:
        expected = Script(clean, Counter())
        wanted = await expected.steps(STEPS[: STEPS.index(name) + 1])
        assert [plain(one) for one in [*answers, *answer]] == [plain(one) for one in wanted]
        assert await records(full.store, script.session.key) == await records(clean, expected.session.key)
    assert (await script.finish()).phase is TurnPhase.COMPLETED
    assert sorted(ledger.values()) == [1, 1]


@pytest.mark.parametrize("loss", LOSSES)
async def test_full_at_each_statement_of_the_store(full: Disk, loss: Loss) -> None:
    """Creating, appending, compacting, erasing, moving the clock: at each statement all or nothing."""
    store = full.store
    position: list[Position] = [NOWHERE]

    async def appending(compact_through: int = 0) -> None:
        position[0] = await append(store, "k", b"a" * 5000, b"b", expected=position[0], compact_through=compact_through)

    assert await full.each_statement(loss, appending)
    assert await full.each_statement(loss, appending)
    compacting = await full.each_statement(loss, lambda: appending(3))
    assert any(sql.startswith("DELETE FROM record") for sql in compacting)
    assert [seq for seq, _ in await whole(store, "k")] == [4, 5, 6]

    async def moving() -> None:
        await store.advance_clock(1000)

    assert any(sql.startswith("UPDATE meta") for sql in await full.each_statement(loss, moving))

    async def erasing() -> None:
        assert await store.erase("k")

    erased = await full.each_statement(loss, erasing)
    assert any(sql.startswith("DELETE FROM record") for sql in erased)
    assert await whole(store, "k") == []


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("swallows", [False, True])
async def test_full_under_an_effect(full: Disk, loss: Loss, swallows: bool) -> None:
    """A tool in the store's transaction: its rows and the records are both there or both not, even if it swallows errors.

    SQLite is in autocommit once it has rolled back by itself: what the tool ran then would be stored on its own.
    """
    store = full.store
    await store.append_with(
        "setup", lambda t: t.execute("CREATE TABLE mine (n)"), lambda _: [b"x"], expected=NOWHERE, head=HEAD
    )
    swallowed = 0

    def effect(transaction: Any) -> int:
        nonlocal swallowed
        for number in range(3):
            try:
                transaction.execute(f"INSERT INTO mine VALUES ({number})")
            except sqlite3.Error:
                if not swallows:
                    raise
                swallowed += 1
        return 3

    async def call() -> None:
        outcome = await store.append_with("k", effect, lambda n: [b"%d" % n], expected=NOWHERE, head=HEAD)
        assert isinstance(outcome[1], Appended)  # pyright: ignore[reportGeneralTypeIssues]

    if swallows and loss == "statement":
        # Only the statement is undone, and the tool has decided to go on without it: nothing is lost that it counts on.
        full.disk.fill(5, loss)
        await call()
        assert swallowed == 1
        found = dump(full.path)
        assert len(found["mine"]) == 2
        return
    met = await full.each_statement(loss, call)
    assert sum(sql.startswith("INSERT INTO mine") for sql in met) == 3
    assert swallowed == (6 if swallows else 0)
    found = dump(full.path)
    assert [row[-1] for row in found["mine"]] == [0, 1, 2]
    assert await whole(store, "k") == [(1, b"3")]


async def test_one_that_does_not_fit_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    """Appends that share a commit: the large one is refused, those that fit are in, each with its own truth."""
    gate = Gate()
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, max_bytes=200_000, clock=gate) as store:
        gate.armed = True
        first = asyncio.ensure_future(append(store, "first", b"x"))
        await anyio.to_thread.run_sync(gate.entered.wait, 30)
        sizes = [10, 1_000_000, 20, 1_000_000, 30]
        group = [
            asyncio.ensure_future(store.append(f"k{n}", [b"a", bytes(size)], expected=NOWHERE, head=HEAD))
            for n, size in enumerate(sizes)
        ]
        await asyncio.sleep(0)
        gate.release.set()
        await first
        outcomes = await asyncio.gather(*group, return_exceptions=True)
        for n, (size, outcome) in enumerate(zip(sizes, outcomes, strict=True)):
            assert isinstance(outcome, Appended if size < 100 else StoreFull)
            assert len(await whole(store, f"k{n}")) == (2 if size < 100 else 0)


@pytest.mark.parametrize("name", STEPS)
async def test_a_bounded_store_that_is_really_full(tmp_path: Path, name: str) -> None:
    """`max_bytes`: full for real, with a page more at each try; after space is freed the same call goes through."""
    path = tmp_path / "turns.db"
    ledger: Counter[str] = Counter()
    async with await SqliteStore.open(path, max_bytes=1_000_000) as store:
        script = Script(store, ledger, padding=NOISE[: len(NOISE) // 2])
        await script.steps(STEPS[: STEPS.index(name)])
        ballast = await _fill(store)
        refusals = 0
        while True:
            before = await anyio.to_thread.run_sync(dump, path)
            if not await refused(lambda: script.step(name)):
                break
            assert await anyio.to_thread.run_sync(dump, path) == before
            refusals += 1
            await store.erase(ballast.pop())
        # Small changes may fit into pages that are there; a large value does not.
        assert refusals or not name.startswith(("start", "complete", "save_final_model", "reserve_final_delivery"))
        for key in ballast:
            await store.erase(key)
        assert (await script.finish()).phase is TurnPhase.COMPLETED
        assert sorted(ledger.values()) == [1, 1]
    assert path.stat().st_size <= 1_000_000


async def _fill(store: SqliteStore) -> list[str]:
    """Fill the store to its bound with logs that can be erased one by one; their keys, the small ones last."""
    keys: list[str] = []
    for size in (100_000, 20_000, 3500, 1):
        while True:
            key = f"ballast {len(keys)}"
            try:
                await append(store, key, bytes(size))
            except StoreFull:
                break
            keys.append(key)
    return keys


async def test_a_full_store_can_be_opened_read_and_emptied(tmp_path: Path) -> None:
    """Full is no damage: the same file, opened again, is read, is emptied, and takes new turns."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, max_bytes=300_000) as store:
        await _fill(store)
    before = dump(path)
    async with await SqliteStore.open(path, max_bytes=300_000) as store:
        assert dump(path) == before
        keys = [head.key async for head in store.heads()]
        assert len(keys) > 3
        with pytest.raises(StoreFull):
            await append(store, "more", bytes(50_000))
        for key in keys:
            assert await whole(store, key)
            assert await store.erase(key)
        await store.tidy()
        assert (await Script(store, Counter()).finish()).completed
    assert path.stat().st_size < 100_000
