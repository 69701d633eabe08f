"""What goes wrong between a process and PostgreSQL: cut connections, killed servers, locks, limits (LOG-1, LOG-6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest

from tests.conformance.support import HEAD, append, bodies, listed, whole
from tests.conformance.tally import adding, tally_log
from tests.servers.postgres import PATIENCE, Server
from tests.servers.proxy import Proxy, When
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Position
from turnkeeper.stores.postgres import PostgresStore

pytestmark = pytest.mark.anyio

WHENS: tuple[When, When] = ("before", "after")


@asynccontextmanager
async def proxied(postgres: Server, database: str, pool_size: int = 4) -> AsyncGenerator[tuple[PostgresStore, Proxy]]:
    """A store whose connections go through a proxy."""
    async with Proxy(postgres.port) as proxy:
        url = postgres.url(database, sslmode="disable", pool_size=pool_size).replace(
            f":{postgres.port}/", f":{proxy.port}/"
        )
        async with await PostgresStore.open(url) as store:
            yield store, proxy


@contextmanager
def held(postgres: Server, database: str, statement: str) -> Generator[psycopg.Connection]:
    """Another session's transaction that has run `statement` and not ended; rolled back at the end."""
    with psycopg.connect(postgres.url(database)) as other:
        other.execute(statement.encode())
        try:
            yield other
        finally:
            other.rollback()


HOLD_K = "SELECT FROM turnkeeper.head WHERE key = 'k' FOR UPDATE"
HOLD_ALL = "LOCK TABLE turnkeeper.head IN ACCESS EXCLUSIVE MODE"


async def until(postgres: Server, condition: str, database: str) -> None:
    """Wait until a session of the database is as `condition` on pg_stat_activity says."""
    query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND {condition}"
    deadline = time.monotonic() + PATIENCE
    while postgres.run(query, [database]) == [(0,)]:
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.01)


WAITING = "wait_event_type = 'Lock'"
IN_TRANSACTION = "state IN ('idle in transaction', 'idle in transaction (aborted)')"


def stuck(postgres: Server, database: str) -> list[tuple[object, ...]]:
    """Sessions of the database that stand in a transaction while nobody works in it."""
    return postgres.run(f"SELECT pid, query FROM pg_stat_activity WHERE datname = %s AND {IN_TRANSACTION}", [database])


# --- cut connections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("first", [True, False], ids=["creating", "appending"])
async def test_a_cut_append_is_in_or_not(postgres: Server, database: str, when: When, first: bool) -> None:
    """LOG-6: the connection is cut before the server got an append, or after: the error says unknown, a read tells which."""
    async with proxied(postgres, database, pool_size=1) as (store, proxy):
        known = NOWHERE if first else await append(store, "k", b"0")
        cut = proxy.cut_next(when)
        with pytest.raises(errors.StoreUnavailable) as raised:
            await store.append("k", [b"a", b"b"], expected=known, head=HEAD)
        assert raised.value.applied is None
        assert cut.is_set()
        expected = [b"a", b"b"] if when == "after" else []
        assert bodies(await store.read("k", after=known)) == expected
        outcome = await store.append("k", [b"next"], expected=known, head=HEAD)
        assert isinstance(outcome, Behind if when == "after" else Appended)
        assert stuck(postgres, database) == []


@pytest.mark.parametrize("when", WHENS)
async def test_the_shell_finds_out_what_became_of_it(postgres: Server, database: str, when: When) -> None:
    """LOG-6: a question whose append was cut is answered as ever, and is in the log once, though no rule would tell a repeat."""
    async with proxied(postgres, database, pool_size=1) as (store, proxy):
        log = tally_log(store)
        for _ in range(3):
            await log.ask(adding(1))
            proxy.cut_next(when)
            assert await log.ask(adding(10)) == "added"
        assert (await tally_log(store).read()).total == 33
        assert len(await whole(store, "tally")) == 6


@pytest.mark.parametrize("when", WHENS)
async def test_cut_neighbours(postgres: Server, database: str, when: When) -> None:
    """LOG-6: appends that shared a statement share its fate: each is told that it is not known, all are in or none is."""
    async with proxied(postgres, database, pool_size=1) as (store, proxy):
        # The first call takes the only lane; the others wait, and go together.
        with held(postgres, database, HOLD_ALL):
            first = asyncio.ensure_future(store.read("k"))
            await until(postgres, WAITING, database)
            calls = [asyncio.ensure_future(append(store, f"k{number}", b"x")) for number in range(10)]
            await asyncio.sleep(0)
            cut = proxy.cut_next(when)
        await first
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert cut.is_set()
        assert {type(answer) for answer in answers} == {errors.StoreUnavailable}
        assert len({id(answer) for answer in answers}) == 10
        assert len(await listed(store)) == (10 if when == "after" else 0)


@pytest.mark.parametrize("when", WHENS)
async def test_a_cut_read_is_repeated(postgres: Server, database: str, when: When) -> None:
    """What only reads is asked again on a new connection, once: a second cut is told."""
    async with proxied(postgres, database, pool_size=1) as (store, proxy):
        await append(store, "k", b"1")
        made = proxy.made
        proxy.cut_next(when)
        assert await whole(store, "k") == [(1, b"1")]
        assert proxy.made == made + 1
        proxy.cut_next(when)
        assert [head.key for head in await listed(store)] == ["k"]

        cut = proxy.cut_next(when, None, when)  # lets the start of the second connection through
        with pytest.raises(errors.StoreUnavailable):
            await store.read("k")
        assert cut.is_set()
        assert await whole(store, "k") == [(1, b"1")]


async def test_erasing_is_not_repeated(postgres: Server, database: str) -> None:
    """LOG-5: an erasure whose answer was lost is not repeated by itself: a younger log could be there by then."""
    async with proxied(postgres, database, pool_size=1) as (store, proxy):
        await append(store, "k", b"1")
        proxy.cut_next("after")
        with pytest.raises(errors.StoreUnavailable) as raised:
            await store.erase("k")
        assert raised.value.applied is None
        assert (await store.read("k")).position == NOWHERE


async def test_connections_cut_while_idle(postgres: Server, database: str) -> None:
    """A connection that the server ended between two calls is noticed before anything is sent on it: no call fails."""
    async with await PostgresStore.open(postgres.url(database, pool_size=2)) as store:
        position = await append(store, "k", b"0")
        for number in range(5):
            await asyncio.gather(*(store.read("k") for _ in range(4)))
            ended = postgres.run(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [database]
            )
            assert ended
            position = await append(store, "k", b"%d" % number, expected=position)
        assert len(await whole(store, "k")) == 6


async def test_a_terminated_backend(postgres: Server, database: str) -> None:
    """LOG-6: the session is terminated while its append waits: unknown to the caller, undone, and the pool of one heals."""
    async with await PostgresStore.open(postgres.url(database, pool_size=1)) as store:
        position = await append(store, "k", b"1")
        with held(postgres, database, HOLD_K):
            call = asyncio.ensure_future(append(store, "k", b"2", expected=position))
            await until(postgres, WAITING, database)
            postgres.run(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND {WAITING}", [database]
            )
            with pytest.raises(errors.StoreUnavailable) as raised:
                await call
        assert raised.value.applied is None
        assert await whole(store, "k") == [(1, b"1")]
        await append(store, "k", b"2", expected=position)


# --- cancellation (field case 26) ------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "append", "read", "heads", "erase", "promises"])
async def test_cancelled_anywhere(postgres: Server, database: str, call: str) -> None:
    """LOG-6: cancelled after any number of turns of the loop: whole or not at all, and the pool of one works directly."""
    calls: dict[str, Callable[[PostgresStore, Position], Coroutine[Any, Any, object]]] = {
        "create": lambda store, _: append(store, "new", b"a", b"b"),
        "append": lambda store, position: append(store, "k", b"a", b"b", expected=position),
        "read": lambda store, _: store.read("k"),
        "heads": lambda store, _: listed(store),
        "erase": lambda store, _: store.erase("other"),
        "promises": lambda store, _: store.promises(),
    }
    url = postgres.url(database, pool_size=1)
    async with await PostgresStore.open(url) as store, await PostgresStore.open(url) as other:
        position = await append(store, "k", b"0")
        for steps in range(12):
            task = asyncio.ensure_future(calls[call](store, position))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(1):
                await append(other, f"of another process {call} {steps}", b"x")
            tail = await store.read("k", after=position)
            assert bodies(tail) in ([], [b"a", b"b"])
            position = await append(store, "k", b"next", expected=tail.position)
            assert len(await whole(store, "new")) in (0, 2)
            await store.erase("new")
        assert stuck(postgres, database) == []
        locks = "SELECT count(*) FROM pg_locks WHERE mode <> 'AccessShareLock' AND pid IN (SELECT pid FROM pg_stat_activity "
        assert postgres.run(f"{locks} WHERE datname = %s)", [database]) == [(0,)]


async def test_cancelled_while_it_waits_for_a_lock(postgres: Server, database: str) -> None:
    """LOG-6: an append cancelled while another holds its log: later it is in or not, once; a repeat does not double it."""
    async with await PostgresStore.open(postgres.url(database, pool_size=2)) as store:
        position = await append(store, "k", b"0")
        with held(postgres, database, HOLD_K):
            call = asyncio.ensure_future(append(store, "k", b"1", expected=position))
            await until(postgres, WAITING, database)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await append(store, "meanwhile", b"x")
        outcome = await store.append("k", [b"1"], expected=position, head=HEAD)
        assert isinstance(outcome, Appended | Behind)
        assert await whole(store, "k") == [(1, b"0"), (2, b"1")]


async def test_a_read_behind_a_cancelled_append(postgres: Server, database: str) -> None:
    """LOG-6: what is read, or erased, behind a cancelled append tells for good what became of it: it does not come later."""
    async with await PostgresStore.open(postgres.url(database, pool_size=3)) as store:
        position = await append(store, "k", b"0")
        await append(store, "other", b"0")
        with held(postgres, database, HOLD_K):
            call = asyncio.ensure_future(append(store, "k", b"1", expected=position))
            await until(postgres, WAITING, database)
            call.cancel()
            reading = asyncio.ensure_future(whole(store, "k"))
            assert await whole(store, "other") == [(1, b"0")]
            assert not reading.done()
        assert await reading == [(1, b"0"), (2, b"1")]
        for steps in range(20):  # also cancelled in the moment in which its answer comes
            call = asyncio.ensure_future(append(store, f"k{steps}", b"1"))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            first = await whole(store, f"k{steps}")
            assert await whole(store, f"k{steps}") == first
            await store.erase(f"k{steps}")
            assert await whole(store, f"k{steps}") == []


async def test_cancelled_before_it_was_sent(postgres: Server, database: str) -> None:
    """LOG-6: a call that is cancelled while it waits for a connection is left undone."""
    async with await PostgresStore.open(postgres.url(database, pool_size=1)) as store:
        with held(postgres, database, HOLD_ALL):
            first = asyncio.ensure_future(store.read("k"))
            await until(postgres, WAITING, database)
            calls = [asyncio.ensure_future(append(store, f"k{number}", b"x")) for number in range(6)]
            await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
        await first
        await asyncio.gather(*calls, return_exceptions=True)
        assert [head.key for head in await listed(store)] == ["k1", "k3", "k5"]


# --- waiting for others ----------------------------------------------------------------------------------------


async def test_a_log_that_another_holds(postgres: Server, database: str) -> None:
    """Who waits too long for a log is told so, and nothing is changed."""
    async with await PostgresStore.open(postgres.url(database, pool_size=2, busy_timeout=0.3)) as store:
        position = await append(store, "k", b"0")
        with held(postgres, database, HOLD_K):
            calls = [append(store, "k", b"1", expected=position) for _ in range(3)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {errors.StoreBusy}
            assert {answer.applied for answer in answers if isinstance(answer, errors.StoreError)} == {False}
            with pytest.raises(errors.StoreBusy):
                await store.erase("k")
            assert await whole(store, "k") == [(1, b"0")]
        assert await whole(store, "k") == [(1, b"0")]
        await append(store, "k", b"1", expected=position)


async def test_who_waits_for_a_log_holds_up_nobody(postgres: Server, database: str) -> None:
    """While many wait for a log that another holds, one connection is left for the others, in whatever statement they were."""
    async with await PostgresStore.open(postgres.url(database, pool_size=2, busy_timeout=PATIENCE)) as store:
        position = await append(store, "k", b"0")
        with held(postgres, database, HOLD_K):
            calls = [asyncio.ensure_future(append(store, "k", b"1", expected=position)) for _ in range(3)]
            calls += [asyncio.ensure_future(append(store, f"k{number}", b"x")) for number in range(20)]
            calls += [asyncio.ensure_future(append(store, "k", b"1", expected=position)) for _ in range(3)]
            await until(postgres, WAITING, database)
            calls += [asyncio.ensure_future(append(store, f"l{number}", b"x")) for number in range(20)]
            async with asyncio.timeout(PATIENCE / 2):
                await asyncio.gather(*calls[3:23], *calls[26:])
                # By now every lane that may wait for the log does.
                await asyncio.gather(*(append(store, f"m{number}", b"x") for number in range(20)))
            assert not any(call.done() for call in (*calls[:3], *calls[23:26]))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Position) for answer in answers) == 41
        assert await whole(store, "k") == [(1, b"0"), (2, b"1")]


async def test_a_log_that_another_is_making(postgres: Server, database: str) -> None:
    """LOG-2: an append that makes a log waits for who is making it; undone, it is ours; done, we are behind."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        await append(store, "model", b"0")
        copy = (
            "INSERT INTO turnkeeper.head (key, incarnation, tail, compacted, kind, phase, labels, ttl_ms, keep_until, size, "
            "created, updated) SELECT 'k', 'abc', 0, 0, kind, phase, labels, 0, 0, 0, 0, 0 FROM turnkeeper.head"
        )
        for commits in (False, True):
            with held(postgres, database, copy) as maker:
                calls = [
                    asyncio.ensure_future(store.append("k", [b"1"], expected=NOWHERE, head=HEAD)) for _ in range(3)
                ]
                await until(postgres, WAITING, database)
                if commits:
                    maker.commit()
            outcomes = await asyncio.gather(*calls)
            assert sum(isinstance(outcome, Appended) for outcome in outcomes) == (0 if commits else 1)
            assert sum(isinstance(outcome, Behind) for outcome in outcomes) == (3 if commits else 2)
            await store.erase("k")


async def test_all_connections_busy(postgres: Server, database: str) -> None:
    """A store whose connections are all waiting says busy in time, to readers and writers, and works on afterwards."""
    async with await PostgresStore.open(postgres.url(database, pool_size=1, busy_timeout=0.3)) as store:
        await append(store, "k", b"0")
        with held(postgres, database, HOLD_ALL):
            began = time.monotonic()
            calls = [store.read("k"), append(store, "l", b"x"), listed(store), store.erase("k"), store.read("l")]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {errors.StoreBusy}
            assert time.monotonic() - began < 0.3 * 5 + 1
        assert await whole(store, "k") == [(1, b"0")]
        assert await whole(store, "l") == []


async def test_statements_that_the_server_ends(postgres: Server, database: str) -> None:
    """A statement timeout that the database's owner has set, or an operator's cancel: busy, and nothing changed."""
    async with await PostgresStore.open(postgres.url(database, pool_size=1)) as store:
        position = await append(store, "k", b"0")
        with held(postgres, database, HOLD_K):
            call = asyncio.ensure_future(append(store, "k", b"1", expected=position))
            await until(postgres, WAITING, database)
            postgres.run(f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE {WAITING}")
            with pytest.raises(errors.StoreBusy) as raised:
                await call
            assert raised.value.applied is False
        assert await whole(store, "k") == [(1, b"0")]
    postgres.run(f"ALTER DATABASE {database} SET statement_timeout = '200ms'")
    async with await PostgresStore.open(postgres.url(database)) as store:
        with held(postgres, database, HOLD_ALL), pytest.raises(errors.StoreBusy):
            await store.read("k")


async def test_a_guard_is_judged_behind_the_wait(postgres: Server, database: str) -> None:
    """LOG-4: an append that waits for the log's lock until its guard has ended is refused: the time is read under the lock."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        position = await append(store, "k", b"0")
        end = (await store.read("k")).now + 60_000
        with held(postgres, database, HOLD_K):
            call = asyncio.ensure_future(
                store.append("k", [b"1"], expected=position, head=HEAD, guard=Guard(not_after=end))
            )
            await until(postgres, WAITING, database)
            await store.advance_clock(120_000)
        outcome = await call
        assert isinstance(outcome, GuardFailed)
        assert outcome.now > end


async def test_a_migration_waits_no_longer_than_it_has_to(postgres: Server, database: str) -> None:
    """A listing holds no transaction between two pages, so that nobody waits for its reader."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        await asyncio.gather(*(append(store, f"k{number:03}", b"x") for number in range(250)))
        heads = store.heads()
        assert (await anext(heads)).key == "k000"
        in_transaction = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND xact_start IS NOT NULL"
        assert postgres.run(in_transaction, [database]) == [(0,)]
        with held(postgres, database, HOLD_ALL):
            pass
        assert len([head async for head in heads]) == 249
