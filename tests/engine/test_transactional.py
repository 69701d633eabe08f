"""Transactional tools: their effect and its completion are one transaction of the store, so there is no gap to die in."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.support import asks, asks_once, last_results, records_of, state_of
from tests.engine.wrapped import CountingStore, FailingStore
from turnkeeper import Agent, EffectRefused, Keeper, ToolContext, tool
from turnkeeper.errors import TurnkeeperError
from turnkeeper.log.record import NOWHERE, Behind, GuardFailed, Head
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite file", "sqlite memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """The tools of these tests speak SQLite's SQL."""
    path = tmp_path / "turns.db" if request.param == "sqlite file" else ":memory:"
    async with await SqliteStore.open(path) as opened:
        yield opened


@tool(transactional=True)
def book(n: int, context: ToolContext) -> str:
    """Book in a table of the tool's own."""
    context.transaction.execute("CREATE TABLE IF NOT EXISTS booking (operation_id TEXT, n INTEGER)")
    context.transaction.execute("INSERT INTO booking VALUES (?, ?)", (context.operation_id, n))
    return f"booked {n}"


async def booked(store: SqliteStore) -> list[int]:
    """What is in the table."""

    def read(transaction: Any) -> list[int]:
        if not transaction.execute("SELECT 1 FROM sqlite_schema WHERE name = 'booking'"):
            return []
        return [n for (n,) in transaction.execute("SELECT n FROM booking ORDER BY n")]

    # Through a transaction on a log of its own, as there is no other way into a store in memory.
    key = f"reader {len([head async for head in store.heads()])}"
    outcome = await store.append_with(key, read, lambda _: [b"r"], expected=NOWHERE, head=Head(kind="test", phase=""))
    assert not isinstance(outcome, Behind | GuardFailed)
    return outcome[0]


@pytest.mark.parametrize("parallel", [True, False])
async def test_effect_and_completion_are_one_write(
    keeper: Keeper, counted: CountingStore, store: SqliteStore, *, parallel: bool
) -> None:
    model = asks_once(("book", {"n": 1}), ("book", {"n": 2}))
    result = await keeper.run(Agent(model, [book], parallel_tools=parallel), "go", turn_id="t")
    assert result.status == "success"
    assert last_results(model.requests[1]) == ["booked 1", "booked 2"]
    history = await keeper.history("t")
    assert history is not None
    for before, after in zip(history.entries, history.entries[1:], strict=False):
        if isinstance(before.record, r.ToolBegun):
            assert isinstance(after.record, r.ToolCompleted)
            assert before.at == after.at
    assert counted.writes == 1 + 2 + 1 + 1
    assert await booked(store) == [1, 2]


async def test_what_raises_is_rolled_back_and_told_to_the_model(keeper: Keeper, store: SqliteStore) -> None:
    errors: list[Exception] = [ValueError("no such room"), EffectRefused("full", kind="full")]

    @tool(transactional=True)
    def try_to_book(context: ToolContext) -> None:
        book.call({"n": 7}, context)
        raise errors.pop(0)

    model = asks([("try_to_book", ""), ("book", {"n": 1})], [("try_to_book", "")])
    assert (await keeper.run(Agent(model, [book, try_to_book]), "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == ["no such room", "booked 1"]
    assert last_results(model.requests[2]) == ["full"]
    assert await booked(store) == [1]
    assert (await state_of(keeper)).attention is None


def _end(context: ToolContext) -> None:
    context.transaction.execute("COMMIT")


def _roll_back(context: ToolContext) -> None:
    context.transaction.execute("ROLLBACK")


def _forge(context: ToolContext) -> None:
    context.transaction.execute("DELETE FROM record")


def _forge_on_the_sly(context: ToolContext) -> None:
    try:
        context.transaction.execute("UPDATE head SET phase = 'COMPLETED'")
    except sqlite3.Error:
        raise ValueError("refused") from None


@pytest.mark.parametrize("act", [_end, _roll_back, _forge, _forge_on_the_sly])
async def test_a_tool_cannot_end_the_transaction_nor_touch_the_log(
    keeper: Keeper, store: SqliteStore, act: Callable[[ToolContext], None]
) -> None:
    @tool(transactional=True)
    def meddle(context: ToolContext) -> None:
        book.call({"n": 7}, context)
        act(context)

    model = asks_once(("meddle", ""), ("book", {"n": 1}))
    assert (await keeper.run(Agent(model, [meddle, book]), "go", turn_id="t")).status == "success"
    told = last_results(model.requests[1])
    assert "not authorized" in told[0] or told[0] == "refused"
    assert await booked(store) == [1]
    assert len(await records_of(keeper, r.ToolCompleted)) == 2


async def test_the_transaction_is_over_behind_the_tool(keeper: Keeper) -> None:
    kept: list[Any] = []

    @tool(transactional=True)
    def keep(context: ToolContext) -> None:
        kept.append(context.transaction)

    await keeper.run(Agent(asks_once(("keep", "")), [keep]), "go", turn_id="t")
    with pytest.raises(sqlite3.ProgrammingError):
        kept[0].execute("SELECT 1")


async def test_a_result_that_cannot_be_kept_does_not_undo_the_effect(keeper: Keeper, store: SqliteStore) -> None:
    @tool(transactional=True)
    def book_and_tell(context: ToolContext) -> Any:
        book.call({"n": 7}, context)
        return {"a", "set"}

    model = asks_once(("book_and_tell", ""))
    assert (await keeper.run(Agent(model, [book_and_tell]), "go", turn_id="t")).status == "success"
    assert "cannot be kept" in last_results(model.requests[1])[0]
    assert await booked(store) == [7]


async def test_the_trouble_of_the_store_is_not_told_to_the_model(store: SqliteStore) -> None:
    """It is the caller's, who runs the turn again: the effect was rolled back, and is made then."""
    failing = FailingStore(store)
    keeper = Keeper(failing)
    model = asks_once(("book", {"n": 1}))
    failing.fail_at(2)
    with pytest.raises(failing.error):
        await keeper.run(Agent(model, [book]), "go", turn_id="t")
    failing.fail_at(0)
    await store.advance_clock(60_000)
    assert (await keeper.run(Agent(model, [book]), "go", turn_id="t", wait=False)).status == "success"
    assert last_results(model.requests[-1]) == ["booked 1"]
    assert await booked(store) == [1]


async def test_the_same_call_in_doubt_holds_for_transactional_tools_as_well(keeper: Keeper, store: SqliteStore) -> None:
    """The tool was fail closed when its outcome became unknown; that it has another policy now does not make it known."""

    @tool(name="book")
    async def unsafe(n: int) -> None:
        raise TimeoutError

    model = asks([("book", {"n": 1})], [("book", {"n": 1})])
    assert (await keeper.run(Agent(model, [unsafe]), "go", turn_id="t")).status == "reconciliation_required"
    await keeper.resolve_tool("t", 0, 0, "unknown", who="ann", why="nobody knows")
    assert (await keeper.run(Agent(model, [book]), "go", turn_id="t")).status == "success"
    assert "not run again" in last_results(model.requests[2])[0]
    assert await booked(store) == []


async def test_a_store_without_transactions_says_so(keeper: Keeper, store: SqliteStore) -> None:
    """To whoever set it up that way, not to the model."""

    class Plain:
        """A store without `append_with`."""

        def __init__(self) -> None:
            self.append = store.append
            self.read = store.read
            self.heads = store.heads
            self.erase = store.erase
            self.tidy = store.tidy
            self.promises = store.promises
            self.close = store.close

    model = asks_once(("book", {"n": 1}))
    with pytest.raises(TurnkeeperError, match="transaction"):
        await Keeper(Plain()).run(Agent(model, [book]), "go", turn_id="t")
    assert await booked(store) == []
