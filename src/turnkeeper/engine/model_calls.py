"""The model's decision of one round: asked for under a lease, tried again where it surely failed, settled where nobody knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import anyio
import msgspec
from msgspec.structs import replace as replace_fields

from turnkeeper.engine.checkpoint_rules import context_state_problems
from turnkeeper.engine.checkpoints import canonical_messages, context_state, imported_call, stable_prefix
from turnkeeper.engine.context import ContextFailed, prepare
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.host import QuietStream
from turnkeeper.engine.journal import Journal
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.engine.observing import model_call
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp, OutcomeUnknown, awaited, classify
from turnkeeper.engine.ports import Agent, ModelRequest
from turnkeeper.engine.rounds import Moved
from turnkeeper.engine.transcript import check_pairs, common_prefix
from turnkeeper.engine.wire import (
    ContextRequest,
    DelegatedStateReference,
    Message,
    ModelInvocationContextSnapshot,
    ModelInvocationResponse,
    RetryPolicyRequest,
    to_builtins,
)
from turnkeeper.errors import InvalidInput, TurnCheckpointError, ValueTooLarge
from turnkeeper.log import values
from turnkeeper.observe.logs import logger
from turnkeeper.turn import commands as c
from turnkeeper.turn.decide import model_invocation_id
from turnkeeper.turn.identity import ProviderReference, ToolCall, tool_calls
from turnkeeper.turn.names import Resolution
from turnkeeper.turn.state import ModelCall

log = logger(__name__)

_PAUSE: Final = 0.5
"""Seconds before the second attempt; doubled for each further one, up to `_LONGEST_PAUSE`."""
_LONGEST_PAUSE: Final = 30.0


class ModelCallFailed(Exception):
    """There is no decision, and this run cannot get one.

    Attributes:
        kind: why, as an error kind (2.16).
        unknown: the call may have been answered, and is not made again before somebody has settled that.
    """

    def __init__(self, kind: str, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.unknown = unknown


class Decided(NamedTuple):
    """A decision, and its tool calls as the log keeps them."""

    round_index: int
    response: ModelInvocationResponse
    calls: tuple[ToolCall, ...]


def reservation(round_index: int, response: ModelInvocationResponse) -> c.ReserveAssistant:
    """The command that makes a decision the canonical one.

    Raises:
        InvalidInput: it cannot be kept, or a tool call has no name.
    """
    builtins = to_builtins(response)
    return c.ReserveAssistant(round_index, values.freeze(builtins, "response"), tool_calls(builtins))


def reference_of(call: ModelCall) -> DelegatedStateReference | None:
    """What the provider calls a model call, where its log says so; of an imported one, where its checkpoint did."""
    if call.reference is not None:
        return DelegatedStateReference(provider=call.reference.provider, kind=call.reference.kind, id=call.reference.id)
    told: Any = None if call.metadata is None else values.thaw(call.metadata).get("reference")
    try:
        return None if told is None else msgspec.convert(told, DelegatedStateReference)
    except msgspec.ValidationError:
        return None  # another engine's word of the same name


class ModelCalls:
    """Makes the model calls of one run."""

    def __init__(self, journal: Journal, leases: LeaseKeeper, agent: Agent) -> None:
        self._journal = journal
        self._leases = leases
        self._agent = agent
        self._invoked: str | None = None

    async def decide(self, round_index: int, messages: Sequence[Message]) -> Decided:
        """The decision of a round. It is deferred, to be written with what it leads to.

        Raises:
            ModelCallFailed: there is none.
            Moved: the log is not as this run took it to be.
            TurnCheckpointBusy: another worker asks the model.
        """
        known = self._journal.state.model
        if known is not None and known.unknown:
            return await self._settle(known, round_index, messages)
        size, most = len(msgspec.json.encode(messages)), self._journal.turn.keeping.limits.transcript
        if size > most:
            raise ModelCallFailed("transcript_too_large", str(ValueTooLarge("transcript", size, most)))
        context = await self._context(round_index, messages) if self._agent.host.makes_context else None
        shown = messages if context is None else context.messages
        pause, most = _PAUSE, self._most_attempts
        for attempt in range(1, most + 1):
            await self._announce(round_index, context if attempt == 1 else None)
            answer = await self._asked(replace(self._request(round_index, shown), context=context))
            if isinstance(answer, Decided):
                return answer
            if isinstance(answer, ModelCallFailed):
                raise answer
            if isinstance(answer, OutcomeUnknown):
                unknown = self._agent.unknown_model == "reconcile"
                raise ModelCallFailed("model_outcome_unknown", str(answer), unknown=unknown)
            if attempt == most or (isinstance(answer, PortError) and answer.configuration_error):
                raise ModelCallFailed("model_error", f"{type(answer).__name__}: {answer}")
            where = self._journal.turn.trace_id
            log.warning("the model call of turn %s failed, will try again: %r", where, answer)
            await self._pause(attempt, pause, answer)
            pause *= 2
        raise AssertionError("an agent makes at least one attempt")

    @property
    def _most_attempts(self) -> int:
        own = self._agent.max_model_attempts
        return self._journal.identity.inherited[1] if own is None else own

    async def _pause(self, failed: int, pause: float, reason: Exception) -> None:
        retry, most = self._agent.host.retry, self._most_attempts
        if retry is None:
            asked = reason.retry_after if isinstance(reason, PortError) else None
            await anyio.sleep(min(max(pause, asked or 0.0), _LONGEST_PAUSE))
            return
        request = RetryPolicyRequest(
            failed_attempts=failed, next_attempt=failed + 1, max_attempts=most, reason=str(reason)
        )
        try:
            await awaited(retry.backoff(request))
        except Exception as e:
            raise ModelCallFailed("retry_policy_error", f"{type(e).__name__}: {e}") from e

    async def _context(self, round_index: int, messages: Sequence[Message]) -> ModelInvocationContextSnapshot:
        """What the host's context pipeline makes of the conversation."""
        state = self._journal.state
        identity = self._journal.identity
        request = ContextRequest(
            session_id=identity.session_id or "",
            turn_id=state.trace_id,
            invocation_id=model_invocation_id(state, round_index),
            iteration=round_index,
            messages=list(messages),
            stable_prefix_messages=stable_prefix(state, identity, self._journal.read),
            context_state=context_state(state, identity, self._journal.read),
            inputs=identity.inputs,
        )
        try:
            snapshot = await prepare(request, self._agent.host)
            check_pairs(snapshot.messages)
        except (ContextFailed, InvalidInput) as e:
            raise ModelCallFailed("context_error", str(e)) from e
        return snapshot

    async def _announce(self, round_index: int, context: ModelInvocationContextSnapshot | None) -> None:
        """The log says that the call is about to be made, and with what, before it is."""
        call, owner = self._journal.state.model, self._journal.owner
        if call is not None and call.owner == owner and call.invocation_id != self._invoked and not call.failed:
            return  # announced already, with what came before
        if call is not None and call.owner != owner and not call.failed and self._agent.unknown_model == "reconcile":
            # Its owner is dead, or else this is refused: nobody knows what became of the call.
            reason = "its owner's lease ran out before it was answered"
            await self._journal.ask(c.FailModel(call.invocation_id, owner, reason, unknown=True))
            raise Moved
        start = self._journal.start_model(round_index)
        if context is None:
            await self._journal.ask(start)
            return
        known = canonical_messages(self._journal.state, self._journal.read)
        keep = common_prefix(known, context.messages)
        tail = [to_builtins(message) for message in context.messages[keep:]]
        rest = to_builtins(replace_fields(context, messages=[]))
        frames = (values.freeze(tail, "context.messages"), values.freeze(rest, "context"))
        await self._journal.ask(c.PrepareContext(round_index, keep, *frames), start)

    def _request(self, round_index: int, messages: Sequence[Message]) -> ModelRequest:
        state = self._journal.state
        assert state.model is not None
        return ModelRequest(
            turn_id=self._journal.turn.trace_id,
            round_index=round_index,
            attempt=max(state.attempts - 1, 0),
            invocation_id=state.model.invocation_id,
            messages=messages,
            tools=self._agent.tools,
            stream=QuietStream(self._agent.host.stream),
            reference=reference_of(state.model),
            known_as=self._known_as,
        )

    async def _known_as(self, reference: DelegatedStateReference) -> None:
        """Journal what the provider calls the call that is being made. It is heard of, so its lease begins anew."""
        known = ProviderReference(
            values.identifier(reference.provider, "reference.provider"),
            values.identifier(reference.kind, "reference.kind"),
            values.identifier(reference.id, "reference.id"),
        )
        owner, turn = self._journal.owner, self._journal.turn
        assert self._invoked is not None
        try:
            await turn.ask(c.RenewModel(self._invoked, owner, self._journal.lease_ms, known))
        except TurnCheckpointError as e:
            # Another worker is at the turn: the lease keeper will say so, and this answer may still be the first one.
            log.warning("turn %s: what its provider calls the model call was not written: %s", turn.trace_id, e)

    async def _asked(self, request: ModelRequest) -> Decided | Exception:
        """See `_invoke`; with its span, where there is telemetry."""
        turn = self._journal.turn
        if turn.telemetry is None:
            return await self._invoke(request)
        with model_call(turn.telemetry, turn, self._journal.span, self._agent.model, request) as ended:
            answer = await self._invoke(request)
            ended(answer.response if isinstance(answer, Decided) else answer)
            return answer

    async def _invoke(self, request: ModelRequest) -> Decided | Exception:
        """Make one call: its decision, or why there is none."""
        owner, lease_ms, turn = self._journal.owner, self._journal.lease_ms, self._journal.turn
        self._invoked = request.invocation_id

        async def renew() -> bool:
            try:
                await turn.ask(c.RenewModel(request.invocation_id, owner, lease_ms))
            except TurnCheckpointError:
                return False
            return True

        answer: Decided | Exception | None = None
        with anyio.CancelScope() as scope:
            what = f"turn {turn.trace_id!r} model call of round {request.round_index}"
            since = await self._leases.fresh(self._journal.asked_at, renew)
            if since is None:
                raise Moved
            with self._leases.holding(what, renew, scope.cancel, since=since):
                try:
                    response = await awaited(self._agent.model.invoke(request))
                except Exception as e:
                    answer = self._judged(e)
                else:
                    try:
                        answer = self._defer(request.round_index, response)
                    except Exception as e:
                        answer = e  # there was an answer, and it cannot be used
        if answer is None:
            raise Moved  # the lease was lost: another worker asks the model now
        if isinstance(answer, Exception):
            unknown = isinstance(answer, OutcomeUnknown) and self._agent.unknown_model == "reconcile"
            told = values.text(f"{type(answer).__name__}: {answer}", "message")
            metadata = answer.metadata if isinstance(answer, OutcomeUnknown) else None
            kept = None if metadata is None else values.freeze(metadata, "metadata")
            await self._journal.ask(c.FailModel(request.invocation_id, owner, told, unknown, kept))
        return answer

    def _judged(self, error: Exception) -> Exception:
        """What a port raised, as what it says of the call: whether it may have been answered (field case 03)."""
        if isinstance(error, PortError):
            return OutcomeUnknown(error.message, metadata=error.metadata) if error.outcome_unknown else error
        if self._agent.unknown_model == "reconcile" and classify(error) == "unknown":
            return error if isinstance(error, OutcomeUnknown) else OutcomeUnknown(f"{type(error).__name__}: {error}")
        return error

    def _defer(self, round_index: int, response: ModelInvocationResponse) -> Decided:
        following = response.next_context_state
        for problem in () if following is None else context_state_problems(following, "nextContextState"):
            raise ModelCallFailed("provider_state_error", f"{problem.field} {problem.reason}")
        command = reservation(round_index, response)
        self._journal.defer(command)
        return Decided(round_index, response, command.calls)

    # --- a call of which nobody knows what became ------------------------------------------------------------

    def _doubted(self, round_index: int, messages: Sequence[Message]) -> ModelRequest:
        """The request of a call in doubt; of an imported one as it was made there, which is how its provider knows it."""
        request = self._request(round_index, messages)
        imported = imported_call(self._journal.state, self._journal.identity)
        if imported is None:
            return request
        shown, attempt = imported.request.context, imported.failed_attempt
        there = replace(request, invocation_id=imported.invocation_id, attempt=attempt)
        return replace(there, messages=shown.messages, context=shown)

    async def _settle(self, call: ModelCall, round_index: int, messages: Sequence[Message]) -> Decided:
        """Ask the host's look-up; whoever else knows it has to say so with `Keeper.resolve_model`."""
        found: LookedUp | None = None
        if self._agent.reconcile_model is not None:
            try:
                found = await awaited(self._agent.reconcile_model(self._doubted(round_index, messages)))
            except Exception:
                log.exception("the look-up of the model call of turn %s failed", self._journal.turn.trace_id)
        if isinstance(found, DidNotHappen):
            settled = c.ResolveModel(call.invocation_id, Resolution.DID_NOT_HAPPEN, "look-up", found.evidence)
            await self._journal.ask(settled)
            raise Moved
        if isinstance(found, Happened):
            settled = c.ResolveModel(call.invocation_id, Resolution.HAPPENED, "look-up", found.evidence)
            command = reservation(round_index, cast("ModelInvocationResponse", found.result))
            await self._journal.ask(settled, command)
            raise Moved  # the decision is in the log now, and read from there
        where = f"the model call {call.invocation_id} may have been answered; settle that, then run the turn again"
        if found is not None:
            where += f" (the look-up says: {found.evidence})"
        raise ModelCallFailed("model_outcome_unknown", where, unknown=True)
