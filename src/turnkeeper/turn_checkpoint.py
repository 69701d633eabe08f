"""The first seed's module under its own names: a face, no logic."""

from turnkeeper.errors import TurnCheckpointBusy, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.turn.names import ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.session import TurnCheckpointSession
from turnkeeper.turn.snapshot import ToolCallDecision, TurnSnapshot

__all__ = [
    "ToolCallAction",
    "ToolCallDecision",
    "ToolCallState",
    "TurnCheckpointBusy",
    "TurnCheckpointConflict",
    "TurnCheckpointError",
    "TurnCheckpointSession",
    "TurnPhase",
    "TurnSnapshot",
]
