"""The records of a turn log: what happened, in the order in which it became durable.

Fields are only ever added at the end, with defaults: an older reader ignores them, a newer one fills them in. A kind of
record that a reader does not know is refused (flows.md, ambiguity 24). Fields of type `bytes` are frames (`log/values.py`).

`trace`: the span of the run that wrote it, for the next run to link to (flows.md F7). It stands in the first record of a run that
can have it, and nowhere without telemetry.
"""

from __future__ import annotations

import msgspec

from turnkeeper.observe.contexts import TraceContext
from turnkeeper.turn.identity import ProviderReference, ToolCall
from turnkeeper.turn.names import Resolution


class TurnRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all records of a turn."""


class Started(TurnRecord, frozen=True, tag="started"):
    """The canonical input (T2 `start`)."""

    trace_id: str
    scope: str
    messages: bytes
    tool_names: bytes
    runtime: bytes
    input_fingerprint: str
    proof_deadline: int = 0
    labels: dict[str, str] = {}
    engine: bytes = b""
    """What the engine has to know again of its run (`engine/identity.py`); empty where the turn is driven by hand."""
    first_round: int = 0
    """The round that is decided first: not 0 where the turn was begun elsewhere, and imported."""
    trace: TraceContext | None = None


class PolicyApplied(TurnRecord, frozen=True, tag="policy_applied"):
    """The host has changed the conversation before a model call: the first `keep` messages stay, then `messages`."""

    round_index: int
    keep: int
    messages: bytes
    stable_prefix: int
    metadata: bytes | None = None


class ContextPrepared(TurnRecord, frozen=True, tag="context_prepared"):
    """What the model is shown in a round, where that is not the conversation: its first `keep` messages, then `messages`.

    `rest` is the snapshot without its messages.
    """

    round_index: int
    keep: int
    messages: bytes
    rest: bytes


class ModelStarted(TurnRecord, frozen=True, tag="model_started"):
    """A model call is about to be made; the invocation id tells attempts apart."""

    round_index: int
    invocation_id: str
    owner: str
    lease_ms: int
    trace: TraceContext | None = None


class ModelRenewed(TurnRecord, frozen=True, tag="model_renewed"):
    """The model call goes on. `reference`: what its provider calls it, noted as soon as that is known."""

    invocation_id: str
    lease_ms: int
    reference: ProviderReference | None = None


class ModelFailed(TurnRecord, frozen=True, tag="model_failed"):
    """The model call surely brought no decision; with `unknown`, nobody knows whether it did."""

    invocation_id: str
    message: str
    unknown: bool = False
    metadata: bytes | None = None
    owner: str = ""
    """Who says so, where it is another one than the call's."""


class ModelResolved(TurnRecord, frozen=True, tag="model_resolved"):
    """What became of a model call of unknown outcome: by whom, why, and how. An answer follows as a decision."""

    invocation_id: str
    resolution: Resolution
    who: str
    why: str


class AssistantReserved(TurnRecord, frozen=True, tag="assistant_reserved"):
    """The canonical decision of a round, before any of its effects (T2 `reserve_assistant`)."""

    round_index: int
    response: bytes
    calls: tuple[ToolCall, ...]


class PermissionRequested(TurnRecord, frozen=True, tag="permission_requested"):
    """Somebody has to say whether a call may run."""

    round_index: int
    slot_index: int


class PermissionResolved(TurnRecord, frozen=True, tag="permission_resolved"):
    """Whether a call may run: who says so, why, and for how long an approval holds (0: for ever)."""

    round_index: int
    slot_index: int
    approved: bool
    who: str
    reason: str | None = None
    metadata: bytes | None = None
    valid_ms: int = 0


class ToolClaimed(TurnRecord, frozen=True, tag="tool_claimed"):
    """A slot has an owner that may begin."""

    round_index: int
    slot_index: int
    owner: str
    fence: int
    lease_ms: int
    replay_safe: bool


class ToolBegun(TurnRecord, frozen=True, tag="tool_begun"):
    """The effect barrier: from here on the effect may have happened. Also claims, where claim and begin are fused.

    `refused`: nothing will run, and the result that says so is in the same append.
    """

    round_index: int
    slot_index: int
    owner: str
    fence: int
    lease_ms: int
    replay_safe: bool
    refused: bool = False
    trace: TraceContext | None = None


class ToolRenewed(TurnRecord, frozen=True, tag="tool_renewed"):
    """The owner still works on the slot."""

    round_index: int
    slot_index: int
    lease_ms: int


class ToolAbandoned(TurnRecord, frozen=True, tag="tool_abandoned"):
    """The call provably caused no effect; the slot may be claimed at once."""

    round_index: int
    slot_index: int


class ToolCompleted(TurnRecord, frozen=True, tag="tool_completed"):
    """The slot's result. `late`: the lease had run out and nobody had changed the slot."""

    round_index: int
    slot_index: int
    result: bytes
    late: bool = False


class ToolAmbiguous(TurnRecord, frozen=True, tag="tool_ambiguous"):
    """Nobody can know whether the effect happened: its owner's lease ran out behind the barrier, or it says so itself."""

    round_index: int
    slot_index: int
    reason: str = "the lease of its owner ran out behind the effect barrier"
    owner: str = ""
    """Who found that out, where it is another one than the slot's."""


class ToolEvidence(TurnRecord, frozen=True, tag="tool_evidence"):
    """A result that came after the slot had become ambiguous: kept beside it, changes nothing (T3 `complete_tool`)."""

    round_index: int
    slot_index: int
    owner: str
    fence: int
    result: bytes


class ToolResolved(TurnRecord, frozen=True, tag="tool_resolved"):
    """An ambiguous slot settled: by whom, why, and how."""

    round_index: int
    slot_index: int
    resolution: Resolution
    who: str
    why: str
    result: bytes | None = None


class RoundCommitted(TurnRecord, frozen=True, tag="round_committed"):
    """The transcript after a round: the first `keep` messages of the one before, then `messages`.

    What stands in the round's decision or results is a reference to them (`references.py`). `runtime` is None where it did
    not change.
    """

    round_index: int
    keep: int
    messages: bytes
    runtime: bytes | None = None


class FinalModelSaved(TurnRecord, frozen=True, tag="final_model_saved"):
    """The canonical final content; may refer to the last decision's strings."""

    content: bytes


class DeliveryReserved(TurnRecord, frozen=True, tag="delivery_reserved"):
    """Key, exact text (None: that of the final model) and presentation of the reply, before it is sent.

    `owner` and `lease_ms` say who sends it now, where the engine does.
    """

    key: str
    text: bytes | None
    delivery: bytes | None
    owner: str = ""
    lease_ms: int = 0
    trace: TraceContext | None = None


class DeliveryClaimed(TurnRecord, frozen=True, tag="delivery_claimed"):
    """Another worker sends the reply again, under the same key: its policy says that this is safe."""

    owner: str
    lease_ms: int
    trace: TraceContext | None = None


class DeliveryUnknown(TurnRecord, frozen=True, tag="delivery_unknown"):
    """Nobody can know whether the reply was sent, and the channel offers no way to find out."""

    reason: str


class DeliveryResolved(TurnRecord, frozen=True, tag="delivery_resolved"):
    """The reply surely was not sent: it may be sent (again)."""

    who: str
    why: str


class Delivered(TurnRecord, frozen=True, tag="delivered"):
    """The reply is out, under the channel's message id. `who` and `why`: found out afterwards."""

    message_id: str
    who: str = ""
    why: str = ""


class DeliveryDisputed(TurnRecord, frozen=True, tag="delivery_disputed"):
    """A second message id for the same reply: evidence of a double send, kept for audit (T2)."""

    message_id: str


class LeasesReleased(TurnRecord, frozen=True, tag="leases_released"):
    """The leases of an owner end here, earlier than they would have: by whose word, and why it is known to be dead."""

    owner: str
    who: str
    why: str


class RunStopped(TurnRecord, frozen=True, tag="run_stopped"):
    """A run of the turn ended short of the turn's end: why, for whoever looks. The turn stays open."""

    owner: str
    status: str
    error_kind: str
    message: str
    trace: TraceContext | None = None


class Completed(TurnRecord, frozen=True, tag="completed"):
    """The turn is closed."""

    no_output: bool = False


AnyRecord = (
    Started
    | PolicyApplied
    | ContextPrepared
    | ModelStarted
    | ModelRenewed
    | ModelFailed
    | ModelResolved
    | AssistantReserved
    | PermissionRequested
    | PermissionResolved
    | ToolClaimed
    | ToolBegun
    | ToolRenewed
    | ToolAbandoned
    | ToolCompleted
    | ToolAmbiguous
    | ToolEvidence
    | ToolResolved
    | RoundCommitted
    | FinalModelSaved
    | DeliveryReserved
    | DeliveryClaimed
    | DeliveryUnknown
    | DeliveryResolved
    | Delivered
    | DeliveryDisputed
    | LeasesReleased
    | RunStopped
    | Completed
)
