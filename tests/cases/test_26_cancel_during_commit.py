"""Field case 26: a call that is cancelled in the middle of a commit is whole or not at all, and nobody is held up."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio.to_thread
import pytest

from tests.cases.gate import Gate
from tests.cases.script import (
    ARGUMENTS,
    FINAL,
    OWNER,
    REPLY_KEY,
    STEPS,
    Script,
    plain,
    records,
    result,
    turn_without_tools,
)
from tests.conformance.support import HEAD, ClockedStore, bodies, whole
from tests.faulty import FaultyStore, When, cancelled, unavailable
from turnkeeper.log.record import NOWHERE
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn_checkpoint import ToolCallAction, ToolCallState, TurnCheckpointConflict, TurnPhase

pytestmark = pytest.mark.anyio

HOUR = 3_600_000
Act = Callable[[], Awaitable[Any]]
How = Literal["before", "after", "while"]
HOWS: tuple[How, ...] = ("before", "after", "while")


class CancelledAt:
    """Awaits a call and cancels its task at the call's nth suspension, wherever in its depths that is."""

    def __init__(self, call: Awaitable[Any], number: int) -> None:
        self._call = call
        self._number = number
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._call.__await__()
        sent: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                future = sent()
            except StopIteration as e:
                return e.value
            self.suspensions += 1
            if self.suspensions == self._number:
                # In the next turn of the loop, as a timeout or another task would: it waits on the store then.
                task.get_loop().call_soon(task.cancel)
            try:
                yield future
            except BaseException as e:
                thrown = e
                sent = lambda thrown=thrown: steps.throw(thrown)  # noqa: E731
            else:
                sent = lambda: next(steps)  # noqa: E731


async def outcome_of(call: Awaitable[Any]) -> Any:
    """What a call that runs in a task of its own returns or raises."""

    async def run() -> Any:
        return await call

    return (await asyncio.gather(asyncio.ensure_future(run()), return_exceptions=True))[0]


async def cancel(faulty: FaultyStore, act: Act, how: How, number: int) -> Any:
    """Act, cancelled at its nth call of the store (before or after it was done) or at its nth suspension."""
    if how == "while":
        faulty.plan()
        return await outcome_of(CancelledAt(act(), number))
    faulty.plan(*[None] * (number - 1), cancelled(how))
    outcome = await outcome_of(act())
    faulty.plan()
    return outcome


def others_can_write(store: Store) -> None:
    """Another process gets its write lock within a second."""
    if isinstance(store, SqliteStore) and store.path != ":memory:":
        with closing(sqlite3.connect(store.path, timeout=1, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")


class Clean(NamedTuple):
    """How it goes when nobody cancels: records before and after, and the answer."""

    before: list[Any]
    after: list[Any]
    answer: Any


async def sweep(
    store: ClockedStore, how: How, key: str, prepare: Callable[[FaultyStore], Awaitable[Act]], *, leases: bool = False
) -> int:
    """Cancel at the first, second, ... point until the call is through; how many points there were.

    Each time: the state is all before or all after, another whole turn works on the same store, and the repeated call
    gives the canonical answer and leaves the log as one call would (`leases`: with the lease once more extended).
    """
    faulty = FaultyStore(store)
    act = await prepare(faulty)
    before = await records(store, key)
    answer = repr(plain(await outcome_of(act())))
    clean = Clean(before, await records(store, key), answer)
    assert len(clean.after) > len(clean.before)
    found: list[Any] = []
    for number in count(1):
        await store.erase(key)
        act = await prepare(faulty)
        outcome = await cancel(faulty, act, how, number)
        if not isinstance(outcome, asyncio.CancelledError):
            assert repr(plain(outcome)) == clean.answer
            assert how != "after" or found == clean.after  # of the last point, behind the append itself
            return number - 1
        others_can_write(store)
        found = await records(store, key)
        assert found in (clean.before, clean.after)
        if how == "before" and number == 1:
            assert found == clean.before
        await turn_without_tools(faulty, f"another turn {number}")
        # Cancelled while it was on its way to a server, it may arrive now; there is nothing in between.
        assert await records(store, key) in (found, clean.after)
        assert repr(plain(await outcome_of(act()))) == clean.answer
        behind = await records(store, key)
        assert behind[: len(clean.after)] == clean.after
        assert len(behind) <= len(clean.after) + leases
    raise AssertionError


@pytest.mark.parametrize("fresh", [False, True], ids=["same session", "new session"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", STEPS)
async def test_every_mutation_of_a_turn(store: ClockedStore, name: str, how: How, fresh: bool) -> None:
    """Cancelled at every await point: CancelledError, all or nothing, a repeat is canonical, and the ledger ends at 1."""
    ledger: Counter[str] = Counter()
    scripts: list[Script] = []

    async def prepare(faulty: FaultyStore) -> Act:
        ledger.clear()
        faulty.plan()
        script = Script(faulty, ledger)
        await script.steps(STEPS[: STEPS.index(name)])
        scripts[:] = [script.on(faulty) if fresh else script]
        return lambda: scripts[0].step(name)

    key = Script(store, ledger).session.key
    points = await sweep(store, how, key, prepare, leases=name in ("claim 0", "renew 0"))
    assert points >= 1

    # To the end from a cancellation at the first point: whether it was applied or not, each effect happens once.
    await store.erase(key)
    faulty = FaultyStore(store)
    act = await prepare(faulty)
    assert isinstance(await cancel(faulty, act, how, 1), asyncio.CancelledError)
    snapshot = await scripts[0].finish()
    assert snapshot.phase is TurnPhase.COMPLETED
    assert snapshot.messages == scripts[0].transcript()
    assert sorted(ledger.values()) == [1, 1]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["doubt", "evidence", "resolve", "dispute"])
async def test_mutations_of_a_turn_in_doubt(store: ClockedStore, name: str, how: How) -> None:
    """The same for what is written where an outcome is unknown, or a reply was sent twice."""
    key = Script(store, Counter()).session.key

    async def prepare(faulty: FaultyStore) -> Act:
        faulty.plan()
        script = Script(faulty, Counter())
        session = script.session
        if name == "dispute":
            await script.steps(STEPS[: STEPS.index("mark_delivered") + 1])
            return lambda: session.mark_delivered(REPLY_KEY, "message-10")
        await script.steps(STEPS[:4])
        await store.advance_clock(HOUR)

        async def doubt() -> Any:
            operation = session.logical_operation_id(0, 0)
            return await session.claim_tool(0, 0, "call-0", "order", ARGUMENTS[0], operation, owner_token="worker-2")

        if name != "doubt":
            await doubt()
        return {
            "doubt": doubt,
            "evidence": lambda: script.step("complete 0"),
            "resolve": lambda: session.resolve_tool(0, 0, "happened", who="me", why="seen", result_record=result(0)),
        }[name]

    assert await sweep(store, how, key, prepare) >= 1


async def test_a_second_message_id_is_kept_once(store: ClockedStore) -> None:
    """A dispute whose answer was lost is one record, and is a conflict each time."""
    faulty = FaultyStore(store)
    script = Script(faulty, Counter())
    await script.steps(STEPS[: STEPS.index("mark_delivered") + 1])
    faulty.plan(unavailable("after"))
    for _ in range(3):
        with pytest.raises(TurnCheckpointConflict):
            await script.session.mark_delivered(REPLY_KEY, "message-10")
    assert script.session.log.cached.disputed_message_ids == ("message-10",)


# --- begin: the effect barrier ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
async def test_a_cancelled_begin_that_was_applied(store: ClockedStore, fused: bool) -> None:
    """It never starts the effect; its owner, which knows that, abandons it, and the next claim runs it once."""
    ledger: Counter[str] = Counter()
    faulty = FaultyStore(store)
    script = Script(faulty, ledger)
    await script.steps(STEPS[:2] if fused else STEPS[:3])
    name = "claim and begin 0" if fused else "begin 0"
    faulty.plan(cancelled("after"))
    assert isinstance(await outcome_of(script.step(name)), asyncio.CancelledError)
    assert not ledger

    # Nothing drifts by itself: not by reading, not by another's claim while the lease is live, not by asking again.
    session, operation = script.session, script.session.logical_operation_id(0, 0)
    for _ in range(3):
        slot = await session.get_tool(0, 0)
        assert slot is not None
        assert (slot.state, slot.owner_token, slot.fence) == (ToolCallState.EXECUTING, OWNER, 1)
    rival = await session.claim_tool(0, 0, "call-0", "order", ARGUMENTS[0], operation, owner_token="worker-2")
    assert rival.action is ToolCallAction.BUSY
    again = await script.step("begin 0")
    assert again.action is ToolCallAction.ALREADY_EXECUTING
    assert not again.should_begin
    assert not ledger

    abandoned = await session.abandon_tool(0, 0, OWNER, 1)
    assert abandoned.action is ToolCallAction.ABANDONED
    reclaimed = await script.step("claim and begin 0")
    assert (reclaimed.action, reclaimed.fence) == (ToolCallAction.BEGUN, 2)
    assert (await script.finish()).phase is TurnPhase.COMPLETED
    assert ledger[operation] == 1


async def test_a_cancelled_begin_that_was_not_applied(store: ClockedStore) -> None:
    """Its owner begins again under the same fence."""
    ledger: Counter[str] = Counter()
    faulty = FaultyStore(store)
    script = Script(faulty, ledger)
    await script.steps(STEPS[:3])
    faulty.plan(cancelled("before"))
    assert isinstance(await outcome_of(script.step("begin 0")), asyncio.CancelledError)
    again = await script.step("begin 0")
    assert (again.action, again.fence) == (ToolCallAction.BEGUN, 1)
    assert (await script.finish()).phase is TurnPhase.COMPLETED
    assert sorted(ledger.values()) == [1, 1]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_begin_whose_connection_was_cut(store: ClockedStore, when: When) -> None:
    """LOG-6: cut instead of cancelled, the answer is found out: BEGUN is told once, to the one that may start the effect."""
    ledger: Counter[str] = Counter()
    faulty = FaultyStore(store)
    script = Script(faulty, ledger)
    await script.steps(STEPS[:3])
    faulty.plan(unavailable(when))
    assert (await script.step("begin 0")).should_begin
    assert (await script.step("begin 0")).action is ToolCallAction.ALREADY_EXECUTING
    assert (await script.finish()).final_text == FINAL
    assert sorted(ledger.values()) == [1, 1]


# --- the SQLite store's own threads ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "memory"])
async def test_work_that_has_begun_is_whole_and_work_that_has_not_is_not(tmp_path: Path, where: str) -> None:
    """LOG-6: cancelled inside the transaction: committed as a whole. Cancelled in the queue: never run."""
    gate = Gate()
    path = tmp_path / "turns.db" if where == "file" else ":memory:"
    async with await SqliteStore.open(path, clock=gate) as store:
        gate.armed = True
        begun = asyncio.ensure_future(store.append("begun", [b"a", b"b"], expected=NOWHERE, head=HEAD))
        await anyio.to_thread.run_sync(gate.entered.wait, 30)
        queued = [
            asyncio.ensure_future(store.append(f"queued {number}", [b"a", b"b"], expected=NOWHERE, head=HEAD))
            for number in range(6)
        ]
        await asyncio.sleep(0)  # so that they have asked
        for task in (begun, *queued[:3]):
            task.cancel()
        cancelled_ones = await asyncio.gather(begun, *queued[:3], return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in cancelled_ones)
        # Whoever asks now what became of it waits for the truth: just before the commit nothing would be there.
        asking = asyncio.ensure_future(store.read("begun"))
        asking_too = asyncio.ensure_future(store.read("begun"))
        await anyio.to_thread.run_sync(lambda: None)
        gate.release.set()
        for tail in await asyncio.gather(asking, asking_too):
            assert bodies(tail) == [b"a", b"b"]
        await asyncio.gather(*queued[3:])
        assert await whole(store, "begun") == [(1, b"a"), (2, b"b")]
        for number in range(6):
            assert await whole(store, f"queued {number}") == ([] if number < 3 else [(1, b"a"), (2, b"b")])
        others_can_write(store)


async def test_a_store_that_is_closed_while_it_works(tmp_path: Path) -> None:
    """Closing finishes what was asked, also by a caller who was cancelled meanwhile; nothing is half."""
    gate = Gate()
    path = tmp_path / "turns.db"
    store = await SqliteStore.open(path, clock=gate)
    gate.armed = True
    tasks = [
        asyncio.ensure_future(store.append(f"k{number}", [b"a", b"b"], expected=NOWHERE, head=HEAD))
        for number in range(4)
    ]
    await anyio.to_thread.run_sync(gate.entered.wait, 30)
    tasks[0].cancel()
    closing_store = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    gate.release.set()
    await closing_store
    assert isinstance((await asyncio.gather(*tasks, return_exceptions=True))[0], asyncio.CancelledError)
    async with await SqliteStore.open(path) as again:
        for number in range(4):
            assert await whole(again, f"k{number}") == [(1, b"a"), (2, b"b")]
