"""The engine's pen: commands that may wait are written together with the next one that may not (one write between effects)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio

from turnkeeper.engine.identity import RunIdentity, identity_of
from turnkeeper.engine.observing import RunSpan
from turnkeeper.engine.stored import Reader
from turnkeeper.errors import TurnCheckpointConflict
from turnkeeper.log.decision import Decision
from turnkeeper.observe.logs import logger
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.handle import TurnHandle, milliseconds
from turnkeeper.turn.names import ToolCallAction
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import TurnState, find_round

T = TypeVar("T")

log = logger(__name__)


def _check_decisions(state: TurnState, commands: Sequence[c.Command]) -> None:
    """Check that a model decision among `commands` is the canonical one of its round, or becomes it (T2: first writer wins).

    What stands behind it in the sequence was made of it, and must not be mixed into another's round.

    Raises:
        TurnCheckpointConflict: another decision was reserved first.
    """
    for command in commands:
        if isinstance(command, c.ReserveAssistant):
            round_ = find_round(state, command.round_index)
            if round_ is not None and round_.response != command.response:
                where = f"turn {state.trace_id!r} round {command.round_index}"
                raise TurnCheckpointConflict(f"{where}: another worker's decision was reserved first, and is used")


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
        self.after_write: Callable[[], Awaitable[None]] | None = None
        """What follows each write, before anything that the write was for: the host's durability port."""
        self.span: RunSpan | None = None
        """The run's, where there is telemetry."""
        self._identity: tuple[tuple[str, bytes], RunIdentity | None] = (("", b""), None)
        self.read = Reader()
        """Of this run: for what is looked at in every round."""
        self.asked_at = time.monotonic()
        """When the last write was asked for: a lease that it took is counted from then."""
        self._deferred: list[c.Command] = []
        self._lock = anyio.Lock(fast_acquire=True)

    @property
    def state(self) -> TurnState:
        """The turn as last seen, without what is deferred."""
        return self.turn.state

    @property
    def identity(self) -> RunIdentity:
        """What the run is known by. It is in the turn's first record and may hold a whole checkpoint, so it is read once."""
        state = self.state
        begun_as, known = self._identity
        if known is None or begun_as != (state.trace_id, state.engine):
            known = identity_of(state)
            self._identity = ((state.trace_id, state.engine), known)
        return known

    def decide(
        self, state: TurnState, commands: Sequence[c.Command], now: int
    ) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
        """What commands of this run come to. With telemetry, the log says whose run it was."""
        decision = decide_all(state, commands, now)
        return decision if self.span is None else self.span.signed(state, decision)

    def defer(self, *commands: c.Command) -> None:
        """Write `commands` with the next `ask`: nothing that cannot be undone happens before that."""
        self._deferred += commands

    async def ask(
        self, *commands: c.Command, while_true: Callable[[TurnState], bool] | None = None
    ) -> list[SlotAnswer | None]:
        """Write what was deferred and `commands`, in one append; the answers to `commands`.

        An answer is None also where the sequence stopped before it. A caller that is cancelled is told so only behind
        the write: a finished effect's result is never lost to a cancellation.

        Raises:
            TurnCheckpointConflict: `while_true` does not hold of the state that would be written to: what the caller
                found out meanwhile is out of date.
        """
        own: list[SlotAnswer | None] = []
        self.asked_at = time.monotonic()
        with anyio.CancelScope(shield=True):  # also around the lock: siblings that are cancelled have results to write
            async with self._lock:
                deferred, self._deferred = self._deferred, []

                def decide(state: TurnState, now: int) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
                    _check_decisions(state, deferred)
                    if while_true is not None and not while_true(state):
                        raise TurnCheckpointConflict(f"turn {state.trace_id!r} was changed by another worker meanwhile")
                    return self.decide(state, [*deferred, *commands], now)

                try:
                    answers = await self.turn.put(decide)
                except BaseException:
                    self._deferred = deferred + self._deferred
                    raise
                own += answers[len(deferred) :]
                self._tell_refused(deferred, answers)
                # A refused command stops the sequence; results of other effects behind it are still to be written.
                self._deferred += [one for one in deferred[len(answers) :] if isinstance(one, c.CompleteTool)]
                if self.after_write is not None:
                    try:
                        await self.after_write()
                    except Exception:
                        await self._give_back([*deferred, *commands], answers)
                        raise
        return own + [None] * (len(commands) - len(own))

    async def _give_back(self, commands: Sequence[c.Command], answers: Sequence[SlotAnswer | None]) -> None:
        """Slots that were taken just now: their tools have not begun, and will not in this run."""
        begun = [
            c.AbandonTool(command.round_index, command.slot_index, self.owner, answer.fence)
            for command, answer in zip(commands, answers, strict=False)
            if isinstance(command, c.ClaimTool) and answer is not None and answer.action is ToolCallAction.BEGUN
        ]
        for command in begun:
            try:
                await self.turn.ask(command)
            except Exception:
                at = {"round": command.round_index, "slot": command.slot_index}
                log.exception("turn %r: a slot could not be given back", self.turn.trace_id, extra=at)

    def _tell_refused(self, deferred: Sequence[c.Command], answers: Sequence[SlotAnswer | None]) -> None:
        for command, answer in zip(deferred, answers, strict=False):
            done = (ToolCallAction.COMPLETED, ToolCallAction.CACHED)
            if isinstance(command, c.CompleteTool) and answer is not None and answer.action not in done:
                where = (self.turn.trace_id, command.round_index, command.slot_index)
                at = {"round": command.round_index, "slot": command.slot_index}
                log.warning(
                    "turn %r round %d slot %d: its result came too late (%s)", *where, answer.action.value, extra=at
                )

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
        with anyio.CancelScope(shield=True):
            async with self._lock:
                return await self._ask_with(claim, complete, effect, frame)

    async def _ask_with(
        self, claim: c.ClaimTool, complete: c.CompleteTool, effect: Callable[[Any], T], frame: Callable[[T], bytes]
    ) -> T | SlotAnswer | None:
        deferred, self._deferred = self._deferred, []
        planned: list[r.AnyRecord] = []

        def decide(state: TurnState, now: int) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
            _check_decisions(state, deferred)
            decision = self.decide(state, [*deferred, claim, complete], now)
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
            answers, result = await self.turn.log.ask_with(decide, effect, records)
            last = answers[-1]
        except BaseException:
            self._deferred = deferred + self._deferred
            raise
        if last is not None and last.action is ToolCallAction.COMPLETED:
            if self.after_write is not None:
                await self.after_write()
            return result
        self._deferred = deferred + self._deferred
        return last

    # --- commands in this run's name -------------------------------------------------------------------------

    def start_model(self, round_index: int) -> c.StartModel:
        """A model call is about to be made."""
        return c.StartModel(round_index, self.owner, self.lease_ms)
