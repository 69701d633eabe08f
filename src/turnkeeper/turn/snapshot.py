"""What a turn's reader gets: the snapshot of a turn and the decision about a slot, under the first seed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import msgspec

from turnkeeper.log import values
from turnkeeper.turn.names import ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.state import TurnState, final_model, final_text, thaw_messages

T = TypeVar("T")


class _Thawed(Generic[T]):
    """A field that is thawed from the stored state when it is first looked at, and is the snapshot's own from then on."""

    def __init__(self, thaw: Callable[[TurnState], T]) -> None:
        self._thaw = thaw
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, snapshot: None, owner: type) -> _Thawed[T]: ...
    @overload
    def __get__(self, snapshot: TurnSnapshot, owner: type) -> T: ...
    def __get__(self, snapshot: TurnSnapshot | None, owner: type) -> T | _Thawed[T]:
        if snapshot is None:
            return self
        value = self._thaw(snapshot._state)  # pyright: ignore[reportPrivateUsage]  # its own field
        snapshot.__dict__[self._name] = value
        return value


def _assistant_responses(state: TurnState) -> dict[int, dict[str, Any]]:
    responses: dict[int, dict[str, Any]] = {}
    round_ = state.round
    while round_ is not None:
        responses[round_.index] = values.thaw(round_.response)
        round_ = round_.previous
    return dict(sorted(responses.items()))


class TurnSnapshot:
    """Decoded canonical whole-turn state returned to inference recovery.

    Every snapshot holds copies of its own: changing one changes neither the stored turn nor another snapshot. The large
    fields are decoded when they are first looked at.

    Attributes:
        phase: where the turn stands.
        messages: the canonical transcript.
        tool_names: the tools that the turn was started with.
        runtime: the host's own state, as of the last commit.
        final_model: the canonical final content.
        final_text: the exact text of the reply.
        final_delivery: the canonical presentation of the reply.
        reply_message_key: the key of the reply.
        sent_message_id: the channel's id of the reply that went out.
        completed: whether the turn is closed.
        current_round: the highest reserved round, -1 before the first.
        revision: grows by one with every change.
        input_fingerprint: what makes two starts the same turn.
        assistant_responses: the reserved decisions by round.
    """

    messages = _Thawed(lambda state: thaw_messages(state.transcript))
    tool_names: _Thawed[list[str] | None] = _Thawed(lambda state: values.thaw(state.tool_names))
    runtime: _Thawed[dict[str, Any]] = _Thawed(lambda state: values.thaw(state.runtime))
    final_model = _Thawed(final_model)
    final_text = _Thawed(final_text)
    final_delivery: _Thawed[dict[str, Any] | None] = _Thawed(
        lambda state: (
            None
            if state.delivery is None or state.delivery.presentation is None
            else values.thaw(state.delivery.presentation)
        )
    )
    assistant_responses = _Thawed(_assistant_responses)

    def __init__(
        self,
        phase: TurnPhase,
        messages: list[Any],
        tool_names: list[str] | None,
        runtime: dict[str, Any],
        final_model: str | None = None,
        final_text: str | None = None,
        final_delivery: dict[str, Any] | None = None,
        reply_message_key: str | None = None,
        sent_message_id: str | None = None,
        completed: bool = False,
        current_round: int = -1,
        revision: int = 0,
        input_fingerprint: str = "",
        assistant_responses: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self._state = TurnState()
        self._scalars(phase, reply_message_key, sent_message_id, completed, current_round, revision, input_fingerprint)
        self.__dict__.update(
            messages=messages,
            tool_names=tool_names,
            runtime=runtime,
            final_model=final_model,
            final_text=final_text,
            final_delivery=final_delivery,
            assistant_responses={} if assistant_responses is None else assistant_responses,
        )

    def _scalars(
        self,
        phase: TurnPhase,
        reply_message_key: str | None,
        sent_message_id: str | None,
        completed: bool,
        current_round: int,
        revision: int,
        input_fingerprint: str,
    ) -> None:
        self.phase = phase
        self.reply_message_key = reply_message_key
        self.sent_message_id = sent_message_id
        self.completed = completed
        self.current_round = current_round
        self.revision = revision
        self.input_fingerprint = input_fingerprint

    @classmethod
    def of(cls, state: TurnState) -> TurnSnapshot:
        """The snapshot of a turn that was started."""
        assert state.phase is not None
        snapshot = cls.__new__(cls)
        snapshot._state = state
        snapshot._scalars(
            state.phase,
            None if state.delivery is None else state.delivery.key,
            state.sent_message_id,
            state.completed,
            state.current_round,
            state.revision,
            state.input_fingerprint,
        )
        return snapshot

    def __repr__(self) -> str:
        return f"TurnSnapshot(phase={self.phase.value}, round={self.current_round}, revision={self.revision})"


class ToolCallDecision(msgspec.Struct, frozen=True):
    """Canonical state observed after a tool-slot operation.

    Attributes:
        action: what became of the operation.
        state: the slot's state then, or None where there is no slot.
        operation_id: the slot's idempotency key, to be handed to the tool's backend.
        provider_call_id: the provider's id, as given.
        raw_arguments: the arguments of the reserved decision.
        owner_token: who owns the slot then.
        fence: grows at each change of owner.
        result: the stored result, where there is one.
        payload_fingerprint: of the arguments.
        lease_end: end of the owner's lease on the store's clock, in milliseconds, where the operation did not change it.
        evidence: a result that arrived when the slot was ambiguous already.
        blocked_by: (round, slot) of the ambiguous slot whose call this one would repeat (journal.md T3, the trap).
    """

    action: ToolCallAction
    state: ToolCallState | None
    round_index: int
    slot_index: int
    operation_id: str
    provider_call_id: str | None
    tool_name: str
    raw_arguments: Any
    owner_token: str | None
    fence: int
    replay_safe: bool
    result: dict[str, Any] | None = None
    payload_fingerprint: str = ""
    lease_end: int | None = None
    evidence: dict[str, Any] | None = None
    blocked_by: tuple[int, int] | None = None

    @property
    def should_begin(self) -> bool:
        """True only when this decision authorizes the external effect."""
        return self.action is ToolCallAction.BEGUN

    @property
    def should_execute(self) -> bool:
        """Alias for integrations that name the effect barrier explicitly."""
        return self.should_begin

    @property
    def terminal(self) -> bool:
        """Whether the slot is COMPLETED or AMBIGUOUS: nothing more happens by itself."""
        return self.state in (ToolCallState.COMPLETED, ToolCallState.AMBIGUOUS)

    @property
    def cached_result(self) -> dict[str, Any] | None:
        """The stored result of a COMPLETED slot, else None."""
        return self.result if self.state is ToolCallState.COMPLETED else None
