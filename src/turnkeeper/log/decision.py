"""What a pure decider gives back."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from turnkeeper.log.record import Guard

R = TypeVar("R")
A = TypeVar("A")


class Decision(NamedTuple, Generic[R, A]):
    """What a pure decider wants: records to append under a guard, and what to tell the caller once they are in.

    Without records the answer is given only on a state that was read after the question, unless it is `final`: an answer
    that no later record can change.
    """

    answer: A
    records: tuple[R, ...] = ()
    guard: Guard | None = None
    final: bool = False
