"""The shell with a tool's effect inside the store's transaction (`FencedLog.ask_with`), on every store that offers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conformance.support import ClockedStore, whole
from tests.conformance.tally import Added, Entry, Tally, adding, tally_log
from tests.conftest import also_encrypted
from tests.faulty import FaultyStore, When, cancelled, unavailable
from turnkeeper.errors import StoreUnavailable, TurnkeeperError
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard
from turnkeeper.log.store import Store, TransactionalStore

pytestmark = [pytest.mark.anyio, also_encrypted("sqlite memory")]


class Effect:
    """An effect that is counted, on a table of its own."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, transaction: Any) -> int:
        """Put a row in, and give how many there are."""
        self.runs += 1
        transaction.execute("CREATE TABLE IF NOT EXISTS effects (run INTEGER)")
        transaction.execute("INSERT INTO effects VALUES (1)")
        return transaction.execute("SELECT count(*) FROM effects")[0][0]


@pytest.fixture
def transactional(store: ClockedStore) -> ClockedStore:
    """A store that can hold an effect; skips the others."""
    if not isinstance(store, TransactionalStore):
        pytest.skip(f"{type(store).__name__} has no transactions for tools")
    return store


def rows(by: str) -> Callable[[int], list[Added]]:
    """Records made of the effect's result: the amount is the number of rows in the effect's table."""

    def build(result: int) -> list[Added]:
        return [Added(result, by)]

    return build


async def test_records_are_made_of_the_result(transactional: ClockedStore) -> None:
    """LOG-1: the placeholder of the decision is replaced by records of the effect's result; state and log agree."""
    log, effect = tally_log(transactional), Effect()
    assert await log.ask_with(adding(-1, "a"), effect, rows("a")) == ("added", 1)
    assert await log.ask_with(adding(-1, "b"), effect, rows("b")) == ("added", 2)
    assert (log.cached.total, log.cached.by, log.appends) == (3, ("a", "b"), 2)
    assert log.cached == await tally_log(transactional).read()


async def test_the_effect_runs_once_although_others_wrote(transactional: ClockedStore) -> None:
    """LOG-2: behind, it catches up, decides again, and only then is the effect run."""
    stale, other, effect = tally_log(transactional), tally_log(transactional), Effect()
    await stale.read()
    await other.ask(adding(10, "x"))
    seen: list[int] = []
    assert await stale.ask_with(adding(-1, "a", seen=seen), effect, rows("a")) == ("added", 1)
    assert seen == [0, 10]
    assert effect.runs == 1
    assert stale.cached.total == 11


async def test_an_answer_without_records_runs_nothing(transactional: ClockedStore) -> None:
    """LOG-2: what was done meanwhile is not done again, and the answer comes from a state read behind the question."""
    stale, other, effect = tally_log(transactional), tally_log(transactional), Effect()
    await stale.read()
    await other.ask_with(adding(-1, "job"), effect, rows("job"))
    assert await stale.ask_with(adding(-1, "job"), effect, rows("job")) == ("known", None)
    assert await other.ask_with(adding(-1, "job"), effect, rows("job")) == ("known", None)
    assert effect.runs == 1


async def test_a_refusal_on_a_stale_state_is_checked(transactional: ClockedStore) -> None:
    """What `decide` raises counts only on a state read behind the question, as without an effect."""

    def needs_ten(state: Tally, _now: int) -> Decision[Entry, str]:
        if state.total < 10:
            raise TurnkeeperError(f"only {state.total}")
        return Decision("enough", (Added(0, "a"),))

    log, other, effect = tally_log(transactional), tally_log(transactional), Effect()
    await log.ask(adding(1, "x"))
    with pytest.raises(TurnkeeperError, match="only 1"):
        await log.ask_with(needs_ten, effect, rows("a"))
    await other.ask(adding(9, "y"))
    assert await log.ask_with(needs_ten, effect, rows("a")) == ("enough", 1)
    assert effect.runs == 1


async def test_a_failed_guard_is_decided_again(transactional: ClockedStore) -> None:
    """LOG-4: outside of the guard the effect does not run."""
    log, effect = tally_log(transactional), Effect()
    await log.ask(adding(1, "x"))
    end = log.cached.stamps[0] + 1000
    await transactional.advance_clock(60_000)

    def decide(_state: Tally, now: int) -> Decision[Entry, str]:
        return Decision("late") if now > end else Decision("in time", (Added(0, "a"),), Guard(not_after=end))

    assert await log.ask_with(decide, effect, rows("a")) == ("late", None)
    assert effect.runs == 0


async def test_what_an_effect_raises_leaves_the_log_usable(transactional: ClockedStore) -> None:
    """LOG-1: nothing happened, and the same object goes on."""
    log = tally_log(transactional)

    def refuses(_transaction: Any) -> int:
        raise LookupError("no such customer")

    with pytest.raises(LookupError):
        await log.ask_with(adding(-1, "a"), refuses, rows("a"))
    assert await log.ask_with(adding(-1, "a"), Effect(), rows("a")) == ("added", 1)
    assert len(await whole(transactional, "tally")) == 1


@pytest.mark.parametrize("how", [unavailable, cancelled])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_answer_is_found_out(transactional: ClockedStore, when: When, how: Any) -> None:
    """LOG-6: an effect whose answer was lost is not run again where its records are in."""
    faulty, effect = FaultyStore(transactional), Effect()
    log = tally_log(faulty)
    await log.read()
    faulty.plan(how(when))
    asked = asyncio.ensure_future(log.ask_with(adding(-1, "a"), effect, rows("a")))
    (answer,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(answer, StoreUnavailable | asyncio.CancelledError)
    again = await log.ask_with(adding(-1, "a"), effect, rows("a"))
    assert again == (("known", None) if when == "after" else ("added", 1))
    assert effect.runs == 1
    assert log.cached == await tally_log(transactional).read()


async def test_a_store_without_transactions_says_so(store: ClockedStore) -> None:
    """A tool that needs the transaction is refused by a typed error before anything happens."""
    plain = SimpleNamespace(append=store.append, read=store.read, heads=store.heads, erase=store.erase)
    effect = Effect()
    with pytest.raises(TurnkeeperError, match="cannot hold"):
        await tally_log(cast("Store", plain)).ask_with(adding(-1, "a"), effect, rows("a"))
    assert effect.runs == 0
