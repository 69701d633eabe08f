"""A turn exported at every sequence number, imported on another kind of store and resumed, comes to the same end."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conftest import opened
from turnkeeper import Agent, Keeper, ScriptedModel, Tool, ToolContext, TurnResult
from turnkeeper.engine.documents import from_json, to_json
from turnkeeper.engine.stored import stored_messages
from turnkeeper.engine.wire import EngineCheckpoint, ModelInvocationResponse, Outcome, Role, to_builtins
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.models.scripted import calls
from turnkeeper.turn import records as r

pytestmark = pytest.mark.anyio

ROUNDS = 5
TOOLS = 2


class World:
    """The model and the tools of a turn of five rounds; effects are counted here, whatever store the turn is on."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.asked: list[int] = []

    def _act(self, n: int, context: ToolContext) -> str:
        self.effects[f"{context.round_index}.{context.slot_index}"] += 1
        return f"done {n}, as a text that is long enough to be referred to"

    def agent(self) -> Agent:
        """The agent."""
        script: list[Any] = [
            calls(*(("act", {"n": 10 * index + n}) for n in range(TOOLS)), spoken=f"round {index}")
            for index in range(ROUNDS)
        ]
        script.append("the end")
        return Agent(ScriptedModel(script), [Tool(self._act, name="act")], parallel_tools=False)


@pytest.fixture(params=["sqlite file", "postgres", "redis"])
async def other(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Keeper]:
    """A Keeper on another kind of store."""
    async with opened(request.param, request, tmp_path) as store:
        yield Keeper(store)


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    """Where the turn begins."""
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        yield keeper


async def transcript(keeper: Keeper, turn_id: str) -> list[dict[str, Any]]:
    """A turn's messages."""
    history = await keeper.history(turn_id)
    assert history is not None
    return [to_builtins(message) for message in stored_messages(history.state)]


async def finished(keeper: Keeper, world: World) -> TurnResult:
    """Run the turn to its end."""
    return await keeper.run(world.agent(), "go", turn_id="t", session_id="s", inputs={"k": [1, None]})


async def test_exported_at_every_sequence_and_resumed_elsewhere(keeper: Keeper, other: Keeper) -> None:
    """Issue C: same final transcript, and no effect repeated."""
    world = World()
    assert (await finished(keeper, world)).status == "success"
    expected = await transcript(keeper, "t")
    history = await keeper.history("t")
    assert history is not None
    seen: set[str] = set()
    for at in range(1, history.tail + 1):
        exported = await keeper.checkpoint("t", at=at)
        assert exported is not None
        if exported.id in seen:
            continue
        seen.add(exported.id)
        loaded = from_json(EngineCheckpoint, to_json(exported), strict=True).value
        assert loaded == exported
        done = {f"{entry.record.round_index}.{entry.record.slot_index}" for entry in history.entries
                if entry.seq <= at and isinstance(entry.record, r.ToolCompleted)}  # fmt: skip
        left = World()
        agent = left.agent()
        await other.adopt(loaded, agent=agent)
        await other.adopt(loaded, agent=agent)
        result = await other.resume(agent, turn_id="t")
        assert (result.status, result.output) == ("success", "the end"), (at, result)
        assert await transcript(other, "t") == expected, at
        effects = {f"{index}.{slot}" for index in range(ROUNDS) for slot in range(TOOLS)}
        assert left.effects == Counter(effects - done), at
        final = await other.checkpoint("t")
        assert final is not None
        assert final.completed_model_iterations == ROUNDS + 1
        assert [one.request_id for one in final.completed_tool_results] == ["call_0", "call_1"] * ROUNDS
        assert (final.session_id, final.run_id, final.inputs) == ("s", exported.run_id, {"k": [1, None]})
        events = await other.events("t")
        sequences = [event.sequence for event in events]
        assert sequences == list(range(loaded.last_sequence + 2, loaded.last_sequence + 2 + len(events)))
        await other.erase("t")
    assert len(seen) == 1 + ROUNDS * (1 + TOOLS + 1) + 1


async def test_a_turn_in_doubt_is_in_doubt_elsewhere(keeper: Keeper, other: Keeper) -> None:
    """Section 7, rows 3 and 5: the indeterminate call is not run; settled, the rest runs."""
    ran: list[int] = []

    def act(n: int) -> str:
        ran.append(n)
        if n == 0 and len(ran) == 1:
            raise TimeoutError("no answer")
        return f"done {n}"

    tools = [Tool(act)]
    asked = calls(("act", {"n": 0}), ("act", {"n": 1}))
    agent = Agent(ScriptedModel([asked, "the end"]), tools, parallel_tools=False)
    assert (await keeper.run(agent, "go", turn_id="t")).status == "reconciliation_required"
    exported = await keeper.checkpoint("t")
    assert exported is not None
    assert exported.reconciliation_required
    assert [one.outcome for one in exported.completed_tool_results] == [Outcome.INDETERMINATE]
    assert [one.id for one in exported.pending_tool_requests] == ["call_1"]

    await other.adopt(exported)
    assert (await other.resume(agent, turn_id="t")).open_slots == ((0, 0),)
    assert ran == [0]
    await other.resolve_tool("t", 0, 0, "happened", who="ann", why="in the books", result="confirmed")
    assert (await other.resume(agent, turn_id="t")).status == "success"
    assert ran == [0, 1]
    shown = [m["parts"][0]["value"] for m in await transcript(other, "t") if m["role"] == Role.TOOL.value]
    assert shown == ["confirmed", "done 1"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "pendingToolRequests[0].name"),  # a tool that the agent does not have
    ({"pending_model_response": None}, "pendingToolRequests"),
    ({"turn_id": ""}, "turnId"),
    ({"pending_tool_requests": []}, "pendingModelResponse.toolRequests[0].id"),
    ({"last_sequence": -1}, "lastSequence"),
    ({"final_output_ready": True}, "finalOutputReady"),
]


@pytest.mark.parametrize(("changes", "field"), REFUSED)
async def test_what_cannot_be_gone_on_with_is_refused(keeper: Keeper, changes: dict[str, Any], field: str) -> None:
    """Issue C, bad input: the path of the field is told, and nothing is appended."""
    await finished(keeper, World())
    held = await keeper.checkpoint("t", at=3)
    assert held is not None
    assert held.pending_model_response is not None
    changed: EngineCheckpoint = replace(held, **{"turn_id": "fresh", **changes})
    with pytest.raises(InvalidInput) as raised:
        await keeper.adopt(changed, agent=Agent(ScriptedModel([])))
    assert raised.value.field == field
    assert await keeper.history("fresh") is None


async def test_a_turn_that_is_there_is_not_begun_again(keeper: Keeper) -> None:
    """The log is the truth: a checkpoint of its own past does not set it back. And nobody resumes what is not there."""
    world = World()
    await finished(keeper, world)
    held = await keeper.checkpoint("t", at=3)
    assert held is not None
    with pytest.raises(TurnCheckpointConflict):
        await keeper.adopt(held)
    with pytest.raises(TurnCheckpointError):
        await keeper.resume(world.agent(), turn_id="fresh")


async def test_a_final_answer_is_delivered_without_asking_again(keeper: Keeper, other: Keeper) -> None:
    """2.7: `finalOutputReady` goes straight to the end."""
    answer = ModelInvocationResponse(output="hello")
    await keeper.run(Agent(ScriptedModel([answer])), "hi", turn_id="t")
    exported = await keeper.checkpoint("t")
    assert exported is not None
    assert exported.final_output_ready
    await other.adopt(exported)
    result = await other.resume(Agent(ScriptedModel([])), turn_id="t")
    assert (result.status, result.output, result.model_calls) == ("success", "hello", 0)
