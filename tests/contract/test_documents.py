"""How documents are read and written: the rules of 1.1, and the odd documents of 1.19."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from turnkeeper.engine.documents import from_json, from_tree, from_yaml, to_json, to_tree, to_yaml
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    EngineEvent,
    InvocationContextState,
    Message,
    ModelInvocationRequest,
    ModelReconciliationState,
    ModelToolRequest,
    Outcome,
    ResumeContext,
    Role,
    StreamChunk,
    TextPart,
    TurnCommit,
    TurnEngineResult,
)
from turnkeeper.errors import InvalidInput, ValueTooLarge
from turnkeeper.log.values import MAX_DEPTH

SMALLEST: dict[str, Any] = {"contextState": {}}
RESULT: dict[str, Any] = {"requestId": "a", "name": "echo", "outcome": "success"}
EVENT: dict[str, Any] = {
    "sequence": 1,
    "id": "e",
    "timestamp": "2026-07-01T00:00:00Z",
    "sessionId": "s",
    "turnId": "t",
    "runId": "r",
    "kind": "turn_started",
}


def checkpoint(**fields: Any) -> EngineCheckpoint:
    """A checkpoint from a document that has these fields beside the smallest."""
    return from_tree(EngineCheckpoint, {**SMALLEST, **fields}, strict=True).value


def refused(kind: type[msgspec.Struct], tree: Any, *, strict: bool = False) -> InvalidInput:
    """Why a document is refused."""
    with pytest.raises(InvalidInput) as caught:
        from_tree(kind, tree, strict=strict)
    return caught.value


# --- 1.1 -----------------------------------------------------------------------------------------------------


def test_the_smallest_document_and_what_is_written_of_it() -> None:
    """1.2: required scalars are written at their defaults too; optional fields are absent."""
    assert to_tree(checkpoint()) == {
        "id": "",
        "sessionId": "",
        "turnId": "",
        "runId": "",
        "delegationDepth": 0,
        "iteration": 0,
        "lastSequence": 0,
        "messages": [],
        "stablePrefixMessages": 0,
        "pendingToolRequests": [],
        "completedToolResults": [],
        "completedModelIterations": 0,
        "reconciliationRequired": False,
        "finalOutputReady": False,
        "resumeSameIteration": False,
        "policyAppliedForIteration": False,
        "contextState": {"portability": "portable", "delegatedState": []},
    }


def test_absent_and_empty_lists_mean_the_same() -> None:
    """1.1: as do null and absent in an optional field."""
    empty = checkpoint(pendingToolRequests=[], completedToolResults=[], contextState={"delegatedState": []})
    null = checkpoint(pendingToolRequests=None, completedToolResults=None, contextState={"delegatedState": None})
    assert checkpoint() == empty == null


def test_metadata_of_a_message_is_always_written() -> None:
    """1.1: the one record that is always there."""
    assert to_tree(Message()) == {"role": "user", "parts": [], "metadata": {}}
    assert from_tree(Message, {}).value == Message()


def test_names_and_enums_are_those_of_the_wire() -> None:
    """1.1: camelCase names; lower snake_case, case-sensitive enums."""
    assert refused(EngineCheckpoint, {**SMALLEST, "run_id": "r"}, strict=True).field == "run_id"
    assert refused(Message, {"role": "User"}).field == "role"


# --- 1.19 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tree", "field"),
    [
        (EngineCheckpoint, {}, "contextState"),
        (EngineCheckpoint, {"contextState": None}, "contextState"),
        (ModelInvocationRequest, {}, "context"),
        (ModelReconciliationState, {"invocationId": "i", "failedAttempt": 0, "message": "m"}, "request"),
        (
            ModelReconciliationState,
            {"invocationId": "i", "failedAttempt": 0, "message": "m", "request": None},
            "request",
        ),
        (TurnEngineResult, {}, "commit"),
        (ResumeContext, {"checkpoint": {}, "maxIterations": 1, "maxModelAttempts": 1}, "checkpoint.contextState"),
        (
            TurnCommit,
            {"sessionId": "s", "turnId": "t", "status": "success", "messages": [], "iterations": 0, "lastSequence": 0},
            "contextState",
        ),
    ],
)
def test_what_every_reader_demands(kind: type[msgspec.Struct], tree: Any, field: str) -> None:
    """Row 1, and the other required objects of 1.5, 1.8, 1.9 and 1.12."""
    assert refused(kind, tree).field == field


@pytest.mark.parametrize("name", ["modelReconciliation", "pendingToolRequests", "inputs", "parentRunId", "metadata"])
def test_null_in_an_optional_field_is_absent(name: str) -> None:
    """Row 2: read as absent, and never written."""
    loaded = checkpoint(**{name: None})
    assert loaded == checkpoint()
    assert None not in to_tree(loaded).values()


@pytest.mark.parametrize("name", ["lastSequence", "messages", "finalOutputReady", "id"])
def test_null_in_a_required_field_is_refused(name: str) -> None:
    """Only an optional field may be absent."""
    assert refused(EngineCheckpoint, {**SMALLEST, name: None}).field == name


def test_int64_may_be_a_numeric_string_and_is_written_as_a_number() -> None:
    """Row 3."""
    assert checkpoint(lastSequence="12").last_sequence == 12
    assert checkpoint(lastSequence=str(-(2**63))).last_sequence == -(2**63)
    assert to_tree(checkpoint(lastSequence="12"))["lastSequence"] == 12
    assert from_tree(EngineEvent, {**EVENT, "sequence": "7"}).value.sequence == 7
    for text in ("", " 12", "1.0", "0x1", "012", "1e3", "9223372036854775808", "\u0661"):
        assert refused(EngineCheckpoint, {**SMALLEST, "lastSequence": text}).field == "lastSequence"
    assert refused(EngineCheckpoint, {**SMALLEST, "iteration": "12"}).field == "iteration", "an int32"


@pytest.mark.parametrize(
    ("kind", "tree", "field"),
    [
        (
            EngineCheckpoint,
            {**SMALLEST, "completedToolResults": [{**RESULT, "outcome": "ok"}]},
            "completedToolResults[0].outcome",
        ),
        (
            EngineCheckpoint,
            {**SMALLEST, "completedToolResults": [RESULT, {"requestId": "a", "name": "b"}]},
            "completedToolResults[1].outcome",
        ),
        (EngineCheckpoint, {"contextState": {"portability": "Portable"}}, "contextState.portability"),
        (EngineCheckpoint, {**SMALLEST, "messages": [{"role": "bot"}]}, "messages[0].role"),
        (EngineEvent, {**EVENT, "kind": "turn_paused"}, "kind"),
        (TurnCommit, {**SMALLEST, "status": "ok"}, "status"),
        (
            EngineCheckpoint,
            {**SMALLEST, "messages": [{}, {"parts": [{"kind": "Text", "value": ""}]}]},
            "messages[1].parts[0].kind",
        ),
        (EngineCheckpoint, {**SMALLEST, "messages": [{"parts": [{"value": ""}]}]}, "messages[0].parts[0].kind"),
        (EngineCheckpoint, {**SMALLEST, "messages": [{"parts": [{"kind": "text"}]}]}, "messages[0].parts[0].value"),
    ],
)
def test_enums_outcomes_and_kinds_are_strict(kind: type[msgspec.Struct], tree: Any, field: str) -> None:
    """Rows 4 to 6: what other readers take for something else is refused, with its path."""
    assert refused(kind, tree).field == field


def test_unknown_fields_are_kept_in_sight_or_refused() -> None:
    """Row 7: never dropped without a trace."""
    tree = {**SMALLEST, "version": 2, "messages": [{"parts": [{"kind": "text", "value": "hi", "lang": {"a": None}}]}]}
    loaded = from_tree(EngineCheckpoint, tree)
    assert loaded.unknown == {"version": 2, "messages[0].parts[0].lang": {"a": None}}
    assert loaded.value.messages[0].text == "hi"
    assert refused(EngineCheckpoint, tree, strict=True).field == "version"


def test_a_list_given_as_an_object_is_refused() -> None:
    """Row 8."""
    assert refused(EngineCheckpoint, {**SMALLEST, "pendingToolRequests": {"echo": {}}}).field == "pendingToolRequests"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", 1.0),
        ("iteration", True),
        ("iteration", 2**31),
        ("finalOutputReady", 1),
        ("id", 7),
        ("metadata", []),
    ],
)
def test_wrong_types_are_refused(name: str, value: Any) -> None:
    """Nothing is converted on the way."""
    assert refused(EngineCheckpoint, {**SMALLEST, name: value}).field == name


def test_a_document_that_is_no_object_names_its_type() -> None:
    """Where there is no path yet."""
    trees: list[Any] = [None, [], "x", 1]
    for tree in trees:
        assert refused(EngineCheckpoint, tree).field == "EngineCheckpoint"


# --- texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"contextState": {}, "contextState": {}}', "twice"),
        ('{"contextState": {}, "inputs": NaN}', "NaN"),
        ('{"contextState": {}, "inputs": -Infinity}', "Infinity"),
        ('{"contextState": {}, "inputs": 1e999}', "larger"),
        ('{"contextState": {}', "no JSON"),
        ('{"contextState": {}} {}', "no JSON"),
        (b'{"contextState": {}, "id": "\xff"}', "UTF-8"),
        ("", "no JSON"),
        ("[" * 200_000, "deeper"),
        (f'{{"inputs": {"9" * 5000}}}', "no JSON"),
    ],
)
def test_text_that_is_no_such_json(text: str | bytes, reason: str) -> None:
    """Duplicate keys, numbers that JSON has not, damage, and towers."""
    with pytest.raises(InvalidInput, match=reason) as caught:
        from_json(EngineCheckpoint, text)
    assert caught.value.field == "EngineCheckpoint"


def test_depth_is_bounded_in_every_form() -> None:
    """The same bound as for all that is kept."""
    deep: Any = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    tree = {**SMALLEST, "inputs": deep}
    for load in (
        lambda: from_tree(EngineCheckpoint, tree),
        lambda: from_json(EngineCheckpoint, json.dumps(tree)),
        lambda: from_yaml(EngineCheckpoint, json.dumps(tree)),
        lambda: to_tree(EngineCheckpoint(context_state=InvocationContextState(), inputs=deep)),
    ):
        with pytest.raises(InvalidInput, match="deeper") as caught:
            load()
        assert caught.value.field.startswith("inputs[0]")


def test_size_is_bounded_both_ways() -> None:
    """In bytes, not in characters."""
    value = EngineCheckpoint(context_state=InvocationContextState(), inputs="\u20ac" * 400)
    for text, load, dump in ((to_json(value), from_json, to_json), (to_yaml(value), from_yaml, to_yaml)):
        size = len(text.encode())
        assert load(EngineCheckpoint, text, max_bytes=size).value == value
        with pytest.raises(ValueTooLarge) as caught:
            load(EngineCheckpoint, text, max_bytes=size - 1)
        assert (caught.value.size, caught.value.limit) == (size, size - 1)
        with pytest.raises(ValueTooLarge):
            dump(value, max_bytes=size - 1)


def test_bytes_and_a_byte_order_mark_are_read() -> None:
    """Files of other systems begin with one."""
    assert from_json(EngineCheckpoint, b'\xef\xbb\xbf{"contextState": {}}').value == checkpoint()
    assert from_yaml(EngineCheckpoint, b"\xef\xbb\xbfcontextState: {}").value == checkpoint()


# --- writing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"iteration": "1"}, "iteration"),
        ({"messages": [Message(role="bot")]}, "messages[0].role"),  # pyright: ignore[reportArgumentType]
        ({"pending_tool_requests": [ModelToolRequest(id=None, name="echo")]}, "pendingToolRequests[0].id"),
        ({"inputs": {"at": dt.datetime(2026, 7, 1, tzinfo=dt.UTC)}}, "inputs.at"),
        ({"inputs": [b"raw"]}, "inputs[0]"),
        ({"inputs": {"a": {1, 2}}}, "inputs.a"),
        ({"inputs": float("nan")}, "inputs"),
        ({"metadata": {1: 2}}, "metadata"),
        ({"pending_output": Outcome.SUCCESS}, "pendingOutput"),
    ],
)
def test_what_is_built_wrongly_is_not_written(fields: dict[str, Any], field: str) -> None:
    """Field case 11: refused with its path, never converted into something that comes back as something else."""
    with pytest.raises(InvalidInput) as caught:
        to_tree(EngineCheckpoint(context_state=InvocationContextState(), **fields))
    assert caught.value.field == field


def test_a_tree_shares_nothing_with_its_value() -> None:
    """Field case 10, both ways."""
    inputs: dict[str, Any] = {"a": [1]}
    value = EngineCheckpoint(context_state=InvocationContextState(), inputs=inputs)
    tree = to_tree(value)
    loaded = from_tree(EngineCheckpoint, tree).value
    inputs["a"].append(2)
    tree["inputs"]["a"].append(3)
    assert loaded.inputs == {"a": [1]}


def test_chunks_of_a_stream() -> None:
    """1.17: a closed union on `kind`."""
    usage = {"kind": "usage", "usage": {"inputTokens": "1", "outputTokens": 2, "totalTokens": 3}}
    assert from_tree(StreamChunk, usage).value.usage.input_tokens == 1
    tool = {"kind": "tool", "toolCall": {"id": "a", "name": "echo", "arguments": "{}"}}
    assert to_tree(from_tree(StreamChunk, tool, strict=True).value) == tool
    with pytest.raises(InvalidInput, match="outcome"):
        from_tree(StreamChunk, {"kind": "failure", "failure": {"message": "cut"}})


def test_the_sample_of_the_contract() -> None:
    """1.2: the sample that the contract's own repository has."""
    sample = checkpoint(
        id="ckpt_abc123",
        sessionId="sess_abc123",
        turnId="turn_abc123",
        runId="run_abc123",
        messages=[
            {"role": "user", "parts": [{"kind": "text", "value": "Hello!"}], "metadata": {"source": "user-input"}}
        ],
    )
    assert sample.messages == [
        Message(role=Role.USER, parts=[TextPart(value="Hello!")], metadata={"source": "user-input"})
    ]


def test_yaml_is_loaded_when_it_is_used() -> None:
    """Whoever reads JSON needs no PyYAML."""
    code = "import sys, turnkeeper.engine.documents as d; print('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
