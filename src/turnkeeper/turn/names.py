"""The names of a turn's phases, slot states and slot actions, as the first seed gives them."""

from __future__ import annotations

from enum import Enum


class TurnPhase(str, Enum):
    """Durable progress phases for a whole model turn (journal.md T2)."""

    STARTED = "STARTED"
    ASSISTANT_RESERVED = "ASSISTANT_RESERVED"
    ROUND_COMMITTED = "ROUND_COMMITTED"
    FINAL_MODEL_SAVED = "FINAL_MODEL_SAVED"
    DELIVERY_RESERVED = "DELIVERY_RESERVED"
    DELIVERED = "DELIVERED"
    COMPLETED = "COMPLETED"


class ToolCallState(str, Enum):
    """Durable states for one logical tool slot (journal.md T3)."""

    CLAIMED = "CLAIMED"
    EXECUTING = "EXECUTING"
    COMPLETED = "COMPLETED"
    AMBIGUOUS = "AMBIGUOUS"


class ToolCallAction(str, Enum):
    """Outcome of a tool-slot claim or state transition (journal.md T3)."""

    ACQUIRED = "ACQUIRED"
    RECLAIMED = "RECLAIMED"
    BUSY = "BUSY"
    BEGUN = "BEGUN"
    ALREADY_EXECUTING = "ALREADY_EXECUTING"
    RENEWED = "RENEWED"
    ABANDONED = "ABANDONED"
    COMPLETED = "COMPLETED"
    CACHED = "CACHED"
    AMBIGUOUS = "AMBIGUOUS"
    CONFLICT = "CONFLICT"
    STALE_OWNER = "STALE_OWNER"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    INVALID_STATE = "INVALID_STATE"
    MISSING = "MISSING"
    SCHEMA_CONFLICT = "SCHEMA_CONFLICT"


class Resolution(str, Enum):
    """What an operator or a reconciler found out about an effect whose outcome was unknown (journal.md T3)."""

    HAPPENED = "happened"
    """It happened, and this is its result."""
    DID_NOT_HAPPEN = "did_not_happen"
    """It did not happen: it may run again."""
    UNKNOWN = "unknown"
    """It cannot be found out: the model is told so, and the effect is not repeated."""
