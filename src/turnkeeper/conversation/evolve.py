"""What each record makes of a conversation's state. Pure: `evolve` gives a new state, and shares what did not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, get_args

import msgspec
from msgspec.structs import replace

from turnkeeper.conversation import records as r
from turnkeeper.conversation.identity import EVENT_BYTES
from turnkeeper.conversation.state import (
    KIND,
    Answer,
    ConversationState,
    Inbound,
    Row,
    Send,
    SendKey,
    SendState,
    Timer,
    find_inbound,
    find_send,
)
from turnkeeper.log.record import Head

_HOUR: Final = 3_600_000
_SNAPSHOT_FROM: Final = 64
"""Records below which a log is left as it is."""
_BUNCH: Final = 64
"""Digests of events that are kept together: adding one copies no more than these."""


class Retention(msgspec.Struct, frozen=True):
    """How long a conversation's log is kept, and what of it.

    Attributes:
        ttl_ms: how long the log is kept after its last change.
        events_ms: how long an event's repetition is known to be one; more than a day, as platforms repeat for so long.
        most_events: how many of them are known at the most.
    """

    ttl_ms: int = 90 * 24 * _HOUR
    events_ms: int = 72 * _HOUR
    most_events: int = 2048


def seen(state: ConversationState, event: bytes) -> bool:
    """Whether an event was taken before."""
    for _, digests in state.events:
        at = digests.find(event)
        while at >= 0:
            if at % EVENT_BYTES == 0:
                return True
            at = digests.find(event, at + 1)
    return False


def _remember(events: tuple[tuple[int, bytes], ...], event: bytes, at: int) -> tuple[tuple[int, bytes], ...]:
    hour = at // _HOUR
    if events and events[-1][0] >= hour and len(events[-1][1]) < _BUNCH * EVENT_BYTES:
        return (*events[:-1], (events[-1][0], events[-1][1] + event))
    return (*events, (max(hour, events[-1][0]) if events else hour, event))


def forget_events(
    events: tuple[tuple[int, bytes], ...], retention: Retention, at: int
) -> tuple[tuple[int, bytes], ...]:
    """Without those that are too old, or too many; by whole bunches."""
    kept = [(hour, digests) for hour, digests in events if (hour + 1) * _HOUR + retention.events_ms > at]
    while sum(len(digests) for _, digests in kept[1:]) >= retention.most_events * EVENT_BYTES:
        del kept[0]
    return tuple(kept)


# --- the inbound journal -----------------------------------------------------------------------------------------


def _with_inbound(state: ConversationState, number: int, **changes: Any) -> ConversationState:
    inbound = tuple(replace(one, **changes) if one.number == number else one for one in state.inbound)
    return replace(state, inbound=inbound)


def _opened(state: ConversationState, record: r.Opened, at: int) -> ConversationState:
    return replace(state, conversation_id=record.conversation_id, seed=record.seed)


def _received(state: ConversationState, record: r.Received, at: int) -> ConversationState:
    number = state.received + 1
    one = Inbound(number, record.kind, record.message, at, record.trace, record.timer)
    timers = tuple(timer for timer in state.timers if timer.id != record.timer) if record.timer else state.timers
    return replace(
        state,
        received=number,
        inbound=(*state.inbound, one),
        events=_remember(state.events, record.event, at),
        timers=timers,
    )


def _claimed(state: ConversationState, record: r.Claimed, at: int) -> ConversationState:
    return _with_inbound(state, record.number, fence=state.fence, attempts=record.attempt, not_before=0)


def _returned(state: ConversationState, record: r.Returned, at: int) -> ConversationState:
    one = find_inbound(state, record.number)
    attempts = 0 if one is None else one.attempts - (not record.counts)
    return _with_inbound(
        state, record.number, fence=0, not_before=record.not_before, reason=record.reason, attempts=max(attempts, 0)
    )


def _got_on(state: ConversationState) -> ConversationState:
    """What is handled now got on, so its attempts are counted anew."""
    if any(one.fence and one.attempts > 1 for one in state.inbound):
        inbound = tuple(replace(one, attempts=1) if one.fence and one.attempts > 1 else one for one in state.inbound)
        return replace(state, inbound=inbound)
    return state


def _settle(state: ConversationState, numbers: set[int]) -> ConversationState:
    left: list[Inbound] = []
    for one in state.inbound:
        if one.number in numbers:
            continue
        # What was handed to a turn that is over, and did not get into it, is handled in its own right.
        left.append(replace(one, steered_into=0) if one.steered_into in numbers else one)
    settled = state.settled + len(state.inbound) - len(left)
    return _pruned(replace(state, inbound=tuple(left), settled=settled))


def _done(state: ConversationState, record: r.Done, at: int) -> ConversationState:
    after = _settle(state, {record.number})
    taken = after.superseded and record.number >= after.superseded_by
    return replace(after, superseded=(), superseded_by=0) if taken else after


def _dropped(state: ConversationState, record: r.Dropped, at: int) -> ConversationState:
    row = state.row
    if row is not None and not row.parked and row.answers and row.answers[-1].number == row.inbound == record.number:
        # The wait that it was given to stays: the next message is its answer.
        revision = state.revisions + 1
        state = replace(
            state, row=replace(row, parked=True, answers=row.answers[:-1], revision=revision), revisions=revision
        )
    return _settle(state, {record.number})


def _superseded(state: ConversationState, record: r.Superseded, at: int) -> ConversationState:
    one = find_inbound(state, record.number)
    assert one is not None
    after = _settle(state, {record.number})
    superseded = (*state.superseded, Answer(one.number, one.kind, one.message, one.at))
    return replace(after, superseded=superseded, superseded_by=record.by)


def _quarantined(state: ConversationState, record: r.Quarantined, at: int) -> ConversationState:
    return _with_inbound(state, record.number, fence=0, quarantined=record.reason)


def _readmitted(state: ConversationState, record: r.Readmitted, at: int) -> ConversationState:
    return _with_inbound(state, record.number, attempts=0, not_before=0, quarantined=None, reason="")


def _steered(state: ConversationState, record: r.Steered, at: int) -> ConversationState:
    inbound = tuple(
        replace(one, steered_into=record.into) if one.number in record.numbers else one for one in state.inbound
    )
    return replace(state, inbound=inbound)


# --- ownership ---------------------------------------------------------------------------------------------------


def _owned(state: ConversationState, record: r.Owned, at: int) -> ConversationState:
    return replace(
        state, owner=record.owner, fence=record.fence, lease_ms=record.lease_ms, lease_end=at + record.lease_ms
    )


def _renewed(state: ConversationState, record: r.Renewed, at: int) -> ConversationState:
    return replace(state, lease_ms=record.lease_ms, lease_end=at + record.lease_ms)


def _released(state: ConversationState, record: r.Released, at: int) -> ConversationState:
    return replace(state, owner="", lease_end=at)


# --- the flow's checkpoint ---------------------------------------------------------------------------------------


def _row_set(state: ConversationState, record: r.RowSet, at: int) -> ConversationState:
    before, revision = state.row, state.revisions + 1
    row = replace(record.row, revision=0 if record.plain else revision)
    after = replace(state, row=row, revisions=revision)
    moved = before is None or (before.instance, before.entry) != (row.instance, row.entry)
    return _pruned(_got_on(after) if moved else after)


def _row_ended(state: ConversationState, record: r.RowEnded, at: int) -> ConversationState:
    before, revision = state.row, state.revisions + 1
    assert before is not None
    row = Row(
        before.flow,
        before.version,
        before.step,
        before.instance,
        before.entry,
        inbound=record.inbound,
        trace=before.trace,
        ended=record.reason,
        revision=revision,
    )
    # Timers of its waits go with it; reminders stay.
    timers = tuple(timer for timer in state.timers if timer.id != before.timer)
    return _pruned(replace(state, row=row, revisions=revision, timers=timers))


def _row_deleted(state: ConversationState, record: r.RowDeleted, at: int) -> ConversationState:
    return _pruned(replace(state, row=None))


def _answer_kept(state: ConversationState, record: r.AnswerKept, at: int) -> ConversationState:
    row = state.row
    assert row is not None
    answers = tuple(replace(one, value=record.value) if one.number == record.number else one for one in row.answers)
    return _got_on(replace(state, row=replace(row, answers=answers)))


def _kept(state: ConversationState, record: r.Kept, at: int) -> ConversationState:
    row = state.row
    assert row is not None
    return _got_on(replace(state, row=replace(row, kept={**row.kept, record.name: record.value})))


def _timer_set(state: ConversationState, record: r.TimerSet, at: int) -> ConversationState:
    others = (timer for timer in state.timers if timer.id != record.id)
    return replace(state, timers=(*others, Timer(record.id, record.due, record.message)))


def _timer_cancelled(state: ConversationState, record: r.TimerCancelled, at: int) -> ConversationState:
    return replace(state, timers=tuple(timer for timer in state.timers if timer.id != record.id))


# --- the outbox --------------------------------------------------------------------------------------------------


def _with_send(before: ConversationState, key: SendKey, **changes: Any) -> ConversationState:
    return replace(before, sends=tuple(replace(one, **changes) if one.key == key else one for one in before.sends))


def _send_begun(state: ConversationState, record: r.SendBegun, at: int) -> ConversationState:
    if find_send(state, record.key) is not None:
        again = {"state": SendState.SENDING, "fence": record.fence, "not_before": 0, "reason": ""}
        return _got_on(_with_send(state, record.key, **again))
    send = Send(
        record.key,
        SendState.SENDING,
        record.content,
        record.fingerprint,
        record.fence,
        at,
        watermark=record.watermark,
    )
    return _got_on(replace(state, sends=(*state.sends, send)))


def _sent(state: ConversationState, record: r.Sent, at: int) -> ConversationState:
    return _with_send(state, record.key, state=SendState.SENT, message_id=record.message_id)


def _send_postponed(state: ConversationState, record: r.SendPostponed, at: int) -> ConversationState:
    return _with_send(state, record.key, state=SendState.RETRY, reason=record.reason, not_before=record.not_before)


def _send_refused(state: ConversationState, record: r.SendRefused, at: int) -> ConversationState:
    return _with_send(state, record.key, state=SendState.DEAD, reason=record.reason)


def _send_unknown(state: ConversationState, record: r.SendUnknown, at: int) -> ConversationState:
    return _with_send(state, record.key, state=SendState.AMBIGUOUS, reason=record.reason)


def _send_resolved(state: ConversationState, record: r.SendResolved, at: int) -> ConversationState:
    to = SendState.SENT if record.sent else SendState.DEAD
    return _pruned(
        _with_send(state, record.key, state=to, message_id=record.message_id, reason=f"{record.who}: {record.why}")
    )


def _pruned(state: ConversationState) -> ConversationState:
    """Without sends that no replay can come by any more: settled ones from before what the row and the open messages cause."""
    if not state.sends:
        return state
    flow = state.flow
    unsettled = {one.number for one in state.inbound}
    from_here = None if flow is None else flow.cause

    def needed(send: Send) -> bool:
        if not send.settled or send.state is SendState.AMBIGUOUS or send.key.record in unsettled:
            return True
        return from_here is not None and send.key[:2] >= from_here

    kept = tuple(filter(needed, state.sends))
    return state if len(kept) == len(state.sends) else replace(state, sends=kept)


def _snapshot(state: ConversationState, record: r.Snapshot, at: int) -> ConversationState:
    return replace(record.state, records=0, weight=0)


_RULES: Final[dict[type, Callable[[ConversationState, Any, int], ConversationState]]] = {
    r.Opened: _opened,
    r.Received: _received,
    r.Claimed: _claimed,
    r.Returned: _returned,
    r.Done: _done,
    r.Quarantined: _quarantined,
    r.Readmitted: _readmitted,
    r.Dropped: _dropped,
    r.Superseded: _superseded,
    r.Steered: _steered,
    r.Owned: _owned,
    r.Renewed: _renewed,
    r.Released: _released,
    r.RowSet: _row_set,
    r.RowEnded: _row_ended,
    r.RowDeleted: _row_deleted,
    r.AnswerKept: _answer_kept,
    r.Kept: _kept,
    r.TimerSet: _timer_set,
    r.TimerCancelled: _timer_cancelled,
    r.SendBegun: _send_begun,
    r.Sent: _sent,
    r.SendPostponed: _send_postponed,
    r.SendRefused: _send_refused,
    r.SendUnknown: _send_unknown,
    r.SendResolved: _send_resolved,
    r.Snapshot: _snapshot,
}
assert set(_RULES) == set(get_args(r.AnyRecord)), "every kind of record has its rule"
_NOT_BY_THE_OWNER: Final = (
    r.Received,
    r.Opened,
    r.Readmitted,
    r.Dropped,
    r.SendResolved,
    r.Snapshot,
    r.Released,
    r.RowDeleted,
)
_OVERHEAD: Final = 48
"""Bytes of a record beside its frames, about."""


def evolve(state: ConversationState, record: r.AnyRecord, at: int) -> ConversationState:
    """The state after `record`, which the store stamped `at`."""
    kind = type(record)
    after = _RULES[kind](state, record, at)
    frame = getattr(record, "message", None) or getattr(record, "content", None) or getattr(record, "value", None)
    weight = _OVERHEAD + (len(frame) if isinstance(frame, bytes) else 0)
    if isinstance(record, r.RowSet):
        weight += len(record.row.state) + sum(len(one.message) for one in record.row.answers)
    # Whatever its owner writes shows that it lives (R1).
    by_host = isinstance(record, r.RowSet) and record.row.document is not None
    alive = after.owner and kind not in _NOT_BY_THE_OWNER and not by_host
    return replace(
        after,
        records=after.records + 1,
        weight=after.weight + weight,
        lease_end=max(after.lease_end, at + after.lease_ms) if alive else after.lease_end,
    )


def _bulk(state: ConversationState) -> int:
    """About how many bytes a snapshot takes."""
    row = state.row
    return (
        1024
        + sum(len(digests) for _, digests in state.events)
        + sum(len(one.message) + _OVERHEAD for one in state.inbound)
        + sum(len(one.content) + 2 * _OVERHEAD for one in state.sends)
        + (0 if row is None else len(row.state) + sum(len(one.message) for one in row.answers))
    )


_DECODER: Final = msgspec.msgpack.Decoder(tuple[bytes, r.AnyRecord])


class ConversationRules:
    """The rules of a conversation log, for the shell."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention

    def initial(self) -> ConversationState:
        """No conversation."""
        return ConversationState()

    def evolve(self, state: ConversationState, record: r.AnyRecord, at: int) -> ConversationState:
        """See `evolve`."""
        return evolve(state, record, at)

    def fold(self, state: ConversationState, entries: Iterable[tuple[r.AnyRecord, int]]) -> ConversationState:
        """The state after records and their times."""
        for record, at in entries:
            state = evolve(state, record, at)
        return state

    def decoder(self) -> msgspec.msgpack.Decoder[tuple[bytes, r.AnyRecord]]:
        """Decodes the records of `records.py`."""
        return _DECODER

    def snapshot(self, state: ConversationState, now: int) -> r.AnyRecord | None:
        """The record that replaces all before it, where they have become more than it takes."""
        if state.records < _SNAPSHOT_FROM or state.weight < _bulk(state):
            return None
        return r.Snapshot(replace(state, events=forget_events(state.events, self._retention, now)))

    def head(self, state: ConversationState) -> Head:
        """For listing: whether something is pending, until when nothing is, and the flow and its step."""
        head, flow, due = state.head, state.flow, state.due
        labels = {"conversation": state.conversation_id}
        if flow is not None:
            labels |= {"flow": flow.flow, "step": flow.step}
        if due is not None:
            labels["due"] = f"{due:015d}"
        if head is None:
            phase = "PARKED" if flow is not None else "IDLE"
        else:
            phase = "PENDING" if head.quarantined is None else "HELD"
            if head.not_before:
                labels["not_before"] = f"{head.not_before:015d}"
        return Head(
            kind=KIND,
            phase=phase,
            attention=state.attention,
            owner=state.owner or None,
            labels=labels,
            ttl_ms=self._retention.ttl_ms,
            keep_until=due or 0,
        )
