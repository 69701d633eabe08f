"""Conversations and answers in the form of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from turnkeeper.engine.tools import Tool
from turnkeeper.engine.wire import (
    ContentPart,
    FilePart,
    ImagePart,
    InvocationUsage,
    Message,
    ModelInvocationResponse,
    ModelToolRequest,
    Role,
    TextPart,
)
from turnkeeper.models.failures import Caller, ModelError, ModelRefused
from turnkeeper.models.media import data_url, is_url

KEPT: Final = "openai_responses"
"""Where an assistant's message keeps the items of its response, for the provider to have them back as they were."""
RUNNING: Final = frozenset({"queued", "in_progress"})
ENDS: Final = frozenset(f"response.{how}" for how in ("completed", "incomplete", "failed", "cancelled"))
"""Events with which a response's stream is over."""
_ANSWERED: Final = frozenset({"completed", "incomplete"})


def response_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """What the model may call. Not `strict`: that would change which arguments are optional."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": False,
        }
        for tool in tools
    ]


def input_items(messages: Sequence[Message], provider: str) -> list[dict[str, Any]]:
    """The conversation as input items. The items of earlier responses go back as they came."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.TOOL:
            call_id = message.metadata.get("tool_call_id")
            items.append({"type": "function_call_output", "call_id": call_id, "output": message.text})
        elif message.role is Role.ASSISTANT:
            items += _assistant_items(message)
        else:
            content = [_input_part(part, provider) for part in message.parts]
            items.append({"type": "message", "role": message.role.value, "content": content})
    return items


def _assistant_items(message: Message) -> list[dict[str, Any]]:
    calls = cast("list[dict[str, Any]]", message.metadata.get("tool_calls") or [])
    kept = cast("dict[str, Any]", message.metadata.get(KEPT) or {})
    if kept:
        items: list[dict[str, Any]] = []
        ids = [call["id"] for call in calls]
        for item in cast("list[dict[str, Any]]", kept["items"]):
            # The transcript may call a request otherwise, where the provider gave no id or one twice.
            asked = item.get("type") == "function_call" and ids
            items.append({**item, "call_id": ids.pop(0)} if asked else item)
        return items
    spoken = [{"type": "message", "role": "assistant", "content": message.text}] if message.parts else []
    return [
        *spoken,
        *(
            {
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        ),
    ]


def _input_part(part: ContentPart, provider: str) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "input_text", "text": part.value}
        case ImagePart():
            return {"type": "input_image", "image_url": data_url(part, provider), "detail": part.detail or "auto"}
        case FilePart() if is_url(part.source):
            return {"type": "input_file", "file_url": part.source}
        case FilePart():
            return {"type": "input_file", "filename": "file", "file_data": data_url(part, provider)}
        case _:
            raise ModelRefused(provider, "the Responses API takes no sound in a conversation; Chat Completions does")


def response_usage(usage: Any) -> InvocationUsage | None:
    """The tokens of a response; None where the server does not count them."""
    if not isinstance(usage, dict):
        return None
    told = cast("dict[str, Any]", usage)
    taken, made = told.get("input_tokens") or 0, told.get("output_tokens") or 0
    return InvocationUsage(
        input_tokens=taken, output_tokens=made, total_tokens=told.get("total_tokens") or taken + made
    )


def response_answer(response: dict[str, Any], caller: Caller) -> ModelInvocationResponse:
    """The answer in a response that is not running any more.

    Raises:
        ModelError: it failed, was cancelled, or was refused.
        AnswerLost: it has no output that could be read.
    """
    status: Any = response.get("status")
    items = cast("list[dict[str, Any]]", response.get("output"))
    if status not in _ANSWERED:
        raise _without_answer(response, caller)
    details = cast("dict[str, Any]", response.get("incomplete_details") or {})
    reason: Any = details.get("reason")
    if reason == "content_filter":
        raise ModelRefused(caller.provider, "a content filter kept the answer back", code=reason)
    try:
        texts = [
            [part for part in item["content"] if part["type"] == "output_text"]
            for item in items
            if item["type"] == "message"
        ]
        refusals = [
            part["refusal"]
            for item in items
            if item["type"] == "message"
            for part in item["content"]
            if part["type"] == "refusal"
        ]
        requests = [
            ModelToolRequest(
                id=item.get("call_id"),
                name=item["name"],
                arguments=item["arguments"],
                metadata={"argumentsText": item["arguments"]},
            )
            for item in items
            if item["type"] == "function_call"
        ]
        spoken = ["".join(part["text"] for part in parts) for parts in texts]
    except (KeyError, TypeError) as e:
        raise caller.unreadable(f"it is no response ({type(e).__name__}: {e})") from None
    if refusals:
        raise ModelRefused(caller.provider, f"Model refused: {' '.join(refusals)}", code="refusal")
    finish = "tool_calls" if requests else "stop"
    if status == "incomplete":
        finish = "length"  # whatever ended it early: its last call may be cut
    said = Message(
        role=Role.ASSISTANT, parts=[TextPart(value=text) for text in spoken if text], metadata={KEPT: {"items": items}}
    )
    told = {"finishReason": finish, "responseId": response.get("id"), "model": response.get("model")}
    return ModelInvocationResponse(
        output=None if requests else "".join(spoken),
        usage=response_usage(response.get("usage")),
        assistant_messages=[said],
        tool_requests=requests,
        metadata={name: value for name, value in told.items() if value is not None},
    )


def _without_answer(response: dict[str, Any], caller: Caller) -> ModelError:
    """Why a response has no answer: its provider says so itself."""
    status, error = response.get("status"), cast("dict[str, Any]", response.get("error") or {})
    if status in ("failed", "cancelled"):
        told = f"the response {response.get('id')} {'was cancelled' if status == 'cancelled' else 'failed'}"
        if error:
            told += f" ({error.get('code')}: {error.get('message')})"
        return caller.said(error, told)
    return caller.unreadable(f"its status is {status!r}")
