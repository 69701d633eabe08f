"""Anthropic's blocks, and OpenAI's items: small rules of their forms that a whole turn does not show."""

from __future__ import annotations

from typing import Any

import pytest

from turnkeeper import Message, TextPart
from turnkeeper.engine.transcript import assistant_messages
from turnkeeper.engine.wire import AudioPart, InvocationUsage, Role
from turnkeeper.models.anthropic_blocks import UNREADABLE, MessageStream, answer_of, blocks_of, usage_of
from turnkeeper.models.failures import Caller, ModelRefused, ModelUnavailable
from turnkeeper.models.openai_chat import chat_answer, chat_messages
from turnkeeper.models.openai_responses import input_items, response_answer

CALLER = Caller("p", None)


def said(text: str, role: Role = Role.USER, **metadata: Any) -> Message:
    """A message."""
    return Message(role=role, parts=[TextPart(value=text)] if text else [], metadata=metadata)


def test_tokens_of_the_cache_are_input() -> None:
    """The provider counts them apart; a budget has to see them."""
    told = {"input_tokens": 1, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 300, "output_tokens": 4}
    assert usage_of(told) == InvocationUsage(input_tokens=321, output_tokens=4, total_tokens=325)
    assert usage_of({"input_tokens": 1, "cache_read_input_tokens": None}) == InvocationUsage(
        input_tokens=1, output_tokens=0, total_tokens=1
    )
    assert usage_of(None) is None


def test_arguments_that_are_no_object_are_shown_as_text() -> None:
    """Another provider's call, and one of its own whose stream stopped in the middle."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"n": 1'}}
    (block,) = blocks_of([said("", Role.ASSISTANT, tool_calls=[call])], "p").messages[0]["content"]
    assert block["input"] == {UNREADABLE: '{"n": 1'}
    stream = MessageStream()
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m"}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"n": 1'}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]
    for event in events:
        stream.feed(event)
    answer = answer_of(stream.message, CALLER, stream.texts)
    assert answer.tool_requests[0].arguments == '{"n": 1'
    (block,) = blocks_of(assistant_messages(answer, 0), "p").messages[0]["content"]
    assert block["input"] == {UNREADABLE: '{"n": 1'}


def test_pieces_of_kinds_that_are_not_known_yet() -> None:
    """Texts grow, what is whole is whole, citations are listed; all of it goes back."""
    stream = MessageStream()
    stream.feed({"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 2}}})
    stream.feed(
        {"type": "content_block_start", "index": 0, "content_block": {"type": "new", "stuff": "", "flag": None}}
    )
    for delta in (
        {"type": "new_delta", "stuff": "a"},
        {"type": "new_delta", "stuff": "b", "flag": True},
        {"type": "citations_delta", "citation": {"n": 1}},
        {"type": "citations_delta", "citation": {"n": 2}},
    ):
        stream.feed({"type": "content_block_delta", "index": 0, "delta": delta})
    stream.feed({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}})
    stream.feed({"type": "message_stop"})
    answer = answer_of(stream.message, CALLER, stream.texts)
    assert answer.usage == InvocationUsage(input_tokens=2, output_tokens=3, total_tokens=5)
    sent = blocks_of(assistant_messages(answer, 0), "p").messages[0]["content"]
    assert sent == [{"type": "new", "stuff": "ab", "flag": True, "citations": [{"n": 1}, {"n": 2}]}]


def test_who_speaks_twice_speaks_once_and_nobody_says_nothing() -> None:
    conversation = blocks_of(
        [
            said("one", Role.SYSTEM),
            said("", Role.SYSTEM),
            said("a"),
            said("b"),
            said("", Role.ASSISTANT),
            said("two", Role.DEVELOPER),
            said("c"),
        ],
        "p",
    )
    assert [block["text"] for block in conversation.system] == ["one", "two"]
    assert [[block["text"] for block in one["content"]] for one in conversation.messages] == [["a", "b", "c"]]


def test_what_is_not_taken() -> None:
    """An answer that wants to be continued, and sound where the API has no place for it."""
    paused: dict[str, Any] = {"content": [], "stop_reason": "pause_turn"}
    with pytest.raises(ModelRefused, match="pause_turn"):
        answer_of(paused, CALLER)
    sound = Message(parts=[AudioPart(source="AAAA", media_type="audio/mpeg")])
    with pytest.raises(ModelRefused, match="sound"):
        blocks_of([sound], "p")
    with pytest.raises(ModelRefused, match="sound"):
        input_items([sound], "p")
    (part,) = chat_messages([sound], "p")[0]["content"]
    assert part == {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}


def test_what_a_request_may_not_have_does_not_go_back() -> None:
    """Parts of a chat answer that the API gives and does not take."""
    message = {"role": "assistant", "content": "a", "annotations": [{"n": 1}], "audio": {"id": "x"}, "more": {"n": 1}}
    answer = chat_answer({"choices": [{"message": message, "finish_reason": "stop"}]}, CALLER)
    assert chat_messages(assistant_messages(answer, 0), "p") == [
        {"role": "assistant", "content": "a", "more": {"n": 1}}
    ]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("server_error", ModelUnavailable), ("rate_limit_exceeded", ModelUnavailable), ("invalid_prompt", ModelRefused)],
)
def test_a_response_that_failed_says_why(code: str, kind: type[Exception]) -> None:
    failed: dict[str, Any] = {
        "id": "r",
        "status": "failed",
        "error": {"code": code, "message": "because"},
        "output": [],
    }
    with pytest.raises(kind, match="because"):
        response_answer(failed, CALLER)


def test_a_response_that_ended_early_runs_nothing() -> None:
    """Whatever ended it: its last call may be cut."""
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}
    for reason in ("max_output_tokens", "steered", None):
        answer = response_answer(
            {"status": "incomplete", "incomplete_details": {"reason": reason}, "output": [item]}, CALLER
        )
        assert (answer.metadata or {})["finishReason"] == "length"
