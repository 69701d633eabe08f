"""What a second message does while a step runs: it waits, is shown to the agent, or takes the first one's place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.conversation.driving import Person, replica, state_of
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.engine.ports import Agent, ModelRequest
from turnkeeper.engine.tools import tool
from turnkeeper.engine.wire import ModelInvocationResponse, chat_form
from turnkeeper.log.store import Store
from turnkeeper.models.scripted import calls, text
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """One that tells of changes or not makes no difference here."""
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


class Model:
    """Looks something up first, then answers with every user message that it was shown."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.calls = 0
        self.again = anyio.Event()

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """Answer."""
        self.calls += 1
        if self.calls == 2:
            self.again.set()
        shown = [chat_form(message) for message in request.messages]
        self.asked.append(shown)
        if not any(message["role"] == "tool" for message in shown):
            return calls(("look", {}))
        return text(" and ".join(message["content"] for message in shown if message["role"] == "user"))


def talking(policy: Any, gate: anyio.Event, entered: anyio.Event, model: Model, *, effect: bool) -> Flow:
    """A flow that runs an agent whose tool waits at a gate."""

    @tool(replay_safe=not effect)
    async def look() -> str:
        entered.set()
        await gate.wait()
        return "seen"

    agent = Agent(model, [look])
    flow = Flow("talk", while_running=policy)

    @flow.step
    async def reply(c: FlowContext) -> None:
        said = " / ".join(message.text for message in (*c.earlier, c.message))
        answer = await c.run(agent, said)
        await c.send(answer.text or "")

    return flow


async def two_messages(
    store: Store, policy: Any, *, effect: bool = False, release: bool = True
) -> tuple[Platform, Model]:
    """A second message comes while the first one's tool is at work."""
    gate, entered, model, platform = anyio.Event(), anyio.Event(), Model(), Platform()
    async with replica(store, talking(policy, gate, entered, model, effect=effect), platform) as person:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_says, person, "one")
            await entered.wait()
            await person.writes("two")
            if release:
                gate.set()
            else:
                await model.again.wait()
                gate.set()
        await person.bot.process("c")
    state = await state_of(store)
    assert state.inbound == ()
    assert state.settled == 2
    return platform, model


async def _says(person: Person, said: str) -> None:
    await person.says(said)


async def test_queue(store: Store) -> None:
    platform, _ = await two_messages(store, "queue")
    assert platform.texts() == ["one", "two"]


async def test_steer(store: Store) -> None:
    """It is shown to the agent before its next model call, once, and answered with it."""
    platform, model = await two_messages(store, "steer")
    assert platform.texts() == ["one and two"]
    assert model.calls == 2


async def test_cancel(store: Store) -> None:
    """The first one is given up, and begun anew together with the second."""
    platform, model = await two_messages(store, "cancel", release=False)
    assert platform.texts() == ["one / two"]
    assert model.calls == 3


async def test_cancel_waits_where_an_effect_was_begun(store: Store) -> None:
    """What may have happened is not given up: the second message waits."""
    platform, _ = await two_messages(store, "cancel", effect=True)
    assert platform.texts() == ["one", "two"]


async def test_steered_message_of_a_turn_that_did_not_see_it_is_handled_by_itself(store: Store) -> None:
    """It was handed to a turn that failed before it was shown: never a loss."""

    class Failing:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            if request.round_index == 0:
                await person.writes("two")
                return calls(("look", {}))
            return text("unreachable")

    @tool(replay_safe=True)
    async def look() -> str:
        return "seen"

    flow = Flow("talk", while_running="steer")

    @flow.step
    async def reply(c: FlowContext) -> None:
        if c.message.text == "one":
            try:
                await c.run(Agent(Failing(), [look], max_rounds=1), "one")
            except Exception as e:
                await c.send(type(e).__name__)
            return
        await c.send(c.message.text)

    platform = Platform()
    async with replica(store, flow, platform) as person:
        await person.says("one")
        await person.bot.process("c")
    assert platform.texts() == ["EffectFailed", "two"]


async def test_stopping_puts_back_what_is_under_way(store: Store) -> None:
    """R1, F6: on a graceful stop another replica goes on at once, and not when a lease has ended."""
    gate, entered, model, platform = anyio.Event(), anyio.Event(), Model(), Platform()
    flow = talking("queue", gate, entered, model, effect=False)
    async with anyio.create_task_group() as tasks, replica(store, flow, platform) as person:
        tasks.start_soon(_says, person, "one")
        await entered.wait()
    state = await state_of(store)
    assert (state.owner, len(state.inbound)) == ("", 1)
    assert state.inbound[0].attempts == 0
    gate.set()
    async with replica(store, flow, platform) as person:
        await person.bot.process("c")
    assert platform.texts() == ["one"]
    assert model.calls == 2


async def test_only_texts_are_steered_and_only_up_to_a_word(store: Store) -> None:
    """J2: a button, or a word that ends the flow, is handled by itself, and what comes behind it comes behind it."""
    model, platform = Model(), Platform()
    ended: list[str] = []

    @tool(replay_safe=True)
    async def look() -> str:
        if model.calls == 1:
            for said in ("two", "Stop", "three"):
                await person.writes(said)
        return "seen"

    flow = Flow("talk", while_running="steer", cancel_words=["stop"])

    @flow.step
    async def reply(c: FlowContext) -> Any:
        answer = await c.run(Agent(model, [look]), c.message.text)
        await c.send(answer.text or "")
        await c.ask()
        return reply

    @flow.on_cancel
    async def over(c: FlowContext) -> None:
        ended.append(c.message.text)

    async with replica(store, flow, platform) as person:
        await person.says("one")
        await person.bot.process("c")
    assert platform.texts() == ["one and two", "three"]
    assert ended == ["Stop"]
