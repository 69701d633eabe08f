"""The states of a conversation's log, numbered, with what the rules say to each question, audited once for each append.

As in `world.py`, time is relative: now is always 0, a lease of n lives for n more ticks, and 0 means that it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from tests.model.world import CLOCKS, TRUE, Broken
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import LOST, decide_all
from turnkeeper.conversation.evolve import ConversationRules, Retention, evolve
from turnkeeper.conversation.state import ConversationState, Row, SendState, find_inbound, find_send
from turnkeeper.errors import ConversationError
from turnkeeper.log.decision import Decision

DecideAll = Callable[[ConversationState, Sequence[c.Command], int], Decision[r.AnyRecord, list[Any]]]
RULES: Final = ConversationRules(Retention())
ENCODER: Final = msgspec.msgpack.Encoder()


class Put(NamedTuple):
    """What putting commands through the shell came to: the log then, and the answers; or what was raised."""

    log: int
    answers: tuple[Any, ...]
    appended: bool = False
    refused: type[ConversationError] | None = None

    @property
    def lost(self) -> bool:
        """Whether an owner was told that it is one no more (R3)."""
        return bool(self.answers) and self.answers[0] is LOST


def restored(state: ConversationState) -> ConversationState:
    """The state as a reader has it who begins with a snapshot of it."""
    body = ENCODER.encode((b"", r.Snapshot(state)))
    _, record = RULES.decoder().decode(body)
    return replace(evolve(ConversationState(), record, TRUE), records=0, weight=0)


class Book:
    """Numbers for states and rows. Equal states are one; what only grows for ever and decides nothing is no part of them."""

    def __init__(self, rules: DecideAll = decide_all, *, audited: bool = True) -> None:
        self._rules = rules
        self._audited = audited
        self._numbers: dict[bytes, int] = {}
        self._states: list[ConversationState] = []
        self._rows: dict[bytes, int] = {}
        self._row_list: list[Row] = []
        self._changes: dict[Hashable, int] = {}

    def __getitem__(self, number: int) -> ConversationState:
        return self._states[number]

    def __len__(self) -> int:
        return len(self._states)

    def number(self, state: ConversationState) -> int:
        """The number of a state; a new one is checked by itself."""
        state = replace(state, records=0, weight=0)
        key = ENCODER.encode(state)
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self._states)
            self._states.append(state)
            if self._audited:
                check_state(state)
        return known

    def row(self, number: int) -> Row:
        """The row of that number."""
        return self._row_list[number]

    def row_number(self, row: Row | None) -> int:
        """The number of a row; -1: none."""
        if row is None:
            return -1
        key = ENCODER.encode(row)
        known = self._rows.get(key)
        if known is None:
            known = self._rows[key] = len(self._row_list)
            self._row_list.append(row)
        return known

    def tick(self, number: int) -> int:
        """The state when the shortest time that leases are made of has passed."""
        return self._changed(("tick", number), self._states[number], _ticked)

    def rename(self, number: int, names: tuple[tuple[str, str], ...]) -> int:
        """The state with its owner called by another name."""
        mapping = dict(names)
        return self._changed(
            ("rename", number, names),
            self._states[number],
            lambda state: replace(state, owner=mapping.get(state.owner, state.owner)),
        )

    def _changed(
        self, key: Hashable, state: ConversationState, change: Callable[[ConversationState], ConversationState]
    ) -> int:
        found = self._changes.get(key)
        if found is None:
            found = self._changes[key] = self.number(change(state))
        return found

    def decide(self, state: ConversationState, command: c.Command) -> Decision[r.AnyRecord, list[Any]]:
        """What the rules say, on the store's time."""
        return self._rules(state, [command], TRUE)

    def put(self, log: int, commands: Sequence[c.Command]) -> list[Put]:
        """What `ConversationHandle.ask` may come to, for every estimate of the store's time that its process may have.

        A view that is behind adds nothing here: whatever is decided on it, without records it is read and decided again, with
        records it is refused and decided again, and no answer of `decide_all` is final.
        """
        outcomes: list[Put] = []
        for now in CLOCKS:
            put = self._put(log, commands, now)
            if put not in outcomes:
                outcomes.append(put)
        return outcomes

    def _put(self, log: int, commands: Sequence[c.Command], now: int) -> Put:
        state = self._states[log]
        for time in (now, TRUE):  # what is refused, or has no records, is decided again on the time that it brought
            try:
                decision = self._rules(state, commands, time)
            except ConversationError as e:
                if time == now != TRUE:
                    continue
                return Put(log, (), refused=type(e))
            if decision.final:
                raise Broken("decide_all gives no final answer", commands)
            if decision.records and (decision.guard is None or decision.guard.holds(TRUE)):
                return Put(self._append(state, commands, decision), tuple(decision.answer), True)
            if not decision.records and time == TRUE:
                return Put(log, tuple(decision.answer))
        raise Broken("a guard holds at the time that it was decided on", commands)

    def _append(
        self, state: ConversationState, commands: Sequence[c.Command], decision: Decision[r.AnyRecord, list[Any]]
    ) -> int:
        before = state
        for record in decision.records:
            after = evolve(before, record, TRUE)
            if self._audited:
                audit(before, record, after)
            before = after
        if self._audited:
            audit_fences(state, commands)
        return self.number(before)


def _ticked(state: ConversationState) -> ConversationState:
    return replace(
        state,
        lease_end=max(state.lease_end - 1, 0),
        inbound=tuple(replace(one, not_before=_sooner(one.not_before)) for one in state.inbound),
        sends=tuple(replace(one, not_before=_sooner(one.not_before)) for one in state.sends),
    )


def _sooner(instant: int) -> int:
    return min(max(instant - 1, 0), 1)


# --- what must hold ----------------------------------------------------------------------------------------------


def check_state(state: ConversationState) -> None:
    """What holds in every state of a log, whoever wrote it."""
    numbers = [one.number for one in state.inbound]
    if numbers != sorted(set(numbers)) or any(not 0 < number <= state.received for number in numbers):
        raise Broken("J2: numbers are dense and in order", numbers)
    if state.settled + len(numbers) != state.received:
        raise Broken("invariant 3: what was taken is pending or settled, never gone", state)
    if not numbers and (state.owner or any(one.state is SendState.SENDING for one in state.sends)):
        raise Broken("invariant 11: after quiescence no lease, no SENDING row", state)
    if restored(state) != state:
        raise Broken("a snapshot stands for the records before it", state)
    RULES.head(state)


def audit(before: ConversationState, record: r.AnyRecord, after: ConversationState, now: int = TRUE) -> None:
    """What holds of every record that is appended; `now` is the store's time."""
    if after.revisions < before.revisions or (
        isinstance(record, r.RowSet | r.RowEnded) and after.revisions == before.revisions
    ):
        raise Broken("invariant 5: revision strictly increases", record)
    if isinstance(record, r.Owned):
        if after.fence <= before.fence:
            raise Broken("invariant 6: fence strictly increases", record)
        if before.owner and before.lease_end > now:
            raise Broken("R1: nobody takes over from an owner whose lease lives", record)
    if isinstance(record, r.SendBegun) and not before.lease_end > now:
        raise Broken("R1: nothing is begun without a lease", record)
    if isinstance(record, r.Claimed):
        one = before.head
        if one is None or one.number != record.number or one.quarantined is not None:
            raise Broken("J2: only the lowest unsettled message is claimed", record)
    if isinstance(record, r.Done | r.Superseded) and any(
        send.key.record == record.number and not send.settled for send in before.sends
    ):
        raise Broken("J4: DONE only when every send is settled", record)
    _audit_sends(before, record, after)
    _audit_answers(before, after)


def _audit_sends(before: ConversationState, record: r.AnyRecord, after: ConversationState) -> None:
    for send in before.sends:
        now = find_send(after, send.key)
        resolved = isinstance(record, r.SendResolved) and record.key == send.key and record.who and record.why
        if now is None and not resolved and (not send.settled or send.state is SendState.AMBIGUOUS):
            raise Broken("invariant 12: an unsettled or AMBIGUOUS send is never forgotten", send)
        if now is None:
            continue
        if (now.content, now.fingerprint) != (send.content, send.fingerprint):
            raise Broken("invariant 8: canonical values never change (O2)", (send, now))
        if send.state is SendState.AMBIGUOUS and now.state is not SendState.AMBIGUOUS:
            if not resolved:
                raise Broken("invariant 12: AMBIGUOUS is never left without an audit entry", record)
        elif send.settled and now != send:
            raise Broken("invariant 8: what became of a send never changes", (send, now))


def _visit(row: Row) -> tuple[str, int]:
    return row.instance, row.entry


def _audit_answers(before: ConversationState, after: ConversationState) -> None:
    if before.row is None or after.row is None or _visit(before.row) != _visit(after.row):
        return
    kept = {one.number: one for one in after.row.answers}
    for one in before.row.answers:
        now = kept.get(one.number)
        if now is not None and (now.message != one.message or (one.value is not None and now.value != one.value)):
            raise Broken("invariant 8: an answer never changes", (one, now))


def audit_fences(before: ConversationState, commands: Sequence[c.Command]) -> None:
    """Whoever wrote as an owner was the owner."""
    for command in commands:
        if isinstance(command, c.OwnerCommand) and (command.owner, command.fence) != (before.owner, before.fence):
            raise Broken("invariant 6: no write with an old fence succeeds", command)


def check_replays(book: Book, log: int, receives: Sequence[c.Receive]) -> None:
    """Invariant 10, and J1: nothing that was taken or settled before changes anything when it comes again."""
    state = book[log]
    open_ones = {one.number for one in state.inbound}
    again: list[c.Command] = list(receives[: state.received])
    for number in range(1, state.received + 1):
        if find_inbound(state, number) is None and number not in open_ones:
            again.append(c.Claim("x", 1, number, "answer", c.Start("f", 1, "s0", b"")))
            again.append(c.Settle(state.owner, state.fence, number, "again"))
    for command in again:
        if isinstance(command, c.OwnerCommand) and not state.owner:
            continue
        decision = book.decide(state, command)
        if decision.records:
            raise Broken("invariant 10: replay of a DONE record changes nothing", (command, decision.records))
