"""Conversations on one replica: takes messages, owns conversations while it handles them, and hands them over."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import anyio
from anyio.abc import TaskGroup

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.channel import Channel
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.decide import Claimed, Receipt
from turnkeeper.conversation.evolve import Retention
from turnkeeper.conversation.flow import Flow, Step
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.intents import Intents, flows_by_name
from turnkeeper.conversation.lookout import Lookout
from turnkeeper.conversation.message import Message, keep_message, redacted_message
from turnkeeper.conversation.observing import begin_turn
from turnkeeper.conversation.run import Desk, StepRun
from turnkeeper.conversation.state import KIND, TraceContext
from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.engine.loop import new_owner
from turnkeeper.errors import (
    MessageNotDelivered,
    OwnershipLost,
    StoreError,
    StoreUnsuitable,
    TurnUnfinished,
)
from turnkeeper.log import values
from turnkeeper.log.keeping import Keeping, Limits, Redact
from turnkeeper.log.record import HeadQuery
from turnkeeper.log.store import NotifyingStore, PrivateStore, Store
from turnkeeper.observe.logs import about, logger
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.turn.handle import milliseconds

if TYPE_CHECKING:
    from turnkeeper.observe.spans import Scene

log = logger(__name__)

_BACKOFF: Final = 0.5
_LONGEST_BACKOFF: Final = 60.0
_OF_THE_WAIT: Final = 0.1
"""The part of the time that a message has waited for somebody, after which it is looked at again."""
_LOOKS: Final = 0.5
"""Most seconds between two looks at what came while a step runs, where the store does not tell."""
_UNSEEN: Final = nullcontext()
"""In place of a span."""


class Processed(NamedTuple):
    """How far a conversation was brought.

    Attributes:
        handled: messages that were settled, or parked at the next wait.
        left: why something is left: another replica is at it (`busy`), it has to wait (`later`), somebody has to look (`held`),
            or others were to have their turn (`more`); None: nothing is.
        until: for `busy` and `later`, when to look again, in milliseconds of the store's clock.
        again_in: seconds until there is something to do, a timer included; None: not before another message comes, or
            somebody has looked.
    """

    handled: int
    left: Literal["busy", "later", "held", "more"] | None = None
    until: int = 0
    again_in: float | None = None


class Conversations:
    """The conversations of a bot, on one replica. Use it as an async context manager.

    Any number of replicas may share a store: each message is handled by the one that owns its conversation then.
    """

    def __init__(
        self,
        store: Store,
        flows: Flow | Sequence[Flow],
        channel: Channel | Callable[[str], Channel],
        *,
        name: str | None = None,
        lease_seconds: float = 30.0,
        max_attempts: int = 5,
        on_poison: Literal["hold", "skip"] = "hold",
        keep_alive: int = 1000,
        retention: Retention = Retention(),  # noqa: B008  # immutable
        telemetry: Telemetry | None = None,
        replicas: bool = False,
        announce: Callable[[str], Awaitable[object]] | None = None,
        limits: Limits = Limits(),  # noqa: B008  # immutable
        redact: Redact | None = None,
    ) -> None:
        """
        Args:
            flows: what the bot does; the first one that a message begins counts.
            channel: where messages go; or, by conversation id, a function that gives it.
            name: of this replica, unique over all; one is made up if None.
            lease_seconds: how long it may be silent before another replica may take over.
            max_attempts: attempts at a message without progress, before it is set aside.
            on_poison: what happens to the conversation then: `hold` it until somebody has looked, or `skip` the message.
            keep_alive: parked conversations whose steps are kept in memory; others run again from their step's start.
            retention: how long logs are kept.
            telemetry: traces and counts what is done here; None: nobody does.
            replicas: other processes take part; a store that they cannot reach is refused (R4).
            announce: tells workers that a conversation has something to do, once that is in its journal.
            limits: the largest sizes that are kept.
            redact: sees every incoming text, and every text of its steps' turns, before it is kept (docs/security.md).

        Raises:
            InvalidInput: two flows have the same name, or one has no steps.
            StoreUnsuitable: `replicas`, and the store is this process's alone.
        """
        if replicas and isinstance(store, PrivateStore) and store.private:
            raise StoreUnsuitable("the store", "is this process's alone, so no other replica can take part")
        self._store = store
        self._flows = flows_by_name([flows] if isinstance(flows, Flow) else flows)
        self._intents = Intents(self._flows)
        self._channel = channel
        self.name = new_owner() if name is None else values.identifier(name, "name")
        self._lease_seconds = lease_seconds
        self._max_attempts = max_attempts
        self._on_poison: Literal["hold", "skip"] = on_poison
        self._keep_alive = keep_alive
        self._retention = retention
        self._telemetry = telemetry
        self._announce = announce
        self._keeping = Keeping(limits, redact)
        self._handles: OrderedDict[str, ConversationHandle] = OrderedDict()
        self._locks: dict[str, anyio.Lock] = {}
        self._live: OrderedDict[str, StepRun] = OrderedDict()
        self._leases = LeaseKeeper(lease_seconds, telemetry)
        self._tasks: TaskGroup | None = None
        self._stopping = False

    async def __aenter__(self) -> Conversations:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._leases.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand over: what is under way stops at its next barrier and is put back, for another replica to go on with."""
        assert self._tasks is not None
        self._stopping = True
        self._tasks.cancel_scope.cancel()
        # What the block has raised goes on as it is: nothing of it is this group's.
        await self._tasks.__aexit__(None, None, None)

    @property
    def announces(self) -> bool:
        """Whether workers are told of what it takes."""
        return self._announce is not None

    # --- taking messages -------------------------------------------------------------------------------------

    async def receive(self, conversation_id: str, message: Message, trace: TraceContext | None = None) -> Receipt:
        """Take a message into the journal; durable when this returns, so its channel may be told then (J1).

        Raises:
            InvalidInput: the message is of an unknown kind, or something in it cannot be kept. Nothing was written.
            ValueTooLarge: it is over the limit of messages.
            StoreError: the store failed: do not acknowledge the message.
        """
        handle = self._handle(conversation_id)
        if trace is None and self._telemetry is not None:
            trace = self._telemetry.current_context()
        kept = keep_message(redacted_message(message, self._keeping), self._keeping.limits.message)
        receipt = await handle.receive(message.event_id, message.kind, kept, trace)
        # Also for what came before and is not settled: whoever took it then may have died before he told anybody.
        if self._announce is not None and (not receipt.duplicate or handle.state.head is not None):
            try:
                await self._announce(conversation_id)
            except StoreError as e:
                if not await self._is_listed(handle):
                    raise  # delivered again, it is told of again
                # Workers look through the store for such ones.
                log.warning(
                    "conversation %s could not be announced: %s",
                    conversation_id,
                    e,
                    extra={"conversation": conversation_id},
                )
        return receipt

    async def _is_listed(self, handle: ConversationHandle) -> bool:
        """Whether who looks through the store finds the conversation by now: an index of logs may lag behind them (LOG-8)."""
        listed = self._store.heads(HeadQuery(kind=KIND, prefix=handle.key))
        return any([head.key == handle.key async for head in listed])

    async def handle(self, conversation_id: str, message: Message) -> Processed:
        """Take a message, and bring its conversation as far as it goes."""
        await self.receive(conversation_id, message)
        return await self.process(conversation_id)

    # --- handling them ---------------------------------------------------------------------------------------

    async def process(self, conversation_id: str, *, at_most: int | None = None) -> Processed:
        """Handle what is pending in a conversation, one message behind the other (J2); at most so many, if given.

        Raises:
            FlowUnknown: the conversation is in a flow, or a version, that this replica does not know.
            StoreError: the store failed; call it again.
        """
        handle = self._handle(conversation_id)
        handled = 0
        async with about(conversation=conversation_id), self._locks.setdefault(conversation_id, anyio.Lock()):
            if handle.state.head is None:
                await handle.read()
            while not self._stopping:
                await handle.fire_due()
                if handle.state.head is None:  # as read now, or as our own last append found it
                    return self._processed(handle, handled)
                if at_most is not None and handled >= at_most:
                    await self._let_go(handle)
                    return Processed(handled, "more", again_in=0.0)
                asked_at = time.monotonic()
                work, why, span = await self._claim(handle)
                match work.what:
                    case "work":
                        with _UNSEEN if span is None else span.current():
                            handled += await self._work(handle, work, why, span, asked_at)
                    case "idle":
                        return self._processed(handle, handled)
                    case "busy" | "later" | "held":
                        await self._let_go(handle)
                        return self._processed(handle, handled, work)
                    case "changed" | "moved_on":
                        pass
        return Processed(handled, "later", again_in=0.0)

    def _processed(self, handle: ConversationHandle, handled: int, work: Claimed | None = None) -> Processed:
        left: Literal["busy", "later", "held"] | None = None
        until, due = 0, handle.state.due
        if work is not None and work.what in ("busy", "later", "held"):
            left, until = work.what, work.until
        when = min((at for at in (until, due) if at), default=None)
        again_in = None if when is None else max(when - handle.log.now(), 0) / 1000
        return Processed(handled, left, until, again_in)

    def _handle(self, conversation_id: str) -> ConversationHandle:
        handle = self._handles.get(conversation_id)
        if handle is None:
            handle = self._handles[conversation_id] = ConversationHandle(
                self._store, conversation_id, self._retention, self._keeping, telemetry=self._telemetry
            )
            self._forget_idle()
        self._handles.move_to_end(conversation_id)
        return handle

    def _forget_idle(self) -> None:
        for one in list(self._handles)[: max(len(self._handles) - 4 * self._keep_alive, 0)]:
            lock = self._locks.get(one)
            if one not in self._live and (lock is None or not lock.locked()):
                del self._handles[one]
                self._locks.pop(one, None)

    async def _let_go(self, handle: ConversationHandle) -> None:
        state = handle.state
        if state.owner == self.name:
            try:
                await handle.ask(c.Release(self.name, state.fence))
            except OwnershipLost:
                log.debug("conversation %s went to another replica", handle.conversation_id)

    async def _claim(self, handle: ConversationHandle) -> tuple[Claimed, str, Scene | None]:
        """Own the conversation and its first message; and, for what is not the flow's own, why; and the span of its handling."""
        state = handle.state
        message = state.head
        assert message is not None
        intent, start, why = self._intents.look(state, message)
        live = self._live.get(handle.conversation_id)
        span = None
        if self._telemetry is not None:
            # Who goes on in memory knows the turn before; who resumes links to it (F7).
            before = state.row.trace if live is None and state.row is not None else None
            span = begin_turn(self._telemetry, state.conversation_id, message.number, [before, message.trace])
        claim = c.Claim(
            self.name,
            milliseconds(self._lease_seconds),
            message.number,
            intent,
            start,
            None if live is None else live.revision,
            self._max_attempts,
            self._on_poison,
            None if span is None else span.context,
        )
        (work,) = await handle.ask(claim)
        return work, why, span

    # --- one message -----------------------------------------------------------------------------------------

    async def _work(
        self, handle: ConversationHandle, work: Claimed, why: str, span: Scene | None, asked_at: float
    ) -> int:
        """Handle one claimed message. How many were settled by it: 1, or 0 where it was put back or lost."""
        row, mode = work.row, work.mode
        flow = None if row is None else self._flows.get(row.flow)
        live = self._live.pop(handle.conversation_id, None)
        aside, outcome, end = self._beside(flow, work, why)
        if aside is None:
            if mode == "continue" and live is not None:
                run = live
                run.feed(work, span)
            else:
                self._drop(live)
                run = StepRun(self._desk(handle), flow, work, row)
                self._spawn(run, why)
        else:
            run = StepRun(self._desk(handle), flow, work, row, aside=aside)
            self._spawn(run, why)
        await self._until_quiet(handle, run, flow, work, asked_at)
        if run.ended == "ended" and aside is not None:
            try:
                await run.settle(outcome, end=end)
            except OwnershipLost:
                run.ended = "lost"
        if aside is not None:
            if live is not None and mode == "unasked" and run.ended == "ended":
                self._keep(handle, live)
            else:
                self._drop(live)
        match run.ended:
            case "parked":
                self._keep(handle, run)
                return 1
            case "ended":
                return 1
            case "lost":
                log.warning("conversation %s went to another replica", handle.conversation_id)
                await handle.read()
                return 0
            case "failed" | "cancelled":
                if span is not None and run.failure is not None and not isinstance(run.failure, TurnUnfinished):
                    span.raised(run.failure)  # who waits for somebody has not failed
                await self._put_back(handle, work, run)
                return 0

    def _beside(self, flow: Flow | None, work: Claimed, why: str) -> tuple[Step | None, str, str | None]:
        """The function that answers a message which is not the flow's own; the outcome; and how the flow ends, if it does."""
        match work.mode:
            case "unasked":
                return (flow and flow.when_unasked) or _nothing, f"unasked: {why}", None
            case "cancel":
                hook = None if flow is None else flow.when_cancelled if why == "cancelled" else flow.when_ended
                return hook or _nothing, why or "interrupted", why or "interrupted"
            case "reminder":
                return _remind, "reminder", None
            case _:
                if flow is not None and work.row is not None and flow.present_name(work.row.step) is None:
                    return flow.when_ended or _nothing, "version", "version"
                return None, "", None

    def _desk(self, handle: ConversationHandle) -> Desk:
        assert self._tasks is not None, "use it as an async context manager"
        channel = self._channel
        chosen = channel if hasattr(channel, "send") else channel(handle.conversation_id)  # type: ignore[operator]
        return Desk(handle, chosen, self.name, self._tasks, self._lease_seconds)  # type: ignore[arg-type]

    def _spawn(self, run: StepRun, why: str) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(run.main, why)

    async def _until_quiet(
        self, handle: ConversationHandle, run: StepRun, flow: Flow | None, work: Claimed, asked_at: float
    ) -> None:
        where = f"conversation {handle.conversation_id!r}"

        async def renew() -> bool:
            try:
                await handle.ask(c.Renew(self.name, work.fence, milliseconds(self._lease_seconds)))
            except OwnershipLost:
                return False
            return True

        watched = flow is not None and flow.while_running == "cancel" and work.mode in ("begin", "resume")
        with self._leases.holding(where, renew, run.scope.cancel, since=asked_at):
            try:
                async with anyio.create_task_group() as watch:
                    if watched:
                        watch.start_soon(self._watch, handle, run, work)
                    await run.quiet.wait()
                    watch.cancel_scope.cancel()
            except anyio.get_cancelled_exc_class():
                run.scope.cancel()
                with anyio.CancelScope(shield=True):
                    await run.quiet.wait()
                    if run.ended in ("cancelled", "failed"):
                        await self._put_back(handle, work, run)
                raise

    async def _watch(self, handle: ConversationHandle, run: StepRun, work: Claimed) -> None:
        """Stop a run whose message a later one supersedes, as long as it has done nothing that cannot be undone."""
        assert work.message is not None
        while True:
            since = handle.log.position
            state = handle.state
            if any(one.number > work.message.number and one.kind == "text" for one in state.inbound):
                if not run.acted:
                    run.scope.cancel()
                return
            if isinstance(self._store, NotifyingStore):
                await self._store.changed(handle.key, since=since, timeout=_LOOKS)
            else:
                await anyio.sleep(_LOOKS)
            await handle.read()

    async def _put_back(self, handle: ConversationHandle, work: Claimed, run: StepRun) -> None:
        """The message was not handled: give it up for a later one, or try it again later, here or elsewhere."""
        assert work.message is not None
        number = work.message.number
        error = run.failure
        later = next((one for one in handle.state.inbound if one.number > number and one.kind == "text"), None)
        commands: list[c.Command]
        if error is None and not run.acted and later is not None and not self._stopping:
            commands = [
                c.EndFlow(self.name, work.fence, number, "superseded"),
                c.Supersede(self.name, work.fence, number, later.number),
            ]
        else:
            waits = isinstance(error, TurnUnfinished | MessageNotDelivered)
            delay = _BACKOFF * 2 ** min(work.message.attempts, 10)
            if waits:
                # No attempts are counted: the longer it has waited for somebody, the rarer it is looked at.
                delay = max(delay, (handle.log.now() - work.message.at) / 1000 * _OF_THE_WAIT)
            if isinstance(error, MessageNotDelivered):
                delay = max(delay, error.retry_after)
            if error is None:
                delay = 0.0
            elif not waits:
                log.error("conversation %s: message %d failed", handle.conversation_id, number, exc_info=error)
            reason = "stopped" if error is None else f"{type(error).__name__}: {error}"
            if waits and reason != work.message.reason:  # told once, however often it is looked at again
                log.warning("conversation %s: message %d waits: %s", handle.conversation_id, number, reason)
            commands = [
                c.ReturnMessage(
                    self.name,
                    work.fence,
                    number,
                    values.text(reason, "reason"),
                    round(min(delay, _LONGEST_BACKOFF) * 1000),
                    counts=not waits and error is not None,
                )
            ]
        try:
            await handle.ask(*commands)
        except OwnershipLost:
            log.debug("conversation %s went to another replica", handle.conversation_id)

    def _keep(self, handle: ConversationHandle, run: StepRun) -> None:
        self._live[handle.conversation_id] = run
        while len(self._live) > self._keep_alive:
            self._drop(self._live.popitem(last=False)[1])

    def _drop(self, run: StepRun | None) -> None:
        if run is not None:
            run.scope.cancel()

    # --- as a worker -----------------------------------------------------------------------------------------

    async def work(self, *, poll_seconds: float = 0.5, at_once: int = 16) -> None:
        """Handle whatever is pending in the store, for as long as this is not cancelled."""
        await Lookout(self.pending, self.process, poll_seconds=poll_seconds, at_once=at_once).run()

    async def pending(self) -> list[str]:
        """Conversations with something to do now, by the store's listing, which may lag."""
        now = max((handle.log.now() for handle in self._handles.values()), default=0)
        found: list[str] = []
        async for head in self._store.heads(HeadQuery(kind=KIND)):
            labels = head.labels
            at = labels.get("not_before", "0") if head.phase == "PENDING" else None
            # Before the store was first heard, its time is not known: the claim tells.
            if any(when is not None and (not now or int(when) <= now) for when in (at, labels.get("due"))):
                found.append(labels["conversation"])
        return found


async def _nothing(_: FlowContext) -> None:
    pass


async def _remind(context: FlowContext) -> None:
    await context.send_reminder()
