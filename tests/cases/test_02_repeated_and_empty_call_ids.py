"""Field case 02: provider call ids that repeat across rounds, repeat within a round, or are empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import shared_json
from turnkeeper import Agent, Keeper, ScriptedModel, ToolContext, tool
from turnkeeper.engine.stored import stored_messages
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.turn.names import ToolCallAction

CASE: dict[str, Any] = shared_json("cases/02-repeated-and-empty-call-ids.json")
ROUNDS: list[list[dict[str, Any]]] = [round_["calls"] for round_ in CASE["rounds"]]


class Shell:
    """The tools, with the operation ids that they were run under."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.ids: list[str | None] = []

        @tool
        async def run_shell(cmd: str, context: ToolContext) -> str:
            return self._run(cmd, context)

        @tool
        async def echo(v: str, context: ToolContext) -> str:
            return self._run(v, context)

        self.tools = [run_shell, echo]

    def _run(self, what: str, context: ToolContext) -> str:
        self.runs.append(context.operation_id)
        self.ids.append(context.call_id)
        return what


SCRIPT: list[Any] = [*({"role": "assistant", "tool_calls": calls} for calls in ROUNDS), "done"]


@pytest.mark.anyio
@pytest.mark.parametrize("parallel", [True, False])
async def test_every_call_is_a_call_of_its_own(tmp_path: Path, parallel: bool) -> None:
    shell = Shell()
    agent = Agent(ScriptedModel(SCRIPT), shell.tools, parallel_tools=parallel)
    async with await Keeper.open(f"sqlite:///{tmp_path}/t.db") as keeper:
        assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
        history = await keeper.history("t")
    assert history is not None
    assert len(shell.runs) == CASE["expected"]["executions_total"]
    assert len(set(shell.runs)) == CASE["expected"]["distinct_operation_ids"]
    # The provider's ids are kept as given, also '' and null.
    assert sorted(map(repr, shell.ids)) == sorted(repr(call["id"]) for calls in ROUNDS for call in calls)
    messages = stored_messages(history.state)
    check_pairs(messages)
    results = [message.metadata["tool_call_id"] for message in messages if message.role.value == "tool"]
    assert len(results) == sum(CASE["expected"]["results_per_round"])
    assert all(results), "a call that is sent back to a provider has an id"


@pytest.mark.anyio
@pytest.mark.parametrize("restart", CASE["restart_points"])
async def test_restarts_change_no_count(tmp_path: Path, restart: str) -> None:
    """Driven by hand up to the named point, then gone on with by another process's engine."""
    url = f"sqlite:///{tmp_path}/t.db"
    shell = Shell()
    async with await Keeper.open(url) as keeper:
        session = keeper.session("t")
        await session.start([{"role": "user", "content": "go"}], ["run_shell", "echo"], {})
        until = {"after round 1 commit": (2, 0), "between slot 0 and slot 1 of round 3": (3, 1)}.get(restart, (4, 0))
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for round_index, calls in enumerate(ROUNDS):
            if (round_index, 0) == until and round_index == 2:
                break
            decision = {"role": "assistant", "content": "", "tool_calls": calls}
            await session.reserve_assistant(round_index, decision)
            stop = False
            for slot, call in enumerate(calls):
                if (round_index, slot) == until:
                    stop = True
                    break
                operation = session.logical_operation_id(round_index, slot)
                claim = await session.claim_tool(
                    round_index, slot, call["id"], call["name"], call["arguments"], operation, begin=True
                )
                assert claim.action is ToolCallAction.BEGUN, claim  # never CACHED or CONFLICT for an id seen before
                shell.runs.append(operation)
                await session.complete_tool(round_index, slot, str(claim.owner_token), claim.fence, {"content": "ran"})
            if stop:
                break
            messages = [
                *messages,
                decision,
                *({"role": "tool", "tool_call_id": c["id"], "content": "ran"} for c in calls),
            ]
            await session.commit_round(round_index, messages, {})
    before = len(shell.runs)
    async with await Keeper.open(url) as keeper:
        model = ScriptedModel(SCRIPT)
        result = await keeper.run(Agent(model, shell.tools), "go", turn_id="t")
        assert result.status == "success", result
    assert 0 < before < len(shell.runs)
    assert len(shell.runs) == len(set(shell.runs)) == CASE["expected"]["executions_total"]
