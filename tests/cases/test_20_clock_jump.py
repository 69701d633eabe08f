"""Field case 20: clocks that disagree or jump. On SQLite the store's clock is the host's, counted on where it is set back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conftest import shared_json
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.names import ToolCallAction
from turnkeeper.turn.session import TurnCheckpointSession
from turnkeeper.turn.snapshot import ToolCallDecision

CASE: dict[str, Any] = shared_json("cases/20-clock-jump.json")
LEASE = CASE["lease_seconds"]
HOUR = 3_600_000


class HostClock:
    """A wall clock that can be set."""

    def __init__(self) -> None:
        self.ms = 1_900_000_000_000

    def __call__(self) -> int:
        return self.ms


async def _session(store: SqliteStore) -> TurnCheckpointSession:
    session = TurnCheckpointSession(store, "t", claim_lease_seconds=LEASE, execution_lease_seconds=LEASE)
    await session.start([{"role": "user", "content": "go"}], ["pay"], {})
    await session.reserve_assistant(0, {"tool_calls": [{"id": "c", "name": "pay", "arguments": "{}"}]})
    return session


async def _claim(session: TurnCheckpointSession, owner: str, *, replay_safe: bool = False) -> ToolCallDecision:
    return await session.claim_tool(0, 0, "c", "pay", "{}", session.logical_operation_id(0, 0), replay_safe, owner)


@pytest.mark.anyio
async def test_row_4_set_back_two_hours_right_after_a_claim(tmp_path: Path) -> None:
    """The slot is claimable again one lease after the next look, not after two hours and a lease."""
    clock = HostClock()
    async with await SqliteStore.open(tmp_path / "t.db", clock=clock) as store:
        assert (await _claim(await _session(store), "A")).action is ToolCallAction.ACQUIRED
        clock.ms -= 2 * HOUR
    async with await SqliteStore.open(tmp_path / "t.db", clock=clock) as store:  # another process
        session = await _session(store)
        assert (await _claim(session, "B")).action is ToolCallAction.BUSY
        clock.ms += LEASE * 1000
        decision = await _claim(session, "B")
        assert decision.action in (ToolCallAction.RECLAIMED, ToolCallAction.ACQUIRED)
        assert decision.owner_token == "B"


@pytest.mark.anyio
async def test_row_5_set_forward_two_hours_while_a_tool_runs(tmp_path: Path) -> None:
    """Never RECLAIMED: the effect may be under way."""
    clock = HostClock()
    async with await SqliteStore.open(tmp_path / "t.db", clock=clock) as store:
        session = await _session(store)
        fence = (await _claim(session, "A")).fence
        assert (await session.begin_tool(0, 0, "A", fence)).should_begin
        clock.ms += 2 * HOUR
        second = TurnCheckpointSession(store, "t")
        assert (await _claim(second, "B")).action is ToolCallAction.AMBIGUOUS
        late = await session.complete_tool(0, 0, "A", fence, {"content": "paid"})
        assert late.action is ToolCallAction.AMBIGUOUS
        stored = await second.get_tool(0, 0)
        assert stored is not None
        assert stored.evidence == {"content": "paid"}
        clock.ms -= 2 * HOUR  # and back: nothing comes undone
        assert (await _claim(second, "B")).action is ToolCallAction.AMBIGUOUS


@pytest.mark.anyio
@pytest.mark.parametrize("replay_safe", [False, True])
async def test_row_6_a_process_that_was_stopped_comes_back(tmp_path: Path, replay_safe: bool) -> None:
    clock = HostClock()
    async with await SqliteStore.open(tmp_path / "t.db", clock=clock) as store:
        session = await _session(store)
        fence = (await _claim(session, "A", replay_safe=replay_safe)).fence
        assert (await session.begin_tool(0, 0, "A", fence)).should_begin
        clock.ms += 20 * 60 * 1000
        second = TurnCheckpointSession(store, "t")
        looked = await _claim(second, "B", replay_safe=replay_safe)
        assert looked.action is (ToolCallAction.RECLAIMED if replay_safe else ToolCallAction.AMBIGUOUS)
        late = await session.complete_tool(0, 0, "A", fence, {"content": "late"})
        assert late.action is (ToolCallAction.STALE_OWNER if replay_safe else ToolCallAction.AMBIGUOUS)
        stored = await second.get_tool(0, 0)
        assert stored is not None
        assert stored.cached_result is None


@pytest.mark.anyio
async def test_row_7_renewals_sleep_on_a_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back an hour while the renewal loop sleeps: it renews all the same."""
    renewed = anyio.Event()

    async def renew() -> bool:
        renewed.set()
        return True

    keeper = LeaseKeeper(0.3)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keeper.run)
            with keeper.holding("slot", renew, lambda: None):
                real = time.time
                monkeypatch.setattr(time, "time", lambda: real() - 3600)
                await renewed.wait()
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_set_back_clock_goes_on_exactly_where_the_log_stands(tmp_path: Path) -> None:
    """LOG-3: neither back nor further ahead than the log's last record, whichever call notices it first."""
    clock = HostClock()
    async with await SqliteStore.open(tmp_path / "t.db", clock=clock) as store:
        session = await _session(store)
        fence = (await _claim(session, "A")).fence
        last = (await store.read(session.key)).now
        clock.ms -= 2 * HOUR
        begun = await session.begin_tool(0, 0, "A", fence)  # guarded, and the first to notice
        assert begun.should_begin
        clock.ms += 5
        tail = await store.read(session.key)
        assert tail.now == last + 5
        assert tail.records[-1].at == last
