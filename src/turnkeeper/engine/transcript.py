"""Transcripts that providers accept: how a round becomes messages, and the check that calls and results pair up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from turnkeeper.engine.wire import Message, ModelInvocationResponse, ModelToolResult, Role, TextPart
from turnkeeper.errors import InvalidInput


def result_text(output: Any) -> str:
    """What the model is shown of a tool's output: text as it is, other values as compact JSON, nothing as "" (1.4)."""
    if output is None:
        return ""
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, separators=(",", ":"))


def request_ids(response: ModelInvocationResponse, round_index: int) -> list[str]:
    """The id of each tool request in the transcript: the provider's, where it is usable and the first of its kind.

    Derived from the round's position otherwise, so that call and result carry the same one after any restart
    (field case 02).
    """
    given = {request.id for request in response.tool_requests}
    ids: list[str] = []
    for index, request in enumerate(response.tool_requests):
        if request.id and request.id not in ids:
            ids.append(request.id)
            continue
        derived = f"call_{round_index}_{index}"
        while derived in given:  # a provider may count in the same way
            derived += "_"
        ids.append(derived)
    return ids


def assistant_messages(response: ModelInvocationResponse, round_index: int) -> list[Message]:
    """The assistant's messages of a round, with the calls that are answered behind them."""
    if not response.tool_requests:
        if response.assistant_messages or response.output is None:
            return list(response.assistant_messages)
        return [Message(role=Role.ASSISTANT, parts=[TextPart(value=result_text(response.output))])]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": request.name, "arguments": _arguments_text(request)}}
        for call_id, request in zip(request_ids(response, round_index), response.tool_requests, strict=True)
    ]
    spoken = list(response.assistant_messages) or [Message(role=Role.ASSISTANT)]
    last = spoken.pop()
    return [*spoken, Message(role=last.role, parts=last.parts, metadata={**last.metadata, "tool_calls": calls})]


def _arguments_text(request: Any) -> str:
    if request.metadata is not None and isinstance(request.metadata.get("argumentsText"), str):
        return request.metadata["argumentsText"]
    if request.arguments is None:
        return ""
    return request.arguments if isinstance(request.arguments, str) else result_text(request.arguments)


def tool_exchange(
    response: ModelInvocationResponse, results: Sequence[ModelToolResult], round_index: int
) -> list[Message]:
    """The messages of a finished round: the assistant's, then one result for each request, in request order."""
    messages = assistant_messages(response, round_index)
    for call_id, result in zip(request_ids(response, round_index), results, strict=True):
        metadata = {"tool_call_id": call_id, "name": result.name}
        messages.append(Message(role=Role.TOOL, parts=[TextPart(value=result_text(result.output))], metadata=metadata))
    return messages


def common_prefix(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """How many leading messages are the same."""
    count = 0
    for one, other in zip(known, messages, strict=False):
        if one != other:
            break
        count += 1
    return count


def check_pairs(messages: Sequence[Message], field: str = "messages") -> None:
    """Check that every tool call is answered once, in the block right behind it, and nothing is answered that was not asked.

    Calls and results are matched by position within the block, since ids repeat and may be empty (field cases 01, 02).

    Raises:
        InvalidInput: naming the message and the call.
    """
    expected: list[str] = []
    for index, message in enumerate(messages):
        if message.role is Role.TOOL:
            given = message.metadata.get("tool_call_id")
            if not expected:
                reason = f"is the result of the call {given!r}, which does not stand right before it"
                raise InvalidInput(f"{field}[{index}]", reason)
            call_id = expected.pop(0)
            if given != call_id and given in expected:
                expected[expected.index(given)] = call_id
            elif given != call_id:
                raise InvalidInput(f"{field}[{index}]", f"answers the call {given!r}, expected was {call_id!r}")
            continue
        if expected:
            raise InvalidInput(f"{field}[{index}]", f"comes before the result of the call {expected[0]!r}")
        calls: Any = message.metadata.get("tool_calls") if message.role is Role.ASSISTANT else None
        expected = [call.get("id") for call in calls] if calls else []
    if expected:
        raise InvalidInput(field, f"the call {expected[0]!r} has no result")
