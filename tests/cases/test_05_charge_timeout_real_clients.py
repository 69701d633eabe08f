"""Field case 05 through the providers' real clients: what the model is told of a charge, and that it is made once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.charge_server import ChargeServer, charge_server, unused_port
from tests.cases.test_05_charge_timeout_unknown_outcome import CASE, charging
from tests.models.clients import KINDS, port_at, settling
from turnkeeper import Keeper
from turnkeeper.models.fake import FakeModel, Script, ScriptedCall, ScriptedRound
from turnkeeper.turn.names import ToolCallState

pytestmark = pytest.mark.anyio

CALLS = [ScriptedCall(name=call["name"], arguments=call["arguments"]) for call in CASE["calls"]]
every_kind = pytest.mark.parametrize(("api", "streaming"), KINDS)


def script(count: int) -> Script:
    """So many charges in one round, and a last word."""
    return Script(rounds=[ScriptedRound(text="I charge.", calls=CALLS[:count]), ScriptedRound(text="It is over.")])


def last_told(fake: FakeModel) -> str:
    """What the model was told last, as it went over the wire."""
    body: dict[str, Any] = fake.requests[-1].body
    said: list[Any] = body["input"] if "input" in body else body["messages"]
    return json.dumps(said[-1])


def charged(server: ChargeServer) -> int:
    """Rows in the ledger."""
    return sum(server.ledger.values())


@every_kind
@pytest.mark.parametrize("behaviour", ["applied_then_504", "applied_then_socket_reset"])
async def test_after_sending_the_outcome_is_unknown(api: str, streaming: bool, behaviour: str) -> None:
    """One charge, no second attempt, no second answer of the model; it is told that the outcome is not known."""
    with charge_server(behaviour) as server, FakeModel(script(1)) as fake:
        async with (
            port_at(fake.url, api, streaming=streaming) as port,
            await Keeper.open("sqlite:///:memory:") as keeper,
        ):
            agent = settling(port, [charging(lambda: server.port)])
            for _ in range(2):
                result = await keeper.run(agent, "pay", turn_id="t")
                assert (result.status, result.open_slots) == ("reconciliation_required", ((0, 0),))
            slot = await keeper.session("t").get_tool(0, 0)
            assert slot is not None
            assert slot.state is ToolCallState.AMBIGUOUS
            assert fake.bought() == {0: 1}
            await keeper.resolve_tool("t", 0, 0, "unknown", who="ann", why="the bank is closed")
            assert (await keeper.run(agent, "pay", turn_id="t")).output == "It is over."
    assert "not known" in last_told(fake)
    assert "failed" not in last_told(fake)
    assert (charged(server), len(server.keys), fake.bought()) == (1, 1, {0: 1, 1: 1})


@every_kind
async def test_each_other_behaviour(api: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not sent: tried again under the next fence. Replay safe: again with the same key. Declined: told. Two equal ones: two."""
    monkeypatch.setattr("turnkeeper.engine.rounds._PAUSE", 0.001)
    for behaviours, replay_safe, calls, rows, attempts in (
        (["refused", "ok"], False, 1, 1, 1),
        (["applied_then_504", "ok"], True, 1, 1, 2),
        (["declined"], False, 1, 0, 1),
        (["ok"], False, 2, 2, 2),
    ):
        refused = [unused_port()] if behaviours[0] == "refused" else []
        answers = [one for one in behaviours if one != "refused"]
        with charge_server(*answers) as server, FakeModel(script(calls)) as fake:
            ports = [*refused, *[server.port] * 3]
            async with (
                port_at(fake.url, api, streaming=streaming) as port,
                await Keeper.open("sqlite:///:memory:") as keeper,
            ):
                tool = charging(lambda ports=ports: ports.pop(0), replay_safe=replay_safe)
                result = await keeper.run(settling(port, [tool]), "pay", turn_id="t")
                slot = await keeper.session("t").get_tool(0, 0)
        assert (result.status, result.message) == ("success", None)
        assert (charged(server), len(server.keys), fake.bought()) == (rows, attempts, {0: 1, 1: 1}), behaviours
        assert len(set(server.keys)) == calls
        assert slot is not None
        assert slot.fence == (2 if refused else 1) or replay_safe
        assert slot.operation_id in server.keys
        if behaviours == ["declined"]:
            assert slot.result is not None
            assert (slot.result["outcome"], slot.result["errorKind"]) == ("failed", "declined")
            assert "declined" in last_told(fake)
