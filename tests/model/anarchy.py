"""A world without manners: any command of a turn, by anybody, with any token and fence, at any time and with any clock.

Workers have no memory here, so a state is the log alone, and every state that a log can get into with these commands is
reached. What holds of every append (`audits.py`) then holds whatever workers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from tests.model.audits import slots_of
from tests.model.world import CLOCKS, CURRENT, TRUE, Ask, Book, Event, Verdict
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn.identity import ToolCall, operation_id, trace_hash
from turnkeeper.turn.names import Resolution

TRACE: Final = "trace"
SCOPE: Final = "primary"
WRITERS: Final = ("a", "b")
LONG: Final = "a text that is long enough to be stored once in a round and referred to afterwards "


class Menu(NamedTuple):
    """Which commands there are."""

    calls: tuple[int, ...] = (1, 0)
    """How many calls the decision of each round has; all calls are the same, as in the trap of T3."""
    owners: tuple[str, ...] = ("a", "b")
    """Of slots."""
    fences: int = 2
    verbs: tuple[str, ...] = ("claim", "claim and begin", "begin", "renew", "abandon", "doubt", "complete")
    replay_safe: tuple[bool, ...] = (False,)
    deliveries: bool = True
    allow_ambiguous: tuple[bool, ...] = (False, True)
    repeat_ambiguous: tuple[bool, ...] = (False,)
    resolutions: tuple[Resolution, ...] = tuple(Resolution)


CALL: Final = ToolCall("call_0", "charge", "the same arguments")


def start(who: str, *, fingerprint: str = "inbound") -> c.Start:
    """The same inbound message, in a prompt of `who`'s own."""
    messages = [{"role": "user", "content": "charge it"}, {"role": "system", "content": f"memories of {who}"}]
    frozen = (values.freeze(messages), values.freeze(["charge"]), values.freeze({"of": who}))
    return c.Start(TRACE, SCOPE, *frozen, fingerprint, 0)


def reserve(round_index: int, who: str, calls: int) -> c.ReserveAssistant:
    """A provider's decision, another one at each call of it."""
    response = {"content": LONG + who, "round": round_index}
    return c.ReserveAssistant(round_index, values.freeze(response), (CALL,) * calls)


def commit(round_index: int, who: str, *, allow_ambiguous: bool = False) -> c.CommitRound:
    """A transcript that quotes the decision and the result, which the log keeps once."""
    messages = [{"content": LONG + who}, {"content": LONG + "result 0"}, {"committed by": who}]
    return c.CommitRound(round_index, 1, messages, values.freeze({"of": who}), allow_ambiguous)


class Offer(NamedTuple):
    """A question, and where it leads."""

    ask: Ask
    followed: bool = True
    """False: what it appends is audited, and its state left alone, because another question leads to one just like it."""
    timed: bool = True
    """Whether what its asker takes for the time can matter."""


def offers(menu: Menu) -> list[Offer]:
    """Every question."""
    slots = [offer for r, calls in enumerate(menu.calls) if calls for offer in _slot(menu, r)]
    return [*_turn(menu), *slots, *(_delivery() if menu.deliveries else ())]


def _turn(menu: Menu) -> Iterator[Offer]:
    for who in WRITERS:
        # Whose value comes first does not matter: let it be a's. Then b's must not count.
        first = who == WRITERS[0]
        yield Offer(Ask(f"start of {who}", start(who)), first, timed=False)
        for index, calls in enumerate(menu.calls):
            yield Offer(Ask(f"reserve {index} of {who}", reserve(index, who, calls)), first, timed=False)
            for allow in menu.allow_ambiguous:
                ask = Ask(f"commit {index} of {who}", commit(index, who, allow_ambiguous=allow))
                yield Offer(ask, first, timed=False)
        yield Offer(Ask(f"final of {who}", c.SaveFinalModel(LONG + who)), first, timed=False)
    for ask in (
        Ask("start with another input", start("c", fingerprint="another")),
        Ask("reserve too far", reserve(len(menu.calls) + 1, "a", 0)),
        Ask("commit too far", commit(len(menu.calls), "a")),
        Ask("commit nothing", commit(-1, "a")),
        Ask("complete", c.MarkCompleted()),
        Ask("complete without output", c.MarkCompleted(allow_no_output=True)),
    ):
        yield Offer(ask, timed=False)


def _delivery() -> Iterator[Offer]:
    for who in WRITERS:
        first = who == WRITERS[0]
        reply = c.ReserveDelivery("key", LONG + who, values.freeze({"of": who}), who, 1)
        yield Offer(Ask(f"reply of {who}", reply), first, timed=False)
        yield Offer(Ask(f"delivered as {who}", c.MarkDelivered("key", f"message of {who}")), first, timed=False)
        yield Offer(Ask(f"claim the reply for {who}", c.ClaimDelivery(who, 1)))
        yield Offer(Ask(f"doubt of {who}", c.DoubtDelivery(who, "a timeout")))
        yield Offer(Ask(f"not sent, says {who}", c.ResolveDelivery(None, who, "looked")))
    yield Offer(Ask("other reply", c.ReserveDelivery("other key", "text", None)), followed=False)
    yield Offer(Ask("other delivered", c.MarkDelivered("other key", "message")))
    yield Offer(Ask("sent", c.ResolveDelivery("found", "operator", "looked")))
    yield Offer(Ask("not sent", c.ResolveDelivery(None, "operator", "looked")))


def _slot(menu: Menu, r: int) -> Iterator[Offer]:
    operation = operation_id(trace_hash(TRACE), SCOPE, r, 0)
    for who in menu.owners:
        claims = [
            (f"{verb} {r}", lease) for verb, lease in (("claim", None), ("claim and begin", 1)) if verb in menu.verbs
        ]
        for safe, repeat, (name, lease) in product(menu.replay_safe, menu.repeat_ambiguous, claims):
            claim = c.ClaimTool(r, 0, operation, CALL, who, safe, 1, lease, repeat)
            yield Offer(Ask(f"{name} by {who}{' safe' if safe else ''}{' repeated' if repeat else ''}", claim))
        for fence in range(1, menu.fences + 1):
            commands = {
                "begin": c.BeginTool(r, 0, who, fence, 1),
                "renew": c.RenewTool(r, 0, who, fence, 1),
                "abandon": c.AbandonTool(r, 0, who, fence),
                "doubt": c.DoubtTool(r, 0, who, fence, "a timeout"),
                "complete": c.CompleteTool(r, 0, who, fence, values.freeze({"text": LONG + "result 0"})),
            }
            for verb in commands.keys() & set(menu.verbs):
                yield Offer(Ask(f"{verb} {r} by {who} fence {fence}", commands[verb]))
            other = c.CompleteTool(r, 0, who, fence, values.freeze({"text": LONG + "result 1"}))
            yield Offer(Ask(f"complete otherwise {r} by {who} fence {fence}", other), followed=False)
    for resolution in menu.resolutions:
        result = None if resolution is Resolution.DID_NOT_HAPPEN else values.freeze({"text": LONG + resolution.value})
        yield Offer(
            Ask(f"resolve {r} {resolution.value}", c.ResolveTool(r, 0, resolution, "operator", "looked", result))
        )


class Anarchy:
    """The world of a menu."""

    def __init__(self, book: Book, menu: Menu) -> None:
        self.book = book
        self.fences = menu.fences
        self.offers = offers(menu)
        self.answered: set[tuple[str, str]] = set()
        """Which questions got which answers, for a look at what was covered."""

    def successors(self, log: int) -> Iterator[tuple[Event, int]]:
        """Every event that may come next."""
        later = self.book.tick(log)
        if later != log:
            yield ("the clock ticks",), later
        for ask, followed, timed in self.offers:
            for now in CLOCKS if timed else (TRUE,):
                step = self.book.step(log, CURRENT, ask, now)
                if step.verdict is None:
                    continue
                self.answered.add((type(ask.commands[0]).__name__, _said(step.verdict)))
                if step.appended and followed and self._in_bounds(step.log):
                    yield (ask,), self._either(step.log)

    def _either(self, log: int) -> int:
        """One of two states that differ only in which owner is which."""
        return min(log, self.book.rename(log, (("a", "b"), ("b", "a"))))

    def _in_bounds(self, log: int) -> bool:
        return all(slot.fence <= self.fences for _, slot in slots_of(self.book[log]))


def _said(verdict: Verdict) -> str:
    if verdict.refused is not None:
        return verdict.refused.__name__
    (answer,) = verdict.answers
    return "done" if answer is None else answer.action.value
