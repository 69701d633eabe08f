"""A chat platform for tests: what was sent to it, and what it can tell of a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnkeeper.conversation.channel import NotSent, Refused, SendOutcome, Sent, Unknown
from turnkeeper.conversation.message import Content
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp

Fault = Callable[[str], SendOutcome | None]
"""By the text: what the platform answers in place of taking it; None takes it."""


@dataclass
class Platform:
    """Takes messages, keyed or not. `fault` comes before it takes one, `lose` answers `Unknown` although it did."""

    dedup_window: float = 0.0
    max_length: int | None = None
    fault: Fault | None = None
    lose: set[str] = field(default_factory=set[str])
    seen: list[tuple[str, str, Content]] = field(default_factory=list[tuple[str, str, Content]])
    calls: list[str] = field(default_factory=list[str])

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """Take a message."""
        self.calls.append(content.text)
        if self.fault is not None and (answer := self.fault(content.text)) is not None:
            return answer
        if self.dedup_window and any(key == known for _, known, _ in self.seen):
            return Sent(f"id-{key}")
        self.seen.append((conversation_id, key, content))
        if content.text in self.lose:
            self.lose.discard(content.text)
            return Unknown("the connection was cut")
        return Sent(f"id-{key}")

    def texts(self, conversation_id: str = "c") -> list[str]:
        """What a person sees."""
        return [content.text for where, _, content in self.seen if where == conversation_id]


@dataclass
class SearchablePlatform(Platform):
    """One whose messages can be looked up."""

    lookups: int = 0

    async def find(self, conversation_id: str, key: str) -> LookedUp:
        """Look for a message by its key."""
        self.lookups += 1
        found = next((known for _, known, _ in self.seen if known == key), None)
        return DidNotHappen("not in the channel") if found is None else Happened(f"id-{found}", "found in the channel")


__all__ = ["NotSent", "Platform", "Refused", "SearchablePlatform", "Sent", "Unknown"]
