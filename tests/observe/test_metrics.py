"""Metrics: what became durable, by who wrote it; and what nobody else can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from tests.engine.support import Channel, asks, asks_once
from tests.observe.watching import Watched
from turnkeeper import (
    Agent,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    OutcomeUnknown,
    ReplyPort,
    ScriptedModel,
    Tool,
)
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.engine.wire import InvocationUsage
from turnkeeper.errors import StoreUnavailable
from turnkeeper.log.store import Store
from turnkeeper.observe import names
from turnkeeper.observe.telemetry import kind_of_store
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


async def ok() -> str:
    """A tool."""
    return "ok"


async def test_effects_of_a_turn(keeper: Keeper, watched: Watched) -> None:
    """Refused calls are no effects."""
    model = asks_once(("ok", {}), ("ok", {}), ("unknown", {}))
    await keeper.run(Agent(model, [Tool(ok)]), "q", turn_id="t", reply=ReplyPort(Channel().send))
    assert watched.effects() == {
        ("model", "begun"): 2,
        ("model", "completed"): 2,
        ("tool", "begun"): 2,
        ("tool", "completed"): 2,
        ("send", "begun"): 1,
        ("send", "completed"): 1,
    }
    assert watched.metric(names.AMBIGUOUS_OPEN) == {}
    await keeper.run(Agent(model, [Tool(ok)]), "q", turn_id="t", reply=ReplyPort(Channel().send))
    assert watched.effects()["model", "begun"] == 2  # it was there
    assert watched.metric(names.TURNS) == {("success",): 2}


async def test_a_transactional_tool(keeper: Keeper, watched: Watched) -> None:
    def act() -> str:
        return "ok"

    await keeper.run(Agent(asks([("act", {})]), [Tool(act, transactional=True)]), "q", turn_id="t")
    assert watched.effects()["tool", "begun"] == watched.effects()["tool", "completed"] == 1


async def test_a_model_call_in_doubt_is_open_until_it_is_settled(keeper: Keeper, watched: Watched) -> None:
    def lost(_: ModelRequest) -> str:
        raise OutcomeUnknown("504")

    agent = Agent(ScriptedModel(lost), unknown_model="reconcile")
    assert (await keeper.run(agent, "q", turn_id="t")).status == "reconciliation_required"
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("model",): 1}
    await keeper.resolve_model("t", "did_not_happen", who="me", why="asked them")
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("model",): 0}
    assert watched.effects()["model", "ambiguous"] == 1


async def test_a_reply_in_doubt(keeper: Keeper, watched: Watched) -> None:
    reply = ReplyPort(Channel(OutcomeUnknown("504")).send)
    assert (await keeper.run(Agent(ScriptedModel(["a"])), "q", turn_id="t", reply=reply)).status != "success"
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("send",): 1}
    await keeper.resolve_delivery("t", message_id="m1", who="me", why="seen")
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("send",): 0}
    assert watched.effects() == {
        ("model", "begun"): 1,
        ("model", "completed"): 1,
        ("send", "begun"): 1,
        ("send", "ambiguous"): 1,
        ("send", "completed"): 1,
    }


async def test_model_calls(keeper: Keeper, watched: Watched) -> None:
    class Counting:
        provider = "acme"
        model = "acme-1"

        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            if request.attempt == 0:
                raise ConnectionError("503")
            usage = InvocationUsage(input_tokens=10, output_tokens=5, total_tokens=15)
            return ModelInvocationResponse(output="a", usage=usage)

    await keeper.run(Agent(Counting()), "q", turn_id="t")
    assert watched.metric(names.MODEL_DURATION) == {
        ("ConnectionError", "chat", "acme", "acme-1"): 1,
        ("chat", "acme", "acme-1"): 1,
    }
    assert watched.metric(names.TOKEN_USAGE) == {
        ("chat", "acme", "acme-1", "input"): 1,
        ("chat", "acme", "acme-1", "output"): 1,
    }


async def test_append_latency_by_store(keeper: Keeper, watched: Watched) -> None:
    await keeper.run(Agent(asks([("ok", {})]), [Tool(ok)]), "q", turn_id="t")
    assert watched.metric(names.APPEND_DURATION) == {("sqlite",): 4}


class LosesAnswers:
    """A store whose append is in, and whose answer is lost, once."""

    def __init__(self, below: Store) -> None:
        self.beneath = below
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)

    async def append(self, key: str, bodies: Sequence[bytes], **more: Any) -> Any:
        """See `Store.append`."""
        done = await self.beneath.append(key, bodies, **more)
        if not self.lost:
            self.lost = True
            raise StoreUnavailable("the store", "gone", applied=None)
        return done


async def test_an_append_whose_answer_is_lost_counts_once(store: Store, watched: Watched) -> None:
    losing: Any = LosesAnswers(store)
    keeper = Keeper(losing, telemetry=watched.telemetry)
    await keeper.run(Agent(ScriptedModel(["a"])), "q", turn_id="t")
    assert losing.lost
    assert watched.effects() == {("model", "begun"): 1, ("model", "completed"): 1}
    assert watched.metric(names.APPEND_DURATION) == {("sqlite",): 1}  # how long the other took, nobody knows


def test_kinds_of_stores() -> None:
    class Wrapping:
        beneath = object.__new__(SqliteStore)

    assert kind_of_store(Wrapping()) == "sqlite"


async def test_a_lost_lease(watched: Watched) -> None:
    leases = LeaseKeeper(0.06, watched.telemetry)
    lost = anyio.Event()

    async def renew() -> bool:
        return False

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leases.run)
        with leases.holding("it", renew, lost.set), anyio.fail_after(10):
            await lost.wait()
        tasks.cancel_scope.cancel()
    assert watched.metric(names.LEASE_LOSSES) == {(): 1}
