"""A foreign checkpoint as the beginning of a turn log: what it says becomes records, and the engine goes on from there (2.7)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from turnkeeper.engine.checkpoint_rules import check_checkpoint, check_resume_context
from turnkeeper.engine.identity import MAX_MODEL_ATTEMPTS, RunIdentity
from turnkeeper.engine.missing_calls import with_their_calls
from turnkeeper.engine.stored import final_text, stored_form
from turnkeeper.engine.transcript import check_pairs, request_ids
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    ModelInvocationResponse,
    ModelReconciliationState,
    ModelToolResult,
    Outcome,
    ResumeContext,
    Role,
    to_builtins,
)
from turnkeeper.errors import InvalidInput
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn.identity import invocation_id, operation_id, tool_calls, trace_hash

OWNER = "import"
"""Who owns the slots whose results a checkpoint brings."""
_LEASE_MS = 1
PRIMARY = "primary"


def scope_of(checkpoint: EngineCheckpoint) -> str:
    """The scope of the log that a checkpoint belongs to: a delegated run has one of its own."""
    return PRIMARY if checkpoint.delegation_depth == 0 else checkpoint.run_id


def begin_with(
    checkpoint: EngineCheckpoint, known_tools: Collection[str] | None = None, *, resume: ResumeContext | None = None
) -> list[c.Command]:
    """What to put on an empty turn log, in one append, so that it stands where the checkpoint does.

    Args:
        checkpoint: loaded from a document.
        known_tools: the tools of the agent that is to go on with it; None where that is not known yet.
        resume: the bounds that it is to be resumed with, and how far the journal goes that it came with.

    Raises:
        InvalidInput: it contradicts itself, or cannot be gone on with here; names the path.
    """
    check_checkpoint(checkpoint)
    budgets = {} if resume is None else _budgets(checkpoint, resume)
    begun_as = fingerprint_of(checkpoint, budgets)
    values.identifier(checkpoint.turn_id, "turnId")
    scope = values.identifier(scope_of(checkpoint), "runId", longest=128)
    held = checkpoint.pending_model_response
    if held is None and checkpoint.pending_tool_requests:
        raise InvalidInput("pendingToolRequests", "cannot be run without `pendingModelResponse`, which asked for them")
    for index, request in enumerate(checkpoint.pending_tool_requests):
        if known_tools is not None and request.name not in known_tools:
            raise InvalidInput(f"pendingToolRequests[{index}].name", f"there is no tool {request.name!r}")
    _ = RunIdentity(begun_with=checkpoint).usage_before  # told now, and not when somebody wants to know the usage
    done = [] if held is None else _results_of_batch(checkpoint, held)
    earlier = checkpoint.completed_tool_results[: len(checkpoint.completed_tool_results) - len(done)]
    checkpoint = with_their_calls(checkpoint, earlier)
    check_pairs(checkpoint.messages)
    identity = RunIdentity(
        session_id=checkpoint.session_id,
        run_id=checkpoint.run_id,
        parent_run_id=checkpoint.parent_run_id,
        delegation_depth=checkpoint.delegation_depth,
        inputs=checkpoint.inputs,
        # What the records say is not kept twice.
        begun_with=replace(checkpoint, messages=[], completed_tool_results=earlier, pending_model_response=None),
    )
    if budgets:
        identity = replace(identity, **budgets)
    commands: list[c.Command] = [
        c.Start(
            checkpoint.turn_id,
            scope,
            values.freeze([to_builtins(message) for message in checkpoint.messages], "messages"),
            values.freeze([], "tool_names"),
            values.freeze({}, "runtime"),
            begun_as,
            0,
            {},
            identity.frame(),
            checkpoint.iteration + _is_over(checkpoint),
        )
    ]
    if held is not None:
        commands += _round(checkpoint, held, done, scope)
    elif checkpoint.model_reconciliation is not None:
        unknown = checkpoint.model_reconciliation
        commands += [
            c.StartModel(checkpoint.iteration, OWNER, _LEASE_MS),
            c.FailModel(_first_invocation(checkpoint, scope), OWNER, unknown.message, True, _frame_of(unknown)),
        ]
    elif checkpoint.final_output_ready:
        spoken = [message for message in checkpoint.messages[-1:] if message.role is Role.ASSISTANT]
        text = final_text(ModelInvocationResponse(output=checkpoint.pending_output, assistant_messages=spoken))
        commands.append(c.MarkCompleted(allow_no_output=True) if text is None else c.SaveFinalModel(text))
    return commands


def _frame_of(unknown: ModelReconciliationState) -> bytes | None:
    return None if unknown.metadata is None else values.freeze(unknown.metadata, "modelReconciliation.metadata")


def fingerprint_of(checkpoint: EngineCheckpoint, budgets: Mapping[str, int]) -> str:
    """What tells whether a turn was begun with this very checkpoint, and the same bounds."""
    bounds = [dict(budgets)] if budgets else []
    return values.fingerprint(["checkpoint", to_builtins(checkpoint), *bounds], "checkpoint")


def _budgets(checkpoint: EngineCheckpoint, resume: ResumeContext) -> dict[str, int]:
    """What a resume context bounds the turn with, as the contract's engines read it (1.9)."""
    try:
        check_resume_context(resume)
    except InvalidInput as e:
        raise InvalidInput(f"resume.{e.field}", e.reason) from None
    if resume.checkpoint != checkpoint:
        raise InvalidInput("resume.checkpoint", "is not the checkpoint that is to be adopted")
    most, first = max(resume.max_iterations, 0), start_iteration(checkpoint)
    if first > most:
        raise InvalidInput("resume.maxIterations", f"is {most}, and the turn goes on with iteration {first} (2.2)")
    return {
        "max_iterations": most,
        "max_model_attempts": resume.max_model_attempts if resume.max_model_attempts > 0 else MAX_MODEL_ATTEMPTS,
        "last_journal_sequence": resume.last_journal_sequence,
    }


def start_iteration(checkpoint: EngineCheckpoint) -> int:
    """The iteration that a plain resume begins with (2.7)."""
    outstanding = checkpoint.pending_tool_requests or checkpoint.pending_model_response is not None
    blocked = checkpoint.final_output_ready or checkpoint.reconciliation_required
    over = not (checkpoint.resume_same_iteration or outstanding or blocked)
    return checkpoint.iteration + over


def _first_invocation(checkpoint: EngineCheckpoint, scope: str) -> str:
    return invocation_id(trace_hash(checkpoint.turn_id), scope, checkpoint.iteration, 0)


def _is_over(checkpoint: EngineCheckpoint) -> bool:
    """Whether the round of the checkpoint has nothing left to do, so that the next one is decided first (2.7)."""
    undecided = checkpoint.resume_same_iteration or checkpoint.model_reconciliation is not None
    return checkpoint.pending_model_response is None and not undecided


def _results_of_batch(checkpoint: EngineCheckpoint, held: ModelInvocationResponse) -> list[ModelToolResult]:
    """The results of the held response's own calls, which stand at the end of those of the whole turn (5.1, 2 and 3).

    Ids may repeat over rounds, so they are counted: a result of a round that is over has its message in the conversation.
    """
    completed = checkpoint.completed_tool_results
    told = sum(message.role is Role.TOOL for message in checkpoint.messages)
    least = len(held.tool_requests) - len(checkpoint.pending_tool_requests)
    count = min(max(len(completed) - told, least), len(held.tool_requests), len(completed))
    return completed[len(completed) - count :]


def _round(
    checkpoint: EngineCheckpoint, held: ModelInvocationResponse, done: Sequence[ModelToolResult], scope: str
) -> list[c.Command]:
    """The open round: its decision, and a finished or doubtful slot for each result that is there."""
    response = to_builtins(held)
    calls = tool_calls(response)
    commands: list[c.Command] = [
        c.ReserveAssistant(checkpoint.iteration, values.freeze(response, "pendingModelResponse"), calls)
    ]
    left, doubts = list(done), list[c.Command]()
    for index, request_id in enumerate(request_ids(held, checkpoint.iteration)):
        result = next((one for one in left if one.request_id in (request_id, held.tool_requests[index].id)), None)
        if result is None:
            continue
        left.remove(result)
        here = (checkpoint.iteration, index)
        operation = operation_id(trace_hash(checkpoint.turn_id), scope, *here)
        claim = c.ClaimTool(*here, operation, calls[index], OWNER, False, _LEASE_MS, _LEASE_MS, True)
        # Where nobody has to be asked any more, the host has settled it: the model is told that it is not known.
        if result.outcome is Outcome.INDETERMINATE and checkpoint.reconciliation_required:
            doubts.insert(0, claim)
            doubts.append(c.DoubtTool(*here, OWNER, 1, "the checkpoint says that its outcome is not known"))
        else:
            frame = values.freeze(stored_form(result, "completedToolResults"), "completedToolResults")
            commands += [claim, c.CompleteTool(*here, OWNER, 1, frame)]
    if left:
        raise InvalidInput(
            "completedToolResults",
            f"has a result of {left[0].request_id!r}, which `pendingModelResponse` did not ask for",
        )
    # A doubt ends a sequence of commands, so it is the last one. Others are left begun under a lease that is over: whoever
    # claims them finds them in doubt as well.
    return commands + doubts
