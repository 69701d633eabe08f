"""The engine's pen: commands that may wait are written together with the next one that may not (one write between effects)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from turnkeeper.log.decision import Decision
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.handle import TurnHandle, milliseconds
from turnkeeper.turn.names import ToolCallAction
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import TurnState

T = TypeVar("T")


class Journal:
    """One run's access to its turn log.

    Attributes:
        turn: the log.
        owner: who this run is, in claims and leases.
        lease_ms: the length of its leases.
    """

    def __init__(self, turn: TurnHandle, owner: str, lease_seconds: float) -> None:
        self.turn = turn
        self.owner = owner
        self.lease_ms = milliseconds(lease_seconds)
        self._deferred: list[c.Command] = []
        self._lock = anyio.Lock()

    @property
    def state(self) -> TurnState:
        """The turn as last seen, without what is deferred."""
        return self.turn.state

    def defer(self, *commands: c.Command) -> None:
        """Write `commands` with the next `ask`: nothing that cannot be undone happens before that."""
        self._deferred += commands

    async def ask(self, *commands: c.Command) -> list[SlotAnswer | None]:
        """Write what was deferred and `commands`, in one append; the answers to `commands`.

        An answer is None also where the sequence stopped before it. A caller that is cancelled is told so only behind
        the write: a finished effect's result is never lost to a cancellation.
        """
        async with self._lock:
            deferred, self._deferred = self._deferred, []
            own: list[SlotAnswer | None] = []
            try:
                with anyio.CancelScope(shield=True):
                    own += (await self.turn.ask(*deferred, *commands))[len(deferred) :]
            except BaseException:
                self._deferred = deferred + self._deferred
                raise
        return own + [None] * (len(commands) - len(own))

    async def flush(self) -> None:
        """Write what was deferred."""
        if self._deferred:
            await self.ask()

    async def salvage(self) -> None:
        """Write what was deferred about effects, where the rest of it has become moot: another worker went on."""
        deferred, self._deferred = self._deferred, []
        for command in deferred:
            if isinstance(command, c.CompleteTool):
                await self.ask(command)

    async def ask_with(
        self, claim: c.ClaimTool, complete: c.CompleteTool, effect: Callable[[Any], T], frame: Callable[[T], bytes]
    ) -> T | SlotAnswer | None:
        """Claim a slot, run `effect` and complete the slot with it, all in one transaction of the store.

        Gives the effect's result; or, where it did not run, the answer that stood in its way.
        """
        async with self._lock:
            deferred, self._deferred = self._deferred, []
            planned: list[r.AnyRecord] = []

            def decide(state: TurnState, now: int) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
                decision = decide_all(state, [*deferred, claim, complete], now)
                planned[:] = decision.records
                last = decision.answer[-1]
                if last is None or last.action is not ToolCallAction.COMPLETED:
                    return Decision(decision.answer)
                return decision

            def records(result: T) -> list[r.AnyRecord]:
                done = r.ToolCompleted(complete.round_index, complete.slot_index, frame(result))
                return [*planned[:-1], done]

            last: SlotAnswer | None = None
            result: T | None = None
            try:
                with anyio.CancelScope(shield=True):
                    answers, result = await self.turn.log.ask_with(decide, effect, records)
                    last = answers[-1]
            except BaseException:
                self._deferred = deferred + self._deferred
                raise
            if last is not None and last.action is ToolCallAction.COMPLETED:
                return result
            self._deferred = deferred + self._deferred
            return last

    # --- commands in this run's name -------------------------------------------------------------------------

    def start_model(self, round_index: int) -> c.StartModel:
        """A model call is about to be made."""
        return c.StartModel(round_index, self.owner, self.lease_ms)
