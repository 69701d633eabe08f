"""What a checkpoint must not say: states that contradict themselves (engine-contract.md 1.7, 2.2, 2.6, 2.10, 2.18)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnkeeper.engine.wire import (
    EngineCheckpoint,
    InvocationContextState,
    Message,
    ModelReconciliationState,
    ModelToolRequest,
    ModelToolResult,
    Portability,
    ResumeContext,
)
from turnkeeper.errors import InvalidInput


@dataclass(frozen=True)
class Problem:
    """Something that makes a checkpoint unfit to be resumed.

    Attributes:
        field: the path (`contextState.delegatedState`).
        reason: what is wrong with it.
    """

    field: str
    reason: str


def check_checkpoint(checkpoint: EngineCheckpoint, field: str = "") -> None:
    """Refuse a checkpoint that cannot be what an engine wrote, before anything of it is used.

    Args:
        checkpoint: loaded, so its types are right already.
        field: where it stands itself, to be put before the path.

    Raises:
        InvalidInput: naming the path of the first problem.
    """
    for problem in checkpoint_problems(checkpoint):
        raise InvalidInput(f"{field}.{problem.field}".removeprefix("."), problem.reason)


def check_resume_context(context: ResumeContext) -> None:
    """Refuse a resume context that contradicts itself. Its bounds alone are read leniently (1.9), so they are not judged.

    Raises:
        InvalidInput: naming the path.
    """
    check_checkpoint(context.checkpoint, "checkpoint")
    if context.last_journal_sequence < 0:
        raise InvalidInput("lastJournalSequence", f"must not be negative, but is {context.last_journal_sequence}")
    included = context.checkpoint.last_sequence
    if 0 < context.last_journal_sequence < included:
        reason = (
            f"the journal ends at {context.last_journal_sequence}, and the checkpoint includes more, up to {included}"
        )
        raise InvalidInput("lastJournalSequence", reason)


def checkpoint_problems(checkpoint: EngineCheckpoint) -> Iterator[Problem]:
    """All that is wrong with a checkpoint. Whether its tools are known is for who has the tools to say."""
    for name, text in (("sessionId", checkpoint.session_id), ("turnId", checkpoint.turn_id)):
        if not text:
            yield Problem(name, "must not be empty")
    yield from _counts(
        delegationDepth=checkpoint.delegation_depth,
        iteration=checkpoint.iteration,
        lastSequence=checkpoint.last_sequence,
        completedModelIterations=checkpoint.completed_model_iterations,
    )
    yield from _prefix(checkpoint.stable_prefix_messages, checkpoint.messages, "stablePrefixMessages")
    yield from context_state_problems(checkpoint.context_state, "contextState")
    yield from _held_response(checkpoint)
    yield from _phase(checkpoint)
    if checkpoint.model_reconciliation is not None:
        yield from _reconciliation(checkpoint, checkpoint.model_reconciliation)


def context_state_problems(state: InvocationContextState, field: str) -> Iterator[Problem]:
    """What is wrong with a description of provider-held state (1.7)."""
    count = len(state.delegated_state)
    if state.portability is Portability.PORTABLE and count:
        yield Problem(f"{field}.delegatedState", f"must be empty where portability is portable, but has {count}")
    if state.portability is Portability.DELEGATED and not count:
        yield Problem(f"{field}.delegatedState", "must have at least one reference where portability is delegated")


def _counts(**numbers: int) -> Iterator[Problem]:
    for name, number in numbers.items():
        if number < 0:
            yield Problem(name, f"must not be negative, but is {number}")


def _prefix(prefix: int, messages: Sequence[Message], field: str) -> Iterator[Problem]:
    if not 0 <= prefix <= len(messages):
        yield Problem(field, f"must lie between 0 and the {len(messages)} messages, but is {prefix}")


def _held_response(checkpoint: EngineCheckpoint) -> Iterator[Problem]:
    """A held response waits for its tools: each of its requests is pending or has a result, and nothing else is pending."""
    held = checkpoint.pending_model_response
    if held is None:
        return
    if not held.tool_requests:
        yield Problem("pendingModelResponse.toolRequests", "must not be empty: a response is held for its tools only")
    if held.next_context_state is not None:
        yield from context_state_problems(held.next_context_state, "pendingModelResponse.nextContextState")
    waiting = list(held.tool_requests)
    for index, request in enumerate(checkpoint.pending_tool_requests):
        named = [candidate for candidate in waiting if candidate.id == request.id]
        same = [candidate for candidate in named if _same_call(candidate, request)]
        if not named:
            reason = f"{request.id!r} is not among the requests of pendingModelResponse"
            yield Problem(f"pendingToolRequests[{index}].id", reason)
            continue
        if not same:
            yield Problem(
                f"pendingToolRequests[{index}]", "differs from the request of that id in pendingModelResponse"
            )
        waiting.remove((same or named)[0])
    yield from _unanswered(held.tool_requests, waiting, checkpoint.completed_tool_results)


def _same_call(one: ModelToolRequest, other: ModelToolRequest) -> bool:
    return (one.name, one.arguments) == (other.name, other.arguments)


def _unanswered(
    requests: Sequence[ModelToolRequest], executed: Sequence[ModelToolRequest], results: Sequence[ModelToolResult]
) -> Iterator[Problem]:
    # Results are those of the whole turn and ids repeat over rounds: enough of an id is all that can be demanded.
    left = Counter(result.request_id for result in results)
    for request in executed:
        left[request.id or ""] -= 1
        if left[request.id or ""] < 0:
            field = f"pendingModelResponse.toolRequests[{requests.index(request)}].id"
            yield Problem(field, f"{request.id!r} is neither pending nor completed")


def _phase(checkpoint: EngineCheckpoint) -> Iterator[Problem]:
    """Of "a model call comes next", "tools are outstanding", "ready to commit" and "blocked", a state is one."""
    outstanding = bool(checkpoint.pending_tool_requests) or checkpoint.pending_model_response is not None
    if checkpoint.final_output_ready and outstanding:
        yield Problem("finalOutputReady", "contradicts the tool requests that are outstanding")
    if checkpoint.final_output_ready and checkpoint.reconciliation_required:
        yield Problem("finalOutputReady", "contradicts reconciliationRequired")
    if checkpoint.resume_same_iteration and (outstanding or checkpoint.final_output_ready):
        yield Problem("resumeSameIteration", "contradicts the model's answer to this iteration, which is there already")


def _reconciliation(checkpoint: EngineCheckpoint, state: ModelReconciliationState) -> Iterator[Problem]:
    """An unknown model call is the active one, and nothing follows from it yet."""
    field = "modelReconciliation"
    if not checkpoint.reconciliation_required:
        yield Problem(field, "must be absent where reconciliationRequired is false")
    if checkpoint.active_invocation_id != state.invocation_id:
        yield Problem("activeInvocationId", f"must be that of modelReconciliation, {state.invocation_id!r}")
    if checkpoint.pending_tool_requests or checkpoint.pending_model_response is not None:
        yield Problem(field, "contradicts the tool requests that are outstanding: an unknown call has asked for none")
    if state.failed_attempt < 0:
        yield Problem(f"{field}.failedAttempt", f"must not be negative, but is {state.failed_attempt}")
    snapshot, at = state.request.context, f"{field}.request.context"
    yield from _prefix(snapshot.stable_prefix_messages, snapshot.messages, f"{at}.stablePrefixMessages")
    yield from context_state_problems(snapshot.context_state, f"{at}.contextState")
    for name, sent, expected in (
        ("sessionId", snapshot.session_id, checkpoint.session_id),
        ("turnId", snapshot.turn_id, checkpoint.turn_id),
        ("invocationId", snapshot.invocation_id, state.invocation_id),
        ("iteration", snapshot.iteration, checkpoint.iteration),
    ):
        if sent != expected:
            yield Problem(f"{at}.{name}", f"must be {expected!r}, as the checkpoint says, but is {sent!r}")
