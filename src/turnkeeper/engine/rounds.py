"""One round's tool slots: claimed, run by their policy, completed; what is in doubt is looked up or stops the turn."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
from msgspec.structs import replace

from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.delegation import ChildPaused, Delegate
from turnkeeper.engine.journal import Journal
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.engine.observing import tool_call
from turnkeeper.engine.outcomes import DidNotHappen, Happened, awaited, classify
from turnkeeper.engine.permissions import Parked, PermissionDesk
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.prepared_calls import PreparedCall
from turnkeeper.engine.stored import UNKNOWN_TEXT, kept_result, stored_result
from turnkeeper.engine.tools import Policy, Tool, ToolContext
from turnkeeper.engine.transcript import request_ids
from turnkeeper.engine.wire import ModelInvocationResponse, ModelToolResult, Outcome
from turnkeeper.errors import InvalidInput, OwnershipLost, TurnCheckpointBusy, ValueTooLarge
from turnkeeper.log import values
from turnkeeper.observe.logs import logger
from turnkeeper.turn import commands as c
from turnkeeper.turn.identity import ToolCall
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import Slot, TurnState, find_slot

log = logger(__name__)

_CANCELLED: Final = "it was cancelled while it ran"
_TRIES: Final = 3
"""Runs of a call that provably did not happen, or that may run again, before the model is told of the failure."""
_MOST_OWNERS: Final = 10
"""Runs of a call that its look-up says did not happen, before the model is told of the failure."""
_PLACEHOLDER: Final = values.freeze(None)
"""Stands for the result of a transactional tool while its append is decided; also compared with a result that is there."""
_DENIED: Final = "Permission denied"
_PAUSE: Final = 0.2
"""Seconds before the second run; doubled for each further one."""


class Stopped(Exception):
    """The round cannot go on before somebody settles these slots."""

    kind = "effect_outcome_unknown"

    def __init__(self, slots: list[int]) -> None:
        super().__init__(f"slots {slots} may have happened")
        self.slots = slots


class ToolMisconfigured(Exception):
    """A tool says that neither another attempt nor the model can help: the turn fails, and the call has no result (2.16)."""

    def __init__(self, name: str, error: PortError) -> None:
        super().__init__(f"{name}: {error.message}")
        self.kind = "tool_configuration_error"


class Moved(Exception):
    """The log is not as this run took it to be: look at it again."""

    kind = "moved"


class Paused(Exception):
    """Everything is done but calls whose delegated runs wait for somebody."""

    def __init__(self, child: ChildPaused, slots: list[int]) -> None:
        super().__init__(str(child))
        self.child = child
        self.slots = slots


class ToolRound:
    """The tools of one round. `run` gives a result for every request, in request order, or says why there is none."""

    def __init__(
        self,
        journal: Journal,
        leases: LeaseKeeper,
        agent: Agent,
        round_index: int,
        response: ModelInvocationResponse,
        calls: Sequence[ToolCall],
        slots: Sequence[Slot | None],
        delegate: Delegate | None = None,
    ) -> None:
        self._delegate = delegate
        self._paused: list[tuple[int, ChildPaused]] = []
        self._journal = journal
        self._leases = leases
        self._agent = agent
        self._round = round_index
        ids = request_ids(response, round_index)
        self._calls = [PreparedCall(index, call, ids[index]) for index, call in enumerate(calls)]
        self._slots = slots
        self._results: list[ModelToolResult | None] = [None] * len(self._calls)
        self._running = 0
        self._requests = response.tool_requests
        self._desk = None if agent.permission is None else PermissionDesk(journal, agent.permission, round_index)
        cut = (response.metadata or {}).get("finishReason") == "length"
        for call, request in zip(self._calls, response.tool_requests, strict=True):
            limit = journal.turn.keeping.limits.arguments
            call.prepare(agent.by_name, request.arguments, cut=cut, limit=limit)

    async def run(self) -> list[ModelToolResult]:
        """Run what is not done yet. The last completion may still be deferred when this returns.

        Raises:
            Stopped: an outcome is unknown and no policy settles it.
            Parked: calls wait for somebody's permission; all others are done.
            PermissionFailed: the permission port failed.
            ToolMisconfigured: a tool cannot be run as it is set up; the others of the round have run.
            Moved: another worker has changed the log.
            TurnCheckpointBusy: another worker is at one of the slots.
        """
        await self._take_over()
        waiting = [call for call, result in zip(self._calls, self._results, strict=True) if result is None]
        parked: list[int] = []
        if self._agent.parallel_tools and len(waiting) > 1:
            permitted = [call for call in waiting if await self._permitted(call)]
            parked += [call.slot_index for call in waiting if call not in permitted]
            if permitted:
                await self._run_together(permitted)
        else:
            for call in waiting:
                # Before the next barrier: what is cancelled between two calls leaves the second one untouched.
                await anyio.lowlevel.checkpoint_if_cancelled()
                if await self._permitted(call):
                    await self._run_one(call)
                else:
                    parked.append(call.slot_index)
        if parked or self._paused:
            await self._journal.flush()
            if parked:
                raise Parked(parked)
            raise Paused(self._paused[0][1], [index for index, _ in self._paused])
        return [result for result in self._results if result is not None]

    async def _permitted(self, call: PreparedCall) -> bool:
        """Whether a call may be gone on with: to run, or, where it was denied, to be refused. False: nobody has decided."""
        if self._desk is None or call.refusal is not None or self._slots[call.slot_index] is not None:
            return True
        request = replace(self._requests[call.slot_index], id=call.request_id)
        decision = await self._desk.ask(call.slot_index, request)
        if decision is None:
            return False
        if not decision.approved:
            kind: Any = (decision.metadata or {}).get("errorKind")
            denied = call.failed(
                kind if isinstance(kind, str) and kind else "permission_denied", decision.reason or _DENIED
            )
            call.refusal = replace(denied, metadata=decision.metadata)
        return True

    # --- what is there already -------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Results that are stored, and slots that are in doubt."""
        doubtful: list[int] = []
        for call, slot in zip(self._calls, self._slots, strict=True):
            if slot is None:
                continue
            if slot.state is ToolCallState.EXECUTING and not slot.replay_safe:
                answer = await self._claim(call)  # turns ambiguous where its owner's lease is over
                if answer.action is ToolCallAction.BEGUN:
                    # Its owner gave it back just now. It is ours, and nothing runs: taken again when its turn comes.
                    call.fence = answer.fence
                    await self._journal.ask(self._abandon(call))
                    raise Moved
                slot = self._slot(call)
                if slot.state is ToolCallState.EXECUTING:
                    raise Moved
            if slot.result is not None and not slot.open_question:
                self._results[call.slot_index] = stored_result(slot.result, call.request_id, call.call.tool_name)
            elif slot.open_question and not await self._settle(call, slot):
                doubtful.append(call.slot_index)
        if doubtful:
            raise Stopped(doubtful)

    def _slot(self, call: PreparedCall) -> Slot:
        round_ = self._journal.state.round
        slot = round_.slots[call.slot_index] if round_ is not None and round_.index == self._round else None
        if slot is None:
            raise Moved
        return slot

    async def _settle(self, call: PreparedCall, slot: Slot) -> bool:
        """Find out about an ambiguous slot by its tool's policy. Whether there is an answer now."""
        tool = call.tool
        found: Any = None
        if tool is not None and tool.look_up is not None:
            try:
                found = await awaited(tool.look_up(self._context(call, slot.fence)))
            except Exception:
                # A look-up that fails has not told anything; the question stays open.
                told = (tool.name, self._journal.turn.trace_id)
                log.exception("the look-up of %s failed in turn %s", *told, extra=self._at(call))
                return False
        name = f"look-up of {call.call.tool_name}"
        if isinstance(found, Happened):
            result = call.result(Outcome.SUCCESS, found.result)
            await self._resolve(call, slot, Resolution.HAPPENED, name, found.evidence, result)
        elif isinstance(found, DidNotHappen):
            await self._resolve(call, slot, Resolution.DID_NOT_HAPPEN, name, found.evidence, None)
            if slot.fence >= _MOST_OWNERS:
                call.refusal = call.failed("tool_error", f"It was tried {slot.fence} times and did not happen.")
                self._slots = [*self._slots[: call.slot_index], slot, *self._slots[call.slot_index + 1 :]]
        elif self._agent.on_ambiguous == "report":
            result = call.result(Outcome.INDETERMINATE, UNKNOWN_TEXT, "effect_outcome_unknown")
            await self._resolve(call, slot, Resolution.UNKNOWN, "agent", "on_ambiguous='report'", result)
        else:
            return False
        return True

    async def _resolve(
        self, call: PreparedCall, slot: Slot, resolution: Resolution, who: str, why: str, result: ModelToolResult | None
    ) -> None:
        kept, frame = (None, None) if result is None else self._kept(call, result)
        settle = c.ResolveTool(self._round, call.slot_index, resolution, who, why, frame)

        def same_owner(state: TurnState) -> bool:
            # While we looked, somebody else may have settled it and run it again: what was found was not about that run.
            now = find_slot(state, self._round, call.slot_index)
            return now is not None and now.fence == slot.fence

        await self._journal.ask(settle, while_true=same_owner)
        self._results[call.slot_index] = kept

    # --- running ---------------------------------------------------------------------------------------------

    def _claim_command(self, call: PreparedCall, *, repeat: bool = False) -> c.ClaimTool:
        tool = call.tool
        return c.ClaimTool(
            self._round,
            call.slot_index,
            self._journal.turn.operation_id(self._round, call.slot_index),
            call.call,
            self._journal.owner,
            tool is None or tool.replayable,
            self._journal.lease_ms,
            self._journal.lease_ms,
            repeat,
            self._desk is not None and call.refusal is None,
            call.refusal is not None,
        )

    def _own_commands(self, call: PreparedCall) -> list[c.Command]:
        """What takes the slot: behind it, its effect may run; or it is done, where the call is refused."""
        if call.refusal is None:
            return [self._claim_command(call)]
        slot = self._slots[call.slot_index]
        fence = 1 if slot is None else slot.fence + 1
        call.refusal, frame = self._kept(call, call.refusal)
        # Nothing runs, so an ambiguous call of an earlier round is not repeated by it.
        return [self._claim_command(call, repeat=True), self._complete(call, fence, frame)]

    def _complete(self, call: PreparedCall, fence: int, frame: bytes) -> c.CompleteTool:
        return c.CompleteTool(self._round, call.slot_index, self._journal.owner, fence, frame)

    def _kept(self, call: PreparedCall, result: ModelToolResult) -> tuple[ModelToolResult, bytes]:
        """The result as it is kept, and its frame. It is what the model is shown, in this run as behind any restart."""
        where = f"result of {call.call.tool_name} (round {self._round} slot {call.slot_index})"
        try:
            return kept_result(result, where, self._journal.turn.keeping)
        except InvalidInput as e:
            # The effect has happened: its slot gets a stand-in, and the model is told why (field cases 11, 25).
            kind = "result_too_large" if isinstance(e, ValueTooLarge) else "result_not_storable"
            log.warning("turn %s: %s", self._journal.turn.trace_id, e, extra=self._at(call))
            stand_in = call.result(result.outcome, f"The call was made, but its result cannot be kept: {e}", kind)
            return kept_result(stand_in, where)

    async def _claim(self, call: PreparedCall) -> SlotAnswer:
        call.since = time.monotonic()
        (answer,) = await self._journal.ask(self._claim_command(call))
        return self._checked(call, answer)

    def _checked(self, call: PreparedCall, *answers: SlotAnswer | None) -> SlotAnswer:
        """The last answer to the commands of a slot, where this run can go on from it."""
        answer = next((answer for answer in reversed(answers) if answer is not None), None)
        if answer is None:
            raise Moved
        if answer.action is ToolCallAction.BUSY:
            where = f"turn {self._journal.turn.trace_id!r} round {self._round} slot {call.slot_index}"
            raise TurnCheckpointBusy(where, answer.owner, answer.lease_end)
        if answer.action in (ToolCallAction.BEGUN, ToolCallAction.AMBIGUOUS, ToolCallAction.COMPLETED):
            return answer
        raise Moved

    async def _run_together(self, calls: list[PreparedCall]) -> None:
        transactional = [call for call in calls if call.tool is not None and call.tool.policy is Policy.TRANSACTIONAL]
        together = [call for call in calls if call not in transactional]
        begun, problem = await self._begin_together(together) if together else ([], None)
        self._running = len(begun)
        problems: list[Exception] = []

        async def run(call: PreparedCall) -> None:
            # What goes wrong with one call must neither cancel its siblings nor come out wrapped in a group.
            try:
                await self._observed(call, self._run_begun)
            except Exception as e:
                problems.append(e)

        async with anyio.create_task_group() as tasks:
            for call in begun:
                tasks.start_soon(run, call)
        problem = next((e for e in problems if not isinstance(e, Moved)), problem or next(iter(problems), None))
        for call in together:
            if call not in begun and call.refusal is not None and self._results[call.slot_index] is None:
                await self._run_one(call)  # refused now: an equal call is in doubt
        for call in transactional if problem is None else ():
            await self._run_one(call)
        if problem is not None:
            await self._journal.flush()
            raise problem
        await self._stop_if_in_doubt(begun)

    async def _begin_together(self, calls: list[PreparedCall]) -> tuple[list[PreparedCall], Exception | None]:
        """Take all slots in one append: those whose effects may run now, and what stands in the way of the others."""
        commands = [self._own_commands(call) for call in calls]
        for call in calls:
            call.since = time.monotonic()
        answers = iter(await self._journal.ask(*(command for own in commands for command in own)))
        begun: list[PreparedCall] = []
        problem: Exception | None = None
        for call, own in zip(calls, commands, strict=True):
            try:
                self._begun(call, self._checked(call, *[next(answers) for _ in own]))
                begun += [call] if call.fence else []
            except (Moved, Stopped, TurnCheckpointBusy) as e:
                # Commands behind the refused one were not put; what was begun before it runs all the same.
                problem = problem or e
        return begun, problem

    async def _run_one(self, call: PreparedCall) -> None:
        if call.tool is not None and call.refusal is None and call.tool.policy is Policy.TRANSACTIONAL:
            await self._observed(call, self._run_transactional)
            return
        call.since = time.monotonic()
        self._begun(call, self._checked(call, *await self._journal.ask(*self._own_commands(call))))
        if call.fence:
            self._running = 1
            await self._observed(call, self._run_begun)
            await self._stop_if_in_doubt([call])
        elif self._results[call.slot_index] is None:
            await self._run_one(call)  # refused now: an equal call is in doubt

    def _begun(self, call: PreparedCall, answer: SlotAnswer) -> None:
        """Take note of a claim's answer: a fence to run under, a result, or a reason to stop."""
        if answer.action is ToolCallAction.BEGUN:
            call.fence = answer.fence
        elif answer.action is ToolCallAction.COMPLETED:
            self._results[call.slot_index] = call.refusal
        elif answer.blocked_by is not None:
            text = "The same call was made before in this turn and its outcome is not known. It was not run again."
            call.refusal = call.failed("effect_outcome_unknown", text)
        else:
            raise Stopped([call.slot_index])

    def _abandon(self, call: PreparedCall) -> c.AbandonTool:
        return c.AbandonTool(self._round, call.slot_index, self._journal.owner, call.fence)

    async def _observed(self, call: PreparedCall, run: Callable[[PreparedCall], Awaitable[None]]) -> None:
        """Run a call; with its span, where there is telemetry."""
        turn = self._journal.turn
        if turn.telemetry is None:
            await run(call)
            return
        with tool_call(turn.telemetry, call, self._context(call, call.fence), turn.scope) as ended:
            await run(call)
            ended(self._results[call.slot_index], find_slot(turn.state, self._round, call.slot_index))

    def _at(self, call: PreparedCall) -> dict[str, int]:
        """Of log records."""
        return {"round": self._round, "slot": call.slot_index}

    async def _run_begun(self, call: PreparedCall) -> None:
        """Run a call whose barrier is crossed, and write what came of it. The last one's completion may wait."""
        tool = call.tool
        assert tool is not None
        pause = _PAUSE
        result: ModelToolResult | None = None
        for attempt in range(1, _TRIES + 1):
            result, error = await self._attempt(call, tool)
            if result is not None or error is None:
                break
            if isinstance(error, ChildPaused):
                # Nothing is under way: the child's own log holds how far it is.
                self._running -= 1
                self._paused.append((call.slot_index, error))
                await self._journal.ask(self._abandon(call))
                return
            kind = classify(error, tool.refusals)
            if kind == "refused":
                if isinstance(error, PortError) and error.configuration_error:
                    self._running -= 1
                    await self._journal.ask(self._abandon(call))
                    raise ToolMisconfigured(tool.name, error)
                result = call.refused(error)
                break
            if kind == "unknown" and not tool.replayable:
                await self._doubt(call, f"{type(error).__name__}: {error}")
                return
            if attempt == _TRIES:
                text = f"{call.call.tool_name} failed: {type(error).__name__}: {error}"
                result = call.failed("not_sent" if kind == "not sent" else "tool_error", text)
                break
            told = (tool.name, self._journal.turn.trace_id, error)
            log.warning("%s in turn %s failed, will try again: %r", *told, extra=self._at(call))
            # Given back first: nothing is under way while we wait, and whoever dies now leaves no doubt.
            await self._journal.ask(self._abandon(call))
            await anyio.sleep(pause)
            pause *= 2
            self._begun(call, await self._claim(call))
        self._running -= 1
        if result is None:
            return  # lost: whoever owns the slot now goes on with it
        self._results[call.slot_index], frame = self._kept(call, result)
        # Deferred in any case: where the store fails, it is written with whatever is written next.
        self._journal.defer(self._complete(call, call.fence, frame))
        if self._running:
            await self._journal.flush()

    async def _attempt(self, call: PreparedCall, tool: Tool) -> tuple[ModelToolResult | None, Exception | None]:
        """Run the function once: its result, or what it raised, or neither where the slot was lost meanwhile."""
        context = self._context(call, call.fence)
        where = f"turn {context.turn_id!r} round {self._round} slot {call.slot_index} ({tool.name})"
        started = False

        def start() -> Any:
            nonlocal started
            started = True
            return tool.call(call.arguments, context)

        with anyio.CancelScope() as scope:

            def lost() -> None:
                context.lost = True
                scope.cancel()

            async def renew() -> bool:
                command = c.RenewTool(
                    self._round, call.slot_index, self._journal.owner, call.fence, self._journal.lease_ms
                )
                (answer,) = await self._journal.turn.ask(command)
                return answer is not None and answer.action is ToolCallAction.RENEWED

            since = await self._leases.fresh(call.since, renew)
            if since is None:
                return None, None
            with self._leases.holding(where, renew, lost, self._at(call), since):
                try:
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    running = start() if tool.is_async else anyio.to_thread.run_sync(start)
                    output = await awaited(running)
                except OwnershipLost:
                    return None, None
                except Exception as e:
                    return None, e
                except anyio.get_cancelled_exc_class():
                    # Said at once, so that nobody waits for the end of the slot's lease.
                    if not context.lost:
                        # Cancelled at the barrier, or while it waited for a thread: nothing ran. Or it may run again anyway.
                        given_back = not started or tool.replayable
                        await (self._journal.ask(self._abandon(call)) if given_back else self._doubt(call, _CANCELLED))
                    raise
                return call.returned(output)
        return None, None

    async def _doubt(self, call: PreparedCall, reason: str) -> None:
        self._running -= 1
        await self._journal.ask(c.DoubtTool(self._round, call.slot_index, self._journal.owner, call.fence, reason))

    async def _stop_if_in_doubt(self, calls: list[PreparedCall]) -> None:
        paused = [index for index, _ in self._paused]
        open_slots = [
            call.slot_index
            for call in calls
            if self._results[call.slot_index] is None and call.slot_index not in paused
        ]
        if open_slots:
            # Looked at again from the log: the tool's look-up may settle it, or nobody can.
            await self._journal.flush()
            raise Moved

    def _context(self, call: PreparedCall, fence: int, transaction: Any = None) -> ToolContext:
        return ToolContext(
            operation_id=self._journal.turn.operation_id(self._round, call.slot_index),
            turn_id=self._journal.turn.trace_id,
            round_index=self._round,
            slot_index=call.slot_index,
            fence=fence,
            call_id=call.call.provider_call_id,
            transaction=transaction,
            delegate=self._delegate,
        )

    async def _run_transactional(self, call: PreparedCall) -> None:
        tool = call.tool
        assert tool is not None
        slot = self._slots[call.slot_index]
        fence = 1 if slot is None else slot.fence + 1
        raised: list[Exception] = []
        kept: list[ModelToolResult] = []

        def effect(transaction: Any) -> ModelToolResult:
            context = self._context(call, fence, transaction)
            try:
                result, error = call.returned(tool.call(call.arguments, context))
                if error is not None:
                    raise error
                assert result is not None
                return result
            except Exception as e:
                raised.append(e)
                raise

        def frame(result: ModelToolResult) -> bytes:
            one, frozen = self._kept(call, result)
            kept.append(one)
            return frozen

        # Also where the store runs it in a thread of its own, the tool's spans are below the call's.
        in_context = effect if self._journal.turn.telemetry is None else partial(copy_context().run, effect)
        try:
            done = await self._journal.ask_with(
                self._claim_command(call), self._complete(call, fence, _PLACEHOLDER), in_context, frame
            )
        except Exception as e:
            if e not in raised:
                raise  # the store's trouble, not the tool's
            if isinstance(e, PortError) and e.configuration_error:
                raise ToolMisconfigured(tool.name, e) from e
            # Rolled back with its transaction: it surely did not happen.
            call.refusal = call.refused(e)
            await self._run_one(call)
            return
        if isinstance(done, ModelToolResult):
            self._results[call.slot_index] = kept[-1]
            return
        self._begun(call, self._checked(call, done))
        if call.refusal is None:
            raise Moved
        await self._run_one(call)
