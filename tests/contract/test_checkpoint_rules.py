"""Checkpoints that contradict themselves are refused with the path."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.material import traced_checkpoints
from turnkeeper.engine.checkpoint_rules import check_checkpoint, check_resume_context, checkpoint_problems
from turnkeeper.engine.documents import from_tree
from turnkeeper.engine.wire import EngineCheckpoint, ResumeContext
from turnkeeper.errors import InvalidInput

A = {"id": "call-a", "name": "echo", "arguments": {"v": "a"}}
B = {"id": "call-b", "name": "echo", "arguments": {"v": "b"}}
RESULT_A = {"requestId": "call-a", "name": "echo", "outcome": "success", "output": "a"}
REFERENCE = {"provider": "openai", "kind": "response", "id": "resp_1"}
BASE: dict[str, Any] = {
    "id": "c",
    "sessionId": "s",
    "turnId": "t",
    "runId": "r",
    "lastSequence": 9,
    "contextState": {},
    "messages": [{"role": "user", "parts": [{"kind": "text", "value": "hi"}]}],
    "stablePrefixMessages": 1,
}
HELD: dict[str, Any] = {
    **BASE,
    "activeInvocationId": "i",
    "pendingToolRequests": [B],
    "completedToolResults": [RESULT_A],
    "completedModelIterations": 1,
    "pendingModelResponse": {"toolRequests": [A, B]},
}
SNAPSHOT: dict[str, Any] = {
    "id": "context:i",
    "sessionId": "s",
    "turnId": "t",
    "invocationId": "i",
    "iteration": 0,
    "contextState": {},
    "messages": BASE["messages"],
}
UNKNOWN: dict[str, Any] = {"invocationId": "i", "request": {"context": SNAPSHOT}, "failedAttempt": 0, "message": "cut"}
BLOCKED: dict[str, Any] = {
    **BASE,
    "activeInvocationId": "i",
    "reconciliationRequired": True,
    "modelReconciliation": UNKNOWN,
}


def problems(tree: dict[str, Any]) -> list[str]:
    """The paths of all that is wrong with a document."""
    return [problem.field for problem in checkpoint_problems(from_tree(EngineCheckpoint, tree, strict=True).value)]


def snapshot(**fields: Any) -> dict[str, Any]:
    """An unknown model call with these fields in its snapshot."""
    return {**UNKNOWN, "request": {"context": {**SNAPSHOT, **fields}}}


def test_every_traced_checkpoint_is_sound() -> None:
    """What another engine wrote: mid-round, final, blocked, resolved, cancelled, and left over from a failed write."""
    for tree in traced_checkpoints():
        assert problems(tree) == []


@pytest.mark.parametrize(
    "tree",
    [
        BASE,
        HELD,
        BLOCKED,
        {**BASE, "contextState": {"portability": "delegated", "delegatedState": [REFERENCE]}},
        {**BASE, "contextState": {"portability": "opaque"}},
        {**BASE, "contextState": {"portability": "opaque", "delegatedState": [REFERENCE]}},
        {**BASE, "finalOutputReady": True, "pendingOutput": "bye"},
        {**BASE, "resumeSameIteration": True, "policyAppliedForIteration": True},
        {**BASE, "pendingToolRequests": [A]},
        {**HELD, "pendingToolRequests": [A, B]},
        {**HELD, "pendingToolRequests": [], "completedToolResults": [RESULT_A, {**RESULT_A, "requestId": "call-b"}]},
        {**HELD, "pendingToolRequests": [A, A], "pendingModelResponse": {"toolRequests": [A, A]}},
        {**HELD, "pendingOutput": "said beside the calls"},
        {**BASE, "reconciliationRequired": True, "completedToolResults": [{**RESULT_A, "outcome": "indeterminate"}]},
    ],
)
def test_sound(tree: dict[str, Any]) -> None:
    """The states of 2.6, the whole batch that one engine keeps pending (5.1 row 3), and repeated ids (5.1 row 2)."""
    assert problems(tree) == []


@pytest.mark.parametrize(
    ("tree", "field"),
    [
        ({**BASE, "sessionId": ""}, "sessionId"),
        ({**BASE, "turnId": ""}, "turnId"),
        ({**BASE, "delegationDepth": -1}, "delegationDepth"),
        ({**BASE, "iteration": -1}, "iteration"),
        ({**BASE, "lastSequence": -1}, "lastSequence"),
        ({**BASE, "completedModelIterations": -1}, "completedModelIterations"),
        ({**BASE, "stablePrefixMessages": 2}, "stablePrefixMessages"),
        ({**BASE, "stablePrefixMessages": -1}, "stablePrefixMessages"),
        ({**BASE, "contextState": {"delegatedState": [REFERENCE]}}, "contextState.delegatedState"),
        ({**BASE, "contextState": {"portability": "delegated"}}, "contextState.delegatedState"),
        ({**HELD, "pendingToolRequests": [B, {**A, "id": "call-c"}]}, "pendingToolRequests[1].id"),
        ({**HELD, "pendingToolRequests": [{**B, "arguments": {}}]}, "pendingToolRequests[0]"),
        ({**HELD, "pendingToolRequests": [{**B, "name": "pay"}]}, "pendingToolRequests[0]"),
        ({**HELD, "pendingToolRequests": [B, B]}, "pendingToolRequests[1].id"),
        ({**HELD, "completedToolResults": []}, "pendingModelResponse.toolRequests[0].id"),
        ({**HELD, "pendingToolRequests": []}, "pendingModelResponse.toolRequests[1].id"),
        ({**BASE, "pendingModelResponse": {}}, "pendingModelResponse.toolRequests"),
        (
            {
                **HELD,
                "pendingModelResponse": {"toolRequests": [A, B], "nextContextState": {"portability": "delegated"}},
            },
            "pendingModelResponse.nextContextState.delegatedState",
        ),
        ({**HELD, "finalOutputReady": True}, "finalOutputReady"),
        ({**BASE, "pendingToolRequests": [A], "finalOutputReady": True}, "finalOutputReady"),
        ({**BASE, "finalOutputReady": True, "reconciliationRequired": True}, "finalOutputReady"),
        ({**HELD, "resumeSameIteration": True}, "resumeSameIteration"),
        ({**BASE, "finalOutputReady": True, "resumeSameIteration": True}, "resumeSameIteration"),
        ({**BLOCKED, "reconciliationRequired": False}, "modelReconciliation"),
        ({**BLOCKED, "activeInvocationId": "j"}, "activeInvocationId"),
        ({**BLOCKED, "activeInvocationId": None}, "activeInvocationId"),
        ({**BLOCKED, "pendingToolRequests": [A]}, "modelReconciliation"),
        ({**BLOCKED, "modelReconciliation": {**UNKNOWN, "failedAttempt": -1}}, "modelReconciliation.failedAttempt"),
        (
            {**BLOCKED, "modelReconciliation": snapshot(stablePrefixMessages=2)},
            "modelReconciliation.request.context.stablePrefixMessages",
        ),
        (
            {**BLOCKED, "modelReconciliation": snapshot(contextState={"portability": "delegated"})},
            "modelReconciliation.request.context.contextState.delegatedState",
        ),
        *(
            (
                {**BLOCKED, "modelReconciliation": snapshot(**{name: other})},
                f"modelReconciliation.request.context.{name}",
            )
            for name, other in (("sessionId", "x"), ("turnId", "x"), ("invocationId", "x"), ("iteration", 1))
        ),
    ],
)
def test_contradictions(tree: dict[str, Any], field: str) -> None:
    """One thing wrong, one path."""
    assert problems(tree) == [field]
    checkpoint = from_tree(EngineCheckpoint, tree).value
    with pytest.raises(InvalidInput) as caught:
        check_checkpoint(checkpoint)
    assert caught.value.field == field
    with pytest.raises(InvalidInput) as caught:
        check_resume_context(ResumeContext(checkpoint=checkpoint, max_iterations=1, max_model_attempts=1))
    assert caught.value.field == f"checkpoint.{field}"


def test_resume_contexts() -> None:
    """1.9: the bounds are clamped by whoever resumes; a sequence is none where it is negative."""
    checkpoint = from_tree(EngineCheckpoint, BASE).value
    check_resume_context(ResumeContext(checkpoint=checkpoint, max_iterations=-1, max_model_attempts=0))
    with pytest.raises(InvalidInput) as caught:
        check_resume_context(
            ResumeContext(checkpoint=checkpoint, max_iterations=1, max_model_attempts=1, last_journal_sequence=-1)
        )
    assert caught.value.field == "lastJournalSequence"
