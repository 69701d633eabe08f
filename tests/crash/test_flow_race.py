"""Two processes that handle the conversations of one store, killed and started again, while messages come in twice."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Final

import anyio
import pytest

from tests.crash.flow_platform import platform, visible
from tests.crash.flow_workers import counting_flow
from tests.crash.ledger import Ledger
from tests.crash.places import Place, Stage
from tests.crash.scenario import Boundaries
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import send_key
from turnkeeper.conversation.message import Message
from turnkeeper.conversation.state import ConversationState, SendState
from turnkeeper.log.store import Store
from turnkeeper.stores.opening import open_store

CONVERSATIONS: Final = 20
MESSAGES: Final = 5
"""In each conversation."""
DEATHS: Final = 5
"""Of each worker."""
PATIENCE: Final = 50.0
"""Seconds until messages that are not handled count as stuck."""


def _worker(place: Place, channel: str, number: int, chance: random.Random) -> int:
    """A worker and those that come after it, each as soon as the one before is dead; how many were killed."""
    for life in count():
        die_at = chance.randint(30, 120) if life < DEATHS else 0
        job = {
            "url": place.url,
            "ledger": str(place.folder / "ledger"),
            "stop": str(place.folder / "stop"),
            "channel": channel,
            "name": f"worker {number}, life {life}",
            "die_at": die_at,
        }
        if place.nursery.run(job, "flow_workers").killed_by is None:
            return life
    raise AssertionError


class FrontEnd:
    """Takes the messages of all conversations, from a platform that delivers many of them twice, also at the same time."""

    def __init__(self, store: Store, folder: Path, chance: random.Random) -> None:
        to = platform("keyed", Ledger(folder / "ledger"), Boundaries(0))
        self._doors = [Conversations(store, [counting_flow()], to, name=f"front-end {n}") for n in range(2)]
        self._store = store
        self._chance = chance
        self.taken: dict[str, list[str]] = {f"{folder}/{n}": [] for n in range(CONVERSATIONS)}
        """By conversation, the texts that were acknowledged, in the order of their numbers."""

    async def take_all(self) -> None:
        """Take what is said in all conversations."""
        async with anyio.create_task_group() as talks:
            for conversation in self.taken:
                talks.start_soon(self._talk, conversation)

    async def _talk(self, conversation: str) -> None:
        for number in range(1, MESSAGES + 1):
            text = f"message {number}"
            message = Message(event_id=f"event {number}", text=text)
            fresh: list[int] = []

            async def deliver(door: Conversations, message: Message = message, fresh: list[int] = fresh) -> None:
                receipt = await door.receive(conversation, message)
                fresh += [] if receipt.duplicate else [receipt.number]

            async with anyio.create_task_group() as deliveries:
                for door in self._doors[: self._chance.randint(1, 2)]:
                    deliveries.start_soon(deliver, door)
            assert fresh == [number], "a message is taken once"  # J1, J2
            self.taken[conversation].append(text)
            if number > 1 and self._chance.random() < 0.5:
                late = Message(event_id=f"event {number - 1}", text=f"message {number - 1}")
                assert (await self._chance.choice(self._doors).receive(conversation, late)).duplicate
            await anyio.sleep(self._chance.random() * 0.3)  # people are not as fast as bots

    async def at_the_end(self) -> dict[str, ConversationState]:
        """All conversations, as soon as everything in them is settled."""
        states: dict[str, ConversationState] = {}
        with anyio.fail_after(PATIENCE):
            while len(states) < len(self.taken):
                await anyio.sleep(0.1)
                for conversation in self.taken.keys() - states.keys():
                    state = await ConversationHandle(self._store, conversation).read()
                    if state.settled == state.received == MESSAGES:
                        states[conversation] = state
        return states


def _check(conversation: str, state: ConversationState, texts: list[str], ledger: Ledger, channel: str) -> int:
    """Every acknowledged message is answered once, in order; how many sends are in doubt."""
    assert (state.owner, state.head) == ("", None)  # invariant 11
    assert SendState.SENDING not in {send.state for send in state.sends}
    doubts = {send_key(conversation, state.seed, send.key) for send in state.sends if send.state is SendState.AMBIGUOUS}
    assert channel == "neither" or not doubts
    shown = visible(ledger, conversation)
    assert max(Counter(row["key"] for row in shown).values()) == 1  # invariant 1
    wanted = [f"{number}: {text}" for number, text in enumerate(texts, 1)]
    # Where a process was taken for dead while it sent, what it has sent may come late; nobody sends it again.
    sure = [row["text"] for row in shown if row["key"] not in doubts]
    unsure = [row["text"] for row in shown if row["key"] in doubts]
    assert sorted(sure + unsure) == sorted(set(sure + unsure))
    missing = [text for text in wanted if text not in sure]
    assert len(missing) == len(doubts)
    assert set(unsure) <= set(missing)
    assert sure == [text for text in wanted if text in sure]  # J2, invariants 3, 4
    return len(doubts)


@pytest.mark.parametrize("channel", ["keyed", "neither"])
@pytest.mark.parametrize("stage", ["sqlite file", "postgres", "redis"], indirect=True)
def test_two_workers_killed_again_and_again(stage: Stage, channel: str) -> None:
    """R1, R3, R5, R6, J1, J2, invariants 1, 3, 4, 11: every acknowledged message is handled once and in order, by whomever."""
    chance = random.Random(7)
    with stage.together("race") as places:
        folder = places[0].folder
        workers = [
            stage.lanes.threads.submit(_worker, place, channel, number, random.Random(number))
            for number, place in enumerate(places)
        ]

        async def front_end() -> tuple[FrontEnd, dict[str, ConversationState]]:
            store = await open_store(places[0].url)
            front = FrontEnd(store, folder, chance)
            try:
                await front.take_all()
                return front, await front.at_the_end()
            finally:
                (folder / "stop").touch()
                await store.close()

        front, states = anyio.run(front_end)
        killed = [worker.result() for worker in workers]
        ledger = Ledger(folder / "ledger")
        doubts = [_check(name, state, front.taken[name], ledger, channel) for name, state in states.items()]
        fences = sum(state.fence for state in states.values())
        print(f"{stage.name}, {channel}: {killed} workers killed, {fences} ownerships, {sum(doubts)} sends in doubt")
        assert min(killed) > 1
