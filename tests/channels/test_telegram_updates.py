"""Updates as messages, and what buttons carry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.channels.telegram_updates import (
    LONGEST_VALUE,
    ButtonTooLong,
    Ignored,
    Place,
    Update,
    button_data,
    place_of,
    pressed,
    read_update,
    update_id,
)
from turnkeeper.conversation.identity import send_key
from turnkeeper.conversation.message import Button, keep_message, kept_message
from turnkeeper.conversation.state import SendKey

KEY = send_key("telegram:1:2", b"seed", SendKey(1, 2, 0))
CHAT = {"id": -100123, "type": "supergroup"}
ANN = {"id": 77, "is_bot": False, "first_name": "Ann", "language_code": "de"}


def keyboard(*buttons: Button, key: str = KEY) -> dict[str, Any]:
    """As Telegram shows it with a press."""
    return {
        "inline_keyboard": [
            [{"text": one.label, "callback_data": button_data(key, number, one)}] for number, one in enumerate(buttons)
        ]
    }


@given(st.text(min_size=1), st.text(st.characters(codec="utf-8")))
def test_a_button_comes_back_as_it_went(label: str, value: str) -> None:
    button = Button(label, value)
    try:
        markup = keyboard(Button("Other"), button)
    except (ButtonTooLong, UnicodeEncodeError):
        return
    data = markup["inline_keyboard"][1][0]["callback_data"]
    assert 1 <= len(data.encode()) <= 64
    assert pressed(data, markup) == (KEY, label, value or label)


@pytest.mark.parametrize("length", [LONGEST_VALUE, LONGEST_VALUE + 1, 60])
def test_long_values(length: int) -> None:
    """A label may be as long as it likes; a value of its own may not."""
    label = "é" * (length // 2) + "x" * (length % 2)
    markup = keyboard(Button(label))
    data = markup["inline_keyboard"][0][0]["callback_data"]
    assert pressed(data, markup) == (KEY, label, label)
    assert pressed(data, None).prompt == (KEY if length <= LONGEST_VALUE else "")  # its message is gone
    if length > LONGEST_VALUE:
        with pytest.raises(ButtonTooLong, match=str(LONGEST_VALUE)):
            button_data(KEY, 0, Button("Yes", label))


@pytest.mark.parametrize("key", ["", "reply_1", "msg_", "msg_" + "0" * 31, "msg_" + "g" * 32, KEY + "0"])
def test_keys_that_are_not_a_conversations(key: str) -> None:
    with pytest.raises(ButtonTooLong):
        button_data(key, 0, Button("Yes"))


@given(st.text() | st.from_regex(r"\A[=#][A-Za-z0-9_-]{22}.*\Z"), st.none() | st.dictionaries(st.text(), st.integers()))
def test_buttons_of_other_programs(data: str, markup: Any) -> None:
    told = pressed(data, markup)
    assert not told.prompt or len(told.prompt) == len(KEY)


def test_places() -> None:
    for place in (Place(1, 2), Place(1, -1001234567890), Place(1, -100, 7)):
        assert place_of(place.conversation_id) == place
    assert Place(1, -100, 7).conversation_id == "telegram:1:-100:7"
    for name in (
        "telegram:1",
        "telegram:1:x",
        "telegram:1:2:",
        "telegram:1:2:-3",
        "telegram:1:2\n",
        "webhook:1:2",
        "telegram:\u0661:2",
    ):
        assert place_of(name) is None, name


def said(**more: Any) -> dict[str, Any]:
    """A message."""
    return {"message_id": 11, "from": ANN, "chat": CHAT, "date": 1_700_000_000, **more}


def read(kind: str, content: Any) -> Update | Ignored:
    """An update of that kind; a message of it can be kept."""
    update = read_update(4711, {"update_id": 900, kind: content})
    if isinstance(update, Update):
        assert kept_message(keep_message(update.message)) == update.message
        assert update.message.event_id == "900"
    return update


def test_texts() -> None:
    update = read("message", said(text="hi", reply_to_message={"message_id": 9, "text": "?"}))
    assert isinstance(update, Update)
    assert update.conversation_id == "telegram:4711:-100123"
    message = update.message
    assert (message.kind, message.text, message.sender, message.edits) == ("text", "hi", "77", "")
    assert message.data["telegram"] == {
        "message_id": 11,
        "chat_type": "supergroup",
        "date": 1_700_000_000,
        "from": {"id": 77, "first_name": "Ann", "language_code": "de"},
        "reply_to": 9,
    }


def test_threads() -> None:
    """Topics are conversations of their own; a reply's thread is none."""
    for topic, name in ((True, "telegram:4711:-100123:5"), (False, "telegram:4711:-100123")):
        update = read("message", said(text="hi", message_thread_id=5, is_topic_message=topic))
        assert isinstance(update, Update)
        assert update.conversation_id == name


def test_media_are_kept_as_they_are() -> None:
    photo = [{"file_id": "x", "width": 90, "height": 51}]
    update = read("message", said(photo=photo, caption="look"))
    assert isinstance(update, Update)
    assert (update.message.text, update.message.data["telegram"]["photo"]) == ("look", photo)
    update = read("message", said(location={"latitude": 52.5, "longitude": 13.4}))
    assert isinstance(update, Update)
    assert update.message.text == ""
    assert update.message.data["telegram"]["location"] == {"latitude": 52.5, "longitude": 13.4}


def test_edits() -> None:
    update = read("edited_message", said(text="hello", edit_date=1))
    assert isinstance(update, Update)
    assert (update.message.kind, update.message.text, update.message.edits) == ("edit", "hello", "11")


def test_buttons() -> None:
    markup = keyboard(Button("Yes", "y"), Button("No"))
    press = {"id": "5", "from": ANN, "chat_instance": "1", "data": markup["inline_keyboard"][0][0]["callback_data"]}
    update = read("callback_query", {**press, "message": said(text="Sure?", reply_markup=markup)})
    assert isinstance(update, Update)
    message = update.message
    assert (message.kind, message.text, message.prompt, message.value) == ("button", "Yes", KEY, "y")
    assert (update.callback, message.sender) == ("5", "77")
    # Of a message that Telegram shows no more, and of another program.
    update = read("callback_query", {**press, "message": {"message_id": 11, "chat": CHAT, "date": 0}})
    assert isinstance(update, Update)
    assert (update.message.prompt, update.message.value) == (KEY, "y")
    update = read("callback_query", {**press, "data": "buy 5", "message": said(text="Sure?")})
    assert isinstance(update, Update)
    assert (update.message.prompt, update.message.value) == ("", "buy 5")


@pytest.mark.parametrize(
    ("kind", "content", "why"),
    [
        ("message", said(new_chat_members=[ANN]), "service"),
        ("message", said(text=5), "cannot be read"),
        ("message", [], "cannot be read"),
        ("message", said(text="x", chat={"id": "5"}), "cannot be read"),
        ("channel_post", said(text="x"), "channel_post"),
        ("inline_query", {"id": "1"}, "inline_query"),
        ("callback_query", {"id": "1", "from": ANN, "inline_message_id": "x", "data": "y"}, "outside"),
        ("callback_query", {"id": "1", "from": ANN, "message": said(), "game_short_name": "x"}, "outside"),
    ],
)
def test_what_is_ignored(kind: str, content: Any, why: str) -> None:
    update = read(kind, content)
    assert isinstance(update, Ignored)
    assert why in update.why
    assert update.callback == ("1" if kind == "callback_query" else "")


@pytest.mark.parametrize("raw", [None, [], 5, {}, {"update_id": "5"}, {"update_id": True}, {"update_id": None}])
def test_what_is_no_update(raw: Any) -> None:
    assert update_id(raw) is None
