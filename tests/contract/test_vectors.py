"""The shared conformance vectors that are about data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.contract.material import vectors
from turnkeeper.engine import wire
from turnkeeper.engine.documents import from_json, from_tree, from_yaml, to_json, to_tree, to_yaml
from turnkeeper.engine.wire import (
    ContentPart,
    EngineCheckpoint,
    InvocationContextState,
    Message,
    ModelToolRequest,
    TextPart,
)
from turnkeeper.errors import InvalidInput


def test_content_part_discriminators() -> None:
    """1.3: the kinds of a part are a closed, case-sensitive set."""
    cases = vectors("content_part_discriminator_vectors.json")
    assert len(cases) == 3
    for case in cases:
        if case["operation"] == "load":
            loaded = from_tree(ContentPart, case["input"], strict=True).value
            assert to_tree(loaded) == case["expected"]
            continue
        assert case["expected"]["error"] == "unknown-discriminator"
        with pytest.raises(InvalidInput) as caught:
            from_tree(ContentPart, case["input"])
        assert caught.value.field == case["expected"]["discriminator"]
        assert case["expected"]["value"] in caught.value.reason


def test_records_keep_their_nulls() -> None:
    """1.1: null inside an open record survives, at any depth. The types of the older harness family are not ours (1.18)."""
    cases = [case for case in vectors("record_unknown_nullability_vectors.json") if hasattr(wire, case["model"])]
    assert [case["model"] for case in cases] == ["Message"]
    for case in cases:
        kind: type[msgspec.Struct] = getattr(wire, case["model"])
        value = from_tree(kind, case["input"], strict=True).value
        for saved in (value, from_json(kind, to_json(value)).value, from_yaml(kind, to_yaml(value)).value):
            assert to_tree(saved) == case["input"]
            assert to_tree(saved)[case["fieldPath"]] == case["expected"]


def open_record() -> Any:
    """The record with nulls in it that the vectors use everywhere."""
    return vectors("record_unknown_nullability_vectors.json")[0]["expected"]


def test_every_open_field_of_a_checkpoint_keeps_its_nulls() -> None:
    """The same record in each open field of our own types, where the vectors name types of the harness family."""
    record = open_record()
    request = ModelToolRequest(id="a", name="echo", arguments=record, metadata=record)
    checkpoint = EngineCheckpoint(
        context_state=InvocationContextState(),
        messages=[Message(parts=[TextPart(value="hi")], metadata=record)],
        inputs=record,
        pending_tool_requests=[request],
        pending_output=record,
        metadata=record,
    )
    tree = to_tree(checkpoint)
    for field in (tree["inputs"], tree["pendingOutput"], tree["metadata"], tree["messages"][0]["metadata"]):
        assert field == record
    assert tree["pendingToolRequests"][0] == {"id": "a", "name": "echo", "arguments": record, "metadata": record}
    assert from_json(EngineCheckpoint, to_json(checkpoint)).value == checkpoint
    assert from_yaml(EngineCheckpoint, to_yaml(checkpoint)).value == checkpoint
