"""Model ports: what answers the engine's requests. Those of the providers are modules of their own: `openai`, `anthropic`."""

from turnkeeper.models.scripted import ScriptedModel

__all__ = ["ScriptedModel"]
