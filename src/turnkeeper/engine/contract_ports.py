"""The ports of the portable contract, as protocols over its wire types (engine-contract.md 1.16).

What the contract says of an operation beside its types (`atomic`, `nonFatal`, …) stands on the operation itself, see `operation`.
Where the contract hands a cancellation token, an async operation here is cancelled the way async code is: by its task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from turnkeeper.engine.wire import (
    ContextCandidate,
    ContextRequest,
    EngineCheckpoint,
    EngineEvent,
    EnginePermissionDecision,
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    Message,
    ModelInvocationContextSnapshot,
    ModelInvocationResponse,
    ModelToolRequest,
    ModelToolResult,
    RetryPolicyRequest,
    TextChunk,
    ThinkingChunk,
    TurnCommit,
)
from turnkeeper.errors import InvalidInput, TurnkeeperError

F = TypeVar("F", bound=Callable[..., Any])


class PortError(TurnkeeperError):
    """A port could not do what it was asked; never on the wire.

    Plain: the effect surely did not happen, so a model call is tried again and a tool's failure is shown to the model.

    Attributes:
        message: what went wrong.
        outcome_unknown: the effect may have happened: it is neither repeated nor guessed.
        configuration_error: neither another attempt nor the model can help; the turn fails.
        metadata: what the provider said of it; kept in the state that is left for reconciliation.
        retry_after: seconds that the provider asks to wait before the next attempt, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        outcome_unknown: bool = False,
        configuration_error: bool = False,
        metadata: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        if outcome_unknown and configuration_error:
            raise InvalidInput(
                "outcome_unknown", "an effect that was never tried, for its configuration, is not unknown"
            )
        super().__init__(message)
        self.message = message
        self.outcome_unknown = outcome_unknown
        self.configuration_error = configuration_error
        self.metadata = metadata
        self.retry_after = retry_after


class HostPolicyError(TurnkeeperError):
    """A host policy refuses: the turn fails with its kind.

    Attributes:
        error_kind: the host's own (`input_guardrail_denied`, …); the turn's output names it.
        message: what the turn's output says.
    """

    def __init__(self, error_kind: str, message: str) -> None:
        super().__init__(f"{error_kind}: {message}")
        self.error_kind = error_kind
        self.message = message


@dataclass(frozen=True)
class Operation:
    """What the contract says of an operation beside its types.

    Attributes:
        wire_name: its name in the contract.
        sync: answers at once, without waiting for anything.
        runtime_cancellable: may be cancelled while it runs; what is not, is waited for in any case.
        atomic: all of it happens or nothing.
        non_fatal: its failure changes nothing about how the turn ended.
    """

    wire_name: str
    sync: bool = False
    runtime_cancellable: bool = False
    atomic: bool = False
    non_fatal: bool = False


def operation(
    wire_name: str,
    *,
    sync: bool = False,
    runtime_cancellable: bool = False,
    atomic: bool = False,
    non_fatal: bool = False,
) -> Callable[[F], F]:
    """Say of a port's method what the contract says of the operation; `operation_of` reads it."""
    said = Operation(wire_name, sync, runtime_cancellable, atomic, non_fatal)

    def mark(method: F) -> F:
        method.__contract_operation__ = said  # pyright: ignore[reportFunctionMemberAccess]  # read by `operation_of`
        return method

    return mark


def operation_of(method: Callable[..., Any]) -> Operation:
    """What the contract says of a port's method."""
    said: Operation = method.__contract_operation__  # pyright: ignore[reportFunctionMemberAccess]  # set by `operation`
    return said


# --- the four ports of the contract proper -------------------------------------------------------------------


class EnginePermissionPort(Protocol):
    """Says whether a tool call may run. Its own failure fails the turn."""

    @operation("authorize", runtime_cancellable=True)
    async def authorize(self, request: ModelToolRequest) -> EnginePermissionDecision:
        """Allow or deny; the model sees a denial."""
        ...


class EngineToolPort(Protocol):
    """Runs tools."""

    @operation("execute", runtime_cancellable=True)
    async def execute(self, request: ModelToolRequest) -> ModelToolResult:
        """Run a call; raises `PortError`."""
        ...


class EngineDurabilityPort(Protocol):
    """Keeps events and checkpoints. It has no reading side: that is the host's."""

    @operation("append")
    async def append(self, event: EngineEvent) -> None:
        """Keep an event; it is durable on return."""
        ...

    @operation("appendWithCheckpoint", atomic=True)
    async def append_with_checkpoint(self, events: Sequence[EngineEvent], checkpoint: EngineCheckpoint) -> None:
        """Keep events and the state that includes them, all or nothing; durable on return."""
        ...


class EnginePostCommitPort(Protocol):
    """Does what follows from a committed turn."""

    @operation("afterCommit", runtime_cancellable=True, non_fatal=True)
    async def after_commit(self, effect_id: str, commit: TurnCommit) -> None:
        """Act once for an effect id, however often it is called with it."""
        ...


# --- native ports --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProviderChunk:
    """A piece of a stream as the provider gave it; never on the wire."""

    value: Any


class ModelStreamPort(Protocol):
    """Takes what a model says while it says it. Nothing of it is kept."""

    @operation("emit", non_fatal=True)
    async def emit(self, chunk: TextChunk | ThinkingChunk | ProviderChunk) -> None:
        """Show a piece of an answer that may yet be discarded."""
        ...


class HostPolicyPort(Protocol):
    """The host's say before a model call and before a commit; both raise `HostPolicyError`."""

    @operation("beforeModel", runtime_cancellable=True)
    async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
        """The conversation as the model is to see it; made durable where it differs."""
        ...

    @operation("beforeCommit", runtime_cancellable=True)
    async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
        """The final output as the turn is to have it."""
        ...


class RetryPolicyPort(Protocol):
    """Waits between two attempts at a model call."""

    @operation("backoff", runtime_cancellable=True)
    async def backoff(self, request: RetryPolicyRequest) -> None:
        """Return when the next attempt may start; raise, and the turn fails."""
        ...


class ConversationPort(Protocol):
    """Makes messages of a finished tool round."""

    @operation("formatToolExchange", sync=True)
    def format_tool_exchange(
        self, response: ModelInvocationResponse, results: Sequence[ModelToolResult]
    ) -> Sequence[Message]:
        """The messages of the round: `results` are complete and in request order."""
        ...


class ContextSource(Protocol):
    """Offers messages for the context of a model call."""

    @operation("load", runtime_cancellable=True)
    async def load(self, request: ContextRequest) -> Sequence[ContextCandidate]:
        """Candidates, each with an id that no other source uses."""
        ...


class ContextTransform(Protocol):
    """Changes or drops candidates.

    Attributes:
        name: given as the reason why a dropped candidate is excluded.
    """

    name: str

    @operation("apply", runtime_cancellable=True)
    async def apply(
        self, request: ContextRequest, candidates: Sequence[ContextCandidate]
    ) -> Sequence[ContextCandidate]:
        """The candidates that are left, in the order that they are to have."""
        ...


class ContextPackingStrategy(Protocol):
    """Packs the conversation and the candidates into what the model is sent.

    Attributes:
        name: given as the reason why a candidate that it did not decide on is excluded.
    """

    name: str

    @operation("pack", runtime_cancellable=True)
    async def pack(
        self, request: ContextRequest, candidates: Sequence[ContextCandidate]
    ) -> ModelInvocationContextSnapshot:
        """The snapshot; its session, turn, invocation and iteration are the request's."""
        ...
