"""What steps must not do, and that it harms nobody but themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.conversation.driving import replica, state_of
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.tools import tool
from turnkeeper.errors import EffectConflict, InvalidInput
from turnkeeper.models.scripted import ScriptedModel
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


async def test_step_that_is_not_async() -> None:
    flow = Flow("f")

    def only(c: FlowContext) -> None: ...

    untyped: Any = only
    with pytest.raises(InvalidInput, match="'only' of the flow 'f' has to be an async function"):
        flow.step(untyped)


async def test_one_flow_needs_no_list(store: SqliteStore) -> None:
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None: ...

    Conversations(store, flow, Platform())


@pytest.mark.parametrize("continues", [True, False])
async def test_time_limit_around_a_wait(store: SqliteStore, continues: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It would be unknown after a restart. It is reported, and has no effect: the answer reaches the wait all the same."""
    flow = Flow("f")
    over = anyio.Event()

    @flow.step
    async def only(c: FlowContext) -> None:
        try:
            async with asyncio.timeout(0.05):
                await c.ask("A?")
        except TimeoutError:
            over.set()
            if continues:
                await c.send("Too late.")
        else:
            await c.send(f"Got {c.message.text}.")

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
        await over.wait()
        with caplog.at_level(logging.CRITICAL), anyio.fail_after(20):
            await person.says("x")
    assert platform.texts() == ["A?", "Got x."]
    assert "use `c.ask(timeout=...)`" in caplog.text
    assert (await state_of(store)).flow is None


async def test_two_waits_at_once(store: SqliteStore) -> None:
    """A named error; the bot goes on with its other conversations, also where the step's own tasks have lost ownership."""
    flow = Flow("f")
    failures: list[BaseException] = []

    @flow.step
    async def only(c: FlowContext) -> None:
        if c.conversation_id == "c":
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(c.ask, "A?")
                    tasks.start_soon(c.ask, "B?")
            except BaseException as e:
                failures.append(e)
                raise
        await c.ask("C?")

    platform = Platform()
    async with replica(store, flow, platform) as person:
        with anyio.fail_after(20):
            assert (await person.says("go")).left == "later"
        await person.bot.handle("other", Message(event_id="1", text="go"))
    assert "wait for one answer at a time" in repr(failures[0])
    assert platform.texts("other") == ["C?"]


async def test_ownership_lost_inside_the_steps_own_task_group(store: SqliteStore) -> None:
    """It comes as a group. It ends the step, and not the bot."""
    flow = Flow("f")
    sent, taken_over = anyio.Event(), anyio.Event()

    async def say(c: FlowContext) -> None:
        await c.send("A")
        sent.set()
        await taken_over.wait()
        await c.send("B")

    @flow.step
    async def only(c: FlowContext) -> None:
        if c.conversation_id == "c" and not sent.is_set():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(say, c)
        else:
            await c.send("A")

    platform = Platform()
    async with replica(store, flow, platform) as person, anyio.create_task_group() as tasks:
        tasks.start_soon(person.says, "go")
        await sent.wait()
        await store.advance_clock(60_000)
        async with replica(store, flow, platform) as other:
            await other.bot.process("c")
        taken_over.set()
        await person.bot.handle("other", Message(event_id="1", text="go"))
    assert platform.texts() == ["A"]
    assert platform.texts("other") == ["A"]


@pytest.mark.parametrize("effect", ["charge", "agent"])
async def test_effect_that_differs_when_the_step_runs_again(
    store: SqliteStore, effect: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Same place, other arguments: a named error, and neither is it done nor is the first one's result given for it."""
    flow = Flow("f")
    charged: list[int] = []
    runs: list[object] = []
    failures: list[BaseException] = []

    @tool
    def charge(cents: int) -> int:
        charged.append(cents)
        return cents

    async def differs(c: FlowContext) -> object:
        runs.append(None)
        if effect == "charge":
            return await c.do(charge, cents=len(runs))
        return await c.run(Agent(ScriptedModel(["hi"])), f"number {len(runs)}")

    @flow.step
    async def only(c: FlowContext) -> None:
        try:
            await differs(c)
        except Exception as e:
            failures.append(e)
            raise
        await c.ask("A?")

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("go")
    async with replica(store, flow, platform) as person:
        with caplog.at_level(logging.CRITICAL):
            assert (await person.says("x")).left == "later"
    (failure,) = failures
    assert isinstance(failure, EffectConflict)
    assert failure.effect == effect
    assert charged == ([1] if effect == "charge" else [])
