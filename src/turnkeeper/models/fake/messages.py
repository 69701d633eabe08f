"""Anthropic's Messages API, as the fake provider speaks it."""

from __future__ import annotations

import json
from typing import Any, Final, cast

from turnkeeper.models.fake.desk import Desk, Rejected, Work, check_results, pieces, sign

API: Final = "messages"


def answer_id(work: Work) -> str:
    """What the answer is called."""
    return f"msg_{work.number}"


def round_of(body: dict[str, Any], desk: Desk) -> int:
    """The round that a request asks for; its conversation is checked.

    Raises:
        Rejected: no provider would accept it.
    """
    if not isinstance(body.get("max_tokens"), int):
        raise Rejected("max_tokens: Field required")
    answers = 0
    waiting: list[str] = []
    for message in cast("list[dict[str, Any]]", body.get("messages") or []):
        content: Any = message.get("content")
        if not content:
            raise Rejected("messages: text content blocks must be non-empty")
        blocks = cast("list[dict[str, Any]]", content) if isinstance(content, list) else []
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        check_results(waiting, results)
        waiting = []
        if message["role"] == "assistant":
            calls = [block for block in blocks if block["type"] == "tool_use"]
            if any(not isinstance(block["input"], dict) for block in calls):
                raise Rejected("tool_use.input: Input should be a valid dictionary")
            waiting = [block["id"] for block in calls]
            _check_thoughts(blocks, answers, desk)
            answers += 1
    check_results(waiting, [])
    return answers


def _check_thoughts(blocks: list[dict[str, Any]], index: int, desk: Desk) -> None:
    rounds = desk.script.rounds
    thinking = rounds[index].thinking if index < len(rounds) else ""
    if thinking and blocks[:2] != _thoughts(thinking):
        raise Rejected("the thinking blocks of an answer must come back first, and as they were")


def _thoughts(thinking: str) -> list[dict[str, Any]]:
    return [
        {"type": "thinking", "thinking": thinking, "signature": sign(thinking)},
        {"type": "redacted_thinking", "data": sign(sign(thinking))},
    ]


def _stop_reason(work: Work) -> str:
    if work.round.finish is not None:
        return "max_tokens" if work.round.finish == "length" else "refusal"
    return "tool_use" if work.round.calls else "end_turn"


def _blocks(work: Work) -> list[dict[str, Any]]:
    blocks = _thoughts(work.round.thinking) if work.round.thinking else []
    blocks += [{"type": "text", "text": work.round.text}] if work.round.text else []
    for index, call in enumerate(work.round.calls):
        blocks.append(
            {"type": "tool_use", "id": work.call_id("toolu", index), "name": call.name, "input": _input(call.text)}
        )
    return blocks


def _input(text: str | None) -> Any:
    """What the API makes of the model's text, where it is not streamed: an object, if there is one in it."""
    try:
        return json.loads(text) if text and text.strip() else {}
    except ValueError:
        return text


def whole(work: Work) -> dict[str, Any]:
    """The answer in one piece."""
    return {
        "id": answer_id(work),
        "type": "message",
        "role": "assistant",
        "model": work.body.get("model"),
        "content": _blocks(work),
        "stop_reason": _stop_reason(work),
        "stop_sequence": None,
        "usage": {"input_tokens": work.round.input_tokens, "output_tokens": work.round.output_tokens},
    }


def events(work: Work) -> list[dict[str, Any]]:
    """The answer in pieces."""
    message = whole(work)
    begun: dict[str, Any] = {
        **message,
        "content": [],
        "stop_reason": None,
        "usage": {**message["usage"], "output_tokens": 1},
    }
    told: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    texts = iter(work.round.calls)
    for index, block in enumerate(_blocks(work)):
        deltas: list[dict[str, Any]] = []
        empty: dict[str, Any] = block
        match block["type"]:
            case "text":
                empty = {"type": "text", "text": ""}
                deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
            case "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "tool_use":
                empty = {**block, "input": {}}
                parts = ["", *pieces(next(texts).text)]
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in parts]
            case _:
                pass
        told.append({"type": "content_block_start", "index": index, "content_block": empty})
        told += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        told.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    told.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": work.round.output_tokens}})
    told.append({"type": "message_stop"})
    return told
