"""The rules of a conversation: its journal, its ownership and its row (flows.md F2, F4, F5), pure; sends go to `outbox.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.causation import Mode, row_after
from turnkeeper.conversation.evolve import evolve, seen
from turnkeeper.conversation.identity import instance_id
from turnkeeper.conversation.outbox import begin_send, settle_send
from turnkeeper.conversation.state import ConversationState, Inbound, Row, SendState, find_inbound, find_send
from turnkeeper.errors import ConversationError, FlowCheckpointConflict, OwnerAlive
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard


class Receipt(NamedTuple):
    """A message is in the journal: its number; or it was there before."""

    number: int
    duplicate: bool


class Claimed(NamedTuple):
    """What a claim came to.

    work: handle `message` by `mode`; `row` is the flow's. idle: nothing is pending. busy: another owner is at it until `until`.
    later: not before `until`. held: the message is quarantined. changed: another message is first now, look again.
    moved_on: the message was settled in the claim (set aside, or nothing was left to do).
    """

    what: Literal["work", "idle", "busy", "later", "held", "changed", "moved_on"]
    fence: int = 0
    message: Inbound | None = None
    mode: Mode = "settle"
    row: Row | None = None
    until: int = 0


LOST: Final = "lost"
"""The answer to an owner that is not one any more."""

_DROPPED: Final = "its message was dropped"

AnyDecision = Decision[r.AnyRecord, Any]


def decide(state: ConversationState, command: c.Command, now: int) -> AnyDecision:
    """Decide one command.

    Raises:
        ConversationError: it does not fit what is there.
        OutboxConflict: a send's content differs from what its key stands for.
        OwnerAlive: it is to be taken from an owner that was heard of just now.
    """
    if isinstance(command, c.OwnerCommand):
        return _by_owner(state, command, now)
    match command:
        case c.Receive():
            return _receive(state, command)
        case c.FireTimer():
            return _fire(state, command, now)
        case c.Claim():
            return _claim(state, command, now)
        case c.ResolveSend():
            return _resolve_send(state, command)
        case c.ResolveMessage():
            return _resolve_message(state, command)
        case c.TakeAway():
            return _take_away(state, command, now)
        case c.PutRow() | c.DeleteRow():
            return _put_row(state, command)
        case _:
            raise AssertionError(f"no rule for {command!r}")


def decide_all(state: ConversationState, commands: Sequence[c.Command], now: int) -> Decision[r.AnyRecord, list[Any]]:
    """Decide commands one behind the other, for one append; an owner that lost stops them all."""
    answers: list[Any] = []
    records: list[r.AnyRecord] = []
    guard: Guard | None = None
    for command in commands:
        decision = decide(state, command, now)
        for record in decision.records:
            state = evolve(state, record, now)
        records += decision.records
        answers.append(decision.answer)
        if decision.guard is not None:
            guard = decision.guard.meet(guard)
        if decision.answer is LOST:
            return Decision([LOST])
    return Decision(answers, tuple(records), guard)


def _receive(state: ConversationState, command: c.Receive) -> AnyDecision:
    if seen(state, command.event):
        return Decision(Receipt(state.received, duplicate=True), final=True)
    opened = () if state.conversation_id else (r.Opened(command.conversation_id, command.seed),)
    record = r.Received(command.event, command.kind, command.message, command.trace)
    return Decision(Receipt(state.received + 1, duplicate=False), (*opened, record))


def _fire(state: ConversationState, command: c.FireTimer, now: int) -> AnyDecision:
    timer = next((one for one in state.timers if one.id == command.id), None)
    if timer is None or now < timer.due:
        return Decision(None)
    record = r.Received(command.event, "timer", timer.message, timer=timer.id)
    return Decision(Receipt(state.received + 1, duplicate=False), (record,), Guard(not_before=timer.due))


# --- claiming ----------------------------------------------------------------------------------------------------


def _claim(state: ConversationState, command: c.Claim, now: int) -> AnyDecision:
    message = state.head
    if message is None:
        return Decision(Claimed("idle"))
    handover = None if state.row is None else state.row.handover
    adopted: Guard | None = None
    if handover is not None and handover.kind == "ephemeral" and handover.expires:
        if handover.expires <= now:
            state = replace(state, row=None)  # F6: it counts as absent
            adopted = Guard(not_before=handover.expires)
        else:
            adopted = Guard(not_after=handover.expires - 1)
    live = bool(state.owner) and now < state.lease_end
    if live and state.owner != command.owner:
        return Decision(Claimed("busy", until=state.lease_end))
    if message.quarantined is not None:
        return Decision(Claimed("held", message=message))
    if message.number != command.about:
        return Decision(Claimed("changed"))
    if now < message.not_before:
        return Decision(Claimed("later", until=message.not_before, message=message))
    records: list[r.AnyRecord] = []
    guard = adopted
    fence = state.fence
    if live:
        guard = Guard(not_after=state.lease_end - 1).meet(guard)
    else:
        if state.owner:
            guard = Guard(not_before=state.lease_end).meet(guard)
        fence += 1
        records.append(r.Owned(command.owner, fence, command.lease_ms))
    if message.not_before:
        guard = Guard(not_before=message.not_before).meet(guard)
    if message.attempts >= command.max_attempts:
        return Decision(Claimed("moved_on"), (*records, *_set_aside(state, message, command), r.Released()), guard)
    mode, row = row_after(state, message, command, instance_id(state.conversation_id, state.seed, message.number))
    if mode == "settle":
        records += [*_left_open(state, "its row says that it is handled"), r.Done(message.number, "settled before")]
        return Decision(Claimed("moved_on"), (*records, r.Released()), guard)
    if row is not None:
        records.append(r.RowSet(row))
        row = replace(row, revision=state.revisions + 1)
        if state.flow is not None and state.flow.timer and message.timer != state.flow.timer and mode != "unasked":
            records.append(r.TimerCancelled(state.flow.timer))
    # A claim under the same fence counts too: its process may have died and come back under its old name.
    records.append(r.Claimed(message.number, message.attempts + 1))
    return Decision(Claimed("work", fence, message, mode, row or state.row), tuple(records), guard)


def _set_aside(state: ConversationState, message: Inbound, command: c.Claim) -> list[r.AnyRecord]:
    """J5: attempts without progress are over."""
    reason = f"{message.attempts} attempts without progress; the last one: {message.reason or 'its worker died'}"
    if command.on_poison == "skip":
        dropped = r.Dropped(message.number, "on_poison='skip'", reason)
        return [r.Quarantined(message.number, reason), *_left_open(state, _DROPPED), dropped]
    return [r.Quarantined(message.number, reason)]


def _left_open(state: ConversationState, why: str) -> list[r.AnyRecord]:
    """What becomes of sends that nobody asks for any more, so that they hold up no others (J4)."""
    return [
        r.SendRefused(send.key, why) if send.state is SendState.RETRY else r.SendUnknown(send.key, why)
        for send in state.sends
        if not send.settled
    ]


# --- what only the owner may do ----------------------------------------------------------------------------------


def _by_owner(state: ConversationState, command: c.OwnerCommand, now: int) -> AnyDecision:
    if state.owner != command.owner or state.fence != command.fence:
        return Decision(LOST)
    if isinstance(command, c.SettleSend):
        return settle_send(state, command)  # also late: nobody has changed it since
    if isinstance(command, c.BeginSend | c.Renew) and now >= state.lease_end:
        return Decision(LOST)  # nobody took over yet, and nothing is begun any more (R1)
    guard = Guard(not_after=state.lease_end - 1) if isinstance(command, c.BeginSend | c.Renew) else None
    decision = _owned(state, command, now)
    return decision._replace(guard=guard) if decision.records and guard is not None else decision


def _owned(state: ConversationState, command: c.OwnerCommand, now: int) -> AnyDecision:
    match command:
        case c.BeginSend():
            return begin_send(state, command, now)
        case c.Renew():
            return Decision(None, (r.Renewed(command.lease_ms),))
        case c.KeepAnswer() | c.KeepValue() if state.flow is None:
            raise ConversationError(f"conversation {state.conversation_id!r}: there is no flow to keep a value in")
        case c.KeepAnswer():
            return Decision(None, (r.AnswerKept(command.number, command.value),))
        case c.KeepValue():
            return Decision(None, (r.Kept(command.name, command.value),))
        case c.SetTimer():
            due = command.due or now + command.after_ms
            return Decision(due, (r.TimerSet(command.id, due, command.message),))
        case c.CancelTimer():
            known = any(timer.id == command.id for timer in state.timers)
            return Decision(known, (r.TimerCancelled(command.id),) if known else ())
        case c.SetRow():
            return _set_row(state, command)
        case c.EndFlow():
            return Decision(None, (r.RowEnded(command.inbound, command.reason),) if state.flow is not None else ())
        case c.Settle() | c.Supersede():
            return _settle(state, command)
        case c.Steer():
            return _steer(state, command)
        case c.ReturnMessage():
            returned = r.Returned(command.number, command.reason, now + command.delay_ms, command.counts)
            return Decision(None, (returned, r.Released()))
        case c.Release():
            return Decision(None, (r.Released(),))
        case _:
            raise AssertionError(f"no rule for {command!r}")


def _set_row(state: ConversationState, command: c.SetRow) -> AnyDecision:
    known = 0 if state.row is None else state.row.revision
    if command.row.revision != known:
        raise FlowCheckpointConflict(state.conversation_id, command.row.revision, known)
    return Decision(state.revisions + 1, (r.RowSet(command.row),))


def _settle(state: ConversationState, command: c.Settle | c.Supersede) -> AnyDecision:
    message = find_inbound(state, command.number)
    if message is None:
        return Decision(None)
    # J4. Whatever is open was begun for this message: a step that runs again may count on from an earlier one's sends.
    open_send = next((one for one in state.sends if not one.settled), None)
    if open_send is not None:
        raise ConversationError(
            f"conversation {state.conversation_id!r}: message {command.number} is not settled before its send "
            f"{tuple(open_send.key)} is ({open_send.state.value})"
        )
    if isinstance(command, c.Supersede):
        return Decision(None, (r.Superseded(command.number, command.by),))
    done = r.Done(command.number, command.outcome)
    # What was handed to its turn is settled with it, where it got there: the caller says so one by one, before.
    others = any(one.number != command.number for one in state.inbound)
    return Decision(None, (done,) if others else (done, r.Released()))


def _steer(state: ConversationState, command: c.Steer) -> AnyDecision:
    handed = tuple(
        one.number
        for one in state.inbound
        if command.into < one.number <= command.upto and one.kind == "text" and not one.steered_into
    )
    return Decision(handed, (r.Steered(handed, command.into),) if handed else ())


# --- operators, and hosts with a runtime of their own ------------------------------------------------------------


def _resolve_send(state: ConversationState, command: c.ResolveSend) -> AnyDecision:
    send = find_send(state, command.key)
    if send is None or send.state is not SendState.AMBIGUOUS:
        raise ConversationError(
            f"conversation {state.conversation_id!r}: the send {tuple(command.key)} is not in doubt: nothing to resolve"
        )
    return Decision(None, (r.SendResolved(command.key, command.sent, command.who, command.why, command.message_id),))


def _resolve_message(state: ConversationState, command: c.ResolveMessage) -> AnyDecision:
    message = find_inbound(state, command.number)
    where = f"conversation {state.conversation_id!r}: message {command.number}"
    # A message waits where nobody has it in hand; in hand, it is being tried.
    waits = message is not None and message.not_before > 0 and not message.fence
    if message is None or (message.quarantined is None and (command.drop or not waits)):
        raise ConversationError(
            f"{where} is not quarantined{' and does not wait' * (not command.drop)}: nothing to resolve"
        )
    if command.drop:
        return Decision(None, (*_left_open(state, _DROPPED), r.Dropped(command.number, command.who, command.why)))
    return Decision(None, (r.Readmitted(command.number, command.who, command.why),))


def _take_away(state: ConversationState, command: c.TakeAway, now: int) -> AnyDecision:
    where = f"conversation {state.conversation_id!r}"
    if state.owner != command.owner or now >= state.lease_end:
        raise ConversationError(f"{where}: {command.owner} does not own it any more, so nobody waits for it")
    silent_from = state.lease_end - state.lease_ms // 2
    if now < silent_from and not command.force:
        raise OwnerAlive(where, command.owner, silent_from - now)
    guard = None if command.force else Guard(not_before=silent_from)
    return Decision(None, (r.Released(command.owner, command.who, command.why),), guard)


def _put_row(state: ConversationState, command: c.PutRow | c.DeleteRow) -> AnyDecision:
    known = 0 if state.row is None or state.row.ended is not None else state.row.revision
    if command.expected is not None and command.expected != known:
        raise FlowCheckpointConflict(state.conversation_id, command.expected, known)
    if isinstance(command, c.DeleteRow):
        return Decision(None, () if state.row is None else (r.RowDeleted(),))
    opened = () if state.conversation_id else (r.Opened(command.conversation_id, command.seed),)
    plain = command.expected is None
    return Decision(0 if plain else state.revisions + 1, (*opened, r.RowSet(command.row, plain)))
