"""A tool's effect in the store's own transaction (`TransactionalStore`), on every store that offers it."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from tests.conformance.support import HEAD, ClockedStore, append, listed, whole
from tests.conftest import also_encrypted
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Position
from turnkeeper.log.store import TransactionalStore

pytestmark = [pytest.mark.anyio, also_encrypted("sqlite memory", "postgres")]


class Done(NamedTuple):
    """The effect and its records are in."""

    result: int
    appended: Appended


def told(outcome: tuple[int, Appended] | Behind | GuardFailed) -> Done | Behind | GuardFailed:
    """The outcome, with a name for success: the refusals are tuples as well."""
    return outcome if isinstance(outcome, Behind | GuardFailed) else Done(*outcome)


class Ledger:
    """Effects that a test counts by looking into the table that they write."""

    def __init__(self, store: ClockedStore) -> None:
        if not isinstance(store, TransactionalStore):
            pytest.skip(f"{type(store).__name__} has no transactions for tools")
        self.store: TransactionalStore = store
        self.calls = 0
        self.position: Position = NOWHERE

    async def open(self) -> None:
        """Make the table, in an append of its own log."""
        await self.append("setup", "CREATE TABLE ledger (entry INTEGER)")
        self.calls = 0

    async def append(
        self, key: str, *statements: str, expected: Position = NOWHERE, guard: Guard | None = None
    ) -> Done | Behind | GuardFailed:
        """Run statements as an effect whose result is how many they were."""

        def effect(transaction: Any) -> int:
            self.calls += 1
            for statement in statements:
                transaction.execute(statement)
            return len(statements)

        def records(result: int) -> list[bytes]:
            return [b"%d" % result, b"done"]

        return told(await self.store.append_with(key, effect, records, expected=expected, head=HEAD, guard=guard))

    async def entries(self) -> list[int]:
        """What the table holds."""
        found: list[int] = []

        def look(transaction: Any) -> int:
            found[:] = [row[0] for row in transaction.execute("SELECT entry FROM ledger ORDER BY entry")]
            return 0

        outcome = told(
            await self.store.append_with("look", look, lambda _: [b"looked"], expected=self.position, head=HEAD)
        )
        assert isinstance(outcome, Done)
        self.position = outcome.appended.position
        return found


@pytest.fixture
async def ledger(store: ClockedStore) -> Ledger:
    """A table for effects; skips stores without transactions for tools."""
    opened = Ledger(store)
    await opened.open()
    return opened


async def test_effect_and_records_are_both_in(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-1: the effect, its result and the records made of the result are one append."""
    outcome = await ledger.append("k", "INSERT INTO ledger VALUES (1)", "INSERT INTO ledger VALUES (2)")
    assert isinstance(outcome, Done)
    assert outcome.result == 2
    assert await whole(store, "k") == [(1, b"2"), (2, b"done")]
    assert (await store.read("k")).position == outcome.appended.position
    assert (await store.read("k")).records[0].at == outcome.appended.at
    assert await ledger.entries() == [1, 2]
    assert ledger.calls == 1


async def test_an_exception_undoes_the_effect(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-1: what the effect raises comes back to the caller as it is, and nothing has happened."""

    class Refused(Exception):
        pass

    def effect(transaction: Any) -> int:
        transaction.execute("INSERT INTO ledger VALUES (1)")
        raise Refused("no funds")

    heads = await listed(store)
    with pytest.raises(Refused, match="no funds"):
        await ledger.store.append_with("k", effect, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    assert await whole(store, "k") == []
    assert await listed(store) == heads
    assert await ledger.entries() == []
    assert isinstance(await ledger.append("k", "INSERT INTO ledger VALUES (1)"), Done)


async def test_an_exception_while_the_records_are_made_undoes_the_effect(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-1: an effect whose result cannot be recorded has not happened."""

    def records(result: int) -> list[bytes]:
        raise ValueError(f"cannot keep {result}")

    def effect(transaction: Any) -> int:
        transaction.execute("INSERT INTO ledger VALUES (1)")
        return 7

    with pytest.raises(ValueError, match="cannot keep 7"):
        await ledger.store.append_with("k", effect, records, expected=NOWHERE, head=HEAD)
    assert await whole(store, "k") == []
    assert await ledger.entries() == []


@pytest.mark.parametrize("raised", [StopIteration, KeyError, StopAsyncIteration, asyncio.CancelledError])
async def test_whatever_an_effect_raises_its_caller_is_answered(
    store: ClockedStore, ledger: Ledger, raised: type[BaseException]
) -> None:
    """LOG-6: exceptions that mean something to event loops and generators reach the caller too, and hold nobody up."""

    def effect(transaction: Any) -> int:
        transaction.execute("INSERT INTO ledger VALUES (1)")
        raise raised

    neighbours = [asyncio.ensure_future(append(store, f"n{number}", b"x")) for number in range(3)]
    call = ledger.store.append_with("k", effect, lambda _: [b"x"], expected=NOWHERE, head=HEAD)
    with pytest.raises((raised, RuntimeError)):
        await asyncio.wait_for(call, 20)  # the fault to look for is an answer that never comes
    await asyncio.gather(*neighbours)
    assert await whole(store, "k") == []
    assert await ledger.entries() == []


async def test_behind_does_not_run_the_effect(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-2: a writer who does not know the tail gets what it missed, and its effect was not even tried."""
    await append(store, "k", b"1")
    outcome = await ledger.append("k", "INSERT INTO ledger VALUES (1)")
    assert isinstance(outcome, Behind)
    assert [record.body for record in outcome.tail.records] == [b"1"]
    assert ledger.calls == 0
    assert await ledger.entries() == []


async def test_a_failed_guard_does_not_run_the_effect(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-4: judged before the effect, on the store's clock; Behind is said first here as well."""
    position = await append(store, "k", b"1")
    late = await ledger.append("k", "INSERT INTO ledger VALUES (1)", expected=position, guard=Guard(not_after=1))
    assert isinstance(late, GuardFailed)
    behind = await ledger.append("k", "INSERT INTO ledger VALUES (1)", guard=Guard(not_after=1))
    assert isinstance(behind, Behind)
    assert ledger.calls == 0
    await store.advance_clock(60_000)
    window = Guard(not_before=late.now + 60_000)
    assert isinstance(await ledger.append("k", "INSERT INTO ledger VALUES (1)", expected=position, guard=window), Done)
    assert ledger.calls == 1


async def test_one_of_many_effects_at_one_tail_happens(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-2: twenty workers with the same effect at the same tail: it happens once."""
    outcomes = await asyncio.gather(*(ledger.append("k", "INSERT INTO ledger VALUES (1)") for _ in range(20)))
    assert sum(isinstance(outcome, Done) for outcome in outcomes) == 1
    assert ledger.calls == 1
    assert await ledger.entries() == [1]


async def test_a_failing_effect_does_not_undo_its_neighbours(store: ClockedStore, ledger: Ledger) -> None:
    """LOG-1: effects that share a commit succeed and fail each for itself."""
    wrong = "INSERT INTO no_such_table VALUES (1)"
    outcomes = await asyncio.gather(
        *(
            ledger.append(f"k{number}", f"INSERT INTO ledger VALUES ({number})", *([wrong] if number % 3 == 0 else []))
            for number in range(12)
        ),
        return_exceptions=True,
    )
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Exception if number % 3 == 0 else Done)
        assert len(await whole(store, f"k{number}")) == (0 if number % 3 == 0 else 2)
    assert await ledger.entries() == [number for number in range(12) if number % 3]


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_effect_is_whole_or_not_at_all(store: ClockedStore, ledger: Ledger, steps: int) -> None:
    """LOG-6: cancelled anywhere: effect and records are both there or both not."""
    task = asyncio.ensure_future(ledger.append("k", "INSERT INTO ledger VALUES (1)"))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    entries = await ledger.entries()  # behind it in the same store, so whatever became of it is settled
    assert (entries, await whole(store, "k")) in [([], []), ([1], [(1, b"1"), (2, b"done")])]
