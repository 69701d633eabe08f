"""The context pipeline: sources offer, transforms choose, one packer decides what the model is sent (engine-contract.md 2.18)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from turnkeeper.engine.checkpoint_rules import context_state_problems
from turnkeeper.engine.host import Host
from turnkeeper.engine.wire import (
    ContextCandidate,
    ContextRequest,
    Disposition,
    InvocationContextDecision,
    ModelInvocationContextSnapshot,
)
from turnkeeper.errors import TurnkeeperError


class ContextFailed(TurnkeeperError):
    """A source, a transform or the packer failed, or broke the snapshot's rules."""


class AppendPacker:
    """The default: the conversation, then every candidate's messages, in order."""

    name = "append"

    async def pack(
        self, request: ContextRequest, candidates: Sequence[ContextCandidate]
    ) -> ModelInvocationContextSnapshot:
        """See `ContextPackingStrategy`."""
        offered = [message for candidate in candidates for message in candidate.messages]
        decisions = [
            InvocationContextDecision(
                candidate_id=candidate.id, disposition=Disposition.INCLUDED, reason="appended", rank=rank
            )
            for rank, candidate in enumerate(candidates)
        ]
        return ModelInvocationContextSnapshot(
            id=f"context:{request.invocation_id}",
            session_id=request.session_id,
            turn_id=request.turn_id,
            invocation_id=request.invocation_id,
            iteration=request.iteration,
            messages=[*request.messages, *offered],
            decisions=decisions,
            stable_prefix_messages=request.stable_prefix_messages,
            context_state=request.context_state,
        )


async def prepare(request: ContextRequest, host: Host) -> ModelInvocationContextSnapshot:
    """What the model is sent for a request.

    Raises:
        ContextFailed: two candidates have one id, or a port failed, or the snapshot breaks its rules.
    """
    try:
        return await _prepare(request, host)
    except ContextFailed:
        raise
    except Exception as e:
        raise ContextFailed(f"{type(e).__name__}: {e}") from e


async def _prepare(request: ContextRequest, host: Host) -> ModelInvocationContextSnapshot:
    candidates: list[ContextCandidate] = []
    for source in host.sources:
        candidates += await source.load(request)
    ids = [candidate.id for candidate in candidates]
    if len(set(ids)) != len(ids):
        raise ContextFailed(f"the candidate id {next(one for one in ids if ids.count(one) > 1)!r} is there twice")
    dropped: list[InvocationContextDecision] = []
    for transform in host.transforms:
        left = list(await transform.apply(request, candidates))
        kept = {candidate.id for candidate in left}
        dropped += [_excluded(candidate, transform.name) for candidate in candidates if candidate.id not in kept]
        candidates = left
    packing = host.packing or AppendPacker()
    snapshot = await packing.pack(request, candidates)
    decided = {decision.candidate_id for decision in snapshot.decisions}
    undecided = [_excluded(candidate, packing.name) for candidate in candidates if candidate.id not in decided]
    _check(snapshot, request)
    return replace(snapshot, decisions=[*snapshot.decisions, *dropped, *undecided])


def _excluded(candidate: ContextCandidate, by: str) -> InvocationContextDecision:
    return InvocationContextDecision(
        candidate_id=candidate.id, disposition=Disposition.EXCLUDED, reason=f"dropped by {by}"
    )


def _check(snapshot: ModelInvocationContextSnapshot, request: ContextRequest) -> None:
    if not 0 <= snapshot.stable_prefix_messages <= len(snapshot.messages):
        raise ContextFailed("the snapshot's stable prefix is longer than its messages")
    for name in ("session_id", "turn_id", "invocation_id", "iteration"):
        if getattr(snapshot, name) != getattr(request, name):
            raise ContextFailed(f"the snapshot's {name} is not the request's")
    for problem in context_state_problems(snapshot.context_state, "contextState"):
        raise ContextFailed(f"{problem.field} {problem.reason}")
