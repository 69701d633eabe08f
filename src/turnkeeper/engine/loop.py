"""The agent loop on a turn log: looks at the log, does what comes next, and can be killed between any two lines."""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import anyio
import anyio.lowlevel

from turnkeeper.engine import observing, stored
from turnkeeper.engine.contract_ports import EngineDurabilityPort
from turnkeeper.engine.delegation import DelegatedResult, DelegationTooDeep
from turnkeeper.engine.delivery import DeliveryStopped, deliver, key_of
from turnkeeper.engine.emission import Emitter
from turnkeeper.engine.identity import RunIdentity, identity_of
from turnkeeper.engine.journal import Journal
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.engine.model_calls import Decided, ModelCallFailed, ModelCalls
from turnkeeper.engine.permissions import Parked, PermissionFailed
from turnkeeper.engine.policies import HostSaidNo, apply_policy, exchange_of, final_output
from turnkeeper.engine.ports import Agent, ReplyPort
from turnkeeper.engine.rounds import Moved, Paused, Stopped, ToolMisconfigured, ToolRound
from turnkeeper.engine.starting import bounded_by, start_of
from turnkeeper.engine.tools import ToolContext
from turnkeeper.engine.transcript import assistant_messages, check_pairs
from turnkeeper.engine.usage import NOTHING, Meter, added, usage_of
from turnkeeper.engine.wire import (
    InvocationUsage,
    Message,
    ModelInvocationResponse,
    to_builtins,
)
from turnkeeper.errors import TurnCheckpointBusy, TurnCheckpointError
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.log.store import NotifyingStore
from turnkeeper.observe import names
from turnkeeper.observe.logs import about, logger
from turnkeeper.turn import commands as c
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.names import ToolCallState, TurnPhase
from turnkeeper.turn.state import Transcript, TurnState, final_model

log = logger(__name__)

Status = Literal["success", "failed", "reconciliation_required", "parked"]

_POLL: Final = 0.5
"""Most seconds between two looks at a turn that another worker is at, where the store does not tell of changes."""
_STUCK: Final = 5
"""Looks at an unchanged log without getting on, before that is called a fault."""
_BEHIND_A_BARRIER: Final = (ToolCallState.EXECUTING, ToolCallState.AMBIGUOUS)


@dataclass(frozen=True)
class TurnResult:
    """How a run of a turn ended.

    Attributes:
        turn_id: the turn.
        status: `success`; `failed` (run it again to go on); `reconciliation_required`: an effect's outcome is unknown and has
            to be settled first; `parked`: somebody has to permit a tool call.
        output: the final text, or None where the turn has none.
        error_kind, message: why it did not succeed.
        open_slots: (round, slot) of the tool calls that have to be settled or permitted.
        sent_message_id: the channel's id of the reply.
        rounds: model decisions in the turn.
        model_calls: model calls that were started for it, over all runs.
    """

    turn_id: str
    status: Status
    output: str | None = None
    error_kind: str | None = None
    message: str | None = None
    open_slots: tuple[tuple[int, int], ...] = ()
    sent_message_id: str | None = None
    rounds: int = 0
    model_calls: int = 0


class _Failed(Exception):
    """The turn cannot go on in this run."""

    def __init__(self, kind: str, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.unknown = unknown


def new_owner() -> str:
    """A name for one run, unique over all machines."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{secrets.token_hex(8)}"


class TurnRun:
    """One run of a turn in this process, from wherever its log stands."""

    span_name = names.TURN

    def __init__(
        self,
        turn: TurnHandle,
        agent: Agent,
        reply: ReplyPort | None,
        durability: EngineDurabilityPort | None = None,
    ) -> None:
        self._turn = turn
        self._agent = agent
        self._reply = reply
        self._journal = Journal(turn, new_owner(), agent.lease_seconds)
        self._leases = LeaseKeeper(agent.lease_seconds, turn.telemetry)
        self._known: tuple[Transcript | None, list[Message]] = (None, [])
        self._models = ModelCalls(self._journal, self._leases, agent)
        self._response: Decided | None = None
        self._meter = Meter()
        self._used_below = NOTHING
        self._emitter = None if durability is None else Emitter(turn, durability)

    async def run(self, start: c.Start | None, *, wait: bool) -> TurnResult:
        """Go on until the turn is closed, fails, or needs somebody. Without `start`, the turn has to be there.

        Raises:
            TurnCheckpointConflict: the turn was started with another input.
            TurnCheckpointBusy: another worker is at it, and `wait` is not set.
            StoreError: the store failed; nothing is lost, run the turn again.
        """
        telemetry = self._turn.telemetry
        with about(turn=self._turn.trace_id, scope=self._turn.scope):
            if telemetry is None:
                return await self._supervised(start, wait=wait)
            with observing.run(telemetry, self._turn, self.span_name, start) as span:
                self._journal.span = span
                result = await self._supervised(start, wait=wait)
                span.ended(result.status, result.error_kind, result.message)
                return result

    async def _supervised(self, start: c.Start | None, *, wait: bool) -> TurnResult:
        ended: list[TurnResult | Exception] = []
        renewing = anyio.CancelScope(shield=True)

        async def renew() -> None:
            # Also while a cancelled run waits for a tool in a thread, which cannot be stopped and is still ours.
            with renewing:
                await self._leases.run()

        async def to_the_end() -> None:
            try:
                ended.append(await self._run(start, wait=wait))
            except Exception as e:
                ended.append(e)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._last_words(start, cancelled=not ended)
                renewing.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(renew)
            # In a task of its own: a cancellation of the caller's task then comes by way of the group, and shields hold.
            tasks.start_soon(to_the_end)
        if not ended:
            raise anyio.get_cancelled_exc_class()  # its own task was cancelled, by a loop that is shut down
        if isinstance(ended[0], Exception):
            raise ended[0]
        return ended[0]

    async def _last_words(self, start: c.Start | None, *, cancelled: bool) -> None:
        """A finished effect's result is written also where the run ends in an error or a cancellation, and then that."""
        try:
            await self._journal.salvage()
        except Exception as e:
            log.error("turn %s: a finished effect's result could not be written: %s", self._turn.trace_id, e)
            return
        if cancelled:
            try:
                await self._tell_cancelled(start)
            except Exception as e:
                log.warning("turn %s: that its run was cancelled could not be written: %s", self._turn.trace_id, e)

    async def _tell_cancelled(self, start: c.Start | None) -> None:
        """Say that the run was cancelled, where it has a life to end: a turn that is not there begins with it (2.11)."""
        stop = c.StopRun(self._journal.owner, "cancelled", "cancelled", "the run was cancelled")

        def decide(state: TurnState, now: int) -> Decision[Any, Any]:
            if state.phase is None:
                return self._journal.decide(state, [] if start is None else [start, stop], now)
            # A run that has changed nothing writes nothing. (Whether its start came through may not be known.)
            wrote = self._turn.log.appends > 0 or state.owner == self._journal.owner or state.revision == 1
            # Behind a barrier, the contract reads a cancellation as proof that the tool did not run (5.2, 2).
            slots = () if state.round is None else state.round.slots
            begun = any(one is not None and one.state in _BEHIND_A_BARRIER for one in slots)
            return self._journal.decide(state, [stop] if wrote and not begun else [], now)

        await self._follow()
        await self._turn.put(decide)
        if self._emitter is not None:
            await self._emitter.catch_up()

    async def _follow(self) -> None:
        """Let the host's durability port know of each write from here on."""
        if self._emitter is not None and self._journal.after_write is None:
            await self._emitter.begin()
            self._journal.after_write = self._emitter.catch_up

    async def _run(self, start: c.Start | None, *, wait: bool) -> TurnResult:
        await self._start(start)
        if self._journal.span is not None:
            self._journal.span.found(self._journal.state)
        stuck, revision = 0, -1
        while not self._journal.state.completed:
            try:
                await (
                    anyio.lowlevel.checkpoint_if_cancelled()
                )  # writes are shielded, so what comes next may be an effect
                await self._step()
            except Stopped:
                why = "a tool call may have happened; settle it, then run the turn again"
                return await self._stop("reconciliation_required", "effect_outcome_unknown", why)
            except Parked as e:
                why = "a tool call waits for somebody's permission; decide, then run the turn again"
                slots = tuple((self._journal.state.current_round, index) for index in e.slots)
                return self._result("parked", error_kind="approval_needed", message=why, open_slots=slots)
            except Paused as e:
                slots = tuple((self._journal.state.current_round, index) for index in e.slots)
                status: Status = "parked" if e.child.status == "parked" else "reconciliation_required"
                return self._result(status, error_kind=e.child.error_kind, message=str(e), open_slots=slots)
            except ToolMisconfigured as e:
                await self._journal.salvage()
                return await self._stop("failed", e.kind, str(e))
            except PermissionFailed as e:
                await self._journal.salvage()
                return await self._stop("failed", "permission_error", str(e))
            except HostSaidNo as e:
                await self._journal.salvage()
                return await self._stop("failed", e.kind, str(e))
            except DeliveryStopped as e:
                return await self._stop("reconciliation_required" if e.unknown else "failed", e.kind, str(e))
            except _Failed as e:
                await self._journal.salvage()
                return await self._stop("reconciliation_required" if e.unknown else "failed", e.kind, str(e))
            except TurnCheckpointBusy as e:
                await self._journal.salvage()
                if not wait:
                    raise
                await self._wait(e)
            except (Moved, TurnCheckpointError) as e:
                await self._journal.salvage()
                state = await self._turn.read()
                stuck = stuck + 1 if state.revision == revision else 0
                revision = state.revision
                if stuck >= _STUCK:
                    raise (
                        e
                        if isinstance(e, TurnCheckpointError)
                        else TurnCheckpointError(f"turn {self._turn.trace_id!r} does not get on in phase {state.phase}")
                    ) from e
        return self._result("success")

    async def _start(self, start: c.Start | None) -> None:
        """Start the turn, with its first model call in the same append, or find where it stands."""
        await anyio.lowlevel.checkpoint_if_cancelled()  # a store need not wait for anything, so it need not notice
        await self._follow()
        if start is None:
            if (await self._turn.read()).phase is None:
                raise TurnCheckpointError(f"turn {self._turn.trace_id!r} was never started, or its log was erased")
            return
        first = self._journal.start_model(0)

        def decide(state: TurnState, now: int) -> Decision[Any, Any]:
            fresh = state.phase is None and self._agent.announces_ahead
            return self._journal.decide(state, [start, first] if fresh else [start], now)

        await self._turn.put(decide)
        if self._emitter is not None:
            await self._emitter.catch_up()
        if self._turn.state.phase is not TurnPhase.STARTED:
            # What is known may come from this process's cache; others may have gone on.
            await self._turn.read()

    async def _wait(self, busy: TurnCheckpointBusy) -> None:
        now = self._turn.log.now()
        left = _POLL if busy.until is None else max((busy.until - now) / 1000, 0.01)
        log.info("turn %s is owned by %s, waiting", self._turn.trace_id, busy.owner)
        store = self._turn.log.store
        if isinstance(store, NotifyingStore):
            await store.changed(self._turn.key, since=self._turn.log.position, timeout=left)
        else:
            await anyio.sleep(min(left, _POLL))
        await self._turn.read()

    # --- one step --------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        state = self._journal.state
        match state.phase:
            case TurnPhase.ASSISTANT_RESERVED if state.round is not None and state.round.calls:
                await self._tools()
            case TurnPhase.ROUND_COMMITTED | TurnPhase.STARTED if state.round is None or state.round.calls:
                await self._model()
            case TurnPhase.ASSISTANT_RESERVED | TurnPhase.ROUND_COMMITTED:
                await self._finish(self._decided(state))
            case TurnPhase.FINAL_MODEL_SAVED:
                await self._close(final_model(state))
            case TurnPhase.DELIVERY_RESERVED if self._reply is not None:
                await deliver(self._journal, self._leases, self._reply)
            case TurnPhase.DELIVERY_RESERVED:
                raise _Failed(
                    "no_reply_channel", "a reply is reserved, and this run was given no channel to send it on"
                )
            case _:
                await self._journal.ask(c.MarkCompleted())

    @property
    def _most_rounds(self) -> int:
        own = self._agent.max_rounds
        return self._journal.identity.inherited[0] if own is None else own

    async def _model(self) -> None:
        state = self._journal.state
        round_index = state.current_round + 1
        if round_index >= self._most_rounds:
            raise _Failed("max_iterations", f"the model decided {round_index} times and did not come to an end")
        budget = self._agent.budget
        why = None if budget is None else budget.exceeded(self._used())
        if why is not None:
            raise _Failed("budget_exhausted", why)
        if self._agent.host.policy is not None and state.policy_round != round_index:
            await apply_policy(self._journal, self._agent.host.policy, round_index, messages=self._messages(state))
        messages = self._messages(self._journal.state)
        try:
            self._response = await self._models.decide(round_index, messages)
        except ModelCallFailed as e:
            raise _Failed(e.kind, str(e), unknown=e.unknown) from e
        response = self._response.response
        if response.tool_requests:
            await self._tools()
        else:
            await self._finish(response)

    def _decided(self, state: TurnState) -> ModelInvocationResponse:
        """The canonical decision of the current round."""
        assert state.round is not None
        return stored.stored_response(state.round)

    async def _tools(self) -> None:
        """Run the round's tools; commit the round and announce the next model call with the last completion."""
        state = self._journal.state
        if state.phase is TurnPhase.ASSISTANT_RESERVED and state.round is not None:
            round_index, response, calls = state.round.index, self._decided(state), state.round.calls
            slots = state.round.slots
        else:
            assert self._response is not None
            round_index, response, calls = self._response
            slots = [None] * len(calls)
        transcript = state.transcript
        before = self._messages(state)
        round_ = ToolRound(
            self._journal, self._leases, self._agent, round_index, response, calls, slots, self._delegated
        )
        exchange = exchange_of(self._agent.host, response, await round_.run(), round_index)
        commands: list[c.Command] = [self._commit(round_index, len(before), exchange, state)]
        if round_index + 1 < self._most_rounds and self._agent.announces_ahead:
            commands.append(self._journal.start_model(round_index + 1))
        await self._journal.ask(*commands)
        self._remember(transcript, before, exchange)

    def _commit(self, round_index: int, keep: int, exchange: Sequence[Message], state: TurnState) -> c.CommitRound:
        return c.CommitRound(round_index, keep, [to_builtins(message) for message in exchange], state.runtime)

    async def _finish(self, response: ModelInvocationResponse) -> None:
        """The model had its last word: commit it and reserve or close, in one append."""
        state = self._journal.state
        text = stored.final_text(response)
        if state.phase is not TurnPhase.ROUND_COMMITTED or state.round is None or state.round.calls:
            round_index = state.current_round + (state.phase is not TurnPhase.ASSISTANT_RESERVED)
            before = self._messages(state)
            exchange = assistant_messages(response, round_index)
            self._journal.defer(self._commit(round_index, len(before), exchange, state))
        if self._agent.host.policy is not None:
            await self._journal.flush()
            text = await final_output(self._journal, self._agent.host.policy, text, messages=self._messages(state))
        if text is not None:
            self._journal.defer(c.SaveFinalModel(text))
        await self._close(text)

    async def _close(self, text: str | None) -> None:
        if self._reply is None or text is None:
            await self._journal.ask(c.MarkCompleted(allow_no_output=True))
        else:
            key = key_of(self._journal)
            await self._journal.ask(c.ReserveDelivery(key, text, None, self._journal.owner, self._journal.lease_ms))

    # --- usage, and delegated runs ---------------------------------------------------------------------------

    def _used(self) -> InvocationUsage:
        """Tokens of the turn, and of the runs that it delegated in this process."""
        return added(self._meter.read(self._journal.state, self._journal.identity), self._used_below)

    async def _delegated(self, agent: Agent, messages: Sequence[Any], context: ToolContext) -> DelegatedResult:
        """Run an agent below a tool call: see `subagent`."""
        mine = self._journal.identity
        depth = mine.delegation_depth + 1
        if depth > self._agent.max_depth:
            raise DelegationTooDeep(depth, self._agent.max_depth)
        scope = f"run_{context.operation_id}"
        identity = RunIdentity(
            session_id=mine.session_id,
            run_id=scope,
            parent_run_id=mine.run_id,
            delegation_depth=depth,
        )
        if agent.budget is None and self._agent.budget is not None:
            agent = dataclasses.replace(agent, budget=self._agent.budget.left(self._used()))
        turn = self._turn.sibling(scope)
        ended = await TurnRun(turn, agent, None).run(
            start_of(
                turn, agent, messages, runtime={"inbound": context.operation_id}, identity=bounded_by(agent, identity)
            ),
            wait=True,
        )
        self._used_below = added(self._used_below, usage_of(turn.state, identity_of(turn.state)))
        return DelegatedResult(scope, ended.status, ended.output, ended.error_kind, ended.message)

    # --- the transcript --------------------------------------------------------------------------------------

    def _messages(self, state: TurnState) -> list[Message]:
        """The canonical transcript, decoded and checked once, and then kept up with."""
        transcript, messages = self._known
        if transcript is not state.transcript or transcript is None:
            messages = stored.stored_messages(state)
            check_pairs(messages)
            self._known = (state.transcript, messages)
        return messages

    def _remember(self, transcript: Transcript | None, before: list[Message], exchange: list[Message]) -> None:
        after = self._journal.state.transcript
        if after is not None and after.previous is transcript and after.keep == len(before):
            self._known = (after, [*before, *exchange])

    # --- results ---------------------------------------------------------------------------------------------

    async def _stop(self, status: Status, error_kind: str, message: str) -> TurnResult:
        """The result of a run that ends short of the turn's end; the log tells why, for whoever looks."""
        message = values.text(message, "message")
        stop = c.StopRun(self._journal.owner, status, error_kind, message)
        await self._journal.ask(*self._unmade_call(message), stop)
        open_slots = tuple((a.round_index, a.slot_index) for a in self._journal.state.ambiguous if not a.closed)
        return self._result(status, error_kind=error_kind, message=message, open_slots=open_slots)

    def _unmade_call(self, why: str) -> list[c.Command]:
        """Takes back a model call that was announced ahead and is not made: nobody need wait for the end of its lease."""
        call = self._journal.state.model
        if call is None or call.failed or call.unknown or call.owner != self._journal.owner:
            return []
        return [c.FailModel(call.invocation_id, self._journal.owner, f"not made: {why}")]

    def _result(self, status: Status, **changes: Any) -> TurnResult:
        state = self._journal.state
        return TurnResult(
            turn_id=self._turn.trace_id,
            status=status,
            output=final_model(state),
            sent_message_id=state.sent_message_id,
            rounds=state.current_round + 1,
            model_calls=state.model_calls,
            **changes,
        )


async def run_turn(
    turn: TurnHandle,
    agent: Agent,
    messages: Sequence[Any],
    *,
    reply: ReplyPort | None = None,
    runtime: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    proof_deadline_ms: int = 0,
    wait: bool = True,
    session_id: str | None = None,
    inputs: Any = None,
    durability: EngineDurabilityPort | None = None,
) -> TurnResult:
    """Run a turn to its end, or go on with it from where its log stands, or give its recorded result.

    Args:
        messages: the conversation up to and with the message to be answered, in the wire or the chat form.
        reply: where the answer is sent; without one the turn ends with its final text.
        runtime: the host's own state, kept with the turn. `runtime["inbound"]`, if given, identifies the input.
        labels: readable labels, for listing.
        proof_deadline_ms: until when, on the store's clock, the transport may redeliver; 0 for no bound (T1.7).
        wait: where another worker is at the turn, wait for it; else raise.
        session_id: the session that checkpoints and events name; the turn id if None.
        inputs: the turn's inputs, as checkpoints carry them.
        durability: the host's own keeper of events and checkpoints, which gets them behind each write of the log.

    Raises:
        InvalidInput: a message has no known form, or a call without its result.
        DurabilityFailed: the host's port did not take what is durable in the log.
        TurnCheckpointConflict: the turn id was used for another input.
        TurnCheckpointBusy: another worker is at it, and `wait` is not set.
        StoreError: the store failed; nothing is lost, run the turn again.
    """
    identity = RunIdentity(
        session_id=None if session_id is None else values.identifier(session_id, "session_id"),
        inputs=inputs,
    )
    start = start_of(
        turn,
        agent,
        messages,
        runtime=runtime,
        identity=bounded_by(agent, identity),
        labels=labels,
        proof_deadline_ms=proof_deadline_ms,
    )
    return await TurnRun(turn, agent, reply, durability).run(start, wait=wait)


async def resume_turn(
    turn: TurnHandle,
    agent: Agent,
    *,
    reply: ReplyPort | None = None,
    wait: bool = True,
    durability: EngineDurabilityPort | None = None,
) -> TurnResult:
    """Go on with a turn from where its log stands, without its input. See `run_turn`.

    Raises:
        TurnCheckpointError: there is no such turn.
    """
    return await TurnRun(turn, agent, reply, durability).run(None, wait=wait)
