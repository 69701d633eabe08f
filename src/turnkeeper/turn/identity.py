"""Identities of a turn: its key, its slots' operation ids, and fingerprints of what must stay the same."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any, Final, cast

import msgspec

from turnkeeper.errors import InvalidInput
from turnkeeper.log import values

_VERSION: Final = 1


class ToolCall(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One tool call of a reserved decision: what a claim of its slot must match.

    `provider_call_id` is kept as the provider gave it, also empty, repeated or None; nothing is keyed by it (field case 02).
    """

    provider_call_id: str | None
    tool_name: str
    arguments_fingerprint: str


class ProviderReference(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a provider calls something that it holds: a model call can be asked for by it, after whoever made it has died."""

    provider: str
    kind: str
    id: str


def _digest(*parts: str | int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode()
        digest.update(b"%d:%s" % (len(text), text))
    return digest.hexdigest()


@lru_cache(1024, typed=True)  # asked for with every command on a slot
def trace_hash(trace_id: str) -> str:
    """A short form of a trace id, of fixed length and without characters that mean something to a store (T1.2)."""
    return _digest("trace", trace_id)


def turn_key(trace: str, scope: str) -> str:
    """The key of a turn's log. The braces keep a trace's keys in one slot of a Redis Cluster (T1.2)."""
    return f"turn:{{{trace}}}:{scope}"


@lru_cache(1024, typed=True)  # asked for by who claims, by the rules, and for the answer
def operation_id(trace: str, scope: str, round_index: int, slot_index: int) -> str:
    """The slot's idempotency key: from trace, scope, round and slot alone (T3)."""
    return "op_" + _digest("op", _VERSION, trace, scope, round_index, slot_index)


def derived_id(kind: str, trace_id: str, scope: str, *place: int) -> str:
    """An id of that kind for a place in a turn: the same whenever and wherever it is asked for, and no other turn's."""
    return f"{kind}_" + _digest(kind, _VERSION, trace_hash(trace_id), scope, *place)


def invocation_id(trace: str, scope: str, round_index: int, attempt: int) -> str:
    """The idempotency key of one attempt at a round's model call."""
    return "inv_" + _digest("invocation", _VERSION, trace, scope, round_index, attempt)


def reply_key(trace: str, scope: str) -> str:
    """The key under which a turn's reply is sent, the same on every attempt."""
    return "reply_" + _digest("reply", _VERSION, trace, scope)


def input_fingerprint(messages: list[Any], runtime: dict[str, Any]) -> str:
    """What makes two starts the same turn: the inbound message, not the prompt assembled around it (T2).

    Taken over `runtime["inbound"]` where the host gives it, else over the user messages behind the last assistant message.
    """
    if "inbound" in runtime:
        return values.fingerprint(["inbound", runtime["inbound"]], "runtime.inbound")
    behind: list[Any] = []
    for message in reversed(messages):
        role: Any = cast("dict[str, Any]", message).get("role") if isinstance(message, dict) else None
        if role == "assistant":
            break
        if role == "user":
            behind.append(message)
    return values.fingerprint(["messages", behind], "messages")


def kept_call_id(provider_call_id: str | None) -> str | None:
    """A provider's call id as the log keeps it."""
    return None if provider_call_id is None else values.text(provider_call_id, "provider_call_id")


def kept_labels(labels: dict[str, str] | None) -> dict[str, str]:
    """A turn's labels as its log and its head keep them.

    Raises:
        InvalidInput: a name or a value is no text.
    """
    return {values.text(name, "labels"): values.text(value, f"labels.{name}") for name, value in (labels or {}).items()}


def _field(call: dict[str, Any], name: str) -> Any:
    """A field of a tool call that has it flat, or nested under `function` as in OpenAI's chat form."""
    if name in call:
        return call[name]
    function = call.get("function")
    return cast("dict[str, Any]", function).get(name) if isinstance(function, dict) else None


def raw_calls(response: dict[str, Any]) -> list[tuple[str | None, str, Any]]:
    """The tool calls of a decision: (provider's call id, tool name, raw arguments), in order.

    Forms known: `toolRequests` (the engine's wire form) and `tool_calls` (OpenAI's, nested or flat), each a list of
    objects, and Anthropic's `content` blocks of type `tool_use`.

    Raises:
        InvalidInput: a call has no name, or is no object.
    """
    name = next((n for n in ("toolRequests", "tool_calls") if response.get(n)), "content")
    listed: Any = response.get(name)
    if name == "content":
        blocks = cast("list[Any]", listed) if isinstance(listed, list) else []
        listed = [b for b in blocks if isinstance(b, dict) and cast("dict[str, Any]", b).get("type") == "tool_use"]
    if not isinstance(listed, list):
        raise InvalidInput(f"response.{name}", "must be a list of tool calls")
    calls: list[tuple[str | None, str, Any]] = []
    for index, call in enumerate(cast("list[Any]", listed)):
        where = f"response.{name}[{index}]"
        if not isinstance(call, dict):
            raise InvalidInput(where, "must be an object")
        fields = cast("dict[str, Any]", call)
        call_id: Any = fields.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise InvalidInput(f"{where}.id", "must be text or null")
        call_id = kept_call_id(call_id)
        arguments = fields.get("input") if name == "content" else _field(fields, "arguments")
        calls.append((call_id, values.identifier(_field(fields, "name"), f"{where}.name"), arguments))
    return calls


def arguments_fingerprint(arguments: Any, field: str) -> str:
    """What makes two calls of a tool the same: its arguments as an object, however the model has spaced or ordered their text.

    Text that is no JSON object stands for itself.
    """
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
            if isinstance(parsed, dict):
                return values.fingerprint(parsed, field)
        except (ValueError, RecursionError, InvalidInput):  # no JSON, or an object that cannot be kept
            pass
    return values.fingerprint(arguments, field)


def tool_calls(response: dict[str, Any]) -> tuple[ToolCall, ...]:
    """The tool calls of a decision as the log keeps them. See `raw_calls`."""
    return tuple(
        ToolCall(call_id, name, arguments_fingerprint(arguments, f"arguments of {name}"))
        for call_id, name, arguments in raw_calls(response)
    )
