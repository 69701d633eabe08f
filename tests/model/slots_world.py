"""Workers that race through the tool slots of one round: stale views, crashes, lost replies, zombies, an operator.

A worker is what it remembers, nothing more. Between two of its store calls anything may happen, for any time, so every worker
is a zombie as soon as the clock moves on. A crash takes its memory; it comes back under a new owner token, and the old one
is called `dead` from then on. Workers are interchangeable, so states that differ only in which is which are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from tests.model.audits import audit, slots_of
from tests.model.world import CLOCKS, CURRENT, STALE, TRUE, Ask, Audit, Book, Broken, DecideAll, Event, Verdict
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.identity import ToolCall, operation_id, trace_hash
from turnkeeper.turn.leases import leases
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState
from turnkeeper.turn.snapshot import ToolCallDecision
from turnkeeper.turn.state import TurnState

TRACE: Final = "trace"
SCOPE: Final = "primary"
NAMES: Final = ("a", "b", "c")
DEAD: Final = "dead"
Appended = tuple[Ask, Verdict, int]
"""The question, what the rules said, and what its asker took for the time."""
Told = tuple[tuple[ToolCallAction, int], ...]
"""Actions and fences, one for each command that was answered."""

_A = ToolCallAction


class At:
    """What a worker does next. (Plain numbers: enum members are slow to hash.)"""

    CLAIM = 0
    BEGIN = 1
    EFFECT = 2
    ABANDON = 3
    COMPLETE = 4
    DOUBT = 5
    COMMIT = 6
    GONE = 7


class Worker(NamedTuple):
    """All that a worker remembers."""

    at: int = At.CLAIM
    slot: int = 0
    fence: int = 0
    cache: int = STALE
    lost: int = 0
    """The answer to an append that is in, which the worker has not seen yet: it is about to find out (LOG-6). 0: none."""
    running: bool = False
    """The effect is still under way although the worker gave it up; only in a mutant."""


class Late(NamedTuple):
    """An append that the network still has: it lands, or not, as long as nobody else appends (LOG-6)."""

    sender: int
    """Which worker's, or -1: of one that died."""
    at: int
    slot: int
    fence: int
    now: int
    """What its sender took for the time."""
    answer: int
    waiting: bool
    """Whether its sender looked, did not find it, asks again, and would know it if it came after all."""


class World(NamedTuple):
    """One state: the log, what the workers remember, how often each slot's effect happened, and an append under way."""

    log: int
    workers: tuple[Worker, ...]
    effects: tuple[int, ...]
    late: Late | None = None


class Settings(NamedTuple):
    """Which world."""

    workers: int = 3
    replay_safe: bool = False
    slots: int = 1
    fused: bool = False
    """Claim and begin in one append, and a completion together with the next slot's."""
    abandons: bool = False
    """A worker may find out that its call provably did not leave, and give the slot back."""
    doubts: bool = False
    """A worker may not know whether its effect happened, and say so."""
    operator: bool = False
    """Somebody resolves ambiguous slots."""
    releases: bool = False
    """Somebody takes leases from owners that he holds to be dead, and may be wrong."""
    finds_out: bool = True
    """Replies get lost, and are found out about; without this, only cancelled callers miss them."""
    lands_late: bool = False
    """An append whose answer is missed may also be applied later, at any time before the next one."""
    claim_lease: int = 1
    execution_lease: int = 1
    most_fences: int = 3
    """Claims beyond this fence are not followed, so that the states are finitely many."""
    tolerated: int = 1
    """Effects of one operation that are not called broken; more than one only to see how far a mutant goes."""
    rules: DecideAll = decide_all
    audited: bool = True
    fenced: bool = True
    abandons_running: bool = False
    """Mutant: a worker abandons a call that may still run."""
    operator_guesses: bool = False
    """Mutant: the operator says "did not happen" although the call may still run, or did."""


@cache
def operation(slot: int) -> str:
    """The slot's idempotency key."""
    return operation_id(trace_hash(TRACE), SCOPE, 0, slot)


@cache
def release(owner: str) -> Ask:
    """The operator takes an owner's leases, however lately it was heard of."""
    return Ask(f"release {owner}", c.ReleaseLeases(owner, "operator", "it is dead", force=True))


CALLS: Final = tuple(ToolCall("call", "charge", "the same arguments") for _ in range(2))


@cache
def authorises(action: ToolCallAction) -> bool:
    """`should_begin` of a decision with that action."""
    return ToolCallDecision(action, None, 0, 0, "", None, "", None, None, 0, False).should_begin


class Slots:
    """The world of `Settings`: its first state, what may happen in each, and what must hold."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        audits: tuple[Audit, ...] = (audit,) if settings.audited else ()
        self.book = Book(rules=settings.rules, audits=audits, keeps=_has_final_answers, fenced=settings.fenced)
        self._seen: dict[tuple[int, int], int] = {}
        self._moves: dict[tuple[int, int, Worker], list[tuple[Event, int, Worker, Appended | None]]] = {}
        self._keys: dict[tuple[int, int, Worker], tuple[int, ...]] = {}
        self._canonical: dict[World, World] = {}
        self._answers: list[Told] = [()]
        self._heard_numbers: dict[int, int] = {}

    def initial(self) -> World:
        """The decision is reserved, and nobody knows it yet."""
        state = evolve(
            TurnState(),
            r.Started(TRACE, SCOPE, values.freeze([]), values.freeze(None), values.freeze({}), "fp"),
            TRUE,
        )
        calls = CALLS[: self.settings.slots]
        state = evolve(state, r.AssistantReserved(0, values.freeze({}), calls), TRUE)
        workers = (Worker(),) * self.settings.workers
        return World(self.book.number(state), workers, (0,) * self.settings.slots)

    # --- what the workers ask --------------------------------------------------------------------------------

    def _claim(self, slot: int, owner: str) -> c.ClaimTool:
        s = self.settings
        begin = s.execution_lease if s.fused else None
        return c.ClaimTool(0, slot, operation(slot), CALLS[slot], owner, s.replay_safe, s.claim_lease, begin)

    @cache  # noqa: B019  # a world lives as long as its test
    def ask(self, at: int, slot: int, fence: int, owner: str) -> Ask:
        """What a worker asks at that place."""
        s = self.settings
        match at:
            case At.CLAIM:
                return Ask(f"claim {slot}", self._claim(slot, owner))
            case At.BEGIN:
                return Ask(f"begin {slot} fence {fence}", c.BeginTool(0, slot, owner, fence, s.execution_lease))
            case At.ABANDON:
                return Ask(f"abandon {slot} fence {fence}", c.AbandonTool(0, slot, owner, fence))
            case At.COMPLETE:
                # By its fence, a result tells whose it is, and workers stay interchangeable.
                done = c.CompleteTool(0, slot, owner, fence, values.freeze({"result of fence": fence}))
                if s.fused and slot + 1 < s.slots:
                    return Ask(f"complete {slot} fence {fence}, claim on", done, self._claim(slot + 1, owner))
                return Ask(f"complete {slot} fence {fence}", done)
            case At.DOUBT:
                return Ask(f"doubt {slot} fence {fence}", c.DoubtTool(0, slot, owner, fence, "a timeout"))
            case At.COMMIT:
                return Ask("commit", c.CommitRound(0, 0, ["the transcript"], values.freeze({})))
            case _:
                raise AssertionError(at)

    @cache  # noqa: B019
    def resolve(self, slot: int, resolution: Resolution) -> Ask:
        """The operator settles a slot."""
        result = None if resolution is Resolution.DID_NOT_HAPPEN else values.freeze({"told": resolution.value})
        return Ask(
            f"resolve {slot} {resolution.value}", c.ResolveTool(0, slot, resolution, "operator", "looked", result)
        )

    # --- what may happen -------------------------------------------------------------------------------------

    def successors(self, world: World) -> Iterator[tuple[Event, World]]:
        """Every event that may come next."""
        for event, after in self._events(world):
            yield event, self.canonical(after)

    def _events(self, world: World) -> Iterator[tuple[Event, World]]:
        later = self._tick(world)
        if later != world:
            yield ("the clock ticks",), later
        for i, worker in enumerate(world.workers):
            if worker != Worker():
                yield (NAMES[i], "crashes"), self._crash(world, i)
            if worker.at == At.GONE:
                continue
            if worker.lost:
                found = worker._replace(cache=CURRENT, lost=0)
                yield (NAMES[i], "finds out"), _with(world, i, self._told(found, self._answers[worker.lost]))
            elif worker.at == At.EFFECT:
                yield from self._effect(world, i, worker)
            else:
                yield from self._call(world, i, worker)
        if self.settings.operator:
            yield from self._operate(world)
        if self.settings.releases:
            yield from self._release(world)
        if world.late is not None:
            yield from self._land(world, world.late)

    def _tick(self, world: World) -> World:
        workers = tuple(w._replace(cache=self.book.tick(w.cache)) for w in world.workers)
        return World(self.book.tick(world.log), workers, world.effects, world.late)

    def _crash(self, world: World, i: int) -> World:
        buried = ((NAMES[i], DEAD),)
        workers = [w._replace(cache=self.book.rename(w.cache, buried)) for w in world.workers]
        workers[i] = Worker()
        late = world.late
        if late is not None and late.sender == i:
            late = late._replace(sender=-1, waiting=False)
        return World(self.book.rename(world.log, buried), tuple(workers), world.effects, late)

    def _effect(self, world: World, i: int, worker: Worker) -> Iterator[tuple[Event, World]]:
        s = self.settings
        effects = list(world.effects)
        # Replay-safe effects may happen again; that one happened is all that matters of them.
        effects[worker.slot] = 1 if s.replay_safe else effects[worker.slot] + 1
        happened = world._replace(effects=tuple(effects))
        yield (NAMES[i], "effect", worker.slot), _with(happened, i, worker._replace(at=At.COMPLETE, running=False))
        if s.abandons and not worker.running:
            running = s.abandons_running
            yield (NAMES[i], "effect did not leave"), _with(world, i, worker._replace(at=At.ABANDON, running=running))
        if s.doubts:
            # It happened or did not, it never will from now on, and the worker cannot tell.
            yield (
                (NAMES[i], "effect", worker.slot, "without an answer"),
                _with(happened, i, worker._replace(at=At.DOUBT)),
            )
            yield (NAMES[i], "no effect, no answer"), _with(world, i, worker._replace(at=At.DOUBT))

    def _call(self, world: World, i: int, worker: Worker) -> Iterator[tuple[Event, World]]:
        key = (world.log, i, worker)
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = list(self._ask(world.log, i, worker))
        for event, log, after, appended in moves:
            if appended is None:
                yield event, _with(world, i, after)
                continue
            self._audit_completions(world, *appended[:2])
            yield event, _with(self._appended(world, i, log), i, after)
            if self.settings.lands_late and world.late is None and len(event) == 3:  # once for each append
                late = Late(i, *worker[:3], appended[2], self._heard(appended[1]), False)
                gave_up = _with(world, i, worker._replace(cache=STALE))
                yield (*event, "cancelled, on its way"), gave_up._replace(late=late)
                yield (*event, "no answer, not found"), world._replace(late=late._replace(waiting=True))

    def _land(self, world: World, late: Late) -> Iterator[tuple[Event, World]]:
        owner = DEAD if late.sender < 0 else NAMES[late.sender]
        step = self.book.step(world.log, CURRENT, self.ask(late.at, late.slot, late.fence, owner), late.now)
        if step.appended:
            after = self._appended(world, -1, step.log)
            sender = after.workers[late.sender]
            if late.waiting and sender[:3] == (late.at, late.slot, late.fence):
                # Its next append is behind, and what it missed begins with its own: it has its answer.
                after = _with(after, late.sender, sender._replace(lost=late.answer))
            yield (owner, late, "lands"), after

    def _ask(self, log: int, i: int, worker: Worker) -> Iterator[tuple[Event, int, Worker, Appended | None]]:
        """All that one store call may lead to. What the others remember is no part of it."""
        s = self.settings
        ask = self.ask(worker.at, worker.slot, worker.fence, NAMES[i])
        for now in CLOCKS:
            step = self.book.step(log, worker.cache, ask, now)
            here = worker._replace(cache=step.cache)
            if step.verdict is None:
                yield (NAMES[i], ask, "is behind"), log, here, None
                continue
            number = self._heard(step.verdict)
            told = self._answers[number]
            if not step.appended:
                yield (NAMES[i], ask, told), log, self._told(here, told), None
                continue
            if max(fence for _, fence in told) > s.most_fences:
                continue
            what = (ask, step.verdict, now)
            yield (NAMES[i], ask, told), step.log, self._told(here, told), what
            yield (NAMES[i], ask, told, "cancelled"), step.log, here._replace(cache=STALE), what
            if s.finds_out:
                yield (NAMES[i], ask, told, "reply lost"), step.log, here._replace(cache=STALE, lost=number), what
        if worker.cache == CURRENT:
            yield (NAMES[i], ask, "cancelled before it was in"), log, worker._replace(cache=STALE), None

    def _heard(self, verdict: Verdict) -> int:
        """The number of what a worker hears."""
        number = self._heard_numbers.get(id(verdict))
        if number is None:
            if verdict.refused is None:
                # A turn command is answered with None: done.
                told = tuple((_A.COMPLETED, 0) if x is None else (x.action, x.fence) for x in verdict.answers)
            else:
                told = ((_A.BUSY, 0),)
            if told not in self._answers:
                self._answers.append(told)
            number = self._heard_numbers[id(verdict)] = self._answers.index(told)
        return number

    def _audit_completions(self, world: World, ask: Ask, verdict: Verdict) -> None:
        for command, answer in zip(ask.commands, verdict.answers, strict=False):
            done = answer is not None and answer.action is _A.COMPLETED
            if done and isinstance(command, c.SlotCommand) and not world.effects[command.slot_index]:
                raise Broken("a completion stands for an effect", ask)

    def _appended(self, world: World, writer: int, log: int) -> World:
        behind = self.book.behind(world.log)
        workers = tuple(
            w._replace(cache=behind) if w.cache == CURRENT and i != writer else w for i, w in enumerate(world.workers)
        )
        return World(log, workers, world.effects)

    def _told(self, worker: Worker, told: Told) -> Worker:
        """What a worker does about its answers."""
        for action, fence in told:
            worker = self._told_one(worker, action, fence)
        return worker

    def _told_one(self, worker: Worker, action: ToolCallAction, fence: int) -> Worker:
        s = self.settings
        if authorises(action):
            return worker._replace(at=At.EFFECT, fence=fence)
        match action:
            case _A.ACQUIRED | _A.RECLAIMED:
                return worker._replace(at=At.BEGIN, fence=fence)
            case _A.CACHED | _A.COMPLETED | _A.AMBIGUOUS:
                return self._next(worker)
            case _A.ABANDONED if worker.running:
                return worker._replace(at=At.EFFECT)
            case _A.ALREADY_EXECUTING if worker.at == At.BEGIN and s.abandons:
                # It knows that it ran nothing, so its own begun call provably did not leave (field case 26).
                return worker._replace(at=At.ABANDON)
            case _A.INVALID_STATE if worker.at == At.CLAIM or worker.at == At.COMMIT:
                return Worker(At.GONE)
            case _A.CONFLICT:
                return self._next(worker)
            case _:
                return worker if worker.at == At.COMMIT else Worker(At.CLAIM, worker.slot, cache=worker.cache)

    def _next(self, worker: Worker) -> Worker:
        """Behind a slot: the next one, then the commit of the round where there are several."""
        if worker.at == At.COMMIT:
            return Worker(At.GONE)
        slot = worker.slot + 1
        if slot < self.settings.slots:
            return Worker(At.CLAIM, slot, cache=worker.cache)
        return Worker(At.GONE) if self.settings.slots == 1 else Worker(At.COMMIT, cache=worker.cache)

    def _operate(self, world: World) -> Iterator[tuple[Event, World]]:
        """The operator looks at the world, not only at the log, and says the truth (unless it guesses)."""
        for (_, index), slot in slots_of(self.book[world.log]):
            if slot.state is not ToolCallState.AMBIGUOUS:
                continue
            under_way = any(self._may_run(w, index) for w in world.workers)
            resolutions = [Resolution.UNKNOWN]
            if world.effects[index]:
                resolutions.append(Resolution.HAPPENED)
            if (not world.effects[index] and not under_way) or self.settings.operator_guesses:
                resolutions.append(Resolution.DID_NOT_HAPPEN)
            for resolution in resolutions:
                step = self.book.step(world.log, CURRENT, self.resolve(index, resolution), TRUE)
                if step.appended:
                    yield ("operator", index, resolution.value), self._appended(world, -1, step.log)

    def _release(self, world: World) -> Iterator[tuple[Event, World]]:
        for owner in {lease.owner for lease in leases(self.book[world.log], TRUE)}:
            step = self.book.step(world.log, CURRENT, release(owner), TRUE)
            if step.appended:
                yield ("operator", "releases", owner), self._appended(world, -1, step.log)

    def _may_run(self, worker: Worker, slot: int) -> bool:
        """Whether the worker may still run the effect of a slot: it was, or will find out that it was, told BEGUN."""
        # The second command of a fused question is the claim of the slot that comes next.
        to_come = enumerate(self._answers[worker.lost], worker.slot)
        begun = (worker.at == At.EFFECT or worker.running) and worker.slot == slot
        return begun or any(index == slot and authorises(action) for index, (action, _) in to_come)

    # --- what must hold --------------------------------------------------------------------------------------

    def check(self, world: World) -> None:
        """Invariant 2: an effect that is not replay safe happens once at the most."""
        if not self.settings.replay_safe and max(world.effects) > self.settings.tolerated:
            raise Broken("at most one effect of an operation that is not replay safe", world.effects)

    def settled(self, world: World) -> bool:
        """Where every state must be able to get to: each slot has its result, or its open question for a person.

        With an operator, not even that is left. A slot that was claimed as often as the world follows is not judged.
        """
        slots = [slot for _, slot in slots_of(self.book[world.log])]
        if any(slot.fence >= self.settings.most_fences for slot in slots):
            return True
        return len(slots) == self.settings.slots and all(
            slot.state is ToolCallState.COMPLETED
            or (slot.state is ToolCallState.AMBIGUOUS and not (self.settings.operator and slot.open_question))
            for slot in slots
        )

    def canonical(self, world: World) -> World:
        """The one of all worlds that differ only in which worker is which."""
        found = self._canonical.get(world)
        if found is None:
            found = self._canonical[world] = self._sorted(world)
        return found

    def _sorted(self, world: World) -> World:
        keys = [self._key(world.log, i, worker) for i, worker in enumerate(world.workers)]
        if world.late is not None and world.late.sender >= 0:
            keys[world.late.sender] = (*keys[world.late.sender], 1)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        if order == list(range(len(keys))):
            return world
        names = tuple((NAMES[old], NAMES[new]) for new, old in enumerate(order) if new != old)
        workers = tuple(
            w if w.cache < 0 else w._replace(cache=self.book.rename(w.cache, names))
            for w in (world.workers[old] for old in order)
        )
        late = world.late
        if late is not None and late.sender >= 0:
            late = late._replace(sender=order.index(late.sender))
        return World(self.book.rename(world.log, names), workers, world.effects, late)

    def _key(self, log: int, i: int, worker: Worker) -> tuple[int, ...]:
        key = (log, i, worker)
        found = self._keys.get(key)
        if found is None:
            mine = (self._relation(log, i), self._relation(worker.cache, i))
            found = self._keys[key] = (*mine, worker.at, worker.slot, worker.fence, worker.lost, worker.running)
        return found

    def _relation(self, number: int, i: int) -> int:
        """What a state looks like to a worker: its own slots, others' slots."""
        if number < 0:
            return number
        key = (number, i)
        found = self._seen.get(key)
        if found is None:
            names = tuple((name, "me" if n == i else "other") for n, name in enumerate(NAMES))
            found = self._seen[key] = self.book.rename(number, names)
        return found


def _with(world: World, i: int, worker: Worker) -> World:
    return World(world.log, (*world.workers[:i], worker, *world.workers[i + 1 :]), world.effects, world.late)


def _has_final_answers(state: TurnState) -> bool:
    committed = state.transcript is not None and state.transcript.round is not None
    return committed or any(slot.state is ToolCallState.COMPLETED for _, slot in slots_of(state))
