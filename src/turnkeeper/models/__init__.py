"""Model ports: what answers the engine's requests."""

from turnkeeper.models.scripted import ScriptedModel

__all__ = ["ScriptedModel"]
