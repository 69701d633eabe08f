"""The records of a conversation log: what happened, in the order in which it became durable.

Fields are only ever added at the end, with defaults. Fields of type `bytes` that hold values are frames (`log/values.py`).
"""

from __future__ import annotations

import msgspec

from turnkeeper.conversation.state import ConversationState, Row, SendKey, TraceContext


class ConversationRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all records of a conversation."""


class Opened(ConversationRecord, frozen=True, tag="opened"):
    """The first record: whose log this is, and what its random values are made of."""

    conversation_id: str
    seed: bytes


# --- the inbound journal (flows.md F2) ---------------------------------------------------------------------------


class Received(ConversationRecord, frozen=True, tag="received"):
    """A message is taken, before its channel is told so (J1). Its number is the next one, densely (J2)."""

    event: bytes
    """Digest of the channel's event id."""
    kind: str
    message: bytes
    trace: TraceContext | None = None
    timer: str = ""
    """The timer that this is the firing of."""


class Claimed(ConversationRecord, frozen=True, tag="claimed"):
    """The owner begins to handle a message; `attempt` counts those since it last got on."""

    number: int
    attempt: int


class Returned(ConversationRecord, frozen=True, tag="returned"):
    """A message was not handled to its end: it is pending again, from an instant of the store's clock on."""

    number: int
    reason: str
    not_before: int
    counts: bool = True
    """Whether this was an attempt of its own; waiting for somebody is not."""


class Done(ConversationRecord, frozen=True, tag="done"):
    """A message is settled (J4)."""

    number: int
    outcome: str


class Quarantined(ConversationRecord, frozen=True, tag="quarantined"):
    """A message that does not get on is set aside; it is kept, and reported."""

    number: int
    reason: str


class Readmitted(ConversationRecord, frozen=True, tag="readmitted"):
    """Somebody wants a quarantined message to be tried again."""

    number: int
    who: str
    why: str


class Dropped(ConversationRecord, frozen=True, tag="dropped"):
    """Somebody has decided that a quarantined message is not handled."""

    number: int
    who: str
    why: str


class Superseded(ConversationRecord, frozen=True, tag="superseded"):
    """A message's handling was cancelled by a later message, which is handled with it in hand."""

    number: int
    by: int


class Steered(ConversationRecord, frozen=True, tag="steered"):
    """Messages that came while another was handled are handed to that one's agent turn."""

    numbers: tuple[int, ...]
    into: int


# --- ownership (R1) ----------------------------------------------------------------------------------------------


class Owned(ConversationRecord, frozen=True, tag="owned"):
    """A replica owns the conversation; every later write of it renews the lease."""

    owner: str
    fence: int
    lease_ms: int


class Renewed(ConversationRecord, frozen=True, tag="renewed"):
    """The owner is alive."""

    lease_ms: int


class Released(ConversationRecord, frozen=True, tag="released"):
    """Nobody owns the conversation. With `who`, it was taken from its `owner`, and `why` that is known to be dead."""

    owner: str = ""
    who: str = ""
    why: str = ""


# --- the flow's checkpoint (F1, F4) ------------------------------------------------------------------------------


class RowSet(ConversationRecord, frozen=True, tag="row_set"):
    """The flow's checkpoint. Its revision is the next one of the conversation's own count (R2)."""

    row: Row
    plain: bool = False
    """Written without a condition: it counts as revision 0."""


class RowEnded(ConversationRecord, frozen=True, tag="row_ended"):
    """The flow is over; what is left of its row settles the replay of its last message (C9)."""

    inbound: int
    reason: str


class RowDeleted(ConversationRecord, frozen=True, tag="row_deleted"):
    """A host with its own runtime has deleted the row. The count of revisions goes on."""


class AnswerKept(ConversationRecord, frozen=True, tag="answer_kept"):
    """A wait has accepted an answer, as this value."""

    number: int
    value: bytes


class Kept(ConversationRecord, frozen=True, tag="kept"):
    """A value that the unfinished step may not make anew (C10)."""

    name: str
    value: bytes


class TimerSet(ConversationRecord, frozen=True, tag="timer_set"):
    """At an instant of the store's clock this becomes an inbound message."""

    id: str
    due: int
    message: bytes


class TimerCancelled(ConversationRecord, frozen=True, tag="timer_cancelled"):
    """A timer is not wanted any more."""

    id: str


# --- the outbox (F3) ---------------------------------------------------------------------------------------------


class SendBegun(ConversationRecord, frozen=True, tag="send_begun"):
    """From here on the message may be out: key, exact content, and whose fence sends it. Also begins a repeated send."""

    key: SendKey
    content: bytes
    fingerprint: str
    fence: int
    watermark: int = 0
    """For a prompt: messages up to this number are no answers to it (C8)."""


class Sent(ConversationRecord, frozen=True, tag="sent"):
    """The message is out, under the channel's id. `who` and `why`: found out afterwards."""

    key: SendKey
    message_id: str
    who: str = ""
    why: str = ""


class SendPostponed(ConversationRecord, frozen=True, tag="send_postponed"):
    """It surely is not out, and is sent again from an instant on."""

    key: SendKey
    reason: str
    not_before: int


class SendRefused(ConversationRecord, frozen=True, tag="send_refused"):
    """The channel refuses it for good."""

    key: SendKey
    reason: str


class SendUnknown(ConversationRecord, frozen=True, tag="send_unknown"):
    """Nobody can know whether it is out, and it is not sent again by itself."""

    key: SendKey
    reason: str


class SendResolved(ConversationRecord, frozen=True, tag="send_resolved"):
    """Somebody has settled a send of unknown outcome: it was `sent`, or it is given up."""

    key: SendKey
    sent: bool
    who: str
    why: str
    message_id: str = ""


class Snapshot(ConversationRecord, frozen=True, tag="snapshot"):
    """The state up to here; the records before it are dropped in the same append."""

    state: ConversationState


AnyRecord = (
    Opened
    | Received
    | Claimed
    | Returned
    | Done
    | Quarantined
    | Readmitted
    | Dropped
    | Superseded
    | Steered
    | Owned
    | Renewed
    | Released
    | RowSet
    | RowEnded
    | RowDeleted
    | AnswerKept
    | Kept
    | TimerSet
    | TimerCancelled
    | SendBegun
    | Sent
    | SendPostponed
    | SendRefused
    | SendUnknown
    | SendResolved
    | Snapshot
)
