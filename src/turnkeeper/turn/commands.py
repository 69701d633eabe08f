"""What can be asked of a turn. Each command is decided by `turnkeeper.turn.decide`."""

from __future__ import annotations

from typing import Any

import msgspec

from turnkeeper.turn.identity import ProviderReference, ToolCall
from turnkeeper.turn.names import Resolution


class Command(msgspec.Struct, frozen=True, gc=False):
    """Base of all commands."""


class Start(Command, frozen=True):
    """Create the canonical base transcript, or recover the first writer's."""

    trace_id: str
    scope: str
    messages: bytes
    tool_names: bytes
    runtime: bytes
    input_fingerprint: str
    proof_deadline: int
    labels: dict[str, str] = {}
    engine: bytes = b""
    first_round: int = 0


class ApplyPolicy(Command, frozen=True):
    """The conversation as the host wants it before the model call of a round."""

    round_index: int
    keep: int
    messages: bytes
    stable_prefix: int
    metadata: bytes | None = None


class PrepareContext(Command, frozen=True):
    """What the model is shown in a round."""

    round_index: int
    keep: int
    messages: bytes
    rest: bytes


class StartModel(Command, frozen=True):
    """A model call is about to be made by `owner` for this round."""

    round_index: int
    owner: str
    lease_ms: int


class RenewModel(Command, frozen=True):
    """The model call goes on, and its provider calls it that."""

    invocation_id: str
    owner: str
    lease_ms: int
    reference: ProviderReference | None = None


class FailModel(Command, frozen=True):
    """The model call surely brought no decision. With `unknown` nobody knows; behind its lease, anybody may say so."""

    invocation_id: str
    owner: str
    message: str
    unknown: bool = False
    metadata: bytes | None = None


class ResolveModel(Command, frozen=True):
    """Settle a model call of unknown outcome; where it was answered, the decision follows."""

    invocation_id: str
    resolution: Resolution
    who: str
    why: str


class ReserveAssistant(Command, frozen=True):
    """Make a provider's decision the canonical one of its round, unless there is one."""

    round_index: int
    response: bytes
    calls: tuple[ToolCall, ...]


class SlotCommand(Command, frozen=True):
    """Base of the commands on one tool slot."""

    round_index: int
    slot_index: int


class RequestPermission(SlotCommand, frozen=True):
    """Ask whether a call may run."""


class ResolvePermission(SlotCommand, frozen=True):
    """Say whether a call may run; an approval holds for `valid_ms`, or for ever where that is 0."""

    approved: bool
    who: str
    reason: str | None = None
    metadata: bytes | None = None
    valid_ms: int = 0


class ClaimTool(SlotCommand, frozen=True):
    """Become the owner of a slot; with `execution_lease_ms`, cross the effect barrier in the same append."""

    operation_id: str
    call: ToolCall
    owner: str
    replay_safe: bool
    claim_lease_ms: int
    execution_lease_ms: int | None = None
    repeat_ambiguous: bool = False
    """The caller accepts that a call equal to an ambiguous one of an earlier round is made."""
    needs_permission: bool = False
    """The slot is taken for the first time only while an approval holds."""
    refused: bool = False
    """Nothing will run: the result that says so follows in the same append."""


class BeginTool(SlotCommand, frozen=True):
    """Cross the effect barrier."""

    owner: str
    fence: int
    lease_ms: int


class RenewTool(SlotCommand, frozen=True):
    """The effect is still under way."""

    owner: str
    fence: int
    lease_ms: int


class AbandonTool(SlotCommand, frozen=True):
    """The call provably caused no effect."""

    owner: str
    fence: int


class CompleteTool(SlotCommand, frozen=True):
    """The slot's exact result."""

    owner: str
    fence: int
    result: bytes


class DoubtTool(SlotCommand, frozen=True):
    """The owner itself cannot know whether its effect happened (a timeout, a cut connection)."""

    owner: str
    fence: int
    reason: str


class ResolveTool(SlotCommand, frozen=True):
    """Settle an ambiguous slot, with evidence; `fence` tells which run of the call was looked at."""

    resolution: Resolution
    who: str
    why: str
    result: bytes | None = None
    fence: int | None = None


class CommitRound(Command, frozen=True):
    """The transcript after a round: the first `keep` messages of the one before, then `messages`."""

    round_index: int
    keep: int
    messages: list[Any]
    runtime: bytes
    allow_ambiguous: bool = False


class SaveFinalModel(Command, frozen=True):
    """Reserve the final content, unless there is one."""

    content: str


class ReserveDelivery(Command, frozen=True):
    """Reserve the reply's key, exact text and presentation; with a lease, to send it now."""

    key: str
    text: str
    delivery: bytes | None
    owner: str = ""
    lease_ms: int = 0


class ClaimDelivery(Command, frozen=True):
    """Send the reserved reply again, under its key, now that its sender's lease is over."""

    owner: str
    lease_ms: int


class DoubtDelivery(Command, frozen=True):
    """The reserved reply's outcome is unknown, and its sender (`owner`) or anybody behind its lease says so."""

    owner: str
    reason: str


class ResolveDelivery(Command, frozen=True):
    """Settle a reply whose outcome is unknown: its message id, or None where it surely was not sent.

    `who` may also be the sender itself, which knows that nothing was sent. `sender` tells whose send was looked at.
    """

    message_id: str | None
    who: str
    why: str
    sender: str | None = None


class MarkDelivered(Command, frozen=True):
    """The reserved reply is out."""

    key: str
    message_id: str


class ReleaseLeases(Command, frozen=True):
    """Take from an owner whatever it holds of the turn; with `force`, also where it was heard of just now."""

    owner: str
    who: str
    why: str
    force: bool = False


class StopRun(Command, frozen=True):
    """A run ends short of the turn's end."""

    owner: str
    status: str
    error_kind: str
    message: str


class MarkCompleted(Command, frozen=True):
    """Close the turn."""

    allow_no_output: bool = False
