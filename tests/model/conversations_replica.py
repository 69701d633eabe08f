"""What a world of two replicas is made of (`conversations_world.py`): its settings, and what a replica remembers."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from tests.model.conversations_book import DecideAll
from turnkeeper.conversation.decide import decide_all

NAMES: Final = ("a", "b")
BURIED: Final = "x"
"""The name of an owner that died and came back under another one."""
Key = tuple[int, int]
Platform = Literal["dedups", "finds", "neither"]


class At:
    """What a replica does next."""

    LOOK = 0
    CLAIM = 1
    SEND = 2
    EFFECT = 3
    DOUBT = 4
    AGAIN = 5
    PARK = 6
    END = 7
    SALVAGE = 8
    PUT_BACK = 9


class Run(NamedTuple):
    """What a continuation remembers: `StepRun`, its pen and its outlet."""

    number: int
    fence: int
    row: int = -1
    """By the book's count; its revision is the one that was read or written last."""
    dirty: bool = False
    """The row is deferred: it is written with whatever is written next."""
    op: int = 0
    waits: int = 0
    cause: Key = (0, 0)
    given: int = 0
    deferred: tuple[tuple[Key, str], ...] = ()
    """Outcomes of sends that are written with whatever is written next."""
    again: bool = False
    aside: str = ""
    stray: Key | None = None
    """A send that the step, run again, did not ask for, and that is found out about now (`Outlet.settle_rest`)."""
    fails: bool = False
    """Whether the put-back counts as an attempt."""

    @property
    def key(self) -> Key:
        """Of the send that it is at."""
        return self.stray or self.cause


class Replica(NamedTuple):
    """All that a replica remembers."""

    at: int = At.LOOK
    about: int = 0
    intent: str = ""
    run: Run | None = None
    live: Run | None = None
    """The continuation that is parked here."""


class World(NamedTuple):
    """One state: the log, the replicas, what people have seen (key, and the message it was sent for), who was fed what."""

    log: int
    replicas: tuple[Replica, Replica] = (Replica(), Replica())
    out: tuple[tuple[Key, int], ...] = ()
    fed: tuple[tuple[int, tuple[str, int, int]], ...] = ()
    faults: int = 0


class Settings(NamedTuple):
    """Which world."""

    platform: Platform = "dedups"
    steps: tuple[str, ...] = ("as",)
    """Each step's operations: `s` sends, `a` asks and waits."""
    messages: tuple[str, ...] = ("text", "text")
    first_wait: bool = False
    faults: int = 2
    same_name: bool = False
    """A replica that died comes back under its old name."""
    poison: bool = False
    """The platform refuses for good what is sent for message 1; attempts are few."""
    on_poison: Literal["hold", "skip"] = "hold"
    operator: bool = False
    """Somebody settles AMBIGUOUS sends and quarantined messages."""
    releases: bool = False
    """Somebody takes the conversation from its owner: from one that died, or, for a fault, from a live one."""
    rules: DecideAll = decide_all
    audited: bool = True
    careless: bool = False
    """Mutant: a look-up takes absence for conclusive although a send may still be under way."""
    resends: bool = False
    """Mutant: what may be out is sent again on a channel that does not know it."""


def order(replica: Replica) -> tuple[object, ...]:
    return (replica.at, replica.about, replica.intent, flat(replica.run), flat(replica.live))


def flat(run: Run | None) -> tuple[object, ...]:
    return () if run is None else run._replace(stray=run.stray or (0, 0))


def with_(world: World, i: int, replica: Replica) -> World:
    one, two = world.replicas
    return world._replace(replicas=(replica, two) if i == 0 else (one, replica))


def salvage(run: Run) -> int:
    return At.SALVAGE if run.deferred else At.PUT_BACK


def failed(run: Run) -> Replica:
    """The run is over; what it knows of its sends is written, then the message is put back."""
    return Replica(salvage(run), run=run._replace(dirty=False, fails=True))
