"""Field case 17: two messages in one conversation at nearly the same time, on two replicas."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import pytest

from tests.conftest import shared_json
from tests.conversation.driving import state_of
from tests.conversation.platform import Platform
from tests.engine.wrapped import WrappedStore
from turnkeeper import Agent, ModelRequest, ScriptedModel, Tool
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow, Step
from turnkeeper.conversation.identity import conversation_key
from turnkeeper.conversation.message import Message
from turnkeeper.engine.wire import ModelInvocationResponse, to_builtins
from turnkeeper.log import values
from turnkeeper.log.record import NOWHERE, Position, Tail
from turnkeeper.log.store import Store
from turnkeeper.models.scripted import calls, text
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

T = TypeVar("T")

CASE: dict[str, Any] = shared_json("cases/17-two-messages-race.json")
EXPECTED: dict[str, Any] = CASE["expected"]
LONGEST: Final = 0.1
"""Seconds of delay in each call of the store."""


class SlowStore(WrappedStore):
    """Takes its time for each call, before it and behind it."""

    def __init__(self, inner: Store, chance: random.Random) -> None:
        super().__init__(inner)
        self._chance = chance

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the call."""
        delay = self._chance.random() * LONGEST
        before = self._chance.random() * delay
        await anyio.sleep(before)
        outcome = await write()
        await anyio.sleep(delay - before)
        return outcome

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        return await self.around(lambda: self.inner.read(key, after=after))


class Bookings:
    """The assistant of the data file, and what its tools have done, by conversation."""

    def __init__(self) -> None:
        self.ledger: dict[str, Counter[str]] = {}
        self.flow = Flow("assistant")

        @self.flow.step
        async def turn(c: FlowContext) -> None:
            history: list[Any] = c.state.get("history", [])
            asked = {"role": "user", "content": c.message.text}
            answer = await c.run(self._agent(c.conversation_id), [*history, asked])
            c.state["history"] = answer.messages
            assert answer.text is not None
            await c.send(answer.text)

        @self.flow.step
        async def listen(c: FlowContext) -> Step:
            await c.ask()
            return turn

        assert listen is not turn

    def _agent(self, conversation: str) -> Agent:
        ledger = self.ledger.setdefault(conversation, Counter())

        async def book(people: int) -> dict[str, Any]:
            ledger["book"] += 1
            return {"id": f"r{ledger['book']}"}

        async def change(id: str, people: int) -> dict[str, Any]:  # noqa: A002  # as the data file has it
            ledger["change"] += 1
            return {"id": id}

        return Agent(ScriptedModel(self._next), [Tool(book), Tool(change)])

    def _next(self, request: ModelRequest) -> ModelInvocationResponse:
        seen = str([to_builtins(message) for message in request.messages])
        two, four = ("make it 4" not in seen), ("r1" in seen)
        if request.round_index == 1:
            return text("Booked for 2" if two else "Changed to 4")
        if two:
            return calls(("book", {"people": 2}))
        return calls(("change", {"id": "r1", "people": 4}) if four else ("book", {"people": 4}))


async def race(replicas: tuple[Conversations, Conversations], conversation: str, chance: random.Random) -> None:
    """Both messages, the second a moment behind the first, each to a replica of its own."""
    order = chance.sample(replicas, 2)

    async def say(replica: Conversations, said: dict[str, Any]) -> None:
        message = Message(event_id=f"event {said['seq']}", text=said["text"])
        receipt = await replica.receive(conversation, message)
        assert (receipt.number, receipt.duplicate) == (said["seq"], False)
        journaled.set()
        await replica.process(conversation)

    async with anyio.create_task_group() as people:
        for replica, said in zip(order, CASE["inbound"], strict=True):
            journaled = anyio.Event()
            people.start_soon(say, replica, said)
            await anyio.sleep(CASE["gap_ms"] / 1000)
            await journaled.wait()  # which one came first is what the people see


async def test_two_hundred_exact_transcripts(tmp_path: Path) -> None:
    """J2, J3, R1, R3, R6, invariant 4: turn 2 begins when turn 1 is over, and sees what it has done; 200 of 200."""
    times: int = CASE["repeat"]
    path = tmp_path / "turns.db"
    chance = random.Random(17)
    bookings, platform = Bookings(), Platform()
    async with await SqliteStore.open(path) as one, await SqliteStore.open(path) as other:
        async with (
            Conversations(SlowStore(one, chance), [bookings.flow], platform, lease_seconds=120) as left,
            Conversations(SlowStore(other, chance), [bookings.flow], platform, lease_seconds=120) as right,
            anyio.create_task_group() as together,
        ):
            for number in range(times):
                together.start_soon(race, (left, right), f"{CASE['conversation']}-{number}", chance)
        for number in range(times):
            conversation = f"{CASE['conversation']}-{number}"
            state = await state_of(one, conversation)
            assert (state.received, state.settled, state.owner) == (2, 2, ""), EXPECTED["lost_messages"]
            assert state.row is not None
            history: list[dict[str, Any]] = values.thaw(state.row.state)["history"]
            assert [message["role"] for message in history] == EXPECTED["transcript_roles"]
            said = [message["content"] for message in history if message["role"] == "user"]
            assert said == [message["text"] for message in CASE["inbound"]]
            assert platform.texts(conversation) == EXPECTED["replies_in_order"]
            assert bookings.ledger[conversation] == EXPECTED["ledger"]
            records = (await one.read(conversation_key(conversation))).records
            assert [record.seq for record in records] == list(range(1, len(records) + 1))
