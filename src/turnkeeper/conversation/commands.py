"""What may be asked of a conversation log: commands for the pure deciders."""

from __future__ import annotations

from typing import Literal

import msgspec

from turnkeeper.conversation.state import Row, SendKey, TraceContext


class Command(msgspec.Struct, frozen=True):
    """Base of all commands."""


class Receive(Command, frozen=True):
    """Take a message into the journal (J1). `seed` is random, for a conversation that begins with it."""

    conversation_id: str
    seed: bytes
    event: bytes
    kind: str
    message: bytes
    trace: TraceContext | None = None


class FireTimer(Command, frozen=True):
    """Take the message of a timer that is due."""

    id: str
    event: bytes


class Start(Command, frozen=True):
    """The flow that a message begins where none is under way (C1)."""

    flow: str
    version: int
    step: str
    state: bytes
    first_wait: bool = False


Intent = Literal["answer", "unasked", "cancel", "restart", "start"]


class Claim(Command, frozen=True):
    """Own the conversation, and begin to handle its first unsettled message, number `about` (J2, R1).

    `intent` is what the host takes that message for, and `start` the flow that it would begin. `live` is the revision of the
    row that this process holds the continuation of, if it does.
    """

    owner: str
    lease_ms: int
    about: int
    intent: Intent
    start: Start | None = None
    live: int | None = None
    max_attempts: int = 5
    on_poison: Literal["hold", "skip"] = "hold"
    trace: TraceContext | None = None
    """Of the turn that handles it."""


class OwnerCommand(Command, frozen=True):
    """Base of what only the owner may do (J3): refused with an older fence."""

    owner: str
    fence: int


class Renew(OwnerCommand, frozen=True):
    """Go on owning."""

    lease_ms: int


class BeginSend(OwnerCommand, frozen=True):
    """Send a message now, under its key (O1 to O3)."""

    key: SendKey
    content: bytes
    fingerprint: str
    watermark: bool = False
    """Whether messages that came before this one are no answers to it (C8)."""
    again: bool = False
    """What is known of an earlier send allows to send it again: it surely is not out, or its channel drops a second one."""


class SettleSend(OwnerCommand, frozen=True):
    """What became of a send that this owner has begun."""

    key: SendKey
    outcome: Literal["sent", "postponed", "refused", "unknown"]
    message_id: str = ""
    reason: str = ""
    not_before: int = 0
    who: str = ""


class KeepAnswer(OwnerCommand, frozen=True):
    """The wait has accepted the answer that it was given, as this value."""

    number: int
    value: bytes


class KeepValue(OwnerCommand, frozen=True):
    """Keep a value for as long as the step is not finished."""

    name: str
    value: bytes


class SetRow(OwnerCommand, frozen=True):
    """The flow's next checkpoint; its revision has to be the one that was read (R2)."""

    row: Row


class SetTimer(OwnerCommand, frozen=True):
    """Be woken at an instant of the store's clock, or `after_ms` from now on."""

    id: str
    message: bytes
    due: int = 0
    after_ms: int = 0


class CancelTimer(OwnerCommand, frozen=True):
    """Not be woken any more."""

    id: str


class EndFlow(OwnerCommand, frozen=True):
    """The flow is over (C9)."""

    inbound: int
    reason: str


class Settle(OwnerCommand, frozen=True):
    """The message is handled (J4). Releases the conversation where nothing else is pending."""

    number: int
    outcome: str


class Supersede(OwnerCommand, frozen=True):
    """The message's handling was cancelled by message `by`, which gets it in hand."""

    number: int
    by: int


class Steer(OwnerCommand, frozen=True):
    """Hand the texts that came meanwhile to the agent turn of message `into`."""

    into: int
    upto: int


class ReturnMessage(OwnerCommand, frozen=True):
    """The message could not be handled now; try it again after `delay_ms`."""

    number: int
    reason: str
    delay_ms: int
    counts: bool = True


class Release(OwnerCommand, frozen=True):
    """Stop owning, for another replica to go on."""


class ResolveSend(Command, frozen=True):
    """Settle a send of unknown outcome, with evidence."""

    key: SendKey
    sent: bool
    who: str
    why: str
    message_id: str = ""


class ResolveMessage(Command, frozen=True):
    """Try a message again that is quarantined, or waits for its next attempt; or drop a quarantined one."""

    number: int
    drop: bool
    who: str
    why: str


class TakeAway(Command, frozen=True):
    """Take the conversation from its owner, which is known to be dead; with `force`, also where it was heard of just now."""

    owner: str
    who: str
    why: str
    force: bool = False


class PutRow(Command, frozen=True):
    """A host with its own runtime sets the row; with `expected`, only over that revision (R2)."""

    row: Row
    expected: int | None = None
    seed: bytes = b""
    conversation_id: str = ""


class DeleteRow(Command, frozen=True):
    """A host with its own runtime deletes the row; with `expected`, only that revision."""

    expected: int | None = None
