"""Chat Completions, as the fake provider speaks them."""

from __future__ import annotations

from typing import Any, Final, cast

from turnkeeper.models.fake.desk import CREATED, Desk, Rejected, Work, check_results, pieces, sign

API: Final = "chat"


def answer_id(work: Work) -> str:
    """What the answer is called."""
    return f"chatcmpl-{work.number}"


def round_of(body: dict[str, Any], desk: Desk) -> int:
    """The round that a request asks for; its conversation is checked.

    Raises:
        Rejected: no provider would accept it.
    """
    answers = 0
    waiting: list[str] = []
    results: list[str] = []
    for message in [*cast("list[dict[str, Any]]", body.get("messages") or []), {"role": "end"}]:
        if message["role"] == "tool":
            results.append(message["tool_call_id"])
            continue
        check_results(waiting, results)
        waiting, results = [], []
        if message["role"] == "assistant":
            calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
            waiting = [call["id"] for call in calls]
            _check_thoughts(message, calls, answers, desk)
            answers += 1
    return answers


def _check_thoughts(message: dict[str, Any], calls: list[dict[str, Any]], index: int, desk: Desk) -> None:
    rounds = desk.script.rounds
    thinking = rounds[index].thinking if index < len(rounds) else ""
    if thinking and calls:
        if message.get("reasoning_content") != thinking:
            raise Rejected("the reasoning_content of an answer with tool calls must come back as it was")
        if any(call.get("extra_content") != _signed(thinking) for call in calls):
            raise Rejected("a tool call came back without its thought signature")


def _signed(thinking: str) -> dict[str, Any]:
    return {"google": {"thought_signature": sign(thinking)}}


def _calls(work: Work) -> list[dict[str, Any]]:
    more = {"extra_content": _signed(work.round.thinking)} if work.round.thinking else {}
    return [
        {
            "id": work.call_id("call", index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.text},
            **more,
        }
        for index, call in enumerate(work.round.calls)
    ]


def _finish(work: Work) -> str:
    if work.round.finish in ("length", "content_filter"):
        return work.round.finish
    return "tool_calls" if work.round.calls else "stop"


def _usage(work: Work) -> dict[str, Any]:
    taken, made = work.round.input_tokens, work.round.output_tokens
    return {"prompt_tokens": taken, "completion_tokens": made, "total_tokens": taken + made}


def whole(work: Work) -> dict[str, Any]:
    """The answer in one piece."""
    refused = work.round.finish == "refusal"
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if refused or not work.round.text else work.round.text,
        "refusal": work.round.text if refused else None,
        "annotations": [],
    }
    if work.round.thinking:
        message["reasoning_content"] = work.round.thinking
    if work.round.calls:
        message["tool_calls"] = _calls(work)
    return {
        "id": answer_id(work),
        "object": "chat.completion",
        "created": CREATED,
        "model": work.body.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(work), "logprobs": None}],
        "usage": _usage(work),
        "metadata": work.body.get("metadata"),
    }


def events(work: Work) -> list[dict[str, Any]]:
    """The answer in pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(work.round.thinking)]
    spoken = "refusal" if work.round.finish == "refusal" else "content"
    deltas += [{spoken: piece} for piece in pieces(work.round.text)]
    for index, call in enumerate(_calls(work)):
        function = call["function"]
        begun = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        deltas.append({"tool_calls": [begun]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in pieces(function["arguments"])
        ]
    base = {
        "id": answer_id(work),
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": work.body.get("model"),
    }
    told = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    told.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(work)}]})
    options = cast("dict[str, Any]", work.body.get("stream_options") or {})
    if options.get("include_usage"):
        told.append({**base, "choices": [], "usage": _usage(work)})
    return told
