"""Messages and the parts that they are made of (engine-contract.md 1.3)."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from turnkeeper.engine.wire.base import Wire


class Part(Wire, frozen=True, tag_field="kind"):
    """Base of the parts of a message; `kind` tells which."""


class TextPart(Part, frozen=True, tag="text"):
    """Text."""

    value: str


class ImagePart(Part, frozen=True, tag="image"):
    """An image, by URL or base64."""

    source: str
    detail: str | None = None
    media_type: str | None = None


class FilePart(Part, frozen=True, tag="file"):
    """A file, by URL or base64."""

    source: str
    media_type: str | None = None


class AudioPart(Part, frozen=True, tag="audio"):
    """Sound, by URL or base64."""

    source: str
    media_type: str | None = None


ContentPart = TextPart | ImagePart | FilePart | AudioPart


class Role(str, Enum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    DEVELOPER = "developer"
    TOOL = "tool"


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One message of a conversation (1.3). All three fields are always written."""

    role: Role = Role.USER
    parts: list[ContentPart] = []
    metadata: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The text parts, joined by newlines."""
        return "\n".join(part.value for part in self.parts if isinstance(part, TextPart))
