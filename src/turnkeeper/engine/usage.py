"""Tokens of a turn, added up from its canonical decisions: counted once, whoever resumes; and the budget that stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnkeeper.engine.identity import RunIdentity
from turnkeeper.engine.stored import Reader, stored_response
from turnkeeper.engine.wire import EngineCheckpoint, InvocationUsage
from turnkeeper.errors import InvalidInput
from turnkeeper.turn.state import Round, TurnState

NOTHING = InvocationUsage(input_tokens=0, output_tokens=0, total_tokens=0)


def added(one: InvocationUsage, other: InvocationUsage | None) -> InvocationUsage:
    """Both together."""
    if other is None:
        return one
    return InvocationUsage(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        total_tokens=one.total_tokens + other.total_tokens,
    )


def was_held(state: TurnState, begun_with: EngineCheckpoint) -> bool:
    """Whether the first decision of an imported turn came with its checkpoint: its tools were under way there."""
    undecided = begun_with.resume_same_iteration or begun_with.model_reconciliation is not None
    return state.first_round == begun_with.iteration and not undecided


class Meter:
    """Adds up what a turn's decisions took. A decision is read once, however often it is asked for: they do not change."""

    def __init__(self, read: Reader | None = None) -> None:
        self._response = stored_response if read is None else read.response
        self._total = NOTHING
        self._counted: tuple[int, bytes] | None = None
        """The last decision that is in the total: its round, and what it is known by."""

    def read(self, state: TurnState, identity: RunIdentity) -> InvocationUsage:
        """What they took so far, with what is known from before the turn was imported.

        A call whose answer died with its process, or was not the first for its round, is in nobody's log, so it is not counted.
        """
        fresh: list[Round] = []
        round_ = state.round
        while round_ is not None and (round_.index, round_.response) != self._counted:
            fresh.append(round_)
            round_ = round_.previous
        if round_ is None:  # from the beginning: also where the log is another one than before
            self._total = added(NOTHING, identity.usage_before)
            began = identity.begun_with
            if fresh and began is not None and identity.usage_before is not None and was_held(state, began):
                fresh.pop()  # it is in there
        for one in reversed(fresh):
            self._total = added(self._total, self._response(one).usage)
        self._counted = None if state.round is None else (state.round.index, state.round.response)
        return self._total


def usage_of(state: TurnState, identity: RunIdentity, read: Reader | None = None) -> InvocationUsage:
    """What the turn's decisions took: see `Meter`, which is for who asks again and again."""
    return Meter(read).read(state, identity)


@dataclass(frozen=True)
class Budget:
    """What a turn may take. It is looked at before each model call, so the last call may go over it.

    Attributes:
        max_tokens: most tokens in all; None for no bound.
        max_cost: most cost in all, in the unit that `cost` gives; None for no bound.
        cost: what an amount of tokens costs.
    """

    max_tokens: int | None = None
    max_cost: float | None = None
    cost: Callable[[InvocationUsage], float] | None = None

    def __post_init__(self) -> None:
        if self.max_cost is not None and self.cost is None:
            raise InvalidInput("cost", "is needed with max_cost: it says what tokens cost")

    def exceeded(self, usage: InvocationUsage) -> str | None:
        """Why no further model call may be made, or None."""
        if self.max_tokens is not None and usage.total_tokens >= self.max_tokens:
            return f"{usage.total_tokens} tokens are used, of {self.max_tokens}"
        if self.max_cost is not None and self.cost is not None and self.cost(usage) >= self.max_cost:
            return f"{self.cost(usage):g} is spent, of {self.max_cost:g}"
        return None

    def left(self, usage: InvocationUsage) -> Budget:
        """What a delegated run may still take."""
        tokens = None if self.max_tokens is None else max(self.max_tokens - usage.total_tokens, 0)
        spent = 0.0 if self.cost is None else self.cost(usage)
        return Budget(tokens, None if self.max_cost is None else max(self.max_cost - spent, 0.0), self.cost)
