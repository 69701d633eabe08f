"""What comes in and what goes out: messages of people, and the content of our own."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec

from turnkeeper.errors import InvalidInput, ValueTooLarge
from turnkeeper.log import values
from turnkeeper.log.keeping import Keeping, Limits

Kind = Literal["text", "button", "edit", "timer"]
_KINDS: Final = get_args(Kind)
MAX_MESSAGE: Final = Limits().message
"""Bytes of a message, encoded, that are taken where nobody says anything else; larger things are kept elsewhere."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as a channel hands it over.

    Attributes:
        event_id: the channel's id of this delivery's event: what a repeated delivery is told by. Unique in the conversation.
        text: what was said.
        kind: `text`; `button`: a button of a prompt was pressed; `edit`: an earlier message was changed; `timer`: nobody's
            message, a time has come.
        sender: who said it, in the channel's words.
        prompt: for a button, the key of the message that it belongs to (`Content.buttons` carry it).
        value: for a button, its value.
        edits: for an edit, the event id of the message that was changed.
        data: what else the channel knows, JSON-like.
    """

    event_id: str
    text: str = ""
    kind: Kind = "text"
    sender: str = ""
    prompt: str = ""
    value: str = ""
    edits: str = ""
    data: dict[str, Any] = {}


class Button(msgspec.Struct, frozen=True):
    """A button under a prompt: what is shown, and what its pressing says."""

    label: str
    value: str = ""


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """A message to be sent."""

    text: str
    buttons: tuple[Button, ...] = ()
    data: dict[str, Any] = {}


def redacted_message(message: Message, keeping: Keeping) -> Message:
    """The message with its text, and the texts in its data, redacted.

    Raises:
        InvalidInput: it could not be redacted.
    """
    if keeping.redact is None:
        return message
    text = keeping.redacted("message", message.text, "message.text")
    data = keeping.redacted("message", message.data, "message.data")
    return msgspec.structs.replace(message, text=text, data=data)


def keep_message(message: Message, limit: int = MAX_MESSAGE) -> bytes:
    """The message as a frame.

    Raises:
        InvalidInput: its kind is unknown, or something in it cannot be kept.
        ValueTooLarge: it is over `limit` bytes.
    """
    if message.kind not in _KINDS:
        raise InvalidInput("message.kind", f"must be one of {', '.join(_KINDS)}, not {message.kind!r}")
    for name in ("text", "sender", "prompt", "value", "edits"):
        values.text(getattr(message, name), f"message.{name}")
    frame = values.freeze(msgspec.to_builtins(message), "message", limit=limit)
    if len(frame) > limit:
        raise ValueTooLarge("message", len(frame), limit)
    return frame


def kept_message(frame: bytes) -> Message:
    """The message of a frame."""
    return msgspec.convert(values.thaw(frame), Message)


def as_content(given: str | Content) -> Content:
    """A text is a content without buttons."""
    return Content(text=given) if isinstance(given, str) else given


def keep_content(content: Content) -> tuple[bytes, str]:
    """The content as a frame, and its fingerprint.

    Raises:
        InvalidInput: something in it cannot be kept.
    """
    values.text(content.text, "content.text")
    plain = msgspec.to_builtins(content)
    return values.freeze(plain, "content"), values.fingerprint(plain, "content")


def kept_content(frame: bytes) -> Content:
    """The content of a frame."""
    return msgspec.convert(values.thaw(frame), Content)


def chunks(text: str, longest: int | None) -> list[str]:
    """A text in parts that a channel takes, cut at ends of lines or between words where there are any (O4)."""
    if longest is None or len(text) <= longest:
        return [text]
    parts: list[str] = []
    while len(text) > longest:
        cut = max(text.rfind("\n", 1, longest + 1), 0) or max(text.rfind(" ", 1, longest + 1), 0) or longest
        parts.append(text[:cut])
        text = text[cut:].removeprefix("\n") if text[cut : cut + 1] == "\n" else text[cut:].removeprefix(" ")
    return [*parts, text] if text else parts
