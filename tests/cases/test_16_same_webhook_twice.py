"""Field case 16: the platform delivers the same event again, as far as the journal goes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.conformance.support import ClockedStore
from tests.conftest import shared_json
from tests.conversation.driving import state_of
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.decide import Receipt
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/16-same-webhook-twice.json")
DELIVERIES: list[dict[str, Any]] = CASE["deliveries"]
PATIENCE = 30.0


def conversation_of(delivery: dict[str, Any]) -> str:
    """The conversation as its channel names it."""
    if delivery["platform"] == "slack-like":
        return f"slack:{delivery['team']}:{delivery['channel']}"
    return f"telegram:{delivery['bot']}:{delivery['chat']}"


def message_of(delivery: dict[str, Any]) -> Message:
    """The message with the event id that its channel would give it: never the message's own id, nor its text."""
    if delivery["platform"] == "slack-like":
        event = f"{delivery['team']}:{delivery['event_id']}"
    else:
        event = f"{delivery['bot']}:{delivery['update_id']}"
    return Message(event_id=event, text=delivery["text"])


class Bot:
    """Answers every message; its turns can be held up, as a slow model does."""

    def __init__(self, store: ClockedStore) -> None:
        self._store = store
        self.platform = Platform()
        self.turns = 0
        self.may_go_on = anyio.Event()
        self.flow = Flow("bot")

        @self.flow.step
        async def answer(c: FlowContext) -> None:
            self.turns += 1
            await self.may_go_on.wait()
            await c.send(f"You said: {c.message.text}")

        assert answer.__name__ == self.flow.first_step

    def replica(self) -> Conversations:
        """A process of it."""
        return Conversations(self._store, [self.flow], self.platform)


async def test_the_deliveries_of_the_data_file(store: ClockedStore) -> None:
    """J1: four turns, replies and rows, each repeat acknowledged at once: from another replica, while the turn runs, after it,
    after a restart, and a minute later. The same text, or message id, of another event is a turn of its own."""
    bot = Bot(store)
    receipts: list[Receipt] = []

    async def deliver(replica: Conversations, delivery: dict[str, Any]) -> None:
        receipts.append(await replica.receive(conversation_of(delivery), message_of(delivery)))

    async def go_on(replica: Conversations, delivery: dict[str, Any]) -> None:
        await replica.process(conversation_of(delivery))

    first, second, while_it_runs, *later = DELIVERIES
    with anyio.fail_after(PATIENCE):
        async with bot.replica() as one, bot.replica() as other:
            async with anyio.create_task_group() as platform:
                platform.start_soon(deliver, one, first)
                platform.start_soon(deliver, other, second)
            async with anyio.create_task_group() as turns:
                turns.start_soon(go_on, one, first)
                turns.start_soon(go_on, other, second)
                while not bot.turns:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                await deliver(other, while_it_runs)
                await go_on(other, while_it_runs)
                assert not bot.platform.calls, "the repeat was acknowledged before the turn had ended"
                bot.may_go_on.set()
        at = while_it_runs["t"]
        for delivery in later:
            await store.advance_clock(round((delivery["t"] - at) * 1000))
            at = delivery["t"]
            async with bot.replica() as restarted:
                await deliver(restarted, delivery)
                await go_on(restarted, delivery)
    conversations = {conversation_of(delivery) for delivery in DELIVERIES}
    states = [await state_of(store, conversation) for conversation in conversations]
    assert {
        "turns": bot.turns,
        "replies": len(bot.platform.seen),
        "inbound_rows": sum(state.received for state in states),
        "duplicates_answered_ok_to_the_platform": sum(receipt.duplicate for receipt in receipts),
    } == CASE["expected"]
    assert all(state.settled == state.received for state in states)


async def test_an_event_that_both_replicas_get_at_the_same_instant(store: ClockedStore) -> None:
    """J1: of all deliveries of it, one is the first, on whatever replica; twenty times."""
    bot = Bot(store)
    bot.may_go_on.set()
    async with bot.replica() as one, bot.replica() as other:
        for number in range(20):
            conversation, message = f"conversation {number}", message_of(DELIVERIES[0])
            fresh: list[bool] = []

            async def deliver(
                replica: Conversations,
                where: str = conversation,
                message: Message = message,
                fresh: list[bool] = fresh,
            ) -> None:
                receipt = await replica.receive(where, message)
                fresh.append(not receipt.duplicate)
                await replica.process(where)

            async with anyio.create_task_group() as platform:
                for replica in (one, other, one, other):
                    platform.start_soon(deliver, replica)
            assert sorted(fresh) == [False, False, False, True]
            assert bot.turns == len(bot.platform.seen) == number + 1


@pytest.mark.parametrize("by_itself", [True, False], ids=["recovered by itself", "delivered again"])
async def test_the_trap(store: ClockedStore, *, by_itself: bool) -> None:
    """J1, invariant 3: a row that is there and not finished is no reason to drop the work."""
    assert CASE["trap"]["expected_turns"] == 1
    bot = Bot(store)
    bot.may_go_on.set()
    delivery = DELIVERIES[0]
    conversation = conversation_of(delivery)
    # The process ends right behind the commit: it never gets to the turn.
    assert not (await bot.replica().receive(conversation, message_of(delivery))).duplicate
    with anyio.fail_after(PATIENCE):
        async with bot.replica() as restarted, anyio.create_task_group() as tasks:
            if by_itself:
                tasks.start_soon(restarted.work)
            else:
                assert (await restarted.receive(conversation, message_of(delivery))).duplicate
                await restarted.process(conversation)
            while (await state_of(store, conversation)).settled < 1:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert (bot.turns, bot.platform.texts(conversation)) == (1, [f"You said: {delivery['text']}"])
