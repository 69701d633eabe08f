"""What begins a turn: its canonical input, with who runs it and within which bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from turnkeeper.engine.identity import MAX_ITERATIONS, MAX_MODEL_ATTEMPTS, RunIdentity
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.engine.wire import Message, Role, TextPart, chat_form, message_from, to_builtins
from turnkeeper.errors import InvalidInput
from turnkeeper.log import values
from turnkeeper.log.keeping import Keeping
from turnkeeper.turn import commands as c
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.identity import input_fingerprint, kept_labels


def bounded_by(agent: Agent, identity: RunIdentity) -> RunIdentity:
    """The identity with the bounds of the agent that begins the turn."""
    return replace(
        identity,
        max_iterations=MAX_ITERATIONS if agent.max_rounds is None else agent.max_rounds,
        max_model_attempts=MAX_MODEL_ATTEMPTS if agent.max_model_attempts is None else agent.max_model_attempts,
    )


def _redacted(keeping: Keeping, message: Message, field: str) -> Message:
    """A message with its texts redacted. Parts of other kinds, and metadata, are the host's and stay."""
    parts = [
        replace(part, value=keeping.redacted("input", part.value, f"{field}.parts[{index}]"))
        if isinstance(part, TextPart)
        else part
        for index, part in enumerate(message.parts)
    ]
    return replace(message, parts=parts)


def start_of(
    turn: TurnHandle,
    agent: Agent,
    messages: Sequence[Any],
    *,
    identity: RunIdentity,
    runtime: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    proof_deadline_ms: int = 0,
) -> c.Start:
    """What starts a turn. See `run_turn`.

    Raises:
        InvalidInput: a message has no known form, or a call without its result; or it could not be redacted.
        ValueTooLarge: the messages are over the limit of transcripts.
    """
    keeping = turn.keeping
    canonical = [message_from(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if keeping.redact is not None:
        canonical = [_redacted(keeping, message, f"messages[{index}]") for index, message in enumerate(canonical)]
    if not canonical:
        raise InvalidInput("messages", "must not be empty")
    if agent.instructions is not None:
        canonical.insert(0, Message(role=Role.SYSTEM, parts=[TextPart(value=agent.instructions)]))
    check_pairs(canonical)
    runtime = {} if runtime is None else runtime
    return c.Start(
        turn.trace_id,
        turn.scope,
        values.freeze([to_builtins(message) for message in canonical], "messages", limit=keeping.limits.transcript),
        values.freeze([tool.name for tool in agent.tools], "tool_names"),
        values.freeze(runtime, "runtime"),
        # Of the chat form, so that a turn that was started by hand with the same message is the same turn.
        input_fingerprint([chat_form(message) for message in canonical], runtime),
        proof_deadline_ms,
        kept_labels(labels),
        identity.frame(),
    )
