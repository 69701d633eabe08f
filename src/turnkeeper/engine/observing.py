"""What telemetry is told of a run: its span, and those of its effects. Nothing here is reached where telemetry is off."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec.structs import replace

from turnkeeper.engine.identity import identity_of
from turnkeeper.engine.outcomes import OutcomeUnknown, classify
from turnkeeper.engine.ports import ModelPort, ModelRequest, Reply
from turnkeeper.engine.prepared_calls import PreparedCall
from turnkeeper.engine.tools import ToolContext
from turnkeeper.engine.wire import ModelInvocationResponse, ModelToolResult, Outcome, to_builtins
from turnkeeper.log.decision import Decision
from turnkeeper.observe import names
from turnkeeper.observe.contexts import TraceContext
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.names import ToolCallState
from turnkeeper.turn.state import Slot, TurnState

if TYPE_CHECKING:
    from turnkeeper.observe.spans import Scene

A = TypeVar("A")

_SIGNED: Final = (
    r.Started,
    r.ModelStarted,
    r.ToolBegun,
    r.DeliveryReserved,
    r.DeliveryClaimed,
    r.RunStopped,
)
"""Records that can say whose run wrote them."""
_LABEL: Final = "conversation"
"""Under which the turns of a conversation have its id."""
_OUTCOMES: Final = {"refused": "refused", "not sent": "not_sent", "unknown": "ambiguous"}


class RunSpan:
    """The span of one run of a turn, and its name in the log."""

    def __init__(self, scene: Scene, telemetry: Telemetry) -> None:
        self._scene = scene
        self._telemetry = telemetry
        self._used = (0, 0)
        self._wrote = False

    def _follows(self, context: TraceContext | None) -> None:
        if self._scene.link(context):
            self._scene.put({names.TURN_RESUMED: True})

    def found(self, state: TurnState) -> None:
        """The turn as this run finds it."""
        if state.phase is None:
            return
        self._follows(state.trace)
        session = identity_of(state).session_id
        conversation = state.labels.get(_LABEL) or (None if session == state.trace_id else session)
        self._scene.put({names.CONVERSATION_ID: conversation})

    def signed(self, state: TurnState, decision: Decision[r.AnyRecord, A]) -> Decision[r.AnyRecord, A]:
        """The decision with this run's context in its first record that can have it, where the log does not have it yet."""
        mine = self._scene.context
        self._wrote |= mine is not None and state.trace == mine
        if not self._wrote:
            self._follows(state.trace)  # a run that begins with a write finds the one before by that
        if mine is None or state.trace == mine:
            return decision
        for index, record in enumerate(decision.records):
            if isinstance(record, _SIGNED):
                self._follows(state.trace)
                head, tail = decision.records[:index], decision.records[index + 1 :]
                return decision._replace(records=(*head, replace(record, trace=mine), *tail))
        return decision

    def used(self, tokens: tuple[int, int]) -> None:
        """A model call of this run has taken these tokens."""
        self._used = (self._used[0] + tokens[0], self._used[1] + tokens[1])

    def ended(self, status: str, error_kind: str | None, message: str | None) -> None:
        """The run has a result. That somebody has to permit something is no error."""
        self._scene.put({names.TURN_STATUS: status})
        if any(self._used):
            self._scene.put({names.INPUT_TOKENS: self._used[0], names.OUTPUT_TOKENS: self._used[1]})
        if status not in ("success", "parked"):
            self._scene.fail(error_kind or status, message)
        self._telemetry.turn_ended(status, self._scene.error)

    def raised(self, error: BaseException) -> None:
        """The run has no result."""
        status = "raised" if isinstance(error, Exception) else "cancelled"
        self._scene.put({names.TURN_STATUS: status})
        self._telemetry.turn_ended(status, names.error_type(error))


@contextmanager
def run(telemetry: Telemetry, turn: TurnHandle, name: str, start: c.Start | None) -> Generator[RunSpan]:
    """A run of a turn."""
    attributes = {
        names.OPERATION: name if name == names.TURN else None,
        names.CONVERSATION_ID: None if start is None else start.labels.get(_LABEL),
        **_where(turn),
    }
    with telemetry.span(name, "internal", attributes) as scene:
        span = RunSpan(scene, telemetry)
        try:
            yield span
        except BaseException as e:
            span.raised(e)
            raise


def _where(turn: TurnHandle) -> dict[str, str]:
    return {names.TURN_ID: turn.trace_id, names.TURN_SCOPE: turn.scope}


@contextmanager
def model_call(
    telemetry: Telemetry, turn: TurnHandle, run: RunSpan | None, model: ModelPort, request: ModelRequest
) -> Generator[Callable[[ModelInvocationResponse | Exception], None]]:
    """A model call; hand its answer to what is given, or why there is none."""
    known = {names.OPERATION: names.CHAT, **_known_as(model)}
    attributes = {
        **known,
        **_where(turn),
        names.ROUND: request.round_index,
        names.ATTEMPT: request.attempt,
        names.OPERATION_ID: request.invocation_id,
    }
    tokens, began = (0, 0), time.perf_counter()
    name = " ".join((names.CHAT, *filter(None, [known.get(names.REQUEST_MODEL)])))
    with telemetry.span(name, "client", attributes) as scene:
        scene.quote(names.INPUT_MESSAGES, lambda: [to_builtins(message) for message in request.messages])

        def ended(answer: ModelInvocationResponse | Exception) -> None:
            nonlocal tokens
            if isinstance(answer, Exception):
                scene.put({names.OUTCOME: "ambiguous" if isinstance(answer, OutcomeUnknown) else "failed"})
                scene.raised(answer)
                return
            scene.put({names.OUTCOME: "success"})
            scene.quote(names.OUTPUT_MESSAGES, lambda: to_builtins(answer))
            if answer.usage is not None:
                tokens = (answer.usage.input_tokens, answer.usage.output_tokens)
                scene.put({names.INPUT_TOKENS: tokens[0], names.OUTPUT_TOKENS: tokens[1]})
                if run is not None:
                    run.used(tokens)

        try:
            yield ended
        except BaseException as e:
            scene.raised(e)
            raise
        finally:
            telemetry.model_called(known, time.perf_counter() - began, scene.error, tokens)


def _known_as(model: ModelPort) -> dict[str, str]:
    """Provider and model, where the port says so."""
    told = ((names.PROVIDER, "provider"), (names.REQUEST_MODEL, "model"))
    named: list[tuple[str, Any]] = [(key, getattr(model, name, None)) for key, name in told]
    return {key: value for key, value in named if isinstance(value, str) and value}


@contextmanager
def tool_call(
    telemetry: Telemetry, call: PreparedCall, context: ToolContext, scope: str
) -> Generator[Callable[[ModelToolResult | None, Slot | None], None]]:
    """A tool call; hand its result to what is given, or where there is none its slot."""
    attributes = {
        names.OPERATION: names.EXECUTE_TOOL,
        names.TOOL_NAME: call.call.tool_name,
        names.TOOL_TYPE: "function",
        names.TOOL_CALL_ID: call.call.provider_call_id or None,
        names.TURN_ID: context.turn_id,
        names.TURN_SCOPE: scope,
        names.ROUND: context.round_index,
        names.SLOT: context.slot_index,
        names.OPERATION_ID: context.operation_id,
        names.TOOL_POLICY: None if call.tool is None else call.tool.policy.value,
    }
    with telemetry.span(f"{names.EXECUTE_TOOL} {call.call.tool_name}", "internal", attributes) as scene:
        scene.quote(names.TOOL_ARGUMENTS, lambda: call.arguments)

        def ended(result: ModelToolResult | None, slot: Slot | None) -> None:
            scene.put({names.FENCE: None if slot is None else slot.fence})
            if result is not None:
                scene.put({names.OUTCOME: result.outcome.value})
                scene.quote(names.TOOL_RESULT, lambda: result.output)
                if result.outcome is not Outcome.SUCCESS:
                    scene.fail(result.error_kind or "tool_error", str(result.output))
            elif slot is not None and slot.state is ToolCallState.AMBIGUOUS:
                scene.put({names.OUTCOME: "ambiguous"})
                scene.fail("effect_outcome_unknown")
            elif slot is not None and slot.state is ToolCallState.CLAIMED:
                scene.put({names.OUTCOME: "given_back"})
            else:
                scene.put({names.OUTCOME: "lost"})
                scene.fail("lease_lost")

        yield ended


@contextmanager
def reply_send(telemetry: Telemetry, turn: TurnHandle, reply: Reply) -> Generator[Callable[[str], None]]:
    """An attempt at sending a reply; hand the channel's id to what is given."""
    with telemetry.span(names.SEND, "producer", {**_where(turn), names.SEND_KEY: reply.key}) as scene:
        scene.quote(names.SENT_TEXT, lambda: reply.text)

        def sent(message_id: str) -> None:
            scene.put({names.SENT_MESSAGE_ID: message_id, names.OUTCOME: "success"})

        try:
            yield sent
        except Exception as e:
            scene.put({names.OUTCOME: _OUTCOMES[classify(e)]})
            raise
