"""Generated wire values: every type of the contract, with open fields of any JSON and text of any kind."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as shapes
from hypothesis import strategies as st

from turnkeeper.engine import wire
from turnkeeper.engine.wire.base import fields_of

T = TypeVar("T", bound=msgspec.Struct)

# Half a surrogate pair is the one text that is not kept (`log.values`).
TRAPS = (
    *("no", "on", "~", "null", "true", "Off", "1e3", "08", "010", "0o7", "0x1F", "1_000", "12:30:00", "2026-07-01"),
    *(".5", "1.", ".inf", ".nan", "+1", "-.5e3", "<<", "=", "- a", "a: b", "# a", "&a", "*a", "!a", "%a"),
    *(" a\n b ", "\n", "\x85", "\u2028", "\ufeff", "\x00", "\x7f", "\U0001f600"),
)
"""Text that YAML could take for something else, or change."""
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(TRAPS)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=4
)

ALL_TYPES: list[type[msgspec.Struct]] = [
    wire.ContextCandidate,
    wire.ContextRequest,
    wire.EngineCheckpoint,
    wire.EngineEvent,
    wire.EnginePermissionDecision,
    wire.FinalOutputPolicyRequest,
    wire.FinalOutputPolicyResult,
    wire.HostPolicyRequest,
    wire.HostPolicyResult,
    wire.InvocationContextState,
    wire.InvocationUsage,
    wire.Message,
    wire.ModelInvocationContextSnapshot,
    wire.ModelInvocationRequest,
    wire.ModelInvocationResponse,
    wire.ModelReconciliationState,
    wire.ModelToolRequest,
    wire.ModelToolResult,
    wire.ResumeContext,
    wire.RetryPolicyRequest,
    wire.StreamFailure,
    wire.TurnCommit,
    wire.TurnEngineResult,
    wire.TextChunk,
    wire.ThinkingChunk,
    wire.ToolChunk,
    wire.UsageChunk,
    wire.ErrorChunk,
    wire.FailureChunk,
]


@cache
def wire_values(kind: type[T]) -> st.SearchStrategy[T]:
    """Values of a wire type, of any that its fields allow."""
    strategies = {field.name: _of(field.type) for field in fields_of(kind).values()}
    if kind is wire.ModelToolRequest:
        strategies["id"] = TEXT  # None is for providers, not for documents
    return st.builds(kind, **strategies)


def _of(shape: shapes.Type) -> st.SearchStrategy[Any]:
    match shape:
        case shapes.StrType():
            return TEXT
        case shapes.BoolType():
            return st.booleans()
        case shapes.IntType():
            return st.integers(shape.ge, shape.le)
        case shapes.EnumType():
            return st.sampled_from(list(shape.cls))
        case shapes.ListType():
            return st.lists(_of(shape.item_type), max_size=2)
        case shapes.UnionType():
            return st.one_of([_of(member) for member in shape.types])
        case shapes.NoneType():
            return st.none()
        case shapes.DictType():
            return st.dictionaries(TEXT, JSON, max_size=2)
        case shapes.AnyType():
            return JSON
        case shapes.StructType():
            return wire_values(shape.cls)
        case _:
            raise AssertionError(f"no strategy for {shape}")
