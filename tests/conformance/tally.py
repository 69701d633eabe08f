"""The smallest log with rules: amounts that are added up. For tests of the shell that every log shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard, Head
from turnkeeper.log.shell import FencedLog
from turnkeeper.log.store import Store


class Added(msgspec.Struct, frozen=True, array_like=True, tag="added"):
    """An amount, and who added it."""

    amount: int
    by: str = ""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """Nothing more is added."""


Entry = Added | Closed


class Tally(NamedTuple):
    """What a tally comes to."""

    total: int = 0
    by: tuple[str, ...] = ()
    stamps: tuple[int, ...] = ()
    closed: bool = False


class TallyRules:
    """See `turnkeeper.log.shell.Rules`."""

    def initial(self) -> Tally:
        """Nothing added."""
        return Tally()

    def evolve(self, state: Tally, record: Entry, at: int) -> Tally:
        """The state after `record`."""
        if isinstance(record, Closed):
            return state._replace(closed=True)
        return Tally(state.total + record.amount, (*state.by, record.by), (*state.stamps, at), state.closed)

    def fold(self, state: Tally, entries: Iterable[tuple[Entry, int]]) -> Tally:
        """The state after records and their times."""
        for record, at in entries:
            state = self.evolve(state, record, at)
        return state

    def decoder(self) -> msgspec.msgpack.Decoder[tuple[bytes, Entry]]:
        """Decodes an entry."""
        return _DECODER

    def snapshot(self, state: Tally, now: int) -> None:
        """Never."""

    def head(self, state: Tally) -> Head:
        """The total as the phase."""
        return Head(kind="tally", phase=str(state.total))


_DECODER: Final = msgspec.msgpack.Decoder(tuple[bytes, Entry])

TallyLog = FencedLog[Tally, Entry]
Decider = Callable[[Tally, int], Decision[Entry, str]]


def tally_log(store: Store, key: str = "tally") -> TallyLog:
    """The tally under `key`, as a new process sees it."""
    return FencedLog(store, key, TallyRules())


def adding(amount: int, by: str = "", *, guard: Guard | None = None, seen: list[int] | None = None) -> Decider:
    """Add once for each `by`; answers with what became of it. `seen` gets the total of every state it was asked on."""

    def decide(state: Tally, _now: int) -> Decision[Entry, str]:
        if seen is not None:
            seen.append(state.total)
        if by and by in state.by:
            return Decision("known")
        return Decision("added", (Added(amount, by),), guard)

    return decide
