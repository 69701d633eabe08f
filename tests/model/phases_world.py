"""Two workers that race through the steps of a turn, each with values of its own: the first writer's are everyone's.

A crashed worker comes back with values that differ once more, as a provider that is asked again gives another answer. What a
worker is handed back as canonical is what the log holds, also where its own view answers; that the log never changes it is
audited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from tests.model.anarchy import LONG, commit, reserve, start
from tests.model.audits import audit
from tests.model.world import CLOCKS, CURRENT, STALE, TRUE, Ask, Book, Broken, Event
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn.state import TurnState, final_model, final_text, find_round, thaw_messages

LIVES: Final = 2
GONE: Final = 100


class Worker(NamedTuple):
    """How far a worker is, what it knows of the log, and how often it died."""

    at: int = 0
    cache: int = STALE
    life: int = 0


class World(NamedTuple):
    """One state."""

    log: int
    workers: tuple[Worker, ...]


def _decision(index: int) -> Callable[[TurnState], object]:
    return lambda state: getattr(find_round(state, index), "response", None)


def _reply(state: TurnState) -> object:
    return state.delivery and (state.delivery.key, final_text(state), state.delivery.presentation)


_CANONICAL: Final[list[Callable[[TurnState], Any]]] = [
    lambda state: thaw_messages(state.transcript)[0],
    _decision(0),
    lambda state: thaw_messages(state.transcript)[1:4],
    _decision(1),
    final_model,
    _reply,
    lambda state: state.sent_message_id,
    lambda state: state.completed,
]
"""What each step of the turn hands back."""


@cache
def step(at: int, who: str) -> Ask:
    """The worker's question at each step of the turn, with values of its own."""
    command: c.Command = [
        lambda: start(who),
        lambda: reserve(0, who, 0),
        lambda: commit(0, who),
        lambda: reserve(1, who, 0),
        lambda: c.SaveFinalModel(LONG + who),
        lambda: c.ReserveDelivery("key", f"text of {who}", values.freeze({"of": who})),
        lambda: c.MarkDelivered("key", f"message of {who}"),
        c.MarkCompleted,
    ][at]()
    return Ask(f"{type(command).__name__} of {who}", command)


class Race:
    """The steps from `first` up to `last`, of a turn that has come as far as `first`."""

    def __init__(self, first: int, last: int) -> None:
        self.steps = range(first, last)
        self.book = Book(audits=(audit,))
        log = self.book.number(TurnState())
        for at in range(first):
            log = self.book.step(log, CURRENT, step(at, "who came before"), TRUE).log
        self.first = World(log, (Worker(first),) * 2)
        self._values: dict[tuple[int, int], object] = {}

    def successors(self, world: World) -> Iterator[tuple[Event, World]]:
        """Every event that may come next."""
        for i, worker in enumerate(world.workers):
            name = f"{'ab'[i]}{worker.life}"
            if worker.life + 1 < LIVES:
                yield (name, "crashes"), _with(world, i, Worker(self.steps[0], life=worker.life + 1))
            if worker.at in self.steps:
                yield from self._move(world, i, worker, step(worker.at, name))

    def _move(self, world: World, i: int, worker: Worker, ask: Ask) -> Iterator[tuple[Event, World]]:
        for now in CLOCKS:
            said = self.book.step(world.log, worker.cache, ask, now)
            here = worker._replace(cache=said.cache)
            if said.verdict is None:
                yield (ask, "is behind"), _with(world, i, here)
                continue
            after = self._appended(world, i, said.log) if said.appended else world
            if said.verdict.refused is not None:
                # It starts over and comes by what is there already; or the turn is done.
                done = self.book[said.log].completed
                yield (ask, "is refused"), _with(after, i, here._replace(at=GONE if done else self.steps[0]))
                continue
            # A final answer may come from the worker's own view.
            view = said.log if said.cache == CURRENT else said.cache
            if self._value(worker.at, view) != self._value(worker.at, said.log):
                raise Broken("what is handed back as canonical is canonical", ask)
            yield (ask, "done"), _with(after, i, here._replace(at=worker.at + 1))
            if said.appended:
                yield (ask, "cancelled"), _with(after, i, worker._replace(cache=STALE))

    def _appended(self, world: World, writer: int, log: int) -> World:
        behind = self.book.behind(world.log)
        workers = tuple(
            w._replace(cache=behind) if w.cache == CURRENT and i != writer else w for i, w in enumerate(world.workers)
        )
        return World(log, workers)

    def _value(self, at: int, number: int) -> object:
        key = (at, number)
        if key not in self._values:
            self._values[key] = _CANONICAL[at](self.book[number])
        return self._values[key]

    def finished(self, world: World) -> bool:
        """Where every state must be able to get to."""
        return bool(self._value(self.steps[-1], world.log))


def _with(world: World, i: int, worker: Worker) -> World:
    return World(world.log, (*world.workers[:i], worker, *world.workers[i + 1 :]))
