"""What a tool says with a `PortError` or with a result of its own: just what it says in the contract (2.13, 2.16)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.host import Durability
from tests.engine.support import Channel, Ledger, asks, asks_once, last_results, records_of, requests_of, slot_of
from turnkeeper import Agent, Keeper, ReplyPort, Tool, ToolContext
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.stored import stored_result
from turnkeeper.engine.wire import ModelToolResult, Outcome
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r

pytestmark = pytest.mark.anyio


class Port:
    """A tool that acts, and then says what is planned for it: an exception is raised, and anything else returned."""

    def __init__(self, *plan: Any) -> None:
        self.plan = list(plan)
        self.ledger = Ledger()

    async def act(self, context: ToolContext) -> Any:
        """Act."""
        return self.act_now(context)

    def act_now(self, context: ToolContext) -> Any:
        """Act."""
        self.ledger.write(context)
        said = self.plan.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


async def result_of(keeper: Keeper, slot_index: int = 0) -> ModelToolResult:
    """The result that stands in the log."""
    slot = await slot_of(keeper, 0, slot_index)
    assert slot is not None
    assert slot.result is not None
    return stored_result(slot.result, "", "")


@pytest.mark.parametrize("options", [{}, {"replay_safe": True}])
@pytest.mark.parametrize("parallel", [True, False])
async def test_a_plain_one_means_that_it_failed_for_sure(
    keeper: Keeper, options: dict[str, Any], *, parallel: bool
) -> None:
    """2.13: the model is told, with the tool's name; it is not tried again by itself; what the provider said is kept."""
    port = Port(PortError("no such account", metadata={"status": 404}), "acted")
    model = asks_once(("act", ""), ("act", ""))
    agent = Agent(model, [Tool(port.act, **options)], parallel_tools=parallel)
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == ["act failed: no such account", "acted"]
    result = await result_of(keeper)
    assert (result.outcome, result.error_kind, result.metadata) == (Outcome.FAILED, "tool_error", {"status": 404})
    assert port.ledger.once(2)
    assert await records_of(keeper, r.ToolAbandoned) == []


async def test_one_of_unknown_outcome_leaves_the_call_in_doubt(keeper: Keeper) -> None:
    """2.13: it is neither repeated nor guessed."""
    port = Port(PortError("cut", outcome_unknown=True))
    agent = Agent(asks_once(("act", "")), [Tool(port.act)])
    result = await keeper.run(agent, "go", turn_id="t")
    assert (result.status, result.error_kind, result.open_slots) == (
        "reconciliation_required",
        "effect_outcome_unknown",
        ((0, 0),),
    )
    assert [record.reason for record in await records_of(keeper, r.ToolAmbiguous)] == ["PortError: cut"]
    assert port.ledger.once(1)


@pytest.mark.parametrize("parallel", [True, False])
async def test_one_about_the_configuration_fails_the_turn(keeper: Keeper, *, parallel: bool) -> None:
    """2.16: the call has no result and the model is not asked. Once it is set up, the turn goes on with that call."""
    port = Port(PortError("no credentials", configuration_error=True), "acted", "acted again")
    model, durability = asks_once(("act", ""), ("act", "")), Durability()
    agent = Agent(model, [Tool(port.act)], parallel_tools=parallel)
    result = await keeper.run(agent, "go", turn_id="t", durability=durability)
    assert (result.status, result.error_kind, result.message) == (
        "failed",
        "tool_configuration_error",
        "act: no credentials",
    )
    assert durability.events[-1]["payload"]["output"]["errorKind"] == "tool_configuration_error"
    assert requests_of(model) == [(0, 0)]
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert slot.result is None
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert sorted(last_results(model.requests[1])) == ["acted", "acted again"]
    assert len(port.ledger.effects) == 3
    assert len(set(port.ledger.effects)) == 2


async def test_a_result_of_its_own_is_taken_as_it_is(keeper: Keeper) -> None:
    """2.13: whatever id and name it gives itself."""
    told = ModelToolResult(
        request_id="x", name="y", outcome=Outcome.FAILED, output="declined", error_kind="declined", metadata={"a": 1}
    )
    model, port = asks_once(("act", "")), Port(told)
    assert (await keeper.run(Agent(model, [Tool(port.act)]), "go", turn_id="t")).status == "success"
    result = await result_of(keeper)
    assert (result.outcome, result.error_kind, result.metadata) == (Outcome.FAILED, "declined", {"a": 1})
    assert (result.name, last_results(model.requests[1])) == ("act", ["declined"])


async def test_a_result_of_its_own_that_is_indeterminate(keeper: Keeper) -> None:
    """2.13: as if it had been raised."""
    told = ModelToolResult(request_id="x", name="y", outcome=Outcome.INDETERMINATE, output="cut in the middle")
    result = await keeper.run(Agent(asks_once(("act", "")), [Tool(Port(told).act)]), "go", turn_id="t")
    assert (result.status, result.open_slots) == ("reconciliation_required", ((0, 0),))
    assert "cut in the middle" in (await records_of(keeper, r.ToolAmbiguous))[0].reason


async def test_a_channel_that_says_so_has_not_sent(keeper: Keeper) -> None:
    """Of a reply, too, a plain one means that it surely was not sent, and one of unknown outcome that it may have been."""
    for error, status, kind in (
        (PortError("no"), "failed", "reply_refused"),
        (PortError("cut", outcome_unknown=True), "reconciliation_required", "reply_outcome_unknown"),
    ):
        channel = Channel(error)
        ended = await keeper.run(Agent(asks()), "go", turn_id=kind, reply=ReplyPort(channel.send))
        assert (ended.status, ended.error_kind, len(channel.tries)) == (status, kind, 1)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (PortError("no such account"), "success", ["act_now failed: no such account"]),
        (PortError("no table", configuration_error=True), "failed", []),
    ],
    ids=["plain", "configuration"],
)
async def test_in_the_stores_transaction(error: PortError, status: str, told: list[str]) -> None:
    """It is rolled back in either case."""
    store = await SqliteStore.open(":memory:")
    async with Keeper(store) as keeper:
        model = asks_once(("act_now", ""))
        agent = Agent(model, [Tool(Port(error).act_now, transactional=True)])
        result = await keeper.run(agent, "go", turn_id="t")
        assert result.status == status
        assert [text for request in model.requests[1:] for text in last_results(request)] == told
