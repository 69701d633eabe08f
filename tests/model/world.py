"""A pure world around the real rules of a turn: one fenced log, the leases' clock, and workers' stale views of it.

There is no store and no event loop here, and time is relative: now is always 0, a lease of n lives for n more ticks, and 0
means that it is over. So the states of a log are finitely many. Equal ones are one number, and what the rules say about
them is asked, and audited, once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from turnkeeper.errors import TurnCheckpointError
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard
from turnkeeper.turn import commands as c
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.records import AnyRecord
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import Round, TurnState

Answers = tuple[SlotAnswer | None, ...]
DecideAll = Callable[[TurnState, Sequence[c.Command], int], Decision[AnyRecord, Answers]]
Audit = Callable[["Appending"], None]
Event = tuple[object, ...]
"""What happened, in words and the things that they are about; put together only where it is shown."""

TRUE: Final = 0
CLOCKS: Final = (-1000, TRUE, 1000)
"""What a worker may take for the store's time: far behind, right, far ahead. Only a guard makes it true (LOG-4)."""

CURRENT: Final = -1
"""A worker's view: the log as it is."""
STALE: Final = -2
"""A worker's view: anything but the log as it is. Whatever it decides, it is told that it is behind."""


class Broken(AssertionError):
    """An invariant does not hold. `invariant` names it."""

    def __init__(self, invariant: str, detail: object = "") -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


class Ask:
    """Commands that are put together, as one object for each kind of question, so that it can be looked up."""

    __slots__ = ("commands", "name")

    def __init__(self, name: str, *commands: c.Command) -> None:
        self.name = name
        self.commands = commands

    def __repr__(self) -> str:
        return self.name


class Verdict(NamedTuple):
    """What the rules say to an `Ask`."""

    answers: Answers
    records: tuple[AnyRecord, ...] = ()
    guard: Guard | None = None
    final: bool = False
    refused: type[TurnCheckpointError] | None = None


class Appending(NamedTuple):
    """One accepted append, for audits."""

    before: TurnState
    after: TurnState
    ask: Ask
    verdict: Verdict


class Step(NamedTuple):
    """What one store call of `FencedLog.ask`, and all that the shell concludes from its answer, led to."""

    log: int
    cache: int
    verdict: Verdict | None
    """None: the question is still open."""
    appended: bool = False


class Book:
    """The states of a log, numbered, and what the rules say about each.

    Args:
        rules: `decide_all`, or a mutant of it.
        audits: checks of every accepted append.
        keeps: which states still matter to a worker once it is behind: those on which it may get a final answer without
            asking the store. That no others give final answers is checked.
        remembers: whether questions come up again, so that it is worth remembering what became of them.
        fenced: whether the store compares the tail (LOG-2), for mutants.
        guarded: whether the store judges guards (LOG-4), for mutants.
    """

    def __init__(
        self,
        *,
        rules: DecideAll = decide_all,
        audits: Iterable[Audit] = (),
        keeps: Callable[[TurnState], bool] = lambda _: True,
        remembers: bool = True,
        fenced: bool = True,
        guarded: bool = True,
    ) -> None:
        self._rules = rules
        self._audits = tuple(audits)
        self._keeps = keeps
        self._remembers = remembers
        self._latest = -1
        self._fenced = fenced
        self._guarded = guarded
        self._numbers: dict[bytes, int] = {}
        self._states: list[TurnState] = []
        self._verdicts: dict[tuple[int, Ask, int], Verdict] = {}
        self._steps: dict[tuple[int, int, Ask, int], Step] = {}
        self._changes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, number: int) -> TurnState:
        return self._states[number]

    def number(self, state: TurnState) -> int:
        """The number of a state. Its revision is not part of it: it grows for ever, and audits have seen it grow."""
        state = replace(state, revision=0)
        return self._numbered(msgspec.msgpack.encode(state), state)

    def _numbered(self, key: bytes, state: TurnState) -> int:
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self._states)
            self._states.append(state)
        return known

    def behind(self, log: int) -> int:
        """The view of a worker that knew `log` when somebody else appended to it."""
        return log if not self._fenced or self._keeps(self._states[log]) else STALE

    def tick(self, number: int) -> int:
        """The state when the shortest time that leases are made of has passed."""
        if number < 0:
            return number
        return self._changed(("tick", number), number, lambda end: max(end - 1, 0), lambda owner: owner)

    def rename(self, number: int, names: tuple[tuple[str, str], ...]) -> int:
        """The state with owners called by other names."""
        if number < 0 or not names:
            return number
        mapping = dict(names)
        return self._changed(("rename", number, names), number, lambda end: end, lambda o: mapping.get(o, o))

    def _changed(self, key: Hashable, number: int, end: Callable[[int], int], owner: Callable[[str], str]) -> int:
        found = self._changes.get(key)
        if found is None:
            found = self._changes[key] = self.number(_with_leases(self._states[number], end, owner))
        return found

    def verdict(self, number: int, ask: Ask, now: int) -> Verdict:
        """What the rules say to `ask` in that state, at that time."""
        if not self._remembers and number != self._latest:
            self._verdicts.clear()
            self._latest = number
        key = (number, ask, now)
        found = self._verdicts.get(key)
        if found is None:
            found = self._verdicts[key] = self._decide(self._states[number], ask, now)
        return found

    def _decide(self, state: TurnState, ask: Ask, now: int) -> Verdict:
        try:
            decision = self._rules(state, ask.commands, now)
        except TurnCheckpointError as e:
            return Verdict((), refused=type(e))  # the error itself would keep every frame of the search alive
        if decision.final and not decision.records and not self._keeps(state):
            raise Broken("a final answer only where it can never change", ask)
        return Verdict(decision.answer, decision.records, decision.guard, decision.final)

    def step(self, log: int, cache: int, ask: Ask, now: int) -> Step:
        """One store call of a worker with the view `cache` that takes `now` for the store's time."""
        if not self._remembers:
            return self._step(log, cache, ask, now)
        key = (log, cache, ask, now)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._step(log, cache, ask, now)
        return found

    def _step(self, log: int, cache: int, ask: Ask, now: int) -> Step:
        if cache != STALE:
            verdict = self.verdict(log if cache == CURRENT else cache, ask, now)
            if verdict.records:
                held = verdict.guard is None or verdict.guard.holds(TRUE) or not self._guarded
                if held and (cache == CURRENT or not self._fenced):
                    return Step(self._append(log, ask, verdict), CURRENT, verdict, appended=True)
            elif verdict.final:
                return Step(log, cache, verdict)
        # Behind, or a guard that failed, or a read: each brings the log and the time, and it is decided again.
        verdict = self.verdict(log, ask, TRUE)
        return Step(log, CURRENT, None if verdict.records else verdict)

    def _append(self, log: int, ask: Ask, verdict: Verdict) -> int:
        # Revisions start at 1 here so that they can be seen to grow; `number` drops them.
        before = state = replace(self._states[log], revision=1)
        for record in verdict.records:
            state = evolve(state, record, TRUE)
        for audit in self._audits:
            audit(Appending(before, state, ask, verdict))
        return self.number(state)


def _with_leases(state: TurnState, end: Callable[[int], int], owner: Callable[[str], str]) -> TurnState:
    def change(round_: Round | None) -> Round | None:
        if round_ is None:
            return None
        slots = tuple(
            slot and replace(slot, lease_end=end(slot.lease_end), owner=owner(slot.owner)) for slot in round_.slots
        )
        return replace(round_, slots=slots, previous=change(round_.previous))

    model, delivery = state.model, state.delivery
    return replace(
        state,
        round=change(state.round),
        model=model and replace(model, lease_end=end(model.lease_end), owner=owner(model.owner)),
        delivery=delivery and replace(delivery, lease_end=end(delivery.lease_end), owner=owner(delivery.owner)),
        owner=state.owner and owner(state.owner),
    )


W = TypeVar("W", bound=Hashable)


class Explored(NamedTuple, Generic[W]):
    """What an exploration came to."""

    states: int
    transitions: int
    depth: int
    seen: KeysView[W]


def explore(
    initial: W,
    successors: Callable[[W], Iterator[tuple[Event, W]]],
    check: Callable[[W], None] = lambda _: None,
    *,
    goal: Callable[[W], bool] | None = None,
    limit: int = 1_000_000,
) -> Explored[W]:
    """Every state that can be reached, breadth first, each checked.

    Args:
        successors: what may happen next, and the state then. What it raises is the end of the exploration.
        check: raises `Broken` where an invariant does not hold.
        goal: what must stay possible, from every state.
        limit: more states than this are a mistake in the world.
    """
    came: dict[W, tuple[W, Event] | None] = {initial: None}
    edges: dict[W, list[W]] = {}
    transitions = depth = 0
    frontier = [initial]
    world = initial
    try:
        while frontier:
            following: list[W] = []
            for world in frontier:
                check(world)
                for event, after in successors(world):
                    transitions += 1
                    if after not in came:
                        came[after] = (world, event)
                        following.append(after)
                    if goal is not None:
                        edges.setdefault(after, []).append(world)
            assert len(came) <= limit, f"more than {limit} states"
            frontier = following
            depth += 1
        if goal is not None:
            stuck = came.keys() - _leading_to(filter(goal, came), edges)
            if stuck:
                world = stuck.pop()
                raise Broken("every state can still come to a good end")
    except Broken as e:
        raise Broken(e.invariant, "\n".join([str(e), *_way(came, world), str(world)])) from e
    return Explored(len(came), transitions, depth - 1, came.keys())


def _leading_to(goals: Iterable[W], edges: dict[W, list[W]]) -> set[W]:
    """The states from which one of `goals` can be reached."""
    good = set(goals)
    frontier = list(good)
    while frontier:
        frontier = list({before for world in frontier for before in edges.get(world, ())} - good)
        good.update(frontier)
    return good


def _way(came: dict[W, tuple[W, Event] | None], world: W) -> list[str]:
    way: list[str] = []
    step = came[world]
    while step is not None:
        way.append(" ".join(map(str, step[1])))
        step = came[step[0]]
    return way[::-1]
