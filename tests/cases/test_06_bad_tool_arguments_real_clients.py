"""Field case 06 through the providers' real clients: what the model sent is what the tool gets, or nothing runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import shared_json
from tests.models.clients import port_at, settling
from turnkeeper import Agent, Keeper, Tool
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.models.fake import FakeModel, Fault, Script, ScriptedCall, ScriptedRound
from turnkeeper.turn.names import ToolCallState

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/06-bad-tool-arguments.json")
ROWS: list[dict[str, Any]] = CASE["cases"]
GIVEN: dict[str, dict[str, Any]] = {
    '{"id": 12345678901234567890123}': {"id": 12345678901234567890123},
    '{"a":1,"a":2}': {"a": 2},
}
"""What the tool gets of a row that has something in it."""


def logging_tool(received: list[dict[str, Any]], name: str = "act") -> Tool:
    """A tool that takes anything."""

    async def act(**arguments: Any) -> str:
        received.append(arguments)
        return "ran"

    return Tool(act, name=name)


def results_in(body: dict[str, Any]) -> list[str]:
    """The results in a request, as they went over the wire."""
    if "input" in body:
        return [item["output"] for item in body["input"] if item["type"] == "function_call_output"]
    found: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            found.append(message["content"])
        elif isinstance(message["content"], list):
            found += [block["content"] for block in message["content"] if block["type"] == "tool_result"]
    return found


@pytest.mark.parametrize(
    ("api", "streaming"),
    [("chat", True), ("chat", False), ("responses", True), ("background", False), ("messages", True)],
)
async def test_rows(api: str, streaming: bool) -> None:
    """Every row is a round of one turn: run or not as the table says; journaled, and sent back to the provider, as it came."""
    rounds = [ScriptedRound(calls=[ScriptedCall(name="act", arguments=row["raw"])]) for row in ROWS]
    received: list[dict[str, Any]] = []
    with FakeModel(Script(rounds=[*rounds, ScriptedRound(text="over")])) as fake:
        async with (
            port_at(fake.url, api, streaming=streaming) as port,
            await Keeper.open("sqlite:///:memory:") as keeper,
        ):
            result = await keeper.run(settling(port, [logging_tool(received)]), "go", turn_id="t")
            assert (result.status, result.output, result.message) == ("success", "over", None)
            slots = [await keeper.session("t").get_tool(index, 0) for index in range(len(ROWS))]
            checkpoint = await keeper.checkpoint("t")
    told = results_in(fake.requests[-1].body)
    expected: list[dict[str, Any]] = []
    for row, slot, result_told in zip(ROWS, slots, told, strict=True):
        assert slot is not None
        assert slot.state is ToolCallState.COMPLETED
        # Null in a stream of pieces is nothing: no piece came.
        assert (slot.raw_arguments or "") == (row["raw"] or ""), row
        if "invalid" in row["expect"] and not row["expect"].startswith("either"):
            assert "Invalid arguments, the tool was not run" in result_told, row
        else:
            assert result_told == "ran", row
            expected.append(GIVEN.get(row["raw"], {}))
    assert received == expected
    assert fake.bought() == dict.fromkeys(range(len(ROWS) + 1), 1)
    assert checkpoint is not None
    check_pairs(checkpoint.messages)
    if api != "messages":
        sent = json.dumps(fake.requests[-1].body)
        assert all(json.dumps(row["raw"]) in sent for row in ROWS if row["raw"] is not None)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("fault", [Fault(end_after=4), Fault(cut_after=4)], ids=["ended", "cut"])
async def test_a_stream_that_was_cut_is_not_reserved(api: str, fault: Fault) -> None:
    """In the middle of the arguments: no slot, no message of the assistant, nothing runs; the next run gets the whole of them."""
    text = "".join(CASE["stream_cut"]["chunks"]) + '"}'
    received: list[dict[str, Any]] = []
    rounds = [
        ScriptedRound(calls=[ScriptedCall(name="write_file", arguments=text)], faults=[fault]),
        ScriptedRound(text="fine"),
    ]
    with FakeModel(Script(rounds=rounds)) as fake:
        async with port_at(fake.url, api) as port, await Keeper.open("sqlite:///:memory:") as keeper:
            agent = Agent(port, [logging_tool(received, "write_file")], max_model_attempts=1)
            result = await keeper.run(agent, "go", turn_id="t")
            assert result.status == "failed"
            session = keeper.session("t")
            assert await session.get_assistant(0) is None
            assert await session.get_tool(0, 0) is None
            assert len(received) == CASE["stream_cut"]["expect"]["executions"]
            assert (await keeper.run(agent, "go", turn_id="t")).output == "fine"
    assert received == [json.loads(text)]


@pytest.mark.parametrize("api", ["chat", "responses", "background", "messages"])
async def test_an_answer_cut_at_its_length_runs_nothing(api: str) -> None:
    cut = CASE["length_cut"]
    call = cut["tool_calls"][0]
    received: list[dict[str, Any]] = []
    scripted = ScriptedCall(name=call["name"], arguments=call["arguments"], id=call["id"])
    rounds = [ScriptedRound(calls=[scripted], finish=cut["finish_reason"]), ScriptedRound(text="over")]
    with FakeModel(Script(rounds=rounds)) as fake:
        async with port_at(fake.url, api) as port, await Keeper.open("sqlite:///:memory:") as keeper:
            agent = settling(port, [logging_tool(received, call["name"])])
            assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert len(received) == cut["expect"]["executions"]
    assert "arguments may be cut" in results_in(fake.requests[-1].body)[0]
