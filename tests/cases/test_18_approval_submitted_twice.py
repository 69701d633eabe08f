"""Field case 18: two people press the button, or two approvals arrive together."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.conformance.support import ClockedStore
from tests.conftest import opened, shared_json
from turnkeeper import Agent, HumanApproval, Keeper, ScriptedModel, Tool, ToolContext
from turnkeeper.errors import TurnCheckpointBusy, TurnCheckpointConflict
from turnkeeper.log.store import Store
from turnkeeper.models.scripted import calls

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/18-approval-submitted-twice.json")
TIMES: int = CASE["part_1"]["repeat"]


@pytest.fixture(params=["sqlite file", "postgres", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind."""
    async with opened(request.param, request, tmp_path) as store:
        yield store


class World:
    """A turn with pending calls, and the ledger of what ran."""

    def __init__(self, store: ClockedStore, turn_id: str, *names: str) -> None:
        self.store = store
        self.turn_id = turn_id
        self.names = names
        self.ledger: dict[str, int] = dict.fromkeys(names, 0)

    def agent(self) -> Agent:
        """Deploys, once a person says so."""

        async def deploy(context: ToolContext, what: str) -> str:
            self.ledger[what] += 1
            return f"deployed {what}"

        script = [calls(*(("deploy", {"what": name}) for name in self.names)), "done"]
        return Agent(ScriptedModel(script), [Tool(deploy)], permission=HumanApproval(), lease_seconds=30)

    async def run(self) -> str:
        """A replica that goes on with the turn."""
        return (await Keeper(self.store).run(self.agent(), "go", turn_id=self.turn_id, wait=False)).status

    async def killed_run(self, chance: random.Random) -> None:
        """One that is killed somewhere; then its leases are over."""
        with anyio.CancelScope() as dead:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.run)
                for _ in range(chance.randint(0, 12)):
                    await anyio.lowlevel.checkpoint()
                dead.cancel()
        await self.store.advance_clock(30_000)


async def test_part_1_of_two_decisions_one_stands(store: ClockedStore) -> None:
    """100 of 100: one is accepted, the other is told which one stands, and the ledger agrees."""
    chance = random.Random(18)
    for number in range(TIMES):
        world = World(store, f"part 1, {number}", "prod")
        assert await world.run() == "parked"
        accepted: list[bool] = []
        refused: list[str] = []

        async def decide(
            who: str,
            approved: bool,
            turn: str = world.turn_id,
            accepted: list[bool] = accepted,
            refused: list[str] = refused,
        ) -> None:
            try:
                await Keeper(store).decide_permission(turn, 0, 0, approved, who=who)
            except TurnCheckpointConflict as e:
                refused.append(str(e))
            else:
                accepted.append(approved)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(decide, "replica 1", True)
            tasks.start_soon(decide, "replica 2", False)
        (won,), (told,) = accepted, refused
        assert f"{'replica 1 has approved' if won else 'replica 2 has denied'} it already" in told
        await world.killed_run(chance)
        status = await world.run()
        if status == "reconciliation_required":  # killed behind the barrier: the ledger tells
            happened = world.ledger["prod"] == 1
            resolution = "happened" if happened else "did_not_happen"
            result = "deployed prod" if happened else None
            keeper = Keeper(store)
            await keeper.resolve_tool(world.turn_id, 0, 0, resolution, who="op", why="ledger", result=result)
            status = await world.run()
        assert status == "success"
        assert world.ledger == {"prod": int(won)}


async def test_part_2_both_answers_are_kept(store: ClockedStore) -> None:
    """100 of 100: nothing is left paused with every question answered, whoever resumes in between."""
    for number in range(TIMES):
        world = World(store, f"part 2, {number}", "A", "B")
        assert await world.run() == "parked"

        async def answer_and_go_on(slot: int, world: World = world) -> None:
            await Keeper(store).decide_permission(world.turn_id, 0, slot, True, who=f"person {slot}")
            try:
                await world.run()
            except TurnCheckpointBusy:
                return  # the other one is at it

        async with anyio.create_task_group() as tasks:
            for slot in range(2):
                tasks.start_soon(answer_and_go_on, slot)
        assert await world.run() == "success"
        assert world.ledger == {"A": 1, "B": 1}
