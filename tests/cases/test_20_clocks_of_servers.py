"""Field case 20, rows 1 to 3: where the store has a clock of its own, the wall clock of a worker decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.support import ClockedStore
from tests.conftest import shared_json
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.names import ToolCallAction
from turnkeeper.turn_checkpoint import ToolCallDecision, TurnCheckpointSession

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/20-clock-jump.json")
LEASE_MS = CASE["lease_seconds"] * 1000
MINUTE = 60_000
HOUR = 60 * MINUTE
SetClock = Callable[[int], None]


@pytest.fixture
def served(store: ClockedStore) -> ClockedStore:
    """A store whose clock is a server's."""
    if isinstance(store, SqliteStore):
        pytest.skip("SQLite has only the host's clock")
    return store


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets this worker's wall clock forward or back, in milliseconds."""
    seconds, nanoseconds = time.time, time.time_ns

    def set_clock(by: int) -> None:
        monkeypatch.setattr(time, "time", lambda: seconds() + by / 1000)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + by * 1_000_000)

    return set_clock


def session_on(store: ClockedStore) -> TurnCheckpointSession:
    """A worker's session, with the case's leases."""
    seconds = CASE["lease_seconds"]
    return TurnCheckpointSession(store, "t", claim_lease_seconds=seconds, execution_lease_seconds=seconds)


async def claim(session: TurnCheckpointSession, owner: str) -> ToolCallDecision:
    """Claim the turn's one slot."""
    operation = session.logical_operation_id(0, 0)
    return await session.claim_tool(0, 0, "c", "pay", "{}", operation, owner_token=owner)


async def claimed(store: ClockedStore) -> tuple[TurnCheckpointSession, int]:
    """Worker A, which has claimed the slot, and its fence."""
    session = session_on(store)
    await session.start([{"role": "user", "content": "go"}], ["pay"], {})
    await session.reserve_assistant(0, {"tool_calls": [{"id": "c", "name": "pay", "arguments": "{}"}]})
    decision = await claim(session, "A")
    assert decision.action is ToolCallAction.ACQUIRED
    return session, decision.fence


async def test_row_1_a_worker_whose_clock_is_ahead(served: ClockedStore, host: SetClock) -> None:
    """B's clock is ten minutes ahead: A's claim of five seconds ago is live all the same."""
    await claimed(served)
    host(10 * MINUTE)
    await served.advance_clock(5000)
    assert (await claim(session_on(served), "B")).action is ToolCallAction.BUSY


async def test_row_2_a_worker_whose_clock_is_set_back(served: ClockedStore, host: SetClock) -> None:
    """A's clock goes back two hours while it executes: it renews, and the lease ends by the store's clock."""
    session, fence = await claimed(served)
    assert (await session.begin_tool(0, 0, "A", fence)).should_begin
    host(-2 * HOUR)
    await served.advance_clock(10_000)
    assert (await session.renew_tool(0, 0, "A", fence)).action is ToolCallAction.RENEWED
    now = (await served.read(session.key)).now
    slot = await session.get_tool(0, 0)
    assert slot is not None
    assert slot.lease_end is not None
    assert abs(slot.lease_end - (now + LEASE_MS)) <= 1000


@pytest.mark.parametrize("begun", [False, True])
async def test_row_3_a_dead_worker_whose_clock_was_ahead(served: ClockedStore, host: SetClock, begun: bool) -> None:
    """A dies with its clock two hours ahead: one lease later its slot is reclaimed, or in doubt, and not busy for hours."""
    host(2 * HOUR)
    session, fence = await claimed(served)
    if begun:
        assert (await session.begin_tool(0, 0, "A", fence)).should_begin
    host(0)
    await served.advance_clock(LEASE_MS + 1000)
    expected = ToolCallAction.AMBIGUOUS if begun else ToolCallAction.RECLAIMED
    assert (await claim(session_on(served), "B")).action is expected
