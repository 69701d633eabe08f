"""The state of a conversation, as its records make it (`evolve.py`), and what can be read off it."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple

import msgspec

from turnkeeper.observe.contexts import TraceContext

KIND: Final = "conversation"


class SendKey(NamedTuple):
    """Identity of a send: the message that caused it, its number among that one's, and its chunk (flows.md F3, O4)."""

    record: int
    sequence: int
    chunk: int = 0


class SendState(str, Enum):
    """How a send stands."""

    SENDING = "SENDING"
    SENT = "SENT"
    RETRY = "RETRY"
    DEAD = "DEAD"
    AMBIGUOUS = "AMBIGUOUS"


class Inbound(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that is not settled."""

    number: int
    kind: str
    message: bytes
    at: int
    trace: TraceContext | None = None
    timer: str = ""
    attempts: int = 0
    fence: int = 0
    """Of the owner that handles it; 0: nobody does."""
    not_before: int = 0
    quarantined: str | None = None
    steered_into: int = 0
    reason: str = ""
    """Why it was returned last."""


class Answer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that a wait of the unfinished step was given."""

    number: int
    kind: str
    message: bytes
    at: int
    value: bytes | None = None
    """What the wait's validator made of it; None before it has."""


class Handover(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Marks a row as one that a replica left behind for another (F6).

    Attributes:
        kind: `ephemeral`: the row is whole, and is adopted once; `stub`: a flow was here, and its state did not travel.
        source: the replica.
        at, expires: milliseconds of the store's clock; an ephemeral row that has expired counts as absent. 0: never.
    """

    kind: Literal["ephemeral", "stub"]
    source: str
    at: int
    expires: int = 0


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The checkpoint of a flow (flows.md F1).

    Attributes:
        instance: names this run of the flow; `entry` counts the steps that it has entered.
        state: the flow's data, a frame.
        parked: a waking message is the answer of the wait that comes next.
        inbound: the message whose effects the row captures.
        cause: where the sends of the step start to count.
        answers: what the unfinished step was answered so far; at the most one where `first_wait`.
        first_wait: the seed's mode, which keeps the first wait's answer only.
        prompts: the keys of what the wait that the flow is parked at was asked with, again after each rejected answer.
        timer: the timer of that wait.
        watermark: messages up to this number are no answers to that prompt.
        kept: values that the unfinished step may not make anew.
        ended: why the flow is over, or None.
    """

    flow: str
    version: int
    step: str
    instance: str = ""
    entry: int = 0
    state: bytes = b""
    parked: bool = False
    inbound: int = 0
    cause: tuple[int, int] = (0, 0)
    answers: tuple[Answer, ...] = ()
    first_wait: bool = False
    prompts: tuple[tuple[int, int], ...] = ()
    timer: str = ""
    watermark: int = 0
    kept: dict[str, bytes] = {}
    trace: TraceContext | None = None
    handover: Handover | None = None
    ended: str | None = None
    revision: int = 0
    message: Answer | None = None
    """The message of `cause`: what the step sees of the one that it was entered with."""
    earlier: tuple[Answer, ...] = ()
    """Messages whose handling that one has cancelled."""
    document: bytes | None = None
    """The checkpoint of a host with a runtime of its own, as it gave it; the rest of the row is not ours to go on with."""


class Send(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A send that may have to be known again."""

    key: SendKey
    state: SendState
    content: bytes
    fingerprint: str
    fence: int
    at: int
    message_id: str = ""
    reason: str = ""
    not_before: int = 0
    watermark: int = 0

    @property
    def settled(self) -> bool:
        """Whether nothing more is done about it by itself (J4)."""
        return self.state in (SendState.SENT, SendState.DEAD, SendState.AMBIGUOUS)


class Timer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message to oneself, later."""

    id: str
    due: int
    message: bytes


class ConversationState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Everything that the rules of a conversation look at."""

    conversation_id: str = ""
    seed: bytes = b""
    received: int = 0
    """The number of the last message taken."""
    settled: int = 0
    inbound: tuple[Inbound, ...] = ()
    """Messages that are not settled, in order."""
    events: tuple[tuple[int, bytes], ...] = ()
    """Digests of event ids, in bunches of the hour in which they came: what a duplicate is told by."""
    owner: str = ""
    fence: int = 0
    lease_end: int = 0
    lease_ms: int = 0
    row: Row | None = None
    revisions: int = 0
    """The revision given last; never goes back, also across deletion (R2)."""
    sends: tuple[Send, ...] = ()
    timers: tuple[Timer, ...] = ()
    superseded: tuple[Answer, ...] = ()
    """Messages whose handling a later one has cancelled, until that one is handled."""
    records: int = 0
    """Records since the last snapshot, and how many bytes of frames they hold."""
    weight: int = 0
    superseded_by: int = 0
    """The message that the superseded ones are handed to."""

    @property
    def head(self) -> Inbound | None:
        """The message that is handled next: the first that is neither settled nor handed to another's turn."""
        return next((one for one in self.inbound if not one.steered_into), None)

    @property
    def flow(self) -> Row | None:
        """The flow that is under way."""
        return None if self.row is None or self.row.ended is not None else self.row

    @property
    def attention(self) -> str | None:
        """Why a person should look, or None."""
        if any(one.quarantined is not None for one in self.inbound):
            return "quarantined"
        if any(one.state is SendState.AMBIGUOUS for one in self.sends):
            return "unknown_send"
        head = self.head
        return "step_fails" if head is not None and head.attempts > 1 and head.reason else None

    @property
    def due(self) -> int | None:
        """When the next timer is due, on the store's clock, in milliseconds."""
        return min((timer.due for timer in self.timers), default=None)


def find_inbound(state: ConversationState, number: int) -> Inbound | None:
    """The unsettled message of that number."""
    return next((one for one in state.inbound if one.number == number), None)


def find_send(state: ConversationState, key: SendKey) -> Send | None:
    """The send of that key, as far as it is still known."""
    return next((one for one in state.sends if one.key == key), None)
