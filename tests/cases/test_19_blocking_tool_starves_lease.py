"""Field case 19: a blocking tool stops the heartbeat, so a healthy worker is declared dead."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from turnkeeper import Agent, Keeper, ScriptedModel, tool
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r
from turnkeeper.turn.names import ToolCallAction, ToolCallState
from turnkeeper.turn.session import TurnCheckpointSession
from turnkeeper.turn.snapshot import ToolCallDecision

CALL = {"role": "assistant", "tool_calls": [{"id": "c", "name": "charge", "arguments": ""}]}
LEASE = 0.9


async def _until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not holds():  # noqa: ASYNC110  # another process or thread brings it about
            await anyio.sleep(0.01)


async def _second_worker(store: SqliteStore) -> ToolCallDecision:
    session = TurnCheckpointSession(store, "t")
    await session.load()
    return await session.claim_tool(0, 0, "c", "charge", "", session.logical_operation_id(0, 0), owner_token="second")


async def _kinds(keeper: Keeper) -> list[type]:
    history = await keeper.history("t")
    return [] if history is None else [type(entry.record) for entry in history.entries]


@pytest.mark.anyio
async def test_a_a_plain_function_does_not_starve_the_renewals(tmp_path: Path) -> None:
    """It blocks until the lease was renewed twice, and a second worker saw BUSY each time it looked."""
    release, ledger = threading.Event(), list[str]()

    @tool
    def charge() -> str:
        ledger.append("charged")
        assert release.wait(30)
        return "charged"

    url = f"sqlite:///{tmp_path}/t.db"
    seen: set[ToolCallAction] = set()
    async with await Keeper.open(url) as first, await SqliteStore.open(tmp_path / "t.db") as second:
        agent = Agent(ScriptedModel([CALL, "done"]), [charge], lease_seconds=LEASE)
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                assert (await first.run(agent, "pay", turn_id="t")).output == "done"

            tasks.start_soon(run)
            await _until(lambda: bool(ledger))
            with anyio.fail_after(30):
                while (await _kinds(first)).count(r.ToolRenewed) < 2:
                    seen.add((await _second_worker(second)).action)
                    await anyio.sleep(0.05)
            release.set()
        slot = await first.session("t").get_tool(0, 0)
    assert slot is not None
    assert (slot.state, slot.fence) == (ToolCallState.COMPLETED, 1)
    assert seen == {ToolCallAction.BUSY}
    assert ledger == ["charged"]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["b blocks its event loop", "d stopped by a signal"])
async def test_b_d_a_worker_that_cannot_renew(tmp_path: Path, how: str) -> None:
    """The second worker gets AMBIGUOUS when the lease is over and never runs the tool; the late result is evidence."""
    url = f"sqlite:///{tmp_path}/t.db"
    command = [sys.executable, "-m", "tests.cases.blocked_worker", url, str(tmp_path), str(LEASE)]
    root = Path(__file__).parents[2]
    async with await anyio.open_process(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as worker:
        await _until((tmp_path / "ledger").exists)
        if how.startswith("d"):
            os.kill(worker.pid, signal.SIGSTOP)
        async with await SqliteStore.open(tmp_path / "t.db") as store:
            assert (await _second_worker(store)).action is ToolCallAction.BUSY
            with anyio.fail_after(30):
                while (looked := (await _second_worker(store)).action) is ToolCallAction.BUSY:  # noqa: ASYNC110  # time passes
                    await anyio.sleep(0.05)
            assert looked is ToolCallAction.AMBIGUOUS
            os.kill(worker.pid, signal.SIGCONT)
            (tmp_path / "go").touch()
            await worker.wait()
            slot = await TurnCheckpointSession(store, "t").get_tool(0, 0)
        assert worker.stderr is not None
        told = "".join([part.decode() async for part in worker.stderr])
    assert (tmp_path / "result").read_text() == "reconciliation_required"
    assert slot is not None
    assert slot.state is ToolCallState.AMBIGUOUS
    assert slot.evidence is not None
    assert slot.evidence["output"] == "charged"
    assert (tmp_path / "ledger").read_text() == "charged\n"
    assert "is late by" in told  # how late its renewal is
    assert "came too late" in told


@pytest.mark.anyio
async def test_c_a_store_that_is_held_by_somebody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every write is blocked for longer than the lease while a well-behaved tool runs."""
    caplog.set_level(logging.WARNING, "turnkeeper")
    ledger: list[str] = []
    begun = anyio.Event()

    @tool
    async def charge() -> str:
        ledger.append("charged")
        begun.set()
        await anyio.sleep_forever()
        return "never"

    url = f"sqlite:///{tmp_path}/t.db?busy_timeout=0.05"
    async with await Keeper.open(url) as first, await SqliteStore.open(tmp_path / "t.db") as second:
        agent = Agent(ScriptedModel([CALL, "done"]), [charge], lease_seconds=LEASE)
        statuses: list[str] = []
        action: ToolCallAction | None = None
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                statuses.append((await first.run(agent, "pay", turn_id="t")).status)

            tasks.start_soon(run)
            await begun.wait()
            holder = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            await _until(lambda: "could not be renewed" in caplog.text)
            # The lease ends in the same instant as the lock: nobody could renew it before.
            holder.execute("UPDATE meta SET value = value + 900 WHERE name = 'clock_offset_ms'")
            holder.execute("COMMIT")
            holder.close()
            action = (await _second_worker(second)).action
        slot = await first.session("t").get_tool(0, 0)
    assert action is ToolCallAction.AMBIGUOUS
    assert statuses == ["reconciliation_required"]
    assert slot is not None
    assert slot.state is ToolCallState.AMBIGUOUS
    assert ledger == ["charged"]
