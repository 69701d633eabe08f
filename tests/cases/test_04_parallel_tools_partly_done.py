"""Field case 04: four parallel tools, killed in the middle; resuming redoes only what is safe."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.conftest import shared_json
from turnkeeper import Agent, Keeper, ScriptedModel, ToolContext, tool
from turnkeeper.errors import TurnCheckpointError
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.names import TurnPhase
from turnkeeper.turn.session import TurnCheckpointSession
from turnkeeper.turn.snapshot import ToolCallDecision

CASE: dict[str, Any] = shared_json("cases/04-parallel-tools-partly-done.json")
CALLS: list[dict[str, Any]] = CASE["assistant_round_0"]["tool_calls"]
INPUT = [{"role": "user", "content": "go"}]


async def _claim(session: TurnCheckpointSession, slot: int, owner: str) -> ToolCallDecision:
    call = CALLS[slot]
    operation = session.logical_operation_id(0, slot)
    return await session.claim_tool(
        0, slot, call["id"], call["name"], call["arguments"], operation, CASE["replay_safe"][slot], owner
    )


async def _until_the_kill(store: SqliteStore, ledger: Counter[str]) -> None:
    session = Keeper(store).session("t")
    await session.start(INPUT, [call["name"] for call in CALLS], {})
    await session.reserve_assistant(0, CASE["assistant_round_0"])
    for at in CASE["at_kill"]:
        slot = at["slot"]
        if at["state"] is None:
            continue
        fence = (await _claim(session, slot, "dead")).fence
        if at["state"] != "CLAIMED":
            assert (await session.begin_tool(0, slot, "dead", fence)).should_begin
            ledger[CALLS[slot]["name"]] += 1
        if at["state"] == "COMPLETED":
            await session.complete_tool(0, slot, "dead", fence, {"content": "done"})


@pytest.mark.anyio
async def test_second_worker_by_hand(store: SqliteStore) -> None:
    ledger: Counter[str] = Counter()
    await _until_the_kill(store, ledger)
    session = Keeper(store).session("t")
    for expected in CASE["expect_immediately_by_second_worker"]:
        decision = await _claim(session, expected["slot"], "second")
        assert decision.action.value == expected["action"]
        assert decision.fence == expected.get("fence", decision.fence)
    assert (await session.begin_tool(0, 3, "second", 1)).should_begin
    ledger["slow_write"] += 1
    await session.complete_tool(0, 3, "second", 1, {"content": "done"})

    await store.advance_clock(30_000)  # the claim lease
    for expected in CASE["expect_after_claim_lease"]:
        decision = await _claim(session, expected["slot"], "second")
        assert (decision.action.value, decision.fence) == (expected["action"], expected["fence"])
    assert (await session.begin_tool(0, 2, "second", 2)).should_begin
    ledger["send_email"] += 1
    await session.complete_tool(0, 2, "second", 2, {"content": "done"})

    await store.advance_clock(870_000)  # the execution lease
    for expected in CASE["expect_after_execution_lease"]:
        assert (await _claim(session, expected["slot"], "second")).action.value == expected["action"]
    with pytest.raises(TurnCheckpointError, match=r"slots \[1\]"):
        await session.commit_round(0, INPUT, {})
    snapshot = await session.load()
    assert snapshot is not None
    assert snapshot.phase is TurnPhase.ASSISTANT_RESERVED
    assert ledger == CASE["ledger_at_the_end"]


@pytest.mark.anyio
async def test_second_worker_is_the_engine(store: SqliteStore) -> None:
    """Slot 1 is the one that cannot be repeated: it stops the turn; once it is settled, the rest runs once."""
    ledger: Counter[str] = Counter()
    await _until_the_kill(store, ledger)

    @tool(replay_safe=True)
    def read_a(k: str) -> str:
        ledger["read_a"] += 1
        return k

    @tool
    def send_email(to: str, n: int, context: ToolContext) -> str:
        ledger["send_email"] += 1
        return "sent"

    @tool
    def slow_write(path: str) -> str:
        ledger["slow_write"] += 1
        return path

    model = ScriptedModel([CASE["assistant_round_0"], "all done"])
    agent = Agent(model, [read_a, send_email, slow_write])
    keeper = Keeper(store)
    await store.advance_clock(900_000)
    stopped = await keeper.run(agent, INPUT, turn_id="t")
    assert (stopped.status, stopped.open_slots) == ("reconciliation_required", ((0, 1),))
    assert model.requests == []
    await keeper.resolve_tool("t", 0, 1, "happened", who="ann", why="in the outbox", result="sent")
    assert (await keeper.run(agent, INPUT, turn_id="t")).status == "success"
    assert ledger == CASE["ledger_at_the_end"]
    assert [request.round_index for request in model.requests] == [1]  # never asked again for round 0
