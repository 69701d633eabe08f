"""Several real processes on one SQLite file: LOG-2, LOG-3 and LOG-5 of `turnkeeper.log.store.Store` between processes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio

from tests.conformance.support import HEAD, append, contend, whole
from tests.conformance.tally import adding, tally_log
from tests.crew import PATIENCE, SPAWN, crew
from turnkeeper.log.record import NOWHERE, Appended
from turnkeeper.stores.sqlite import SqliteStore

PROCESSES = 4


async def _append_many(number: int, path: str, count: int) -> list[tuple[int, bytes]]:
    """Append `count` records to the one key, whatever the others do; what was accepted, by sequence."""
    async with await SqliteStore.open(path) as store:
        return await contend(store, "contended", str(number), count)


def test_contended_appends(tmp_path: Path) -> None:
    """LOG-2, LOG-5: four processes append to one key: every accepted append has a sequence of its own; none is lost."""
    path, count = str(tmp_path / "turns.db"), 50
    accepted = sorted(pair for pairs in crew(PROCESSES, _append_many, path, count) for pair in pairs)
    assert [seq for seq, _ in accepted] == list(range(1, PROCESSES * count + 1))

    async def look() -> list[tuple[int, bytes]]:
        async with await SqliteStore.open(path) as store:
            return await whole(store, "contended")

    assert anyio.run(look) == accepted
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def _tally(number: int, path: str, tasks: int, count: int) -> int:
    async with await SqliteStore.open(path) as store:
        log = tally_log(store)

        async def work(task: int) -> None:
            for entry in range(count):
                await log.ask(adding(1, f"{number}:{task}:{entry}"))

        async with anyio.create_task_group() as group:
            for task in range(tasks):
                group.start_soon(work, task)
        return log.appends


def test_a_log_shared_by_processes_and_tasks(tmp_path: Path) -> None:
    """LOG-2: four processes with three tasks each put 120 different questions: each is in once, and folded alike by all."""
    path = str(tmp_path / "turns.db")
    assert crew(PROCESSES, _tally, path, 3, 10) == [30] * PROCESSES

    async def look() -> tuple[int, int]:
        async with await SqliteStore.open(path) as store:
            state = await tally_log(store).read()
            return state.total, len(set(state.by))

    assert anyio.run(look) == (120, 120)


async def _create(number: int, path: str, files: int) -> list[bytes]:
    """Open files that are not there yet, all processes at once; the life of the log that is made in each."""
    lives: list[bytes] = []
    for index in range(files):
        async with await SqliteStore.open(f"{path}/{index}.db") as store:
            outcome = await store.append("k", [b"%d" % number], expected=NOWHERE, head=HEAD)
            position = outcome.position if isinstance(outcome, Appended) else None
            lives.append((position or (await store.read("k")).position).incarnation)
    return lives


def test_all_make_the_file_at_once(tmp_path: Path) -> None:
    """LOG-5: processes that start together make one store of a new file; none takes it for another program's, or fails."""
    answers = crew(PROCESSES, _create, str(tmp_path), 25)
    assert all(lives == answers[0] for lives in answers)


async def _look_at_clock(number: int, path: str, ready: Any, moved: Any) -> tuple[int, int, int]:
    """The store's time before and behind the moment at which process 0 moves its clock, and the stamp of an append."""
    async with await SqliteStore.open(path) as store:
        before = (await store.read("k")).now
        ready.wait(PATIENCE)
        if number == 0:
            await store.advance_clock(3_600_000)
        moved.wait(PATIENCE)
        behind = (await store.read("k")).now
        await append(store, f"k{number}", b"x")
        return before, behind, (await store.read(f"k{number}")).records[0].at


def test_the_test_clock_is_everybodys(tmp_path: Path) -> None:
    """LOG-3: the store's clock is one for all processes: moved by one, it is moved for the readings and stamps of all."""
    count = 3
    ready, moved = SPAWN.Barrier(count), SPAWN.Barrier(count)
    path = str(tmp_path / "turns.db")
    for before, behind, stamp in crew(count, _look_at_clock, path, ready, moved):
        assert 3_600_000 <= behind - before < 3_700_000
        assert stamp >= behind
