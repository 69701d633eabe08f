"""The state of a turn, folded from its records. Pure: `evolve` gives a new state and shares what did not change."""

from __future__ import annotations

from typing import Any, Final, assert_never, cast

import msgspec
from msgspec.structs import replace

from turnkeeper.log import values
from turnkeeper.log.record import Head
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import ToolCall
from turnkeeper.turn.names import Resolution, ToolCallState, TurnPhase

KIND: Final = "turn"


class Slot(msgspec.Struct, frozen=True):
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

    @property
    def open_question(self) -> bool:
        """Whether nobody has yet decided about this ambiguous slot."""
        return self.state is ToolCallState.AMBIGUOUS and self.resolution is None


class Round(msgspec.Struct, frozen=True):
    """One model decision and its slots."""

    index: int
    response: bytes
    calls: tuple[ToolCall, ...]
    slots: tuple[Slot | None, ...]
    previous: Round | None


class Transcript(msgspec.Struct, frozen=True):
    """The canonical messages, as a chain of what each round added."""

    keep: int
    tail: bytes
    round: Round | None
    """The round whose strings `tail` refers to."""
    previous: Transcript | None


class ModelCall(msgspec.Struct, frozen=True):
    """A model call that was started and has not brought its decision yet."""

    round_index: int
    invocation_id: str
    owner: str
    lease_end: int
    failed: bool = False


class Delivery(msgspec.Struct, frozen=True):
    """The reserved reply."""

    key: str
    text: bytes | None
    presentation: bytes | None
    owner: str
    lease_end: int
    unknown: bool = False
    not_sent: bool = False
    """Nobody is sending it, and it surely was not sent."""


class AmbiguousCall(msgspec.Struct, frozen=True):
    """A call that may have happened and is not known to have: guards against the model asking for it again (T3)."""

    round_index: int
    slot_index: int
    tool_name: str
    arguments_fingerprint: str
    closed: bool = False
    """Closed as unknown: no open question any more, but still not to be repeated."""


class TurnState(msgspec.Struct, frozen=True):
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

    @property
    def current_round(self) -> int:
        """The highest reserved round, -1 before the first."""
        return -1 if self.round is None else self.round.index

    @property
    def attention(self) -> str | None:
        """Why a person should look, or None."""
        if any(not call.closed for call in self.ambiguous):
            return "ambiguous_tool"
        if self.disputed_message_ids:
            return "double_send"
        if self.delivery is not None and self.delivery.unknown:
            return "unknown_delivery"
        return None


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


def shared_strings(round_: Round | None, *, results: bool = True) -> list[str]:
    """The long strings of a round's decision and results, in the order in which a commit refers to them."""
    if round_ is None:
        return []
    strings = list(values.strings_of(values.thaw(round_.response)))
    for slot in round_.slots if results else ():
        if slot is not None and slot.result is not None:
            strings += values.strings_of(values.thaw(slot.result))
    return strings


def thaw_messages(transcript: Transcript | None) -> list[Any]:
    """The messages of a transcript, new copies."""
    chain: list[Transcript] = []
    while transcript is not None:
        chain.append(transcript)
        transcript = transcript.previous
    messages: list[Any] = []
    for part in reversed(chain):
        del messages[part.keep :]
        messages += cast("list[Any]", values.thaw(part.tail, shared=_Lazy(part.round)))
    return messages


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
    return values.thaw(state.final_model, shared=_Lazy(state.round, results=False))


class _Lazy(list[str]):
    """Shared strings that are looked up only if a value refers to one."""

    def __init__(self, round_: Round | None, *, results: bool = True) -> None:
        super().__init__()
        self._round = round_
        self._results = results

    def __getitem__(self, index: Any) -> Any:
        if not self and self._round is not None:
            self += shared_strings(self._round, results=self._results)
        return cast("str", super().__getitem__(index))


def _put(state: TurnState, round_index: int, slot_index: int, slot: Slot, **changes: Any) -> TurnState:
    """The state with one slot replaced, in whatever round it is."""

    def put(round_: Round | None) -> Round:
        assert round_ is not None
        if round_.index != round_index:
            return replace(round_, previous=put(round_.previous))
        slots = round_.slots
        return replace(round_, slots=(*slots[:slot_index], slot, *slots[slot_index + 1 :]))

    return replace(state, round=put(state.round), revision=state.revision + 1, **changes)


def _slot(state: TurnState, record: Any) -> Slot:
    slot = find_slot(state, record.round_index, record.slot_index)
    assert slot is not None
    return slot


def _owned(state: TurnState, record: r.ToolClaimed | r.ToolBegun, slot_state: ToolCallState, at: int) -> TurnState:
    slot = Slot(slot_state, record.owner, record.fence, at + record.lease_ms, record.replay_safe)
    return _put(state, record.round_index, record.slot_index, slot, owner=record.owner)


def _resolved(state: TurnState, record: r.ToolResolved, at: int) -> TurnState:
    slot = _slot(state, record)
    here = (record.round_index, record.slot_index)
    ambiguous = tuple(call for call in state.ambiguous if (call.round_index, call.slot_index) != here)
    match record.resolution:
        case Resolution.HAPPENED:
            slot = replace(slot, state=ToolCallState.COMPLETED, result=record.result, resolution=record.resolution)
        case Resolution.DID_NOT_HAPPEN:
            slot = replace(slot, state=ToolCallState.CLAIMED, lease_end=at, resolution=None)
        case Resolution.UNKNOWN:
            slot = replace(slot, result=record.result, resolution=record.resolution)
            ambiguous = tuple(
                replace(call, closed=True) if (call.round_index, call.slot_index) == here else call
                for call in state.ambiguous
            )
    return _put(state, *here, slot, ambiguous=ambiguous)


def _ambiguous(state: TurnState, record: r.ToolAmbiguous) -> TurnState:
    slot = replace(_slot(state, record), state=ToolCallState.AMBIGUOUS)
    round_ = find_round(state, record.round_index)
    assert round_ is not None
    call = round_.calls[record.slot_index]
    entry = AmbiguousCall(record.round_index, record.slot_index, call.tool_name, call.arguments_fingerprint)
    return _put(state, record.round_index, record.slot_index, slot, ambiguous=(*state.ambiguous, entry))


def evolve(state: TurnState, record: r.AnyRecord, at: int) -> TurnState:
    """The state after `record`, which the store stamped `at`."""
    match record:
        case r.ToolBegun():
            return _owned(state, record, ToolCallState.EXECUTING, at)
        case r.ToolCompleted():
            slot = replace(_slot(state, record), state=ToolCallState.COMPLETED, result=record.result, late=record.late)
            return _put(state, record.round_index, record.slot_index, slot)
        case r.ToolClaimed():
            return _owned(state, record, ToolCallState.CLAIMED, at)
        case r.ToolRenewed():
            slot = replace(_slot(state, record), lease_end=at + record.lease_ms)
            return _put(state, record.round_index, record.slot_index, slot)
        case r.ToolAbandoned():
            slot = replace(_slot(state, record), state=ToolCallState.CLAIMED, lease_end=at)
            return _put(state, record.round_index, record.slot_index, slot)
        case r.ToolAmbiguous():
            return _ambiguous(state, record)
        case r.ToolEvidence():
            slot = replace(_slot(state, record), evidence=record.result)
            return _put(state, record.round_index, record.slot_index, slot)
        case r.ToolResolved():
            return _resolved(state, record, at)
        case _:
            return replace(_evolve_turn(state, record, at), revision=state.revision + 1)


def _evolve_turn(state: TurnState, record: Any, at: int) -> TurnState:
    match record:
        case r.Started():
            return TurnState(
                phase=TurnPhase.STARTED,
                trace_id=record.trace_id,
                scope=record.scope,
                labels=record.labels,
                input_fingerprint=record.input_fingerprint,
                proof_deadline=record.proof_deadline,
                tool_names=record.tool_names,
                runtime=record.runtime,
                transcript=Transcript(0, record.messages, None, None),
            )
        case r.AssistantReserved():
            empty: tuple[Slot | None, ...] = (None,) * len(record.calls)
            decided = Round(record.round_index, record.response, record.calls, empty, state.round)
            return replace(state, phase=TurnPhase.ASSISTANT_RESERVED, round=decided, model=None, attempts=0)
        case r.RoundCommitted():
            return replace(
                state,
                phase=TurnPhase.ROUND_COMMITTED,
                transcript=Transcript(record.keep, record.messages, state.round, state.transcript),
                runtime=state.runtime if record.runtime is None else record.runtime,
            )
        case r.FinalModelSaved():
            return replace(state, phase=TurnPhase.FINAL_MODEL_SAVED, final_model=record.content)
        case r.Completed():
            return replace(state, phase=TurnPhase.COMPLETED, completed=True, owner=None)
        case r.ModelStarted() | r.ModelRenewed() | r.ModelFailed():
            return _evolve_model(state, record, at)
        case _:
            return _evolve_delivery(state, record, at)


def _evolve_model(state: TurnState, record: r.ModelStarted | r.ModelRenewed | r.ModelFailed, at: int) -> TurnState:
    match record:
        case r.ModelStarted():
            call = ModelCall(record.round_index, record.invocation_id, record.owner, at + record.lease_ms)
            return replace(
                state,
                model=call,
                owner=record.owner,
                model_calls=state.model_calls + 1,
                attempts=state.attempts + 1,
            )
        case r.ModelRenewed():
            assert state.model is not None
            return replace(state, model=replace(state.model, lease_end=at + record.lease_ms))
        case r.ModelFailed():
            assert state.model is not None
            return replace(state, model=replace(state.model, lease_end=at, failed=True))
        case _:
            assert_never(record)


def _evolve_delivery(state: TurnState, record: Any, at: int) -> TurnState:
    match record:
        case r.DeliveryReserved():
            delivery = Delivery(record.key, record.text, record.delivery, record.owner, at + record.lease_ms)
            return replace(
                state, phase=TurnPhase.DELIVERY_RESERVED, delivery=delivery, owner=record.owner or state.owner
            )
        case r.Delivered():
            settled = None if state.delivery is None else replace(state.delivery, unknown=False)
            return replace(state, phase=TurnPhase.DELIVERED, sent_message_id=record.message_id, delivery=settled)
        case r.DeliveryDisputed():
            return replace(state, disputed_message_ids=(*state.disputed_message_ids, record.message_id))
        case _:
            pass
    assert state.delivery is not None
    match record:
        case r.DeliveryClaimed():
            claimed = replace(state.delivery, owner=record.owner, lease_end=at + record.lease_ms, not_sent=False)
            return replace(state, delivery=claimed, owner=record.owner)
        case r.DeliveryUnknown():
            return replace(state, delivery=replace(state.delivery, unknown=True))
        case r.DeliveryResolved():
            return replace(state, delivery=replace(state.delivery, unknown=False, not_sent=True, lease_end=at))
        case _:
            raise AssertionError(f"no rule for {record!r}")


_DECODER: Final = msgspec.msgpack.Decoder(tuple[bytes, r.AnyRecord])


class TurnRules:
    """The rules of a turn log, for the shell. `ttl_ms` is the retention that this writer asks for (T1.6)."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms

    def initial(self) -> TurnState:
        """No turn."""
        return TurnState()

    def evolve(self, state: TurnState, record: r.AnyRecord, at: int) -> TurnState:
        """See `evolve`."""
        return evolve(state, record, at)

    def decoder(self) -> msgspec.msgpack.Decoder[tuple[bytes, r.AnyRecord]]:
        """Decodes the records of `records.py`."""
        return _DECODER

    def head(self, state: TurnState) -> Head:
        """For listing: phase, attention, owner and labels."""
        return Head(
            kind=KIND,
            phase="" if state.phase is None else state.phase.value,
            attention=state.attention,
            owner=state.owner,
            labels={"turn": state.trace_id, "scope": state.scope, **state.labels},
            ttl_ms=self._ttl_ms,
            keep_until=state.proof_deadline,
        )
