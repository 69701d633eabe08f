"""Log records carry what they are about as fields."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from tests.engine.support import asks_once
from turnkeeper import Agent, Flow, FlowContext, Keeper, ModelRequest, NotSent, ScriptedModel, Tool
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.log.store import Store
from turnkeeper.observe.logs import about, logger
from turnkeeper.observe.names import LOG_FIELDS

pytestmark = pytest.mark.anyio


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Those of ours that it has."""
    return {name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)}


def only(caplog: pytest.LogCaptureFixture, text: str) -> logging.LogRecord:
    """The one record that says so."""
    (record,) = (one for one in caplog.records if text in one.getMessage())
    return record


async def test_turn_and_slot(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Without telemetry, too. Calls that run at the same time have their own slots."""
    failures = ["b"]

    async def act(name: str) -> str:
        if name in failures:
            failures.remove(name)
            raise NotSent("no connection")
        return name

    model = asks_once(("act", {"name": "a"}), ("act", {"name": "b"}))
    await Keeper(store).run(Agent(model, [Tool(act)]), "q", turn_id="t")
    record = only(caplog, "will try again")
    assert fields(record) == {"turn": "t", "scope": "primary", "round": 0, "slot": 1}
    assert (record.name, record.module) == ("turnkeeper.engine.rounds", "rounds")  # not the helper's


async def test_a_model_call(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def fails(request: ModelRequest) -> str:
        if request.attempt == 0:
            raise ConnectionError("503")
        return "a"

    await Keeper(store).run(Agent(ScriptedModel(fails)), "q", turn_id="t")
    assert fields(only(caplog, "will try again")) == {"turn": "t", "scope": "primary"}


async def test_a_conversation_and_the_turns_of_its_steps(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def fails(request: ModelRequest) -> str:
        if request.attempt == 0:
            raise ConnectionError("503")
        return "a"

    flow = Flow("f")

    @flow.step
    async def only_step(c: FlowContext) -> None:
        await c.run(Agent(ScriptedModel(fails)), "q")
        raise RuntimeError("broken")

    async with replica(store, flow, Platform()) as person:
        await person.says("hi")
    told = fields(only(caplog, "will try again"))
    assert told.pop("turn")
    assert told == {"scope": "primary", "conversation": "c"}
    assert fields(only(caplog, "message 1 failed")) == {"conversation": "c"}


async def test_a_lease_that_another_task_renews(caplog: pytest.LogCaptureFixture) -> None:
    leases, lost = LeaseKeeper(0.06), anyio.Event()

    async def renew() -> bool:
        return False

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leases.run)  # is about nothing
        with about(turn="t"), leases.holding("it", renew, lost.set, {"slot": 3}), anyio.fail_after(10):
            await lost.wait()
        tasks.cancel_scope.cancel()
    assert fields(only(caplog, "was lost")) == {"turn": "t", "slot": 3}


def test_fields_end_with_their_block_and_are_no_others(caplog: pytest.LogCaptureFixture) -> None:
    log = logger("turnkeeper.test")
    with about(turn="t"):
        with about(slot=1):
            log.warning("in", extra={"round": 2})
        log.warning("between")
    log.warning("out")
    assert [fields(record) for record in caplog.records] == [{"turn": "t", "slot": 1, "round": 2}, {"turn": "t"}, {}]


def test_nothing_is_configured() -> None:
    assert logging.getLogger("turnkeeper").handlers == []
    assert logging.getLogger("turnkeeper").level == logging.NOTSET
