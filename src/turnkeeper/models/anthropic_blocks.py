"""Conversations and answers in the blocks of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

from turnkeeper.engine.arguments import InvalidArguments, parse_arguments
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
from turnkeeper.models.failures import Caller, ModelRefused
from turnkeeper.models.media import is_url, typed_data

KEPT: Final = "anthropic"
"""Where an assistant's message keeps the blocks of its answer, for the provider to have them back as they were."""
UNREADABLE: Final = "unreadable_arguments"
"""The API takes only objects for a call's input. Of arguments that were none, it is shown the text under this name."""
_FINISHES: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


class Conversation(NamedTuple):
    """What the API takes a conversation in."""

    system: list[dict[str, Any]]
    messages: list[dict[str, Any]]


def block_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """What the model may call."""
    return [
        {"name": tool.name, "description": tool.description, "input_schema": {"type": "object", **tool.parameters}}
        for tool in tools
    ]


def blocks_of(messages: Sequence[Message], provider: str) -> Conversation:
    """The conversation: system messages apart, and whoever speaks twice in a row speaks once, as the API wants results."""
    system: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for message in messages:
        if message.role in (Role.SYSTEM, Role.DEVELOPER):
            system += [{"type": "text", "text": message.text}] if message.text else []
            continue
        speaker = "assistant" if message.role is Role.ASSISTANT else "user"
        blocks = _blocks(message, provider)
        if not blocks:
            continue  # the API takes no empty messages
        if said and said[-1]["role"] == speaker:
            said[-1]["content"] += blocks
        else:
            said.append({"role": speaker, "content": blocks})
    return Conversation(system, said)


def _blocks(message: Message, provider: str) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        given: Any = message.metadata.get("tool_call_id")
        return [{"type": "tool_result", "tool_use_id": given, "content": message.text}]
    if message.role is not Role.ASSISTANT:
        return [_block(part, provider) for part in message.parts if not isinstance(part, TextPart) or part.value]
    calls = cast("list[dict[str, Any]]", message.metadata.get("tool_calls") or [])
    kept = cast("dict[str, Any]", message.metadata.get(KEPT) or {})
    if kept:
        ids = [call["id"] for call in calls]
        blocks: list[dict[str, Any]] = []
        for block in cast("list[dict[str, Any]]", kept["content"]):
            # The transcript may call a request otherwise, where the provider gave no id or one twice.
            asked = block.get("type") == "tool_use" and ids
            blocks.append({**block, "id": ids.pop(0)} if asked else block)
        return blocks
    spoken: list[dict[str, Any]] = [{"type": "text", "text": message.text}] if message.text else []
    return spoken + [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": input_of(call["function"]["arguments"]),
        }
        for call in calls
    ]


def _block(part: ContentPart, provider: str) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.value}
        case ImagePart() | FilePart():
            kind = "image" if isinstance(part, ImagePart) else "document"
            if is_url(part.source):
                return {"type": kind, "source": {"type": "url", "url": part.source}}
            media_type, data = typed_data(part, provider)
            return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": data}}
        case _:
            raise ModelRefused(provider, "the Messages API takes no sound in a conversation")


def input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as the API takes them."""
    try:
        return parse_arguments(arguments)
    except InvalidArguments:
        return {UNREADABLE: arguments}


def usage_of(usage: Any) -> InvocationUsage | None:
    """The tokens of an answer. What was written to the provider's cache or read from it was input as well."""
    if not isinstance(usage, dict):
        return None
    told = cast("dict[str, Any]", usage)
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    taken = sum(cast("int", told.get(name) or 0) for name in names)
    made: int = told.get("output_tokens") or 0
    return InvocationUsage(input_tokens=taken, output_tokens=made, total_tokens=taken + made)


def answer_of(message: dict[str, Any], caller: Caller, texts: dict[int, str] | None = None) -> ModelInvocationResponse:
    """The answer in a whole message.

    Args:
        texts: by the place of its block, the text of a call's input as it was streamed.

    Raises:
        ModelRefused: the model refused, or stopped in a way that this port cannot go on from.
        AnswerLost: there is nothing in it that could be read.
    """
    texts = texts or {}
    reason: Any = message.get("stop_reason")
    try:
        blocks = cast("list[dict[str, Any]]", message["content"])
        spoken = [block["text"] for block in blocks if block["type"] == "text"]
        calls = [
            (place, block["id"], block["name"], block["input"])
            for place, block in enumerate(blocks)
            if block["type"] == "tool_use"
        ]
    except (KeyError, TypeError) as e:
        raise caller.unreadable(f"it is no message ({type(e).__name__}: {e})") from None
    if reason == "refusal":
        raise ModelRefused(caller.provider, "Model refused", code="refusal")
    if reason is None:
        raise caller.unreadable("it does not say why it stopped")
    if reason not in _FINISHES:
        # `pause_turn`: a tool of the provider's own wants another request, which no log would know of.
        raise ModelRefused(
            caller.provider, f"it stopped for {reason!r}, which this port does not go on from", code=reason
        )
    requests = [
        ModelToolRequest(
            id=call_id,
            name=name,
            arguments=texts.get(place, given),
            metadata={"argumentsText": texts[place]} if place in texts else None,
        )
        for place, call_id, name, given in calls
    ]
    said = Message(
        role=Role.ASSISTANT,
        parts=[TextPart(value=text) for text in spoken if text],
        metadata={KEPT: {"content": blocks}} if blocks else {},
    )
    told = {"finishReason": _FINISHES[reason], "responseId": message.get("id"), "model": message.get("model")}
    return ModelInvocationResponse(
        output=None if requests else "".join(spoken),
        usage=usage_of(message.get("usage")),
        assistant_messages=[said],
        tool_requests=requests,
        metadata={name: value for name, value in told.items() if value is not None},
    )


class MessageStream:
    """Takes a stream's events one by one; at its end there is a message as it comes without a stream.

    Attributes:
        message: as far as it is known.
        ended: whether the provider has said that it is over.
        texts: by the place of its block, the text of a call's input.
    """

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.ended = False
        self.texts: dict[int, str] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    def feed(self, event: dict[str, Any]) -> None:
        """Take the next event."""
        match event.get("type"):
            case "message_start":
                self.message = event["message"]
            case "content_block_start":
                self._blocks[event["index"]] = event["content_block"]
            case "content_block_delta":
                self._grow(event["index"], event["delta"])
            case "message_delta":
                self.message |= event["delta"]
                usage: dict[str, Any] = event.get("usage") or {}
                counted = {name: value for name, value in usage.items() if value is not None}
                self.message["usage"] = {**(self.message.get("usage") or {}), **counted}
            case "message_stop":
                self.ended = True
                places = sorted(self._blocks)
                self.message["content"] = [self._block(index) for index in places]
                self.texts = {place: self.texts[at] for place, at in enumerate(places) if at in self.texts}
            case _:
                pass

    def _grow(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks[index]
        if delta["type"] == "input_json_delta":
            self.texts[index] = self.texts.get(index, "") + delta["partial_json"]
        elif delta["type"] == "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta["citation"]]
        else:
            # Text, thinking, a signature, and whatever comes of that kind: a piece of the block's field of the same name.
            for name, piece in delta.items():
                if name != "type":
                    have = block.get(name)
                    block[name] = have + piece if isinstance(have, str) and isinstance(piece, str) else piece

    def _block(self, index: int) -> dict[str, Any]:
        block = self._blocks[index]
        return {**block, "input": input_of(self.texts[index])} if index in self.texts else block
