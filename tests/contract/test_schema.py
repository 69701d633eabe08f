"""The exported JSON Schema describes what is written."""

from __future__ import annotations

import copy
from types import UnionType
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.generated import ALL_TYPES, wire_values
from tests.contract.material import traced_checkpoints, traced_events
from turnkeeper.engine.documents import to_tree
from turnkeeper.engine.schema import json_schema
from turnkeeper.engine.wire import ContentPart, EngineCheckpoint, EngineEvent, EngineEventKind, StreamChunk


def validator_of(kind: type[msgspec.Struct] | UnionType) -> Any:
    """A validator of the exported schema, which is one itself."""
    schema = json_schema(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_what_is_written_is_valid(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    """Every document that we write, of every type."""
    validator_of(kind).validate(to_tree(data.draw(wire_values(kind))))


def test_the_traces_are_valid() -> None:
    """Another engine's documents."""
    for kind, trees in ((EngineCheckpoint, traced_checkpoints()), (EngineEvent, traced_events())):
        validator = validator_of(kind)
        for tree in trees:
            validator.validate(tree)


def test_integers_are_integers_and_required_is_as_the_contract_says() -> None:
    """5.1 row 11: int64 is no string here. 1.2: the required fields of a checkpoint."""
    schema = json_schema(EngineCheckpoint)["$defs"]["EngineCheckpoint"]
    assert schema["properties"]["lastSequence"]["type"] == "integer"
    assert schema["properties"]["parentRunId"] == {"type": "string"}
    assert schema["required"] == [
        *("id", "sessionId", "turnId", "runId", "delegationDepth", "iteration", "lastSequence", "messages"),
        *("stablePrefixMessages", "completedModelIterations", "reconciliationRequired", "finalOutputReady"),
        *("resumeSameIteration", "policyAppliedForIteration", "contextState"),
    ]
    assert json_schema(EngineEvent)["$defs"]["EngineEventKind"]["enum"] == sorted(
        kind.value for kind in EngineEventKind
    )
    assert len(EngineEventKind) == 23


def test_null_and_missing_are_not_valid() -> None:
    """1.1: an optional field is absent, never null."""
    validator = validator_of(EngineCheckpoint)
    tree = next(traced_checkpoints())
    for name, value in (("modelReconciliation", None), ("parentRunId", None), ("lastSequence", "12")):
        assert not validator.is_valid({**copy.deepcopy(tree), name: value})
    del tree["contextState"]
    assert not validator.is_valid(tree)


def test_unions_have_a_schema() -> None:
    """`kind` tells the members apart."""
    part = validator_of(ContentPart)
    assert part.is_valid({"kind": "text", "value": "hi"})
    assert not part.is_valid({"kind": "video", "source": "x"})
    chunk = validator_of(StreamChunk)
    assert chunk.is_valid({"kind": "failure", "failure": {"outcome": "determinate", "message": "refused"}})
