"""Random walks over the commands of a conversation: what may be asked, and what must hold behind every step (flows.md).

`Walk` knows no log: `test_conversation_stateful.py` keeps it in a pure state and in real stores. Time moves only when a step
moves it, by what a running clock's milliseconds are nothing beside.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec.structs import replace

from tests.model.conversations_book import RULES, audit, check_state
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import LOST, Claimed, Receipt
from turnkeeper.conversation.evolve import evolve
from turnkeeper.conversation.state import ConversationState, Handover, Row, SendKey, SendState
from turnkeeper.errors import ConversationError

TICK: Final = 250_000
LEASE: Final = 2 * TICK + TICK // 2
"""No sum of ticks comes near the end of a lease."""
OWNERS: Final[tuple[str, ...]] = ("a", "b")
FLOOD: Final = 150
"""Records that are written at once, so that logs are compacted in the middle of a walk."""

flags = st.booleans()
usually = st.sampled_from([True, True, True, True, False])
drawn: Final[dict[str, st.SearchStrategy[Any]]] = {
    "again": flags,
    "condition": st.sampled_from([None, "right", "right", "wrong"]),
    "delay": st.sampled_from([0, 0, TICK]),
    "drop": flags,
    "event": st.integers(0, 11),
    "first": usually,
    "intent": st.sampled_from(["answer", "answer", "answer", "unasked", "cancel", "restart", "start"]),
    "kind": st.sampled_from(["text", "text", "button", "edit"]),
    "live": flags,
    "mark": st.sampled_from(["", "", "", "ephemeral", "stub"]),
    "most": st.sampled_from([1, 2, 5, 5, 5]),
    "name": st.sampled_from(["x", "y"]),
    "nth": st.integers(0, 2),
    "outcome": st.sampled_from(["sent", "sent", "postponed", "refused", "unknown", "unknown"]),
    "owner": st.sampled_from(OWNERS),
    "parked": usually,
    "right": usually,
    "sequence": st.sampled_from([0, 0, 0, 1, 2]),
    "skip": flags,
    "starts": usually,
    "step": st.integers(0, 1),
    "text": st.sampled_from(["same", "same", "same", "same", "other"]),
    "ticks": st.sampled_from([1, 2, 3]),
}
often: Final = {
    "receive": 4,
    "claim": 6,
    "begin": 4,
    "settle_send": 4,
    "park": 4,
    "end": 2,
    "settle": 2,
    "set_row": 2,
    "keep": 2,
    "timer": 2,
    "fire": 2,
    "put_back": 2,
    "release": 1,
    "take_away": 1,
    "renew": 1,
    "steer": 1,
    "supersede": 1,
    "resolve_send": 2,
    "resolve_message": 2,
    "put_row": 1,
    "delete_row": 1,
    "time_passes": 2,
    "flood": 2,
}


def _arguments(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    names = list(inspect.signature(getattr(Walk, name)).parameters)[1:]
    return st.tuples(st.just(name), st.fixed_dictionaries({n: drawn[n] for n in names}))


actions = st.sampled_from([name for name, n in often.items() for _ in range(n)]).flatmap(_arguments)


class Walk(RuleBasedStateMachine):
    """One conversation, two owners, operators and a host, and what is known of it independently of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.fences: dict[str, int] = dict.fromkeys(OWNERS, 0)
        self.granted = 0
        self.events: dict[int, int] = {}
        self.settled: set[int] = set()
        self.fired = 0

    # --- what a subclass keeps it in -------------------------------------------------------------------------

    @property
    def state(self) -> ConversationState:
        """The state as it is."""
        raise NotImplementedError

    def put(self, owner: str, *commands: c.Command) -> list[Any]:
        """Put commands; `[LOST]` where an owner was told so.

        Raises:
            ConversationError: as the rules say.
        """
        raise NotImplementedError

    def pass_time(self, milliseconds: int) -> None:
        """Move the clock on."""
        raise NotImplementedError

    # --- what is checked behind every step -------------------------------------------------------------------

    def appended(self, before: ConversationState, record: r.AnyRecord, at: int) -> ConversationState:
        """The state behind a record of the log, which is judged."""
        after = evolve(before, record, at)
        audit(before, record, after, at)
        return after

    def ask(self, owner: str, *commands: c.Command) -> list[Any] | None:
        """Put commands, and judge what became of it; None where they are refused, and then nothing has changed."""
        before = self.state
        try:
            answers = self.put(owner, *commands)
        except ConversationError:
            assert self.state == before, "what is refused changes nothing"
            return None
        after = self.state
        if answers == [LOST]:
            assert after == before, "whoever lost it changes nothing (R3)"
        for command in commands:
            if isinstance(command, c.OwnerCommand) and command.fence < self.granted:
                assert answers == [LOST], "no write with an old fence succeeds (invariant 6)"
        check_state(replace(after, records=0, weight=0))
        assert (after.received, after.fence) >= (before.received, before.fence)
        assert after.revisions >= before.revisions, "revisions never go back (invariant 5)"
        pending = {one.number for one in after.inbound}
        assert not pending & self.settled, "what is settled stays so (invariant 10)"
        self.settled = set(range(1, after.received + 1)) - pending
        assert RULES.head(after).kind == "conversation"
        return answers

    def _mine(self, owner: str, right: bool) -> tuple[str, int]:
        return owner, self.fences[owner] if right else self.fences[owner] - 1

    def _number(self) -> int:
        head = self.state.head
        return 1 if head is None else head.number

    @rule(act=actions)
    def act(self, act: tuple[str, dict[str, Any]]) -> None:
        """Anything. (One rule: with many, most walks would be ones in which half of them are switched off.)"""
        name, arguments = act
        getattr(self, name)(**arguments)

    # --- steps -----------------------------------------------------------------------------------------------

    def receive(self, owner: str, event: int, kind: str) -> None:
        """J1, J2: a new event gets the next number; one that came before changes nothing."""
        before = self.state
        digest = event.to_bytes(12, "big")
        answers = self.ask(owner, c.Receive("c", b"seed", digest, kind, b"message of %d" % event))
        assert answers is not None
        if event in self.events:
            assert answers[0].duplicate
            assert self.state == before
        else:
            self.events[event] = before.received + 1
            assert answers == [Receipt(before.received + 1, duplicate=False)]

    def claim(self, owner: str, first: bool, intent: c.Intent, starts: bool, live: bool, most: int, skip: bool) -> None:
        """J2, J5, R1: only the first unsettled message, only by one owner at a time, and the fence grows with each."""
        before, settled = self.state, self.settled
        about = self._number() if first else self._number() + 1
        row = before.row
        start = c.Start("flow", 1, "s0", b"data", bool(about % 2)) if starts else None
        revision = row.revision if live and row is not None else None
        claim = c.Claim(owner, LEASE, about, intent, start, revision, most, "skip" if skip else "hold")
        answers = self.ask(owner, claim)
        assert answers is not None
        claimed: Claimed = answers[0]
        if about in settled:
            assert self.state == before, "a claim of what is settled changes nothing (invariant 10)"
        if claimed.what == "work":
            assert claimed.message is not None
            assert claimed.message.number == min(one.number for one in before.inbound if not one.steered_into)
            assert (self.state.owner, self.state.fence) == (owner, claimed.fence)
            assert claimed.fence >= self.granted
            if before.owner != owner:
                assert claimed.fence > self.granted, "fences grow with each owner (invariant 6)"
            self.fences[owner] = claimed.fence
        self.granted = max(self.granted, self.state.fence)

    def begin(self, owner: str, right: bool, sequence: int, text: str, again: bool) -> None:
        """O1 to O3."""
        key = SendKey(self._number(), sequence)
        known = next((one for one in self.state.sends if one.key == key), None)
        answers = self.ask(
            owner, c.BeginSend(*self._mine(owner, right), key, text.encode(), text, again=again, watermark=again)
        )
        if answers is None:
            assert known is not None
            assert known.fingerprint != text, "refused only where the content differs (O2)"
        elif answers != [LOST] and known is not None:
            assert known.fingerprint == text
            if known.settled:
                assert answers[0].what == "known", "what is settled is not sent again (O1)"
            elif known.state is SendState.SENDING:
                assert answers[0].what == ("begun" if again else "in_doubt")

    def settle_send(self, owner: str, right: bool, sequence: int, outcome: Any, delay: int) -> None:
        """The first word about a send counts."""
        key = SendKey(self._number(), sequence)
        later = self.now() + delay if outcome == "postponed" else 0
        self.ask(owner, c.SettleSend(*self._mine(owner, right), key, outcome, "id", "told", later))

    def park(self, owner: str, right: bool, parked: bool, name: str) -> None:
        """J4: the row and DONE in one append, or neither."""
        row, number = self.state.row, self._number()
        unsettled = any(not one.settled for one in self.state.sends)
        if row is None:
            return
        answers = self.ask(
            owner,
            c.SetTimer(*self._mine(owner, right), name, b"time", after_ms=TICK),
            c.SetRow(*self._mine(owner, right), replace(row, parked=parked, inbound=number, timer=name, ended=None)),
            c.Settle(*self._mine(owner, right), number, "parked"),
        )
        if answers is not None and answers != [LOST] and number in self.settled:
            assert not unsettled

    def end(self, owner: str, right: bool) -> None:
        """C9: the flow's end and DONE in one append."""
        mine = self._mine(owner, right)
        self.ask(owner, c.EndFlow(*mine, self._number(), "done"), c.Settle(*mine, self._number(), "handled"))

    def settle(self, owner: str, right: bool, nth: int) -> None:
        """DONE, also of messages that were steered, and of one that is DONE."""
        numbers = [self._number(), *(one.number for one in self.state.inbound if one.steered_into), 1]
        number = numbers[nth % len(numbers)]
        before = self.state
        answers = self.ask(owner, c.Settle(*self._mine(owner, right), number, "handled"))
        if answers is not None and all(one.number != number for one in before.inbound):
            assert self.state == before, "settling what is settled changes nothing (invariant 10)"

    def set_row(self, owner: str, right: bool, condition: str | None, step: int) -> None:
        """R2: over the revision that was read, and no other."""
        row = self.state.row
        known = 0 if row is None else row.revision
        wanted = known if condition != "wrong" else known + 1
        number = self._number()
        base = row or Row("flow", 1, "s0")
        entered = replace(base, step=f"s{step}", entry=base.entry + 1, inbound=number, cause=(number, 0), ended=None)
        answers = self.ask(owner, c.SetRow(*self._mine(owner, right), replace(entered, revision=wanted)))
        if condition == "wrong":
            assert answers in (None, [LOST])
        elif answers != [LOST]:
            assert answers == [self.state.revisions]

    def keep(self, owner: str, right: bool, name: str, nth: int) -> None:
        """A value, and an answer's value."""
        mine = self._mine(owner, right)
        self.ask(owner, c.KeepValue(*mine, name, b"value"), c.KeepAnswer(*mine, nth, b"value"))

    def timer(self, owner: str, right: bool, name: str, delay: int, drop: bool) -> None:
        """A timer is set, or cancelled."""
        mine = self._mine(owner, right)
        command = c.CancelTimer(*mine, name) if drop else c.SetTimer(*mine, name, b"time", after_ms=delay + 1)
        self.ask(owner, command)

    def fire(self, owner: str, nth: int) -> None:
        """A timer that is due becomes a message, once."""
        timers = self.state.timers
        if not timers:
            return
        timer = timers[nth % len(timers)]
        self.fired += 1
        before = self.state.received
        (receipt,) = self.ask(owner, c.FireTimer(timer.id, b"t" + self.fired.to_bytes(11, "big"))) or [None]
        assert (receipt is not None) == (self.state.received == before + 1)
        if receipt is not None:
            assert timer.due <= self.now()

    def put_back(self, owner: str, right: bool, delay: int, again: bool) -> None:
        """The message is pending again."""
        self.ask(owner, c.ReturnMessage(*self._mine(owner, right), self._number(), "failed", delay, counts=again))

    def release(self, owner: str, right: bool) -> None:
        """Nobody owns it."""
        self.ask(owner, c.Release(*self._mine(owner, right)))

    def take_away(self, owner: str) -> None:
        """R1: only from whoever holds the lease; what that one writes then is refused (R3)."""
        before = self.state
        answers = self.ask(owner, c.TakeAway(owner, "ann", "its machine is gone", force=True))
        assert (answers is not None) == (before.owner == owner and self.now() < before.lease_end)
        if answers is not None:
            assert self.put(owner, c.Renew(owner, before.fence, LEASE)) == [LOST]

    def renew(self, owner: str, right: bool) -> None:
        """The owner is alive."""
        self.ask(owner, c.Renew(*self._mine(owner, right), LEASE))

    def steer(self, owner: str, right: bool) -> None:
        """Later messages are handed to the first one's turn."""
        self.ask(owner, c.Steer(*self._mine(owner, right), self._number(), self.state.received))

    def supersede(self, owner: str, right: bool, nth: int) -> None:
        """A later message takes over."""
        later = [one.number for one in self.state.inbound if one.number > self._number()]
        if later:
            mine = self._mine(owner, right)
            end = c.EndFlow(*mine, self._number(), "superseded")
            self.ask(owner, end, c.Supersede(*mine, self._number(), later[nth % len(later)]))

    def resolve_send(self, owner: str, nth: int, again: bool) -> None:
        """Invariant 12."""
        sends = self.state.sends
        if sends:
            send = sends[nth % len(sends)]
            answers = self.ask(owner, c.ResolveSend(send.key, again, "ann", "looked", "id"))
            assert (answers is not None) == (send.state is SendState.AMBIGUOUS)

    def resolve_message(self, owner: str, nth: int, drop: bool) -> None:
        """J5."""
        inbound = self.state.inbound
        if inbound:
            one = inbound[nth % len(inbound)]
            answers = self.ask(owner, c.ResolveMessage(one.number, drop, "ann", "looked"))
            waits = one.not_before > 0 and not one.fence and not drop
            assert (answers is not None) == (one.quarantined is not None or waits)

    def put_row(self, owner: str, condition: str | None, mark: Any, nth: int) -> None:
        """R2, F6: a host's row, also one that is handed over."""
        row = self.state.row
        known = 0 if row is None or row.ended is not None else row.revision
        expected = None if condition is None else known + (condition == "wrong")
        left = Handover(mark, "b", self.now(), self.now() + TICK * nth) if mark else None
        put = replace(row or Row("host", 1, "s0"), parked=True, handover=left, ended=None)
        answers = self.ask(owner, c.PutRow(put, expected, b"seed", "c"))
        assert (answers is None) == (condition == "wrong")
        if answers is not None:
            assert self.state.row is not None
            assert self.state.row.revision == answers[0] == (0 if condition is None else self.state.revisions)

    def delete_row(self, owner: str, condition: str | None) -> None:
        """R2: and the count goes on."""
        row = self.state.row
        known = 0 if row is None or row.ended is not None else row.revision
        expected = None if condition is None else known + (condition == "wrong")
        answers = self.ask(owner, c.DeleteRow(expected))
        assert (answers is None) == (condition == "wrong")
        assert answers is None or self.state.row is None

    def time_passes(self, ticks: int) -> None:
        """Leases end, timers are due."""
        self.pass_time(ticks * TICK)

    def flood(self, owner: str) -> None:
        """Much is written, by whoever owns it."""
        mine = self.state.owner or owner, self.state.fence
        self.ask(owner, *[c.SetTimer(*mine, "flood", b"time", after_ms=TICK)] * FLOOD)

    def now(self) -> int:
        """The store's time, about."""
        raise NotImplementedError


WALKS: Final = settings(
    max_examples=30,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,  # the same walks in every run: a failure here is one everywhere
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
LONG = pytest.mark.timeout(600)
