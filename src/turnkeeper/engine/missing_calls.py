"""Imported conversations that hold tool results without their calls: the calls are put back where the checkpoint knows them.

An engine that only appends what its model says has no `tool_calls` in the assistant's message where the model gives none, and no
assistant message at all where it says nothing. Providers refuse such a conversation. What a call was is known by its result: the
id stands in the tool message, the name in the result, and the arguments where somebody has kept them beside either. A call whose
arguments nobody has is not made up: the model would be shown that it asked for something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from turnkeeper.engine.transcript import result_text
from turnkeeper.engine.wire import EngineCheckpoint, Message, ModelToolResult, Role
from turnkeeper.errors import InvalidInput


def with_their_calls(checkpoint: EngineCheckpoint, committed: Sequence[ModelToolResult]) -> EngineCheckpoint:
    """The checkpoint with a conversation in which each block of tool results has its calls before it.

    Args:
        checkpoint: as another engine wrote it.
        committed: its results that stand in the conversation already.

    Raises:
        InvalidInput: a call is missing, and the checkpoint does not know it; names the message and what is missing.
    """
    messages: list[Message] = []
    prefix = checkpoint.stable_prefix_messages
    results = _results_of(checkpoint.messages, committed)
    for index, message in enumerate(checkpoint.messages):
        before = checkpoint.messages[index - 1] if index else None
        first_of_block = message.role is Role.TOOL and (before is None or before.role is not Role.TOOL)
        if first_of_block and not _has_calls(before):
            calls = [_call(checkpoint.messages, at, results) for at in _block(checkpoint.messages, index)]
            if before is not None and before.role is Role.ASSISTANT:
                messages[-1] = replace(before, metadata={**before.metadata, "tool_calls": calls})
            else:
                # Nobody has been shown this message, so no provider can have it in its cache.
                prefix = min(prefix, len(messages))
                messages.append(Message(role=Role.ASSISTANT, metadata={"tool_calls": calls}))
        messages.append(message)
    return replace(checkpoint, messages=messages, stable_prefix_messages=prefix)


def _has_calls(message: Message | None) -> bool:
    return message is not None and message.role is Role.ASSISTANT and bool(message.metadata.get("tool_calls"))


def _block(messages: Sequence[Message], first: int) -> range:
    end = first
    while end < len(messages) and messages[end].role is Role.TOOL:
        end += 1
    return range(first, end)


def _results_of(messages: Sequence[Message], committed: Sequence[ModelToolResult]) -> dict[int, ModelToolResult]:
    """The results behind the tool messages, by the messages' index: ids repeat over rounds, so both are read from the end."""
    left, found = list(committed), dict[int, ModelToolResult]()
    for index in range(len(messages) - 1, -1, -1):
        given = messages[index].metadata.get("tool_call_id")
        at = next((i for i in range(len(left) - 1, -1, -1) if left[i].request_id == given), None)
        if messages[index].role is Role.TOOL and at is not None:
            found[index] = left.pop(at)
    return found


def _call(messages: Sequence[Message], index: int, results: dict[int, ModelToolResult]) -> dict[str, Any]:
    message, result, where = messages[index], results.get(index), f"messages[{index}].metadata"
    call_id: Any = message.metadata.get("tool_call_id")
    if not isinstance(call_id, str):
        raise InvalidInput(f"{where}.tool_call_id", "is missing: it is not known which call this is the result of")
    name: Any = message.metadata.get("name") or (None if result is None else result.name)
    if not isinstance(name, str) or not name:
        reason = f"is missing: the call {call_id!r} stands nowhere before its result, and no result tells its tool"
        raise InvalidInput(f"{where}.name", reason)
    kept = {**((result and result.metadata) or {}), **message.metadata}
    text: Any = kept.get("argumentsText")
    if not isinstance(text, str):
        if "arguments" not in kept:
            reason = (
                f"is missing: the call {call_id!r} of {name} stands nowhere before its result, nor do its arguments"
            )
            raise InvalidInput(f"{where}.argumentsText", reason)
        text = result_text(kept["arguments"])
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
