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
    reached = _index(await lifecycle.stage(trace_id))
    while reached < target:
        predecessor = STAGES[reached] if reached >= 0 else None
        if await lifecycle.advance(trace_id, predecessor, STAGES[reached + 1]):
            reached += 1
            continue
        # Another worker projects as well, and may know less of the turn: go on from where it got to.
        found = _index(await lifecycle.stage(trace_id))
        if found <= reached:
            return
        reached = found


def _index(stage: str | None) -> int:
    """How far a stage is; behind all of ours where the consumer has taken over (COMPLETED, FAILED, QUARANTINED)."""
    if stage is None:
        return -1
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
