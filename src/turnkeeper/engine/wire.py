"""Wire types of the engine, as the portable contract names them (engine-contract.md section 1). camelCase on the wire."""

from __future__ import annotations

from enum import Enum
from typing import Any, cast

import msgspec

from turnkeeper.errors import InvalidInput


class Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of the wire types: an optional field that is not set is absent, never null (1.1)."""


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


class ModelToolRequest(Wire, frozen=True):
    """A tool call that the model asks for (1.4). `id` is the provider's, as given: it may be empty, repeated or None."""

    id: str | None
    name: str
    arguments: Any = None
    metadata: dict[str, Any] | None = None


class Outcome(str, Enum):
    """How a tool call ended (1.4)."""

    SUCCESS = "success"
    FAILED = "failed"
    INDETERMINATE = "indeterminate"


class ModelToolResult(Wire, frozen=True):
    """What came of a tool call (1.4)."""

    request_id: str
    name: str
    outcome: Outcome
    output: Any = None
    error_kind: str | None = None
    metadata: dict[str, Any] | None = None


class InvocationUsage(Wire, frozen=True):
    """Tokens of one model call (1.6)."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class ModelInvocationResponse(Wire, frozen=True):
    """A model's answer (1.6). Without tool requests it is the final one.

    `metadata["finishReason"] == "length"` says that the answer was cut: none of its calls is run.
    """

    output: Any = None
    usage: InvocationUsage | None = None
    assistant_messages: list[Message] = []
    tool_requests: list[ModelToolRequest] = []
    metadata: dict[str, Any] | None = None


def to_builtins(value: Wire | Message) -> dict[str, Any]:
    """The JSON-like form of a wire type."""
    result: dict[str, Any] = msgspec.to_builtins(value)
    return result


def message_from(value: Any, field: str) -> Message:
    """A message from its wire form, or the chat form that most providers speak (`role`, `content`, `tool_calls`, …).

    Raises:
        InvalidInput: it has neither form; names the field.
    """
    if isinstance(value, Message):
        return value
    if not isinstance(value, dict):
        raise InvalidInput(field, f"must be an object, not {type(value).__name__}")
    fields = cast("dict[str, Any]", value)
    try:
        if "parts" in fields:
            return msgspec.convert(fields, Message)
        parts = _chat_parts(fields.get("content"), field)
        metadata = {name: item for name, item in fields.items() if name not in ("role", "content")}
        return Message(role=Role(fields.get("role")), parts=parts, metadata=metadata)
    except (msgspec.ValidationError, ValueError) as e:
        raise InvalidInput(field, str(e)) from e


def _chat_parts(content: Any, field: str) -> list[ContentPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [TextPart(value=content)]
    if not isinstance(content, list):
        raise InvalidInput(f"{field}.content", f"must be text, null or a list, not {type(content).__name__}")
    parts: list[ContentPart] = []
    for index, item in enumerate(cast("list[Any]", content)):
        match item:
            case {"type": "text", "text": str(text)}:
                parts.append(TextPart(value=text))
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                parts.append(ImagePart(source=url))
            case _:
                raise InvalidInput(f"{field}.content[{index}]", "is neither text nor an image")
    return parts


def chat_form(message: Message) -> dict[str, Any]:
    """The chat form of a message: `content` is text, or null where there are no parts."""
    content: Any = message.text if message.parts else None
    if any(not isinstance(part, TextPart) for part in message.parts):
        content = [
            {"type": "text", "text": part.value}
            if isinstance(part, TextPart)
            else {"type": "image_url", "image_url": {"url": part.source}}
            for part in message.parts
        ]
    return {"role": message.role.value, "content": content, **message.metadata}
