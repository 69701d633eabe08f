"""Telegram's updates as messages, and what its buttons carry: pure."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Final, NamedTuple, cast

import msgspec

from turnkeeper.conversation.message import Button, Message

LONGEST_VALUE: Final = 41
"""Bytes of a button's value: Telegram keeps 64 bytes with a button, and the prompt's key takes 23 of them."""
MEDIA: Final = (
    *("animation", "audio", "checklist", "contact", "dice", "document", "game", "location", "paid_media", "photo"),
    *("poll", "sticker", "story", "venue", "video", "video_note", "voice"),
)
"""What a message may bring in place of a text; it is kept in `data["telegram"]` as Telegram tells it."""
_KEY: Final = re.compile(r"msg_([0-9a-f]{32})", re.ASCII)
_VALUE, _LABEL = "=", "#"
"""How a button says its value: it is there; or it is the label, and too long to be there."""
_CONVERSATION: Final = re.compile(r"telegram:([0-9]{1,20}):(-?[0-9]{1,20})(?::([0-9]{1,20}))?", re.ASCII)


class Place(NamedTuple):
    """Where a conversation takes place."""

    bot_id: int
    chat_id: int
    thread_id: int | None = None

    @property
    def conversation_id(self) -> str:
        """Our name of it."""
        thread = "" if self.thread_id is None else f":{self.thread_id}"
        return f"telegram:{self.bot_id}:{self.chat_id}{thread}"


def place_of(conversation_id: str) -> Place | None:
    """Where a conversation takes place; None: not in Telegram."""
    match = _CONVERSATION.fullmatch(conversation_id)
    if match is None:
        return None
    return Place(int(match[1]), int(match[2]), None if match[3] is None else int(match[3]))


# --- buttons -------------------------------------------------------------------------------------------------


class ButtonTooLong(ValueError):
    """Telegram cannot keep what a button means."""


def button_data(key: str, number: int, button: Button) -> str:
    """What Telegram keeps with a button, in 64 bytes: the key of its prompt, and its value.

    Raises:
        ButtonTooLong: its value is too long, or the key is none of a conversation's.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ButtonTooLong("only a conversation's messages have buttons")
    short = base64.urlsafe_b64encode(bytes.fromhex(match[1])).decode().rstrip("=")
    value = button.value or button.label
    if len(value.encode()) <= LONGEST_VALUE:
        return f"{_VALUE}{short}{value}"
    if button.value:
        raise ButtonTooLong(
            f"the value of a button has {len(value.encode())} bytes, and Telegram takes {LONGEST_VALUE}"
        )
    return f"{_LABEL}{short}{number}"


class Pressed(NamedTuple):
    """A pressed button: its prompt's key (empty: it is none of ours), its label and its value."""

    prompt: str
    label: str
    value: str


def pressed(data: str, markup: Any) -> Pressed:
    """What a button's data says; its label stands in the message's keyboard, where Telegram still shows that."""
    label = _label_of(data, markup)
    kind, short, rest = data[:1], data[1:23], data[23:]
    try:
        key = base64.b64decode(short + "==", altchars=b"-_", validate=True).hex() if len(short) == 22 else ""
    except (binascii.Error, ValueError):
        key = ""
    if key and kind == _VALUE:
        return Pressed(f"msg_{key}", label or rest, rest)
    if key and kind == _LABEL and label:
        return Pressed(f"msg_{key}", label, label)
    # Another program's button, or one whose message is gone: it answers nothing.
    return Pressed("", label or data, data)


def _label_of(data: str, markup: Any) -> str:
    try:
        rows = msgspec.convert(markup, _Markup).inline_keyboard
    except msgspec.ValidationError:
        return ""
    return next((one.text for row in rows for one in row if one.callback_data == data), "")


class _MarkupButton(msgspec.Struct):
    text: str
    callback_data: str | None = None


class _Markup(msgspec.Struct):
    inline_keyboard: list[list[_MarkupButton]]


# --- updates -------------------------------------------------------------------------------------------------


class _User(msgspec.Struct, omit_defaults=True):
    id: int
    is_bot: bool = False
    first_name: str = ""
    last_name: str = ""
    username: str = ""
    language_code: str = ""


class _Chat(msgspec.Struct):
    id: int
    type: str = ""


class _Reference(msgspec.Struct):
    message_id: int


class _Said(msgspec.Struct):
    message_id: int
    chat: _Chat
    date: int = 0
    sender: _User | None = msgspec.field(default=None, name="from")
    sender_chat: _Chat | None = None
    message_thread_id: int | None = None
    is_topic_message: bool = False
    text: str | None = None
    caption: str | None = None
    reply_to_message: _Reference | None = None
    reply_markup: Any = None


class _Callback(msgspec.Struct):
    id: str
    sender: _User = msgspec.field(name="from")
    message: _Said | None = None
    data: str | None = None


class Update(NamedTuple):
    """An update as a message.

    Attributes:
        conversation_id: where it was said.
        callback: the id of the press of a button, for `answerCallbackQuery`; empty: it is none.
    """

    conversation_id: str
    message: Message
    callback: str = ""


class Ignored(NamedTuple):
    """An update that no message is made of, and why."""

    why: str
    callback: str = ""


def update_id(raw: Any) -> int | None:
    """The id of an update; None: it is no update."""
    found = cast("dict[str, Any]", raw).get("update_id") if isinstance(raw, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def read_update(bot_id: int, raw: dict[str, Any]) -> Update | Ignored:
    """An update as a message of a conversation.

    Texts, captions and media are `text`, changed ones `edit` (with the number of the changed message in `edits`: which update
    brought it, Telegram does not say), pressed buttons `button`. What Telegram says beside that is in `data["telegram"]`.
    """
    event = str(raw["update_id"])
    try:
        if "callback_query" in raw:
            return _button(bot_id, event, msgspec.convert(raw["callback_query"], _Callback))
        for kind in ("message", "edited_message"):
            if kind in raw:
                return _text(bot_id, event, msgspec.convert(raw[kind], _Said), raw[kind], edited=kind != "message")
    except msgspec.ValidationError as e:
        return Ignored(f"it cannot be read: {e}")
    return Ignored(f"of a kind that is not asked for: {', '.join(name for name in raw if name != 'update_id')}")


def _text(bot_id: int, event: str, said: _Said, raw: dict[str, Any], *, edited: bool) -> Update | Ignored:
    media = {name: raw[name] for name in MEDIA if name in raw}
    text = said.text if said.text is not None else said.caption
    if text is None and not media:
        return Ignored("nobody has said it (a service message)")
    message = Message(
        event_id=event,
        text=text or "",
        kind="edit" if edited else "text",
        sender=_sender(said),
        edits=str(said.message_id) if edited else "",
        data={"telegram": {**_about(said, said.sender), **media}},
    )
    return Update(_place(bot_id, said).conversation_id, message)


def _button(bot_id: int, event: str, callback: _Callback) -> Update | Ignored:
    said = callback.message
    if said is None or callback.data is None:
        return Ignored("a button outside of this bot's messages", callback.id)
    button = pressed(callback.data, said.reply_markup)
    message = Message(
        event_id=event,
        text=button.label,
        kind="button",
        sender=str(callback.sender.id),
        prompt=button.prompt,
        value=button.value,
        data={"telegram": _about(said, callback.sender)},
    )
    return Update(_place(bot_id, said).conversation_id, message, callback.id)


def _place(bot_id: int, said: _Said) -> Place:
    return Place(bot_id, said.chat.id, said.message_thread_id if said.is_topic_message else None)


def _sender(said: _Said) -> str:
    if said.sender is not None:
        return str(said.sender.id)
    return "" if said.sender_chat is None else str(said.sender_chat.id)


def _about(said: _Said, sender: _User | None) -> dict[str, Any]:
    about: dict[str, Any] = {"message_id": said.message_id, "chat_type": said.chat.type, "date": said.date}
    if sender is not None:
        about["from"] = msgspec.to_builtins(sender)
    if said.reply_to_message is not None:
        about["reply_to"] = said.reply_to_message.message_id
    return about
