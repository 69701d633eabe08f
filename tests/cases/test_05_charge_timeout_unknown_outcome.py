"""Field case 05: HTTP 504 after the charge went through."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.charge_server import charge_server, unused_port
from tests.conftest import shared_json
from turnkeeper import Agent, EffectRefused, Keeper, OutcomeUnknown, ScriptedModel, ToolContext, tool
from turnkeeper.turn.names import ToolCallState

CASE: dict[str, Any] = shared_json("cases/05-charge-timeout-unknown-outcome.json")
ONE_CALL = {"role": "assistant", "tool_calls": [{"id": "c", **CASE["calls"][0]}]}
TWO_CALLS = {"role": "assistant", "tool_calls": [{"id": "c", **call} for call in CASE["calls"]]}


def charging(port: Callable[[], int], *, replay_safe: bool = False) -> Any:
    """A tool that charges over HTTP with its operation id as the idempotency key, as a user would write it."""

    @tool(replay_safe=replay_safe)
    def charge(customer: str, cents: int, context: ToolContext) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port(), timeout=10)
        try:
            body = json.dumps({"customer": customer, "cents": cents})
            connection.request("POST", "/charges", body, {"Idempotency-Key": context.operation_id})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status == 402:
            raise EffectRefused(text, kind="declined")
        if answer.status >= 500:
            raise OutcomeUnknown(f"HTTP {answer.status}")
        return text

    return charge


@pytest.mark.anyio
@pytest.mark.parametrize("behaviour", ["applied_then_504", "applied_then_socket_reset"])
async def test_after_sending_the_outcome_is_unknown(behaviour: str) -> None:
    with charge_server(behaviour) as server:
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            model = ScriptedModel([ONE_CALL, "over"])
            agent = Agent(model, [charging(lambda: server.port)])
            for _ in range(2):  # running it again is no second attempt
                result = await keeper.run(agent, "pay", turn_id="t")
                assert result.status == "reconciliation_required"
            slot = await keeper.session("t").get_tool(0, 0)
            assert slot is not None
            assert slot.state is ToolCallState.AMBIGUOUS
            assert server.keys == [slot.operation_id]
            await keeper.resolve_tool("t", 0, 0, "unknown", who="ann", why="the bank is closed")
            assert (await keeper.run(agent, "pay", turn_id="t")).status == "success"
    told = model.requests[-1].messages[-1].text
    assert "not known" in told
    assert "failed" not in told
    assert sum(server.ledger.values()) == len(server.keys) == 1


@pytest.mark.anyio
async def test_provably_not_sent_is_tried_again_under_the_next_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnkeeper.engine.rounds._PAUSE", 0.001)
    with charge_server("ok") as server:
        ports = [unused_port(), server.port]
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            tool_ = charging(lambda: ports.pop(0))
            assert (
                await keeper.run(Agent(ScriptedModel([ONE_CALL, "paid"]), [tool_]), "pay", turn_id="t")
            ).output == "paid"
            slot = await keeper.session("t").get_tool(0, 0)
    assert slot is not None
    assert (slot.state, slot.fence) == (ToolCallState.COMPLETED, 2)
    assert server.keys == [slot.operation_id]
    assert sum(server.ledger.values()) == 1


@pytest.mark.anyio
async def test_replay_safe_runs_again_with_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnkeeper.engine.rounds._PAUSE", 0.001)
    with charge_server("applied_then_504", "ok") as server:
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            agent = Agent(ScriptedModel([ONE_CALL, "paid"]), [charging(lambda: server.port, replay_safe=True)])
            assert (await keeper.run(agent, "pay", turn_id="t")).status == "success"
            slot = await keeper.session("t").get_tool(0, 0)
    assert slot is not None
    assert slot.state is ToolCallState.COMPLETED
    assert server.keys == [slot.operation_id] * 2
    assert sum(server.ledger.values()) == 1


@pytest.mark.anyio
async def test_a_definite_refusal_is_a_result() -> None:
    with charge_server("declined") as server:
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            agent = Agent(ScriptedModel([ONE_CALL, "sorry"]), [charging(lambda: server.port)])
            assert (await keeper.run(agent, "pay", turn_id="t")).output == "sorry"
            slot = await keeper.session("t").get_tool(0, 0)
    assert slot is not None
    assert slot.state is ToolCallState.COMPLETED
    assert slot.result is not None
    assert (slot.result["outcome"], slot.result["errorKind"]) == ("failed", "declined")
    assert len(server.keys) == 1
    assert not server.ledger


@pytest.mark.anyio
@pytest.mark.parametrize("parallel", [True, False])
async def test_two_equal_purchases_are_two(parallel: bool) -> None:
    with charge_server("ok") as server:
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            agent = Agent(ScriptedModel([TWO_CALLS, "paid"]), [charging(lambda: server.port)], parallel_tools=parallel)
            assert (await keeper.run(agent, "pay", turn_id="t")).status == "success"
            session = keeper.session("t")
    assert sorted(server.keys) == sorted({session.logical_operation_id(0, 0), session.logical_operation_id(0, 1)})
    assert sum(server.ledger.values()) == 2
