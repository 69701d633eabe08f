"""The state of a turn, as its records make it (`evolve.py`), and what can be read off it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from turnkeeper.log import values
from turnkeeper.observe.contexts import TraceContext
from turnkeeper.turn.identity import ProviderReference, ToolCall
from turnkeeper.turn.names import Resolution, ToolCallState, TurnPhase
from turnkeeper.turn.references import References

KIND: Final = "turn"

# What is immutable is in no cycle, so the garbage collector need not look at it (`gc=False`). Rounds and transcripts are chains,
# which only objects that it knows are taken apart without deep recursion.


class Slot(msgspec.Struct, frozen=True, gc=False):
    """One tool slot as it stands (journal.md T3)."""

    state: ToolCallState
    owner: str
    fence: int
    lease_end: int
    """End of the owner's lease on the store's clock, in milliseconds; the lease is over from this instant on."""
    replay_safe: bool
    result: bytes | None = None
    late: bool = False
    evidence: bytes | None = None
    resolution: Resolution | None = None
    lease_ms: int = 0
    """How long the owner's lease was when it last got or renewed it."""

    @property
    def open_question(self) -> bool:
        """Whether nobody has yet decided about this ambiguous slot."""
        return self.state is ToolCallState.AMBIGUOUS and self.resolution is None


class Permission(msgspec.Struct, frozen=True, gc=False):
    """Whether a call may run."""

    approved: bool | None = None
    """None: asked for, and nobody has decided."""
    who: str = ""
    reason: str | None = None
    metadata: bytes | None = None
    valid_until: int = 0
    """When an approval ends on the store's clock, in milliseconds; 0: never."""


class Round(msgspec.Struct, frozen=True):
    """One model decision and its slots."""

    index: int
    response: bytes
    calls: tuple[ToolCall, ...]
    slots: tuple[Slot | None, ...]
    previous: Round | None
    permissions: tuple[Permission | None, ...] = ()
    """For each slot, or empty where none was asked for."""


class Transcript(msgspec.Struct, frozen=True):
    """The canonical messages, as a chain of what each round added."""

    keep: int
    tail: bytes
    round: Round | None
    """The round whose strings `tail` refers to."""
    previous: Transcript | None


class ModelCall(msgspec.Struct, frozen=True, gc=False):
    """A model call that was started and has not brought its decision yet."""

    round_index: int
    invocation_id: str
    owner: str
    lease_end: int
    failed: bool = False
    unknown: bool = False
    """Nobody knows whether it was answered, so it is not made again before somebody has settled that."""
    message: str = ""
    metadata: bytes | None = None
    reference: ProviderReference | None = None
    """What its provider calls it, where that was known in time."""
    lease_ms: int = 0


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """The reserved reply."""

    key: str
    text: bytes | None
    presentation: bytes | None
    owner: str
    lease_end: int
    unknown: bool = False
    not_sent: bool = False
    """Nobody is sending it, and it surely was not sent."""
    lease_ms: int = 0


class AmbiguousCall(msgspec.Struct, frozen=True, gc=False):
    """A call that may have happened and is not known to have: guards against the model asking for it again (T3)."""

    round_index: int
    slot_index: int
    tool_name: str
    arguments_fingerprint: str
    closed: bool = False
    """Closed as unknown: no open question any more, but still not to be repeated."""


class Stop(msgspec.Struct, frozen=True, gc=False):
    """How the last run that ended short of the turn's end did so; `revision` is that of its record."""

    status: str
    error_kind: str
    message: str
    revision: int


class TurnState(msgspec.Struct, frozen=True, gc=False):
    """Everything that the rules of a turn look at."""

    phase: TurnPhase | None = None
    """None: no turn was started under this key."""
    revision: int = 0
    trace_id: str = ""
    scope: str = ""
    labels: dict[str, str] = {}
    input_fingerprint: str = ""
    proof_deadline: int = 0
    tool_names: bytes = b""
    runtime: bytes = b""
    transcript: Transcript | None = None
    round: Round | None = None
    ambiguous: tuple[AmbiguousCall, ...] = ()
    model: ModelCall | None = None
    model_calls: int = 0
    attempts: int = 0
    """Model calls started in the round that is to be decided next."""
    final_model: bytes | None = None
    delivery: Delivery | None = None
    sent_message_id: str | None = None
    disputed_message_ids: tuple[str, ...] = ()
    completed: bool = False
    owner: str | None = None
    stop: Stop | None = None
    engine: bytes = b""
    first_round: int = 0
    policy_round: int = -1
    """The round whose policy is in the transcript already."""
    stable_prefix: int | None = None
    """As the host's policy has set it."""
    trace: TraceContext | None = None
    """The span of the last run that wrote here with telemetry."""

    @property
    def current_round(self) -> int:
        """The highest reserved round; before the first, the one before it: -1, unless the turn was begun elsewhere."""
        return self.first_round - 1 if self.round is None else self.round.index

    @property
    def attention(self) -> str | None:
        """Why a person should look, or None."""
        if self.ambiguous and any(not call.closed for call in self.ambiguous):
            return "ambiguous_tool"
        if self.disputed_message_ids:
            return "double_send"
        if self.model is not None and self.model.unknown:
            return "unknown_model"
        if self.delivery is not None and self.delivery.unknown:
            return "unknown_delivery"
        if self.round is not None and self.phase is TurnPhase.ASSISTANT_RESERVED:
            asked = any(one is not None and one.approved is None for one in self.round.permissions)
            return "approval" if asked else None
        return None


def rounds_of(state: TurnState) -> list[Round]:
    """The rounds, oldest first."""
    found: list[Round] = []
    round_ = state.round
    while round_ is not None:
        found.append(round_)
        round_ = round_.previous
    return found[::-1]


def find_round(state: TurnState, index: int) -> Round | None:
    """The round of that index, if it was reserved."""
    found = state.round
    while found is not None and found.index > index:
        found = found.previous
    return found if found is not None and found.index == index else None


def find_slot(state: TurnState, round_index: int, slot_index: int) -> Slot | None:
    """The slot, if it was ever claimed."""
    found = find_round(state, round_index)
    return found.slots[slot_index] if found is not None and 0 <= slot_index < len(found.slots) else None


def permission_of(round_: Round, slot_index: int) -> Permission | None:
    """The permission of a call, if it was asked for."""
    return round_.permissions[slot_index] if round_.permissions else None


def references(round_: Round | None, *, results: bool = True, thaw: Callable[[bytes], Any] = values.thaw) -> References:
    """What a commit of the round refers to: its decision, and the results as they stand."""
    if round_ is None:
        return References(())
    found = [None if slot is None else slot.result for slot in round_.slots] if results else []
    return References((round_.response, *found), thaw)


def thaw_messages(transcript: Transcript | None) -> list[Any]:
    """The messages of a transcript, new copies."""
    chain: list[Transcript] = []
    while transcript is not None:
        chain.append(transcript)
        transcript = transcript.previous
    messages: list[Any] = []
    for part in reversed(chain):
        del messages[part.keep :]
        messages += thaw_tail(part)
    return messages


def thaw_tail(part: Transcript, thaw: Callable[[bytes], Any] = values.thaw) -> list[Any]:
    """The messages that one part of a transcript adds, new copies. `thaw` gives what they share strings with."""
    return cast("list[Any]", values.thaw(part.tail, shared=references(part.round, thaw=thaw)))


def final_text(state: TurnState) -> str | None:
    """The exact text of the reserved delivery, or None before it."""
    if state.delivery is None:
        return None
    return final_model(state) if state.delivery.text is None else values.thaw(state.delivery.text)


def final_model(state: TurnState) -> str | None:
    """The canonical final content, or None before it."""
    if state.final_model is None:
        return None
    # Only the decision's strings: a result of the last round may still be settled afterwards.
    return values.thaw(state.final_model, shared=references(state.round, results=False))
