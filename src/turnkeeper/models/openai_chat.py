"""Conversations and answers in the form of OpenAI's Chat Completions, which most other providers and servers speak too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from turnkeeper.engine.tools import Tool
from turnkeeper.engine.wire import (
    AudioPart,
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
from turnkeeper.models.failures import Caller, ModelRefused
from turnkeeper.models.media import data_url

KEPT: Final = "openai_chat"
"""Where an assistant's message keeps what a provider sent beside text and calls, for that provider to have it back as it was."""
_SAID_OTHERWISE: Final = frozenset({"role", "content", "tool_calls", "refusal", "function_call"})
_NOT_FOR_REQUESTS: Final = frozenset({"annotations", "audio"})
"""Parts of an answer that a request may not have in that form."""
_CALL_FIELDS: Final = frozenset({"id", "type", "function", "index"})


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """What the model may call."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


def chat_messages(messages: Sequence[Message], provider: str) -> list[dict[str, Any]]:
    """The conversation. What the provider sent goes back to it untouched: the text of arguments, and what `KEPT` keeps."""
    return [_chat_message(message, provider) for message in messages]


def _chat_message(message: Message, provider: str) -> dict[str, Any]:
    if message.role is Role.TOOL:
        return {"role": "tool", "tool_call_id": message.metadata.get("tool_call_id"), "content": message.text}
    if message.role is not Role.ASSISTANT:
        content: Any = message.text
        if not all(isinstance(part, TextPart) for part in message.parts):
            content = [_chat_part(part, provider) for part in message.parts]
        named: Any = message.metadata.get("name")
        return {
            "role": message.role.value,
            "content": content,
            **({"name": named} if isinstance(named, str) else {}),
        }
    kept = cast("dict[str, Any]", message.metadata.get(KEPT) or {})
    calls = cast("list[dict[str, Any]]", message.metadata.get("tool_calls") or [])
    more = cast("list[dict[str, Any]]", kept.get("calls") or [{}] * len(calls))
    said: dict[str, Any] = {
        "role": "assistant",
        "content": message.text if message.parts or not calls else None,
        **cast("dict[str, Any]", kept.get("fields") or {}),
    }
    if calls:
        said["tool_calls"] = [{**call, **extra} for call, extra in zip(calls, more, strict=True)]
    return said


def _chat_part(part: ContentPart, provider: str) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.value}
        case ImagePart():
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": data_url(part, provider), **detail}}
        case FilePart():
            return {"type": "file", "file": {"filename": "file", "file_data": data_url(part, provider)}}
        case AudioPart():
            form = (part.media_type or "audio/wav").rpartition("/")[2]
            data = part.source.rpartition(",")[2]
            return {"type": "input_audio", "input_audio": {"data": data, "format": {"mpeg": "mp3"}.get(form, form)}}


def chat_usage(usage: Any) -> InvocationUsage | None:
    """The tokens of an answer; None where the server does not count them."""
    if not isinstance(usage, dict):
        return None
    told = cast("dict[str, Any]", usage)
    taken, made = told.get("prompt_tokens") or 0, told.get("completion_tokens") or 0
    return InvocationUsage(
        input_tokens=taken, output_tokens=made, total_tokens=told.get("total_tokens") or taken + made
    )


def chat_text(content: Any) -> str:
    """The text of a message's content, which some servers give in pieces of several kinds."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    pieces = cast("list[dict[str, Any]]", content)
    return "".join(piece.get("text") or "" for piece in pieces if piece.get("type") == "text")


def chat_answer(completion: dict[str, Any], caller: Caller) -> ModelInvocationResponse:
    """The answer in a whole completion.

    Raises:
        ModelRefused: the model or a filter refused.
        AnswerLost: there is no message in it that could be read.
    """
    try:
        choice = completion["choices"][0]
        message: dict[str, Any] = dict(choice["message"])
        finish: Any = choice.get("finish_reason")
        calls = [dict(call) for call in cast("list[dict[str, Any]]", message.get("tool_calls") or [])]
        functions = [(call.get("id"), call["function"]["name"], call["function"].get("arguments")) for call in calls]
    except (KeyError, IndexError, TypeError) as e:
        raise caller.unreadable(f"it is no chat completion ({type(e).__name__}: {e})") from None
    if message.get("refusal"):
        raise ModelRefused(caller.provider, f"Model refused: {message['refusal']}", code="refusal")
    if finish == "content_filter":
        raise ModelRefused(caller.provider, "a content filter kept the answer back", code="content_filter")
    requests = [
        ModelToolRequest(
            id=call_id,
            name=name,
            arguments=arguments,
            metadata={"argumentsText": arguments} if isinstance(arguments, str) else None,
        )
        for call_id, name, arguments in functions
    ]
    content: Any = message.get("content")
    text = chat_text(content)
    fields = {
        name: value
        for name, value in message.items()
        if value is not None and name not in _SAID_OTHERWISE | _NOT_FOR_REQUESTS
    }
    if isinstance(content, list):
        fields["content"] = content
    more = [{name: value for name, value in call.items() if name not in _CALL_FIELDS} for call in calls]
    kept = {**({"fields": fields} if fields else {}), **({"calls": more} if any(more) else {})}
    spoken = [
        Message(
            role=Role.ASSISTANT,
            parts=[TextPart(value=text)] if text else [],
            metadata={KEPT: kept} if kept else {},
        )
    ]
    told = {"finishReason": finish, "responseId": completion.get("id"), "model": completion.get("model")}
    return ModelInvocationResponse(
        output=None if requests else text,
        usage=chat_usage(completion.get("usage")),
        assistant_messages=spoken if text or kept else [],
        tool_requests=requests,
        metadata={name: value for name, value in told.items() if value is not None},
    )
