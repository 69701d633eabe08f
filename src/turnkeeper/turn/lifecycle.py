"""The lifecycle projection: a turn's phase, told to the transport after it is durable (journal.md T4)."""

from __future__ import annotations

from typing import Final, Protocol

from turnkeeper.turn.names import TurnPhase

STAGES: Final = ("PROCESSING", "ANSWERED", "DELIVERING", "DELIVERED")
"""The stages that are projected, in order. What follows DELIVERED belongs to the inbound consumer."""

_STAGE: Final = {
    TurnPhase.STARTED: "PROCESSING",
    TurnPhase.ASSISTANT_RESERVED: "PROCESSING",
    TurnPhase.ROUND_COMMITTED: "PROCESSING",
    TurnPhase.FINAL_MODEL_SAVED: "ANSWERED",
    TurnPhase.DELIVERY_RESERVED: "DELIVERING",
    TurnPhase.DELIVERED: "DELIVERED",
    TurnPhase.COMPLETED: "DELIVERED",
}


class Lifecycle(Protocol):
    """Where a transport keeps the stage of each trace."""

    async def stage(self, trace_id: str) -> str | None:
        """The stage recorded, or None."""
        ...

    async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
        """Record `stage` if `predecessor` is recorded; True also if `stage` is recorded already."""
        ...


async def project(lifecycle: Lifecycle, trace_id: str, phase: TurnPhase) -> None:
    """Bring the projection up to `phase`, through every stage in between, never back."""
    target = STAGES.index(_STAGE[phase])
    found = await lifecycle.stage(trace_id)
    if found is not None and found not in STAGES:
        return  # the consumer has taken over (COMPLETED, FAILED, QUARANTINED)
    reached = -1 if found is None else STAGES.index(found)
    for index in range(reached + 1, target + 1):
        if not await lifecycle.advance(trace_id, STAGES[index - 1] if index else None, STAGES[index]):
            return  # another worker projects as well; it has seen at least as much
