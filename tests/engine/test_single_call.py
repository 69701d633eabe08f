"""A tool call that no model has asked for: what is settled by its tool's policy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from turnkeeper.engine.outcomes import DidNotHappen, Happened, OutcomeUnknown
from turnkeeper.engine.single_call import call_tool
from turnkeeper.engine.tools import ToolContext, tool
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.handle import TurnHandle

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


@pytest.mark.parametrize("happened", [True, False])
async def test_look_up_of_who_comes_after(store: SqliteStore, happened: bool) -> None:
    """Its process went away behind the barrier: the next one asks the look-up, and calls again only where it may."""
    called: list[str] = []
    begun = anyio.Event()

    async def look_up(context: ToolContext) -> Happened | DidNotHappen:
        return Happened("found") if happened else DidNotHappen()

    @tool(reconcile=look_up)
    async def charge(context: ToolContext) -> str:
        called.append(context.operation_id)
        if len(called) == 1:
            begun.set()
            await anyio.sleep_forever()
        return "charged"

    nothing: dict[str, str] = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_tool, TurnHandle(store, "t"), charge, nothing)
        await begun.wait()
        tasks.cancel_scope.cancel()
    await store.advance_clock(31_000)
    ended, result = await call_tool(TurnHandle(store, "t"), charge, {})
    assert ended.status == "success"
    assert result is not None
    assert result.output == ("found" if happened else "charged")
    assert called == called[:1] * (1 if happened else 2)


async def test_look_up_of_who_is_told_nothing(store: SqliteStore) -> None:
    """The same process asks the look-up, too."""

    async def look_up(context: ToolContext) -> Happened:
        return Happened("found")

    @tool(reconcile=look_up)
    async def charge() -> str:
        raise OutcomeUnknown("no answer")

    ended, result = await call_tool(TurnHandle(store, "t"), charge, {})
    assert ended.status == "success"
    assert result is not None
    assert result.output == "found"


async def test_without_a_look_up_it_stops(store: SqliteStore) -> None:
    """Nobody can tell: not called again, however often it is asked for."""
    called: list[int] = []

    @tool
    async def charge() -> str:
        called.append(1)
        raise OutcomeUnknown("no answer")

    for _ in range(2):
        ended, result = await call_tool(TurnHandle(store, "t"), charge, {})
        assert (ended.status, result) == ("reconciliation_required", None)
    assert called == [1]
