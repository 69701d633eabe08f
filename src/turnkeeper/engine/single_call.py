"""A tool call that no model has asked for: a step of a flow makes it, by the same rules, in a turn of its own.

Two durable writes: the input, the call and its barrier are one append; its result and the turn's end are the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnkeeper.engine.identity import RunIdentity
from turnkeeper.engine.loop import TurnResult, TurnRun, start_of
from turnkeeper.engine.model_calls import reservation
from turnkeeper.engine.ports import Agent, ModelRequest
from turnkeeper.engine.rounds import Moved, Stopped, ToolRound
from turnkeeper.engine.stored import stored_result
from turnkeeper.engine.tools import Tool
from turnkeeper.engine.wire import ModelInvocationResponse, ModelToolRequest, ModelToolResult, to_builtins
from turnkeeper.errors import TurnCheckpointConflict
from turnkeeper.observe import names
from turnkeeper.turn import commands as c
from turnkeeper.turn.handle import TurnHandle


class _NobodyAsks:
    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        raise AssertionError(f"turn {request.turn_id!r} is a single call, and asks no model")


class _CallRun(TurnRun):
    """A run of a turn whose only decision was made by the host."""

    span_name = names.CALL_TURN

    def __init__(self, turn: TurnHandle, agent: Agent, decision: ModelInvocationResponse) -> None:
        super().__init__(turn, agent, None)
        self._decision = decision
        self._reserve = reservation(0, decision)

    async def _start(self, start: c.Start | None) -> None:
        if start is not None:
            self._journal.defer(start, self._reserve)  # written with the barrier

    def check(self) -> None:
        """Refuse to take another call's result for this one's."""
        known = self._journal.state.round
        if known is not None and known.calls != self._reserve.calls:
            raise TurnCheckpointConflict(f"turn {self._turn.trace_id!r} has made another call than this one")

    async def _step(self) -> None:
        state = self._journal.state
        self.check()
        slots = [None] if state.round is None else state.round.slots
        round_ = ToolRound(
            self._journal, self._leases, self._agent, 0, self._decision, self._reserve.calls, slots, self._delegated
        )
        try:
            await round_.run()
        except Stopped:
            if state.round is not None:
                raise
            # Nothing of the turn was read before its barrier. Once more, with what is there: its tool's policy may settle it.
            raise Moved from None
        if self._journal.state.phase is None:
            raise Moved
        await self._journal.ask(c.MarkCompleted(allow_no_output=True))


async def call_tool(
    turn: TurnHandle,
    tool: Tool,
    arguments: Mapping[str, Any],
    *,
    labels: dict[str, str] | None = None,
    lease_seconds: float = 30.0,
) -> tuple[TurnResult, ModelToolResult | None]:
    """Call a tool once, by its policy, or give the recorded result. The result is None where the run ended short of it.

    Raises:
        InvalidInput: the arguments cannot be kept.
        TurnCheckpointConflict: the turn has made another call.
        StoreError: the store failed; call it again.
    """
    agent = Agent(_NobodyAsks(), [tool], lease_seconds=lease_seconds)
    request = ModelToolRequest(id="call", name=tool.name, arguments=dict(arguments))
    decision = ModelInvocationResponse(tool_requests=[request])
    message = {"role": "user", "content": f"call {tool.name}"}
    inbound = {"inbound": to_builtins(request)}
    start = start_of(turn, agent, [message], identity=RunIdentity(), runtime=inbound, labels=labels)
    call = _CallRun(turn, agent, decision)
    ended = await call.run(start, wait=True)
    call.check()
    if not turn.state.completed or turn.state.round is None:
        return ended, None
    slot = turn.state.round.slots[0]
    assert slot is not None
    assert slot.result is not None
    return ended, stored_result(slot.result, "call", tool.name)
