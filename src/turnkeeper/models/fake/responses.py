"""The Responses API, as the fake provider speaks it."""

from __future__ import annotations

from typing import Any, Final, cast

from turnkeeper.models.fake.desk import CREATED, Desk, Rejected, Work, check_results, pieces, sign

API: Final = "responses"
_OWN: Final = frozenset({"reasoning", "function_call"})


def answer_id(work: Work) -> str:
    """What the answer is called."""
    return f"resp_{work.number}"


def round_of(body: dict[str, Any], desk: Desk) -> int:
    """The round that a request asks for; its conversation is checked.

    Raises:
        Rejected: no provider would accept it.
    """
    given: Any = body.get("input") or []
    if isinstance(given, str):
        return 0
    answers = 0
    waiting: list[str] = []
    results: list[str] = []
    running: list[dict[str, Any]] = []
    for item in [*cast("list[dict[str, Any]]", given), {"type": "message", "role": "end"}]:
        kind: Any = item.get("type", "message")
        if kind == "function_call_output":
            results.append(item["call_id"])
        elif kind in _OWN or item.get("role") == "assistant":
            if results:
                check_results(waiting, results)
                waiting, results = [], []
            running.append(item)
            waiting += [item["call_id"]] if kind == "function_call" else []
            continue
        if running:
            _check_thoughts(running, answers, desk)
            running = []
            answers += 1
        if kind != "function_call_output":
            check_results(waiting, results)
            waiting, results = [], []
    return answers


def _check_thoughts(items: list[dict[str, Any]], index: int, desk: Desk) -> None:
    rounds = desk.script.rounds
    thinking = rounds[index].thinking if index < len(rounds) else ""
    thoughts = [item for item in items if item.get("type") == "reasoning"]
    if bool(thinking) != bool(thoughts):
        raise Rejected("an answer came back without its reasoning item")
    for item in thoughts:
        summary = [{"type": "summary_text", "text": thinking}]
        if item.get("encrypted_content") != sign(item["id"]) or item.get("summary") != summary:
            raise Rejected("a reasoning item was changed on its way")


def _items(work: Work) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if work.round.thinking:
        name = f"rs_{work.number}"
        summary = [{"type": "summary_text", "text": work.round.thinking}]
        items.append({"id": name, "type": "reasoning", "summary": summary, "encrypted_content": sign(name)})
    if work.round.text:
        part: dict[str, Any] = {"type": "output_text", "text": work.round.text, "annotations": [], "logprobs": []}
        if work.round.finish == "refusal":
            part = {"type": "refusal", "refusal": work.round.text}
        items.append(
            {
                "id": f"msg_{work.number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    items += [
        {
            "id": f"fc_{work.number}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": work.call_id("call", index),
            "name": call.name,
            "arguments": call.text,
        }
        for index, call in enumerate(work.round.calls)
    ]
    return items


def whole(work: Work, status: str | None = None) -> dict[str, Any]:
    """The response; while it has that status."""
    reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
    reason = reasons.get(work.round.finish or "")
    over = status is None
    taken, made = work.round.input_tokens, work.round.output_tokens
    usage = {
        "input_tokens": taken,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": taken + made,
    }
    return {
        "id": answer_id(work),
        "object": "response",
        "created_at": CREATED,
        "status": status or ("incomplete" if reason else "completed"),
        "background": bool(work.body.get("background")),
        "error": None,
        "incomplete_details": {"reason": reason} if over and reason else None,
        "model": work.body.get("model"),
        "output": _items(work) if over else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": work.body.get("tools") or [],
        "usage": usage if over else None,
        "metadata": work.body.get("metadata") or {},
    }


def events(work: Work) -> list[dict[str, Any]]:
    """The response in pieces."""
    begun = whole(work, "queued" if work.body.get("background") else "in_progress")
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": {**begun, "status": "in_progress"}},
    ]
    for index, item in enumerate(_items(work)):
        at = {"output_index": index, "item_id": item["id"]}
        told.append({"type": "response.output_item.added", "output_index": index, "item": _begun(item)})
        if item["type"] == "reasoning":
            told += [
                {"type": "response.reasoning_summary_text.delta", **at, "summary_index": 0, "delta": piece}
                for piece in pieces(work.round.thinking)
            ]
        elif item["type"] == "message":
            kind = "refusal" if work.round.finish == "refusal" else "output_text"
            told += [
                {"type": f"response.{kind}.delta", **at, "content_index": 0, "delta": piece}
                for piece in pieces(work.round.text)
            ]
        else:
            told += [
                {"type": "response.function_call_arguments.delta", **at, "delta": piece}
                for piece in pieces(item["arguments"])
            ]
        told.append({"type": "response.output_item.done", "output_index": index, "item": item})
    over = whole(work)
    told.append({"type": f"response.{over['status']}", "response": over})
    return [{**event, "sequence_number": number} for number, event in enumerate(told)]


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is told of before its content."""
    empty: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "encrypted_content": ""}
    return {name: empty.get(name, value) for name, value in item.items()}
