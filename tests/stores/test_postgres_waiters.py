"""Who waits for changes in PostgreSQL, in loops, threads and processes that end (LOG-10, field case 07)."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import time
from collections.abc import AsyncIterator

import pytest

from tests.conformance.support import append
from tests.crew import PATIENCE, Crew
from tests.servers.postgres import Server
from tests.stores.postgres_waiting import LISTENERS, LONG, locked, told, waiting
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE
from turnkeeper.stores.postgres import PostgresStore, listener


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


@pytest.mark.anyio
async def test_two_event_loops(postgres: Server, database: str, store: PostgresStore, other: PostgresStore) -> None:
    """Case 07: each loop that waits has a connection of its own; the object's `close` ends the other loop's wait too."""
    position = await append(store, "k", b"1")
    outcomes: list[bool | type[Exception]] = []

    def elsewhere() -> None:
        async def main() -> None:
            outcomes.append(await told(waiting(store, "k", position)))
            again = await store.read("k")
            try:
                await told(waiting(store, "k", again.position))
            except errors.StoreClosed as e:
                outcomes.append(type(e))

        asyncio.run(main())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    wait = waiting(store, "k", position)
    await locked(postgres, database, 2)
    assert postgres.run(LISTENERS) == [(2,)]
    await append(other, "k", b"2", expected=position)
    assert await told(wait)
    await locked(postgres, database, 1)
    await store.close()
    await asyncio.to_thread(thread.join, PATIENCE)
    assert outcomes == [True, errors.StoreClosed]
    await locked(postgres, database, 0)


def test_a_loop_that_is_over(postgres: Server, database: str) -> None:
    """Case 07: a loop ends in the middle of waits, twice: the store works in the next one, and its close ends every session."""
    url = postgres.url(database)
    store = asyncio.run(PostgresStore.open(url))

    async def leave() -> None:
        waiting(store, "k", NOWHERE)
        await locked(postgres, database, 1)

    async def last() -> None:
        async with store:
            wait = waiting(store, "k", NOWHERE)
            await locked(postgres, database, 1)
            await append(store, "k", b"1")
            assert await told(wait)

    asyncio.run(leave())
    asyncio.run(leave())
    stands_still = asyncio.new_event_loop()
    stands_still.run_until_complete(leave())
    asyncio.run(last())
    asyncio.run(locked(postgres, database, 0))
    stands_still.run_until_complete(asyncio.sleep(0))
    for task in asyncio.all_tasks(stands_still):
        with pytest.raises((errors.StoreClosed, asyncio.CancelledError)):
            stands_still.run_until_complete(task)
    stands_still.close()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
    deadline = time.monotonic() + PATIENCE
    while postgres.run(sessions, [database]) != [(0,)]:
        assert time.monotonic() < deadline


def test_forked_while_somebody_waits(postgres: Server, database: str) -> None:
    """Case 07: a forked child that waits too has a connection of its own, and its end does not end the parent's."""
    store = asyncio.run(PostgresStore.open(postgres.url(database)))
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        position = runner.run(append(store, "k", b"1"))
        wait = loop.create_task(store.changed("k", since=position, timeout=LONG))
        runner.run(locked(postgres, database, 1))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = not asyncio.run(store.changed("k", since=position, timeout=LONG))
                asyncio.run(store.close())
                del runner, loop
                gc.collect()
            finally:
                os._exit(status)
        runner.run(locked(postgres, database, 2))
        assert postgres.run(LISTENERS) == [(2,)]
        second = runner.run(append(store, "k", b"2", expected=position))
        assert runner.run(told(wait))
        again = loop.create_task(store.changed("k", since=second, timeout=LONG))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        runner.run(locked(postgres, database, 1))
        runner.run(append(store, "k", b"3", expected=second))
        assert runner.run(told(again))
        runner.run(store.close())


@pytest.mark.anyio
async def test_closed_while_somebody_waits(postgres: Server, database: str, store: PostgresStore) -> None:
    """LOG-10: closing the store ends waits with StoreClosed, and the listening session; the pool of a later store is free."""
    waits = [waiting(store, f"k{number}", NOWHERE) for number in range(3)]
    await locked(postgres, database, 3)
    await store.close()
    for wait in waits:
        with pytest.raises(errors.StoreClosed):
            await told(wait)
    with pytest.raises(errors.StoreClosed):
        await store.changed("k", since=NOWHERE, timeout=1)
    await locked(postgres, database, 0)
    await asyncio.to_thread(wait_for_no_session, postgres, database)


def wait_for_no_session(postgres: Server, database: str) -> None:
    """Wait until nobody is connected."""
    deadline = time.monotonic() + PATIENCE
    while postgres.run("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database]) != [(0,)]:
        assert time.monotonic() < deadline


@pytest.mark.anyio
async def test_cancelled_anywhere(
    postgres: Server, database: str, store: PostgresStore, other: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-10: a wait that is cancelled after any number of turns of the loop leaves no lock; the connection goes later."""
    position = await append(store, "k", b"1")
    for steps in range(60):
        wait = waiting(store, "k", position)
        for _ in range(steps):
            await asyncio.sleep(0 if steps % 2 else 0.0005)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
    await locked(postgres, database, 0)
    wait = waiting(store, "k", position)
    await locked(postgres, database, 1)
    monkeypatch.setattr(listener, "_LINGER", 0.01)
    await append(other, "k", b"2", expected=position)
    assert await told(wait)
    listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND query LIKE '%%unlock%%'"
    deadline = time.monotonic() + PATIENCE
    while postgres.run(listening, [database]) != [(0,)]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def _wait_for_ever(_number: int, url: str) -> None:
    async with await PostgresStore.open(url) as store:
        await store.changed("k", since=NOWHERE, timeout=math.inf)


@pytest.mark.usefixtures("store")
@pytest.mark.anyio
async def test_a_dead_waiter(postgres: Server, database: str) -> None:
    """LOG-10: a waiter that is killed is waited on by nobody: its lock ends with its session."""
    waiter = Crew(1, _wait_for_ever, postgres.url(database))
    waiter.start()
    await locked(postgres, database, 1)
    (process,) = waiter._processes  # pyright: ignore[reportPrivateUsage]
    process.kill()
    await locked(postgres, database, 0)
    with pytest.raises(EOFError):
        await asyncio.to_thread(waiter.bring)
