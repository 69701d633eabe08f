"""The processStream vectors (engine-contract.md 3.6), and what an answer is made of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import shared_json
from turnkeeper import AnswerCut
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.wire import FailureOutcome, StreamChunk, ToolChunk, to_builtins
from turnkeeper.models.openai_stream import OpenAIStream

VECTORS: list[dict[str, Any]] = [
    one["vector"]
    for one in shared_json("vectors/prompty/vectors.json")["vectors"]
    if one["operation"] == "processStream"
]


def played(events: list[dict[str, Any]]) -> tuple[OpenAIStream, list[StreamChunk]]:
    """A stream of these events, to its end or its cut."""
    stream, chunks = OpenAIStream(), list[StreamChunk]()
    for event in events:
        if event["kind"] == "transportError":
            return stream, [*chunks, *stream.cut(event["message"])]
        chunks += stream.feed(event["value"])
    return stream, [*chunks, *stream.end()]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    """Chunks, partial text, whether somebody has to reconcile, and that nothing is committed."""
    assert vector["input"]["provider"] == "openai"
    stream, chunks = played(vector["input"]["events"])
    expected = vector["expected"]
    assert [to_builtins(chunk) for chunk in chunks] == expected["chunks"]
    assert stream.text == expected["partialText"]
    assert stream.failure is not None
    assert (stream.failure.outcome is FailureOutcome.INDETERMINATE) is expected["requiresReconciliation"]
    assert expected["completionCommitted"] is False
    with pytest.raises(PortError) as raised:
        stream.response()
    assert raised.value.outcome_unknown is expected["requiresReconciliation"]


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event."""
    return {"kind": "provider", "value": {"choices": [{"delta": fields, "finish_reason": finish}]}}


def test_an_answer_with_tool_calls_in_pieces() -> None:
    """1.4: the original text of the arguments is kept; 1.6: usage at most once."""
    first = {"index": 0, "id": "a", "function": {"name": "pay", "arguments": '{"cents":'}}
    second = {"index": 1, "id": "b", "function": {"name": "mail", "arguments": "{}"}}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    stream, chunks = played(
        [
            delta(content="one "),
            delta(content="moment"),
            delta(tool_calls=[first]),
            delta(tool_calls=[second]),
            delta("tool_calls", tool_calls=[{"index": 0, "function": {"arguments": " 5}"}}]),
            {"kind": "provider", "value": {"choices": [], "usage": usage}},
        ]
    )
    assert [chunk.tool_call.name for chunk in chunks if isinstance(chunk, ToolChunk)] == ["pay", "mail"]
    answer = stream.response()
    assert [(one.id, one.name, one.arguments) for one in answer.tool_requests] == [
        ("a", "pay", '{"cents": 5}'),
        ("b", "mail", "{}"),
    ]
    assert answer.tool_requests[0].metadata == {"argumentsText": '{"cents": 5}'}
    assert answer.assistant_messages[0].text == "one moment"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5


def test_a_stream_without_an_end_is_no_answer() -> None:
    """An answer that stops without a word is cut, and nothing of it is used; a finished one is whole."""
    stream, _ = played([delta(content="hel")])
    with pytest.raises(AnswerCut):
        stream.response()
    stream, _ = played([delta(content="hel"), delta("stop", content="lo")])
    assert stream.response().output == "hello"
