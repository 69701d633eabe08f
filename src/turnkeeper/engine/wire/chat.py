"""Messages in the chat form that most providers speak, read and written."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from turnkeeper.engine.wire.message import ContentPart, ImagePart, Message, Role, TextPart
from turnkeeper.errors import InvalidInput


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
