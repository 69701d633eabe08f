"""Chat Completions as other servers speak them: reasoning in several forms, calls without an index, null where nothing is."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.models.clients import asking
from turnkeeper import StillUnknown
from turnkeeper.engine.transcript import assistant_messages
from turnkeeper.engine.wire import ModelInvocationResponse, StreamChunk, TextChunk, ThinkingChunk
from turnkeeper.models.failures import Caller
from turnkeeper.models.openai import METADATA, OpenAIChat
from turnkeeper.models.openai_chat import chat_answer, chat_messages
from turnkeeper.models.openai_stream import OpenAIStream


def streamed(*deltas: dict[str, Any], finish: str = "stop") -> tuple[ModelInvocationResponse, list[StreamChunk]]:
    """The answer that is streamed in these pieces."""
    stream = OpenAIStream()
    chunks: list[StreamChunk] = []
    for delta in deltas:
        chunks += stream.feed({"id": "x", "choices": [{"delta": delta, "finish_reason": None}]})
    chunks += stream.feed({"choices": [{"delta": {}, "finish_reason": finish}]})
    return stream.response(), [*chunks, *stream.end()]


def sent_back(answer: ModelInvocationResponse) -> dict[str, Any]:
    """The assistant's message of the next request."""
    return chat_messages(assistant_messages(answer, 0), "p")[-1]


def test_reasoning_in_items_with_an_index() -> None:
    """Texts grow, what says the same each time does not, and a signature comes when it comes."""
    answer, _ = streamed(
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "Let me "}]},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "think."}]},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": "s1"}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "index": 1, "data": "e1"}], "content": "Yes."},
    )
    assert answer.output == "Yes."
    assert sent_back(answer) == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_details": [
            {"type": "reasoning.text", "index": 0, "text": "Let me think.", "signature": "s1"},
            {"type": "reasoning.encrypted", "index": 1, "data": "e1"},
        ],
    }


def test_content_in_pieces_of_several_kinds() -> None:
    """The text is what was said; all of it goes back."""
    answer, chunks = streamed(
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
        {"content": [{"type": "text", "text": "Good "}]},
        {"content": [{"type": "text", "text": "morning."}]},
    )
    assert answer.output == "Good morning."
    assert [chunk.value for chunk in chunks if isinstance(chunk, TextChunk)] == ["Good ", "morning."]
    assert sent_back(answer)["content"] == [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "Good morning."},
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_as_text(name: str) -> None:
    answer, chunks = streamed({name: "Hm, "}, {name: "well."}, {"content": "Yes."})
    assert [chunk.value for chunk in chunks if isinstance(chunk, ThinkingChunk)] == ["Hm, ", "well."]
    assert sent_back(answer)[name] == "Hm, well."


def test_calls_without_an_index_and_calls_that_all_have_the_first() -> None:
    first = {"id": "a", "function": {"name": "f", "arguments": '{"n":'}}
    rest = {"function": {"arguments": " 1}"}}
    second = {"id": "b", "function": {"name": "g", "arguments": "{}"}}
    wanted = [("a", "f", '{"n": 1}'), ("b", "g", "{}")]
    bare, _ = streamed({"tool_calls": [first]}, {"tool_calls": [rest]}, {"tool_calls": [second]}, finish="tool_calls")
    assert [(one.id, one.name, one.arguments) for one in bare.tool_requests] == wanted
    same, _ = streamed(*({"tool_calls": [{"index": 0, **one}]} for one in (first, rest, second)), finish="tool_calls")
    assert [(one.id, one.name, one.arguments) for one in same.tool_requests] == wanted


def test_what_a_call_carries_goes_back_with_it() -> None:
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    answer, _ = streamed({"tool_calls": [{**call, "extra_content": {"google": {"thought_signature": "s"}}}]})
    (sent,) = sent_back(answer)["tool_calls"]
    assert sent["extra_content"] == {"google": {"thought_signature": "s"}}
    assert (sent["id"], sent["function"]) == ("a", {"name": "f", "arguments": "{}"})


def test_null_everywhere() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None, "extra": None}
    answer = chat_answer({"choices": [{"message": message, "finish_reason": "stop"}], "usage": None}, Caller("p", None))
    assert (answer.output, answer.tool_requests, answer.usage, answer.assistant_messages) == ("", [], None, [])


def test_an_answer_of_reasoning_alone_is_kept_for_its_calls() -> None:
    """No text: the message that carries the calls carries the reasoning too."""
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    answer, _ = streamed({"reasoning_content": "hm"}, {"tool_calls": [{"index": 0, **call}]}, finish="tool_calls")
    sent = sent_back(answer)
    assert (sent["reasoning_content"], sent["content"], len(sent["tool_calls"])) == ("hm", None, 1)


@pytest.mark.anyio
async def test_a_listing_that_does_not_know_the_filter() -> None:
    """It gives everybody's answers: none of them is taken for ours."""
    message = {"role": "assistant", "content": "another conversation's"}
    other = {"id": "x", "choices": [{"message": message, "finish_reason": "stop"}], "metadata": {METADATA: "inv_2"}}
    listed = {"data": [{**other, "metadata": None}, other]}
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(lambda _: httpx2.Response(200, json=listed)))
    async with AsyncOpenAI(api_key="key", base_url="http://odd.test/v1", http_client=http) as client:
        assert isinstance(await OpenAIChat(client, "m", store=True).reconcile(asking()), StillUnknown)
