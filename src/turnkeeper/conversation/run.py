"""One continuation of a conversation in this process: runs steps, parks them at waits, and feeds them their answers."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.agent_turns import AgentAnswer, has_acted, run_agent
from turnkeeper.conversation.channel import Channel
from turnkeeper.conversation.context import FlowContext, Reject, TimedOut, Validate
from turnkeeper.conversation.decide import Claimed
from turnkeeper.conversation.flow import Flow, Step
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import chance_seed, effect_turn, timer_id
from turnkeeper.conversation.message import Content, Message, keep_content, keep_message, kept_content, kept_message
from turnkeeper.conversation.outlet import Outcome, Outlet
from turnkeeper.conversation.pen import Pen
from turnkeeper.conversation.state import Answer, Inbound, Row
from turnkeeper.engine.single_call import call_tool
from turnkeeper.engine.tools import Tool
from turnkeeper.engine.wire import Outcome as ToolOutcome
from turnkeeper.errors import (
    ConversationError,
    EffectConflict,
    EffectFailed,
    OwnershipLost,
    TurnCheckpointConflict,
    TurnUnfinished,
)
from turnkeeper.log import values
from turnkeeper.observe.logs import logger
from turnkeeper.turn.handle import TurnHandle

if TYPE_CHECKING:
    from turnkeeper.observe.spans import Scene

log = logger(__name__)

_NO_FENCE: Final = -1
"""No owner has it: what is written under it is refused."""

Ended = Literal["parked", "ended", "failed", "lost", "cancelled"]
"""How a run stands when it is quiet."""


@dataclass(frozen=True)
class Desk:
    """What a run works with.

    Attributes:
        handle: the conversation. channel: where it goes. owner: in whose name. tasks: where its own tasks run.
        lease_seconds: of the turns that it runs.
    """

    handle: ConversationHandle
    channel: Channel
    owner: str
    tasks: TaskGroup
    lease_seconds: float


class StepRun:
    """A flow's steps from where its row stands; or, with `aside`, one function that answers a message beside the flow."""

    def __init__(
        self, desk: Desk, flow: Flow | None, work: Claimed, row: Row | None, *, aside: Step | None = None
    ) -> None:
        assert work.message is not None
        self._desk = desk
        self._flow = flow
        self._aside = aside
        revision = 0 if work.row is None else work.row.revision
        self._pen = Pen(desk.handle, desk.owner, work.fence, desk.tasks, revision=revision)
        self._outlet = Outlet(self._pen, desk.channel)
        self._record: Inbound = work.message
        self._row = row
        self._cause = (work.message.number, 0) if row is None or aside is not None else row.cause
        self._waits = 0
        self._prompts: tuple[tuple[int, int], ...] = ()
        self._names: Counter[str] = Counter()
        self._chance: random.Random | None = None
        given = Answer(self._record.number, self._record.kind, self._record.message, self._record.at)
        self._given = given if row is None or aside is not None else row.message or given
        self._fed: anyio.Event | None = None
        self._asking = False
        self._span: Scene | None = None
        self.scope = anyio.CancelScope()
        self.quiet = anyio.Event()
        self.ended: Ended = "failed"
        self.failure: Exception | None = None
        self.acted = False
        """Whether something was begun that cannot be undone."""

    @property
    def conversation_id(self) -> str:
        """See `FlowContext`."""
        return self._desk.handle.conversation_id

    @property
    def message(self) -> Message:
        """See `FlowContext`."""
        return kept_message(self._given.message)

    @property
    def earlier(self) -> list[Message]:
        """See `FlowContext`."""
        return [] if self._row is None else [kept_message(one.message) for one in self._row.earlier]

    @property
    def at(self) -> int:
        """When the message that is handled now was taken."""
        return self._given.at

    @property
    def revision(self) -> int:
        """Of the row that a parked run stands at; -1: it cannot be fed."""
        return -1 if self._row is None or self._fed is None else self._row.revision

    # --- from outside ----------------------------------------------------------------------------------------

    async def main(self, why: str = "") -> None:
        """Run until the flow ends, or the run is lost, fails or is cancelled; parks in between. `quiet` tells."""
        self.ended = "cancelled"
        try:
            with self.scope:
                await (self._go() if self._aside is None else self._beside(self._aside, why))
                self.ended = "ended"
        except OwnershipLost:
            self.ended = "lost"
        except BaseExceptionGroup as e:  # of a task group of the step's own
            if e.subgroup(OwnershipLost) is not None:
                self.ended = "lost"
            elif isinstance(e, Exception):
                self.ended, self.failure = "failed", e
            else:
                raise
        except Exception as e:
            self.ended, self.failure = "failed", e
        finally:
            with anyio.CancelScope(shield=True):
                if self.ended in ("failed", "cancelled"):
                    await self._pen.salvage()
            self.quiet.set()

    def feed(self, work: Claimed, span: Scene | None = None) -> None:
        """Give the wait that the run is parked at its answer; `span` is that of its handling."""
        assert self._fed is not None
        self._span = span
        assert work.message is not None
        self._record, self._row = work.message, work.row
        self._pen.fence = work.fence
        self._pen.revision = self.revision
        self.quiet, self.ended = anyio.Event(), "cancelled"
        self._fed.set()

    # --- steps -----------------------------------------------------------------------------------------------

    async def _go(self) -> None:
        flow = self._flow
        assert flow is not None
        while True:
            row = self._row
            assert row is not None
            state: dict[str, Any] = values.thaw(row.state)
            context = FlowContext(self, state)
            step = flow.present_name(row.step)
            assert step is not None
            behind = flow.after(step, await flow.code(step)(context))
            if behind is None:
                await self._outlet.settle_rest()
                number = self._record.number
                end = c.EndFlow(self._pen.owner, self._pen.fence, number, "done")
                await self._pen.write(end, c.Settle(self._pen.owner, self._pen.fence, number, "handled"))
                return
            self._enter(flow, behind, values.freeze(context.state, "state"))

    def _enter(self, flow: Flow, step: str, state: bytes) -> None:
        """The next step's row (C2): written before anything of that step that can be noticed."""
        row = self._row
        assert row is not None
        self._row = replace(
            row,
            version=flow.version,
            step=step,
            entry=row.entry + 1,
            state=state,
            parked=False,
            inbound=self._record.number,
            cause=self._cause,
            answers=(),
            prompts=(),
            timer="",
            watermark=0,
            kept={},
            message=self._given,
        )
        self._pen.set_row(self._row)
        self._waits = 0
        self._names.clear()

    async def _beside(self, aside: Step, why: str) -> None:
        state: dict[str, Any] = {} if self._row is None or not self._row.state else values.thaw(self._row.state)
        await aside(FlowContext(self, state, why=why))
        await self._pen.flush()

    async def settle(self, outcome: str, *, end: str | None = None) -> None:
        """The message is handled beside the flow; with `end`, the flow is over for that reason."""
        number, owner, fence = self._record.number, self._pen.owner, self._pen.fence
        ends = [c.EndFlow(owner, fence, number, end)] if end is not None else []
        await self._outlet.settle_rest()
        await self._pen.write(*ends, c.Settle(owner, fence, number, outcome))

    # --- sending and asking ----------------------------------------------------------------------------------

    async def send(self, content: Content, *, watermark: bool = False, soon: bool = True) -> Outcome:
        """See `FlowContext.send`."""
        record, sequence = self._cause
        self._cause = (record, sequence + 1)
        self.acted = True
        return await self._outlet.send(record, sequence, content, watermark=watermark, soon=soon)

    async def ask(
        self, prompt: Content | None, validate: Validate | None, timeout: float | None, *, only_after: bool
    ) -> Any:
        """See `FlowContext.ask`."""
        row = self._row
        if self._aside is not None or row is None:
            raise ConversationError(
                f"conversation {self.conversation_id!r}: only a step of a flow can wait for an answer"
            )
        if self._asking:
            raise ConversationError(f"conversation {self.conversation_id!r}: a step can wait for one answer at a time")
        self._asking = True
        try:
            return await self._wait_for(prompt, validate, timeout, row, only_after=only_after)
        finally:
            self._asking = False

    async def _wait_for(
        self, prompt: Content | None, validate: Validate | None, timeout: float | None, row: Row, *, only_after: bool
    ) -> Any:
        number = self._waits
        self._waits += 1
        self._prompts = ()
        while True:
            watermark = 0
            if prompt is not None:
                self._prompts = (*self._prompts, self._cause)
                sent = await self.send(prompt, watermark=only_after or row.first_wait, soon=False)
                watermark = sent.watermark
            answer = self._known_answer(number)
            if answer is None:
                answer = await self._park(number, timeout, watermark)
            self._given, self._cause, self._chance = answer, (answer.number, 0), None
            if answer.kind == "timer":
                raise TimedOut(f"conversation {self.conversation_id!r}: nobody answered within {timeout} seconds")
            if answer.value is not None:
                return values.thaw(answer.value)
            try:
                value = await self._judged(validate)
            except ValueError as e:
                self._reject(answer)
                # What other code says in its errors is not for the person who has asked nothing of it.
                told = str(e) if isinstance(e, Reject) else ""
                if told or prompt is None:
                    buttons = () if prompt is None else prompt.buttons
                    prompt = Content(text=told or "Please try again.", buttons=buttons)
                continue
            self._accept(answer, value)
            return value

    def _known_answer(self, number: int) -> Answer | None:
        row = self._row
        assert row is not None
        return row.answers[number] if number < len(row.answers) else None

    async def _judged(self, validate: Validate | None) -> Any:
        message = self.message
        if validate is None:
            return message.value if message.kind == "button" else message.text
        value = validate(message)
        return await value if inspect.isawaitable(value) else value

    def _reject(self, answer: Answer) -> None:
        """C6: the wait stays."""
        assert self._row is not None
        self._row = replace(self._row, answers=tuple(one for one in self._row.answers if one != answer))

    def _accept(self, answer: Answer, value: Any) -> None:
        row = self._row
        assert row is not None
        if answer not in row.answers:
            return  # the seed's mode does not keep it
        frame = values.freeze(value, "answer")
        self._row = replace(
            row, answers=tuple(replace(one, value=frame) if one == answer else one for one in row.answers)
        )
        self._pen.defer(c.KeepAnswer(self._pen.owner, self._pen.fence, answer.number, frame))

    async def _park(self, number: int, timeout: float | None, watermark: int) -> Answer:
        row = self._row
        assert row is not None
        kept = not row.first_wait or number == 0
        await self._outlet.settle_rest()
        # A wait that goes on behind a rejected answer has another timer: the old one's firing may be on its way.
        asked_by = f"ask {self._record.number}"
        timer = "" if timeout is None else timer_id(row.instance, row.entry, asked_by, number)
        parked = replace(
            row,
            parked=kept,
            inbound=self._record.number,
            answers=() if row.first_wait else row.answers,
            # C7: a wait that is asked again must find its prompt unsent, so the count goes on from where it is.
            cause=row.cause if kept else self._cause,
            message=row.message if kept else self._given,
            prompts=self._prompts,
            timer=timer,
            watermark=watermark,
        )
        self._pen.set_row(parked)
        owner, fence = self._pen.owner, self._pen.fence
        commands: list[c.Command] = [c.Settle(owner, fence, self._record.number, "parked")]
        if timeout is not None:
            wake = keep_message(Message(event_id=timer, kind="timer"))
            commands.insert(0, c.SetTimer(owner, fence, timer, wake, after_ms=round(timeout * 1000)))
        await anyio.lowlevel.checkpoint_if_cancelled()
        await self._pen.write(*commands)
        self._row = self._desk.handle.state.row
        self._fed = anyio.Event()
        self.ended = "parked"
        self.quiet.set()
        try:
            await self._fed.wait()
        except anyio.get_cancelled_exc_class():
            # Nobody can feed it any more, and it owns nothing: whoever is answered next runs the step again.
            self._fed, self._pen.fence = None, _NO_FENCE
            if not self.scope.cancel_called and not self._desk.tasks.cancel_scope.cancel_called:
                log.error(
                    "conversation %s: a time limit of the step's own has no effect on a wait: use `c.ask(timeout=...)`",
                    self.conversation_id,
                )
            raise
        if self._span is not None:
            self._span.go_on()
        one = self._record
        known = self._known_answer(number)
        return Answer(one.number, one.kind, one.message, one.at) if known is None else known

    # --- effects ---------------------------------------------------------------------------------------------

    def _turn(self, name: str) -> TurnHandle:
        """The turn of the next effect of that name in this visit of the step."""
        row = self._row
        instance, entry = ("", 0) if row is None else (row.instance, row.entry)
        if self._aside is not None:
            instance, entry = f"aside-{instance}", self._record.number
        nth = self._names[name]
        self._names[name] += 1
        handle = self._desk.handle
        turn_id = effect_turn(instance, entry, name, nth)
        return TurnHandle(handle.log.store, turn_id, keeping=handle.keeping, telemetry=handle.telemetry)

    async def do(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """See `FlowContext.do`."""
        turn = self._turn(tool.name)
        await self._pen.flush()  # what its arguments were made of has to be the same again
        self.acted = self.acted or not tool.replayable
        try:
            ended, result = await call_tool(
                turn, tool, arguments, labels=self._labels(), lease_seconds=self._desk.lease_seconds
            )
        except TurnCheckpointConflict as e:
            raise EffectConflict(self.conversation_id, tool.name) from e
        if result is None:
            raise TurnUnfinished(turn.trace_id, ended.status, ended.message or "", ended.open_slots)
        if result.outcome is ToolOutcome.FAILED:
            raise EffectFailed(tool.name, result.error_kind or "tool_error", str(result.output))
        return result.output

    async def agent_turn(self, agent: Any, messages: list[Any], name: str) -> AgentAnswer:
        """See `FlowContext.run`."""
        turn = self._turn(name)
        await self._pen.flush()
        flow = self._flow
        steer = flow is not None and flow.while_running == "steer" and self._aside is None
        try:
            return await run_agent(
                self._desk.handle,
                self._pen,
                turn,
                agent,
                messages,
                steered_into=self._record.number if steer else None,
                is_word=lambda text: flow is not None and flow.meaning(text) is not None,
                labels=self._labels(),
            )
        except TurnCheckpointConflict as e:
            raise EffectConflict(self.conversation_id, name) from e
        finally:
            self.acted = self.acted or has_acted(turn)

    def _labels(self) -> dict[str, str]:
        return {"conversation": self.conversation_id}

    # --- what is the same again ------------------------------------------------------------------------------

    @property
    def chance(self) -> random.Random:
        """See `FlowContext.random`."""
        if self._chance is None:
            row, state = self._row, self._desk.handle.state
            instance, entry = ("", 0) if row is None else (row.instance, row.entry)
            seed = chance_seed(state.seed, instance, entry, self._given.number)
            self._chance = random.Random(seed)  # noqa: S311  # repeatable on purpose
        return self._chance

    async def once(self, name: str, function: Callable[[], Any]) -> Any:
        """See `FlowContext.once`."""
        row = self._row
        if row is None or self._aside is not None:
            raise ConversationError(f"conversation {self.conversation_id!r}: only a step of a flow can keep values")
        name = values.identifier(name, "name", longest=128)
        if name in row.kept:
            return values.thaw(row.kept[name])
        value = function()
        if inspect.isawaitable(value):
            value = await value
        frame = values.freeze(value, name)
        assert self._row is not None
        self._row = replace(self._row, kept={**self._row.kept, name: frame})
        self._pen.defer(c.KeepValue(self._pen.owner, self._pen.fence, name, frame))
        return values.thaw(frame)

    # --- reminders -------------------------------------------------------------------------------------------

    async def remind(self, name: str, content: Content, after: float) -> None:
        """See `FlowContext.remind`."""
        frame, _ = keep_content(content)
        timer = f"reminder:{values.identifier(name, 'name', longest=128)}"
        sent = Message(event_id=timer, kind="timer", data={"content": values.thaw(frame)})
        self.acted = True
        set_ = c.SetTimer(self._pen.owner, self._pen.fence, timer, keep_message(sent), after_ms=round(after * 1000))
        await self._once_each(timer, set_)

    async def forget(self, name: str) -> None:
        """See `FlowContext.forget`."""
        timer = f"reminder:{name}"
        await self._once_each(timer, c.CancelTimer(self._pen.owner, self._pen.fence, timer))

    async def _once_each(self, timer: str, command: c.Command) -> None:
        """Write what sets or cancels a reminder, unless this visit of the step has done so before: it may have fired since,
        and a later call may have changed it."""
        marks: list[c.Command] = []
        if self._row is not None and self._aside is None:
            mark = f"\0{timer}:{self._names[timer]}"  # no name that `once` takes
            self._names[timer] += 1
            if mark in self._row.kept:
                return
            nothing = values.freeze(None)
            self._row = replace(self._row, kept={**self._row.kept, mark: nothing})
            marks.append(c.KeepValue(self._pen.owner, self._pen.fence, mark, nothing))
        await self._pen.write(*marks, command)

    async def send_reminder(self) -> None:
        """A reminder's time has come."""
        content = self.message.data.get("content")
        if content is not None:
            await self.send(kept_content(values.freeze(content)))
