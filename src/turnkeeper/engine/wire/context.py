"""What a model call is made from: provider-held state, candidates, decisions, snapshot (engine-contract.md 1.5, 1.7, 1.13)."""

from __future__ import annotations

from enum import Enum
from typing import Any

from turnkeeper.engine.wire.base import Int32, Wire, listed, written
from turnkeeper.engine.wire.message import Message


class Portability(str, Enum):
    """Where the state of the conversation is: in the messages, also at a provider, or nobody can tell (1.7)."""

    PORTABLE = "portable"
    DELEGATED = "delegated"
    OPAQUE = "opaque"


class DelegatedStateReference(Wire, frozen=True, kw_only=True):
    """State that a provider holds: the id that it goes by there (1.7)."""

    provider: str
    kind: str
    id: str
    metadata: dict[str, Any] | None = None


class InvocationContextState(Wire, frozen=True, kw_only=True):
    """Whether a provider holds a part of the conversation, and which (1.7).

    Portable means no reference, delegated at least one; `checkpoint_rules` checks it.
    """

    portability: Portability = written(lambda: Portability.PORTABLE)
    delegated_state: list[DelegatedStateReference] = listed(list[DelegatedStateReference])


class Disposition(str, Enum):
    """What became of a candidate (1.5)."""

    INCLUDED = "included"
    EXCLUDED = "excluded"


class InvocationContextDecision(Wire, frozen=True, kw_only=True):
    """Why a candidate is in the context or not (1.5). `rank` counts the included ones from zero."""

    candidate_id: str
    disposition: Disposition
    reason: str
    rank: Int32 | None = None
    estimated_tokens: Int32 | None = None
    metadata: dict[str, Any] | None = None


class ModelInvocationContextSnapshot(Wire, frozen=True, kw_only=True):
    """Exactly what a model is sent; all attempts of one invocation send the same (1.5)."""

    id: str
    session_id: str
    turn_id: str
    invocation_id: str
    iteration: Int32
    messages: list[Message]
    decisions: list[InvocationContextDecision] = listed(list[InvocationContextDecision])
    stable_prefix_messages: Int32 = written(int)
    context_state: InvocationContextState
    metadata: dict[str, Any] | None = None


class ContextRequest(Wire, frozen=True, kw_only=True):
    """What context is asked for (1.13)."""

    session_id: str
    turn_id: str
    invocation_id: str
    iteration: Int32
    messages: list[Message]
    stable_prefix_messages: Int32 = written(int)
    context_state: InvocationContextState
    inputs: Any = None


class ContextCandidate(Wire, frozen=True, kw_only=True):
    """Messages that a source offers for the context (1.13). `source` is the host's label."""

    id: str
    source: str
    messages: list[Message]
    metadata: dict[str, Any] | None = None
