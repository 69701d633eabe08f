"""Field case 06: arguments that are cut, empty or not an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import shared_json
from turnkeeper import (
    Agent,
    AnswerCut,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    ModelToolRequest,
    ScriptedModel,
    Tool,
)
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.turn.names import ToolCallState

CASE: dict[str, Any] = shared_json("cases/06-bad-tool-arguments.json")


def _logging_tool(received: list[dict[str, Any]], name: str = "act") -> Tool:
    async def act(**arguments: Any) -> str:
        received.append(arguments)
        return "ran"

    return Tool(act, name=name)


def _response(raw: Any, name: str = "act", **metadata: Any) -> ModelInvocationResponse:
    request = ModelToolRequest(id="c0", name=name, arguments=raw)
    return ModelInvocationResponse(tool_requests=[request], metadata=metadata or None)


@pytest.mark.anyio
@pytest.mark.parametrize("row", CASE["cases"], ids=lambda row: repr(row["raw"]))
@pytest.mark.parametrize("restart", [False, True])
async def test_rows(tmp_path: Path, row: dict[str, Any], restart: bool) -> None:
    """Runs or not as the table says, and decides the same behind a restart between reserve and claim."""
    raw = row["raw"]
    received: list[dict[str, Any]] = []
    model = ScriptedModel([_response(raw), "over"])
    agent = Agent(model, [_logging_tool(received)])
    url = f"sqlite:///{tmp_path}/t.db"
    if restart:
        async with await Keeper.open(url) as keeper:
            session = keeper.session("t")
            await session.start([{"role": "user", "content": "go"}], ["act"], {})
            await session.reserve_assistant(0, {"toolRequests": [{"id": "c0", "name": "act", "arguments": raw}]})
    async with await Keeper.open(url) as keeper:
        assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
        slot = await keeper.session("t").get_tool(0, 0)
    assert slot is not None
    assert slot.state is ToolCallState.COMPLETED
    assert slot.raw_arguments == raw  # journaled as given
    assert slot.result is not None
    if "invalid" in row["expect"] and not row["expect"].startswith("either"):
        assert received == []
        assert (slot.result["outcome"], slot.result["errorKind"]) == ("failed", "invalid_arguments")
        told = model.requests[-1].messages[-1].text
        assert "Invalid arguments, the tool was not run" in told
    else:
        expected = {'{"id": 12345678901234567890123}': {"id": 12345678901234567890123}, '{"a":1,"a":2}': {"a": 2}}
        assert received == [expected.get(raw, {})]
        assert slot.result["outcome"] == "success"
    for request in model.requests:
        check_pairs(request.messages)


@pytest.mark.anyio
async def test_a_stream_that_was_cut_is_not_reserved(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []

    class Cut:
        """A port whose stream ends without a finish reason."""

        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            raise AnswerCut(f"the stream ended after {''.join(CASE['stream_cut']['chunks'])!r}")

    agent = Agent(Cut(), [_logging_tool(received, "write_file")], max_model_attempts=1)
    async with await Keeper.open(f"sqlite:///{tmp_path}/t.db") as keeper:
        result = await keeper.run(agent, "go", turn_id="t")
        assert (result.status, result.error_kind) == ("failed", "model_error")
        session = keeper.session("t")
        assert await session.get_assistant(0) is None
        assert await session.get_tool(0, 0) is None
        assert received == []
        # The turn is resumable: the next run asks again.
        again = Agent(ScriptedModel(["fine now"]), [_logging_tool(received, "write_file")])
        assert (await keeper.run(again, "go", turn_id="t")).output == "fine now"


@pytest.mark.anyio
async def test_an_answer_cut_at_its_length_runs_nothing(tmp_path: Path) -> None:
    cut = CASE["length_cut"]
    received: list[dict[str, Any]] = []
    call = cut["tool_calls"][0]
    model = ScriptedModel([_response(call["arguments"], call["name"], finishReason=cut["finish_reason"]), "over"])
    async with await Keeper.open(f"sqlite:///{tmp_path}/t.db") as keeper:
        agent = Agent(model, [_logging_tool(received, call["name"])])
        assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert len(received) == cut["expect"]["executions"]
    assert "arguments may be cut" in model.requests[-1].messages[-1].text
