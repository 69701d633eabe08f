"""Ways to drive a turn through Turnkeeper: each takes a store and a turn, and leaves the turn completed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from bench.workload import Turn
from turnkeeper.log.store import Store
from turnkeeper.turn.session import TurnCheckpointSession


class Driver(NamedTuple):
    """One way to drive a turn, and what it may cost beside the floor, one turn at a time."""

    name: str
    run: Callable[[Store, Turn], Awaitable[None]]
    target: float
    fewest_writes: bool = False
    """Whether it may take no more durable writes than there are effects, and two."""


class Journal:
    """The journal session driven directly, call by call; `fused` claims and begins a tool in one append."""

    def __init__(self, store: Store, turn: Turn, *, fused: bool) -> None:
        self.session = TurnCheckpointSession(store, turn.trace_id)
        self._turn = turn
        self._fused = fused
        self._messages: list[Any] = list(turn.messages)

    async def start(self) -> None:
        """Store the input."""
        await self.session.start(self._messages, self._turn.tool_names, self._turn.runtime)

    async def round(self, index: int) -> None:
        """One round, from the model's decision to the commit."""
        session, round_ = self.session, self._turn.rounds[index]
        await session.reserve_assistant(index, round_.decision)
        for slot, ((call_id, name, arguments), result) in enumerate(zip(round_.calls, round_.results, strict=True)):
            operation = session.logical_operation_id(index, slot)
            decision = await session.claim_tool(
                index, slot, call_id, name, arguments, operation, owner_token="worker", begin=self._fused
            )
            if not self._fused:
                decision = await session.begin_tool(index, slot, "worker", decision.fence)
            assert decision.should_begin, decision
            await session.complete_tool(index, slot, "worker", decision.fence, result)
        self._messages += [round_.decision, *round_.results]
        await session.commit_round(index, self._messages, self._turn.runtime)

    async def finish(self) -> None:
        """From the final content to the completed turn."""
        session, key = self.session, f"reply-{self._turn.trace_id}"
        await session.save_final_model(self._turn.final)
        await session.reserve_final_delivery(key, self._turn.final)
        await session.mark_delivered(key, "message-1")
        await session.mark_completed()

    async def turn(self) -> None:
        """The whole turn."""
        await self.start()
        for index in range(len(self._turn.rounds)):
            await self.round(index)
        await self.finish()


async def _seed(store: Store, turn: Turn) -> None:
    await Journal(store, turn, fused=False).turn()


async def _fused(store: Store, turn: Turn) -> None:
    await Journal(store, turn, fused=True).turn()


JOURNAL: Final = [Driver("journal session", _seed, 1.3), Driver("journal session, fused", _fused, 1.3)]
"""The seed's calls one by one, and with claim and begin in one."""
