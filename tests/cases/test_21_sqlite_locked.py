"""Field case 21: many processes on one SQLite file wait for each other, fail typed, and never use WAL over a network."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cases.full_disk import dump
from tests.cases.script import FINAL, MESSAGES, Script
from tests.conformance.support import HEAD, append, whole
from tests.crew import PATIENCE, SPAWN, Crew
from turnkeeper.errors import StoreBusy, StoreUnsuitable
from turnkeeper.log.record import NOWHERE, HeadQuery
from turnkeeper.stores.sqlite import SqliteStore, schema
from turnkeeper.turn_checkpoint import TurnCheckpointSession, TurnPhase

PROCESSES = 8
TURNS = 200


# --- (1) many processes ----------------------------------------------------------------------------------------


async def _take_turns(number: int, path: str, left: Any) -> int:
    """Turns of three mutations each; the last process lists them meanwhile, slowly."""
    async with await SqliteStore.open(path) as store:
        if number == PROCESSES:
            return await _list_slowly(store, left)
        try:
            for turn in range(TURNS):
                session = TurnCheckpointSession(store, f"turn {number}.{turn}")
                await session.start(MESSAGES, ["order"])
                await session.save_final_model(FINAL)
                assert (await session.mark_completed(allow_no_output=True)).completed
        finally:
            with left.get_lock():
                left.value -= 1
    return TURNS


async def _list_slowly(store: SqliteStore, left: Any) -> int:
    """List until all turns are over, with a pause between any two rows; the rows of the longest listing."""
    longest = 0
    while left.value:
        listed: list[str] = []
        async for head in store.heads(HeadQuery(kind="turn")):
            listed.append(head.key)
            if left.value:
                await asyncio.sleep(0.005)  # the case: a reader that is slow between rows
        assert len(listed) == len(set(listed))
        longest = max(longest, len(listed))
    return longest


def test_eight_processes_and_a_slow_listing(tmp_path: Path) -> None:
    """1,600 turns COMPLETED, no lock error to any caller, the file intact, and the listing blocked nobody."""
    path = tmp_path / "turns.db"
    left = SPAWN.Value("i", PROCESSES)
    crew = Crew(PROCESSES + 1, _take_turns, str(path), left)
    crew.start()
    *taken, longest = crew.bring()
    assert taken == [TURNS] * PROCESSES
    assert longest > 0

    async def phases() -> Counter[str]:
        async with await SqliteStore.open(path) as store:
            return Counter([head.phase async for head in store.heads(HeadQuery(kind="turn"))])

    assert anyio.run(phases) == {TurnPhase.COMPLETED.value: PROCESSES * TURNS}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# --- (2) a lock that is held -----------------------------------------------------------------------------------


async def _hold(_number: int, path: str, held: Any, let_go: Any) -> None:
    """Hold a write transaction until told."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE meta SET value = value + 0")
        held.set()
        assert let_go.wait(PATIENCE)
        connection.execute("ROLLBACK")


@pytest.mark.anyio
async def test_a_lock_that_is_held_too_long(tmp_path: Path) -> None:
    """The others wait for the documented time, then raise one typed error; nothing has changed, and a retry works."""
    path, wait = tmp_path / "turns.db", 0.3
    held, let_go = SPAWN.Event(), SPAWN.Event()
    async with await SqliteStore.open(path, busy_timeout=wait) as store:
        ledger: Counter[str] = Counter()
        script = Script(store, ledger)
        await script.steps(["start", "reserve_assistant", "claim 0"])
        position = await append(store, "other", b"1")
        crew = Crew(1, _hold, str(path), held, let_go)
        crew.start()
        try:
            assert await anyio.to_thread.run_sync(held.wait, PATIENCE)
            before = await anyio.to_thread.run_sync(dump, path)
            calls = {
                "begin": lambda: script.step("begin 0"),
                "append": lambda: append(store, "other", b"2", expected=position),
                "create": lambda: append(store, "new", b"1"),
                "erase": lambda: store.erase("other"),
                "clock": lambda: store.advance_clock(5),
            }
            for name, call in calls.items():
                started = time.monotonic()
                with pytest.raises(StoreBusy) as raised:
                    await call()
                assert time.monotonic() - started >= wait, name
                assert raised.value.applied is False
                assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
            # Readers are not held up at all: the log, the listing, and the session's own look.
            assert await whole(store, "other") == [(1, b"1")]
            assert len([head async for head in store.heads()]) == 2
            assert (await script.session.get_tool(0, 0)) is not None
            assert await anyio.to_thread.run_sync(dump, path) == before
            assert not ledger
        finally:
            let_go.set()
            await anyio.to_thread.run_sync(crew.bring)
        assert (await script.step("begin 0")).should_begin
        assert (await script.finish()).phase is TurnPhase.COMPLETED
        assert sorted(ledger.values()) == [1, 1]
        await append(store, "other", b"2", expected=position)


@pytest.mark.anyio
async def test_a_lock_that_is_let_go_in_time(tmp_path: Path) -> None:
    """A caller that waits gets through once the lock is free, without an error: it began by taking the lock."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, busy_timeout=30) as store:
        await append(store, "k", b"1")
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            waiting = asyncio.ensure_future(store.append("other", [b"1"], expected=NOWHERE, head=HEAD))
            reading = await store.read("k")
            assert len(reading.records) == 1
            assert not waiting.done()
            holder.execute("UPDATE meta SET value = value + 1")
            holder.execute("COMMIT")
            await waiting
        assert await whole(store, "other") == [(1, b"1")]


@pytest.mark.anyio
async def test_many_callers_wait_together(tmp_path: Path) -> None:
    """Callers behind a held lock share one wait: the last of them is not told after the sum of all."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, busy_timeout=0.3) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            outcomes = await asyncio.gather(
                *(store.append(f"k{n}", [b"1"], expected=NOWHERE, head=HEAD) for n in range(50)),
                return_exceptions=True,
            )
            assert all(isinstance(outcome, StoreBusy) for outcome in outcomes)
            assert time.monotonic() - started < 50 * 0.3 / 3
            holder.execute("ROLLBACK")
        assert [head async for head in store.heads()] == []


@pytest.mark.anyio
async def test_a_paused_listing_holds_no_lock(tmp_path: Path) -> None:
    """Between two rows of a listing another process writes, checkpoints the WAL whole, and even locks the file for itself."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path) as store:
        await asyncio.gather(*(append(store, f"k{n:03}", b"x") for n in range(250)))
        seen = 0
        async for _ in store.heads():
            seen += 1
            if seen in (1, 100, 201):
                with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
                    other.execute("BEGIN IMMEDIATE")
                    other.execute("UPDATE meta SET value = value + 1")
                    other.execute("COMMIT")
                    busy, in_log, moved = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    assert (busy, in_log, moved) == (0, 0, 0)
        assert seen == 250


@pytest.mark.anyio
async def test_two_stores_in_threads_of_one_process(tmp_path: Path) -> None:
    """An API and a worker in one process, each with an event loop of its own, lose nothing either."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path):
        failures: list[BaseException] = []

        def other(name: str) -> None:
            async def work() -> None:
                async with await SqliteStore.open(path, busy_timeout=30) as store:
                    for turn in range(20):
                        assert (await Script(store, Counter(), trace=f"{name} {turn}").finish()).completed

            try:
                asyncio.run(work())
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=other, args=(name,)) for name in ("api", "worker")]
        for thread in threads:
            thread.start()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
        assert not failures
    async with await SqliteStore.open(path) as store:
        assert Counter([head.phase async for head in store.heads()]) == {"COMPLETED": 40}


# --- (3) network file systems ----------------------------------------------------------------------------------


def _lies_on(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "file_system_type", lambda _path: kind)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs"])
async def test_no_wal_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Refused with what to do instead, and nothing was made; without WAL it is warned about, and the health check says so."""
    path = tmp_path / "turns.db"
    _lies_on(kind, monkeypatch)
    with pytest.raises(StoreUnsuitable, match=f"network file system \\({kind}\\)"):
        await SqliteStore.open(path)
    assert not await anyio.to_thread.run_sync(path.exists)

    with caplog.at_level(logging.WARNING):
        async with await SqliteStore.open(path, journal="delete") as store:
            assert (await Script(store, Counter()).finish()).completed
            promises = {promise.name: promise for promise in await store.promises()}
    assert "network file system" in caplog.text
    assert not promises["file system"].holds
    assert promises["file system"].found == kind
    assert "local disk" in promises["file system"].advice
    assert promises["journal"].found == "delete"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.anyio
async def test_a_wal_file_that_was_moved_to_a_network_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not opened in WAL there, and stays as it is; without WAL, it goes on with what it holds."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path) as store:
        await append(store, "k", b"1")
    before = path.read_bytes()
    _lies_on("nfs4", monkeypatch)
    with pytest.raises(StoreUnsuitable):
        await SqliteStore.open(path)
    assert path.read_bytes() == before
    async with await SqliteStore.open(path, journal="delete") as store:
        assert await whole(store, "k") == [(1, b"1")]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", None])
async def test_local_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """A local disk, or one of which nothing is known, keeps WAL, and the health check names what was found."""
    _lies_on(kind, monkeypatch)
    async with await SqliteStore.open(tmp_path / "turns.db") as store:
        promises = {promise.name: promise for promise in await store.promises()}
    assert promises["file system"].holds
    assert promises["file system"].found == (kind or "unknown")
    assert promises["journal"].holds


MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
40 22 0:40 / /mnt rw - tmpfs tmpfs rw
41 40 0:41 / /mnt/with\040space\134 rw,relatime shared:9 - nfs4 server:/export rw,addr=10.0.0.2
42 40 0:42 / /mnt/größe/漢字 rw - cifs //server/share rw
43 41 0:43 / /mnt/with\040space\134/local rw - xfs /dev/vdb rw
44 40 0:44 /sub /mnt/share rw shared:3 master:1 - virtiofs host - rw
45 40 0:45 / /mnt/twice rw - ext4 /dev/vdc rw
46 40 0:46 / /mnt/twice rw - 9p host rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/turns.db", "ext4"),
        ("/mnt/turns.db", "tmpfs"),
        ("/mnt/with space\\/turns.db", "nfs4"),
        ("/mnt/with space\\/local/deep/turns.db", "xfs"),
        ("/mnt/with space/turns.db", "tmpfs"),
        ("/mnt/größe/漢字/turns.db", "cifs"),
        ("/mnt/größe/turns.db", "tmpfs"),
        ("/mnt/share/turns.db", "virtiofs"),
        ("/mnt/shared/turns.db", "tmpfs"),
        ("/mnt/twice/turns.db", "9p"),
    ],
)
def test_the_file_system_of_a_path(monkeypatch: pytest.MonkeyPatch, path: str, kind: str) -> None:
    """Read from the system's list of mounts: the deepest and latest mount, whatever its name is written with."""
    monkeypatch.setattr(Path, "read_text", lambda _path: MOUNTS.strip())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert schema.file_system_type(Path(path)) == kind


def test_a_link_to_a_network_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is where the file lies, not where the link to it does."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "turns.db").touch()
    (tmp_path / "turns.db").symlink_to(shared / "turns.db")
    mounts = f"1 0 1:1 / / rw - ext4 a rw\n2 1 1:2 / {shared} rw - nfs b rw"
    monkeypatch.setattr(Path, "read_text", lambda _path: mounts)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert schema.file_system_type(tmp_path / "turns.db") == "nfs"
    assert schema.file_system_type(tmp_path / "other.db") == "ext4"


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a list of mounts nothing is known, and nothing is refused."""

    def missing(_path: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert schema.file_system_type(Path("/anywhere/turns.db")) is None
