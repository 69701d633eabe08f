"""What a model streams, and how a stream fails (engine-contract.md 1.17)."""

from __future__ import annotations

from enum import Enum

from turnkeeper.engine.wire.base import Wire
from turnkeeper.engine.wire.invocation import InvocationUsage


class FailureOutcome(str, Enum):
    """Whether a failed stream surely brought no answer (a refusal), or nobody can tell (a cut connection)."""

    DETERMINATE = "determinate"
    INDETERMINATE = "indeterminate"


class StreamFailure(Wire, frozen=True, kw_only=True):
    """Why a stream ended without an answer."""

    outcome: FailureOutcome
    message: str


class ToolCall(Wire, frozen=True, kw_only=True):
    """A tool call as it is streamed: `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Chunk(Wire, frozen=True, tag_field="kind"):
    """Base of the chunks of a stream; `kind` tells which."""


class TextChunk(Chunk, frozen=True, tag="text"):
    """A piece of the answer."""

    value: str


class ThinkingChunk(Chunk, frozen=True, tag="thinking"):
    """A piece of the model's reasoning."""

    value: str


class ToolChunk(Chunk, frozen=True, tag="tool"):
    """A tool call."""

    tool_call: ToolCall


class UsageChunk(Chunk, frozen=True, tag="usage"):
    """The tokens used so far."""

    usage: InvocationUsage


class ErrorChunk(Chunk, frozen=True, tag="error"):
    """Something went wrong, said in words."""

    message: str


class FailureChunk(Chunk, frozen=True, tag="failure"):
    """The stream failed."""

    failure: StreamFailure


StreamChunk = TextChunk | ThinkingChunk | ToolChunk | UsageChunk | ErrorChunk | FailureChunk
