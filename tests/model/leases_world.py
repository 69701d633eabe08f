"""Workers that race for a turn's model call, or for the sending of its reply: no two of them hold the lease at once.

What a worker holds is what it was told: a lease of n from the moment of its append on. The worlds follow that beside the
log, so that they see where the log gives the same thing to a second worker too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

from tests.model.audits import audit
from tests.model.world import CLOCKS, CURRENT, STALE, TRUE, Ask, Book, Broken, Event, Explored, explore
from turnkeeper.errors import TurnCheckpointConflict
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.leases import leases
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import TurnState

NAMES: Final = ("a", "b", "c")
DEAD: Final = "dead"
LEASE: Final = 2
RELEASE: Final = Ask("release the dead", c.ReleaseLeases(DEAD, "operator", "it is dead", force=True))
MOST_CALLS: Final = 4


class At:
    """What a worker does next. (Plain numbers: enum members are slow to hash.)"""

    ASKING = 0
    WORKING = 1
    RENEWING = 2
    GIVING_UP = 3
    REPORTING = 4
    DOUBTING = 5
    GONE = 6


class Worker(NamedTuple):
    """All that a worker remembers, and how long it still holds the lease that it was given."""

    at: int = At.ASKING
    held: int = 0
    cache: int = STALE
    name: str = ""
    """The invocation that it works on."""


class World(NamedTuple):
    """One state: the log, the workers, and how often the reply was sent."""

    log: int
    workers: tuple[Worker, ...]
    sends: int = 0


class Leases:
    """What both worlds share: workers that ask, with stale views and wrong clocks, crash, and lose answers."""

    def __init__(self, workers: int, book: Book, log: int, *, releases: bool) -> None:
        self.book = book
        self.releases = releases
        """Whether somebody takes leases from the dead (from the living, two would hold one at once)."""
        self.first = World(log, (Worker(),) * workers)

    def explored(self) -> Explored[World]:
        """Every state, each checked."""
        return explore(self.first, self._successors, self.check)

    def _successors(self, world: World) -> Iterator[tuple[Event, World]]:
        for event, after in self.successors(world):
            yield event, self.canonical(after)

    def successors(self, world: World) -> Iterator[tuple[Event, World]]:
        """Every event that may come next."""
        later = World(
            self.book.tick(world.log),
            tuple(w._replace(held=max(w.held - 1, 0), cache=self.book.tick(w.cache)) for w in world.workers),
            world.sends,
        )
        if later != world:
            yield ("the clock ticks",), later
        for i, worker in enumerate(world.workers):
            if worker != Worker():
                yield (NAMES[i], "crashes"), self._crash(world, i)
            yield from self.moves(world, i, worker)
        if self.releases and any(lease.owner == DEAD for lease in leases(self.book[world.log], TRUE)):
            step = self.book.step(world.log, CURRENT, RELEASE, TRUE)
            if step.appended:
                yield ("operator", RELEASE), self._appended(world, -1, step.log)

    def moves(self, world: World, i: int, worker: Worker) -> Iterator[tuple[Event, World]]:
        """What one worker may do."""
        raise NotImplementedError

    def check(self, world: World) -> None:
        """What must hold."""
        raise NotImplementedError

    def _crash(self, world: World, i: int) -> World:
        buried = ((NAMES[i], DEAD),)
        workers = [w._replace(cache=self.book.rename(w.cache, buried)) for w in world.workers]
        workers[i] = Worker()
        return World(self.book.rename(world.log, buried), tuple(workers), world.sends)

    def put(
        self, world: World, i: int, ask: Ask, told: Callable[[World, Worker, bool], Worker | None]
    ) -> Iterator[tuple[Event, World]]:
        """A worker asks. `told` says what it does then; it gets the world as it is then, and whether it was refused."""
        worker = world.workers[i]
        for now in CLOCKS:
            step = self.book.step(world.log, worker.cache, ask, now)
            here = worker._replace(cache=step.cache)
            if step.verdict is None:
                yield (NAMES[i], ask, "is behind"), _with(world, i, here)
                continue
            after = self._appended(world, i, step.log) if step.appended else world
            following = told(after, here, step.verdict.refused is not None)
            if following is None:
                continue
            refused = step.verdict.refused.__name__ if step.verdict.refused else "done"
            yield (NAMES[i], ask, refused), _with(after, i, following)
            if step.appended:
                # Cancelled: what it was given, it holds all the same; it asks again, and reads first.
                yield (NAMES[i], ask, "cancelled"), _with(after, i, worker._replace(held=following.held, cache=STALE))

    def _appended(self, world: World, writer: int, log: int) -> World:
        behind = self.book.behind(world.log)
        workers = tuple(
            w._replace(cache=behind) if w.cache == CURRENT and i != writer else w for i, w in enumerate(world.workers)
        )
        return World(log, workers, world.sends)

    def canonical(self, world: World) -> World:
        """Of all worlds that differ in nothing but which worker is which, one."""
        order = sorted(range(len(world.workers)), key=lambda i: self._key(world, i))
        names = tuple((NAMES[old], NAMES[new]) for new, old in enumerate(order) if new != old)
        if not names:
            return world
        workers = (world.workers[old] for old in order)
        renamed = tuple(w._replace(cache=self.book.rename(w.cache, names)) for w in workers)
        return World(self.book.rename(world.log, names), renamed, world.sends)

    def _key(self, world: World, i: int) -> tuple[object, ...]:
        names = tuple((name, "me" if n == i else "other") for n, name in enumerate(NAMES))
        worker = world.workers[i]
        seen = self.book.rename(world.log, names), self.book.rename(worker.cache, names)
        return (*seen, worker.at, worker.held, worker.name)

    def one_owner(self, world: World, working: Sequence[int]) -> None:
        """No two workers that may be at it hold the lease at once."""
        if sum(w.held > 0 and w.at in working for w in world.workers) > 1:
            raise Broken("no two live owners at once", world.workers)


def _with(world: World, i: int, worker: Worker) -> World:
    return World(world.log, (*world.workers[:i], worker, *world.workers[i + 1 :]), world.sends)


def _started() -> TurnState:
    empty = values.freeze([])
    record = r.Started("trace", "primary", empty, values.freeze(None), values.freeze({}), "fingerprint")
    return evolve(TurnState(), record, TRUE)


# --- the model call ------------------------------------------------------------------------------------------


class ModelCalls(Leases):
    """Workers that call the model for one round: start, renew, fail, reserve (first writer wins)."""

    def __init__(self, workers: int, *, guarded: bool = True, releases: bool = False) -> None:
        book = Book(audits=(audit,), keeps=lambda state: state.round is not None, guarded=guarded)
        super().__init__(workers, book, book.number(_started()), releases=releases)

    def moves(self, world: World, i: int, worker: Worker) -> Iterator[tuple[Event, World]]:
        """See `Leases.moves`."""
        me = NAMES[i]
        match worker.at:
            case At.ASKING:
                yield from self.put(world, i, start_model(me), self._asked)
            case At.WORKING:
                yield (me, "goes on"), _with(world, i, worker._replace(at=At.RENEWING))
                yield (me, "gets no decision"), _with(world, i, worker._replace(at=At.GIVING_UP))
                yield (me, "gets a decision"), _with(world, i, worker._replace(at=At.REPORTING))
            case At.RENEWING:
                yield from self.put(world, i, renew_model(me, worker.name), _renewed)
            case At.GIVING_UP:
                yield from self.put(world, i, fail_model(me, worker.name), _given_up)
            case At.REPORTING:
                yield from self.put(world, i, reserve(me), lambda _, w, refused: Worker(At.GONE))
            case _:
                pass

    def _asked(self, world: World, worker: Worker, refused: bool) -> Worker | None:
        state = self.book[world.log]
        if refused:
            return Worker(At.GONE) if state.round is not None else worker
        assert state.model is not None
        if state.attempts > MOST_CALLS:
            return None
        return Worker(At.WORKING, LEASE, worker.cache, state.model.invocation_id)

    def check(self, world: World) -> None:
        """One live caller of the model; behind the decision, none matters any more."""
        if self.book[world.log].round is None:
            self.one_owner(world, (At.ASKING, At.WORKING, At.RENEWING))


def _renewed(_: World, worker: Worker, refused: bool) -> Worker:
    # A call whose lease is lost goes on all the same, as a zombie: its answer is one of several then.
    return worker._replace(at=At.REPORTING) if refused else worker._replace(at=At.WORKING, held=LEASE)


def _given_up(_: World, worker: Worker, refused: bool) -> Worker:
    return Worker(At.ASKING, cache=worker.cache)


@cache
def start_model(owner: str) -> Ask:
    """Ask to call the model."""
    return Ask("start the model call", c.StartModel(0, owner, LEASE))


@cache
def renew_model(owner: str, invocation: str) -> Ask:
    """Go on calling it."""
    return Ask("renew the model call", c.RenewModel(invocation, owner, LEASE))


@cache
def fail_model(owner: str, invocation: str) -> Ask:
    """It brought nothing."""
    return Ask("fail the model call", c.FailModel(invocation, owner, "refused"))


@cache
def reserve(owner: str) -> Ask:
    """It brought a decision."""
    return Ask("reserve", c.ReserveAssistant(0, values.freeze({"content": "decided"}), ()))


# --- the reply -----------------------------------------------------------------------------------------------


class Replies(Leases):
    """Workers that send one reply, and an operator who settles doubts by looking at the channel.

    Args:
        keyed: the channel drops a second message under the same key, so anyone may send again behind a lease. Otherwise a send
            whose sender is gone is in doubt, and only one that surely was not sent may be sent again.
        careful: what a worker knows is a condition of what it writes, judged on the very state that it writes to: that the
            reply still is surely not sent (or the channel has keys), that nobody has taken it over. Without it, what it knew
            when it last looked.
    """

    def __init__(
        self, workers: int, *, keyed: bool, careful: bool = True, guarded: bool = True, releases: bool = False
    ) -> None:
        self.keyed = keyed
        self.careful = careful
        book = Book(rules=_with_conditions, audits=(audit,), guarded=guarded)
        state = evolve(_started(), r.FinalModelSaved(values.freeze("text")), TRUE)
        super().__init__(workers, book, book.number(state), releases=releases)

    def moves(self, world: World, i: int, worker: Worker) -> Iterator[tuple[Event, World]]:
        """See `Leases.moves`."""
        me = NAMES[i]
        match worker.at:
            case At.ASKING:
                yield from self.put(world, i, reserve_reply(me), lambda w, it, refused: self._looked(w, it, me))
            case At.WORKING:
                # A zombie does not look at its lease before it sends.
                sent = world._replace(sends=1 if self.keyed else world.sends + 1)
                yield (me, "sends"), _with(sent, i, worker._replace(at=At.REPORTING))
                yield (me, "sends, no answer"), _with(sent, i, worker._replace(at=At.DOUBTING))
                yield (me, "does not send"), _with(world, i, worker._replace(at=At.GIVING_UP))
            case At.RENEWING:  # takes the reply over
                careful = self.careful and not self.keyed
                yield from self.put(world, i, claim_reply(me, careful), lambda w, it, x: self._claimed(it, x))
            case At.GIVING_UP:
                yield from self.put(
                    world, i, not_sent(me, self.careful), lambda w, it, x: Worker(At.ASKING, cache=it.cache)
                )
            case At.REPORTING:
                yield from self.put(world, i, delivered(), lambda w, it, x: Worker(At.GONE))
            case At.DOUBTING:
                yield from self.put(world, i, doubt(me), lambda w, it, x: Worker(At.ASKING, cache=it.cache))
            case _:
                pass

    def _looked(self, world: World, worker: Worker, me: str) -> Worker:
        """What a worker does about the reply as it stands."""
        delivery = self.book[world.log].delivery
        assert delivery is not None
        if self.book[world.log].sent_message_id is not None:
            return Worker(At.GONE)
        if delivery.owner == me and delivery.lease_end > 0 and not delivery.unknown and not delivery.not_sent:
            # Reserved just now, or by a question of its own whose answer it missed. It has sent nothing yet.
            return Worker(At.WORKING, delivery.lease_end, worker.cache)
        if delivery.unknown:
            return worker  # until the operator has looked
        return Worker(At.RENEWING if self.keyed or delivery.not_sent else At.DOUBTING, 0, worker.cache)

    def _claimed(self, worker: Worker, refused: bool) -> Worker:
        return Worker(At.ASKING, cache=worker.cache) if refused else Worker(At.WORKING, LEASE, worker.cache)

    def successors(self, world: World) -> Iterator[tuple[Event, World]]:
        """See `Leases.successors`; and the operator."""
        yield from super().successors(world)
        delivery = self.book[world.log].delivery
        if delivery is None or not delivery.unknown:
            return
        # The operator tells the truth, and "not sent" only where nobody is about to send.
        sending = any(w.at == At.WORKING for w in world.workers)
        for found in ("message",) if world.sends else () if sending else (None,):
            step = self.book.step(world.log, CURRENT, resolve(found), TRUE)
            if step.appended:
                yield ("operator", found), self._appended(world, -1, step.log)

    def check(self, world: World) -> None:
        """One live sender; on a channel without keys, one send."""
        self.one_owner(world, (At.ASKING, At.WORKING, At.RENEWING))
        if world.sends > 1:
            raise Broken("a channel without keys gets one message", world.sends)


class ClaimWhileNotSent(c.ClaimDelivery, frozen=True):
    """`ClaimDelivery`, under the condition that the reply still is surely not sent on the state that is written to."""


class NotSentWhileMine(c.ResolveDelivery, frozen=True):
    """A sender's own "not sent", under the condition that nobody has taken the reply over: it knows of its own send alone."""


def _with_conditions(
    state: TurnState, commands: Sequence[c.Command], now: int
) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
    command, delivery = commands[0], state.delivery
    taken = (
        isinstance(command, ClaimWhileNotSent | NotSentWhileMine)
        and delivery is not None
        and not (delivery.not_sent if isinstance(command, ClaimWhileNotSent) else delivery.owner == command.who)
    )
    if taken:
        raise TurnCheckpointConflict("another worker took the reply over")
    return decide_all(state, commands, now)


@cache
def reserve_reply(owner: str) -> Ask:
    """Reserve the reply, to send it now."""
    return Ask("reserve the reply", c.ReserveDelivery("key", "text", None, owner, LEASE))


@cache
def claim_reply(owner: str, careful: bool) -> Ask:
    """Take the sending over."""
    return Ask("claim the reply", (ClaimWhileNotSent if careful else c.ClaimDelivery)(owner, LEASE))


@cache
def doubt(owner: str) -> Ask:
    """Nobody knows whether it was sent."""
    return Ask("doubt the reply", c.DoubtDelivery(owner, "a timeout"))


@cache
def not_sent(owner: str, careful: bool) -> Ask:
    """The sender itself knows that it was not."""
    return Ask("not sent", (NotSentWhileMine if careful else c.ResolveDelivery)(None, owner, "refused"))


@cache
def delivered() -> Ask:
    """It was sent."""
    return Ask("delivered", c.MarkDelivered("key", "message"))


@cache
def resolve(found: str | None) -> Ask:
    """The operator looked."""
    return Ask("resolve the reply", c.ResolveDelivery(found, "operator", "looked"))
