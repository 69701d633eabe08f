"""A turn without a store, for tests of single rules: put commands at an instant, see what they did."""

from __future__ import annotations

from typing import Any, Final

from turnkeeper.log import values
from turnkeeper.log.record import Guard
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.identity import ToolCall, operation_id, trace_hash
from turnkeeper.turn.names import ToolCallState, TurnPhase
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import Slot, TurnState, find_slot

TRACE: Final = "trace"
SCOPE: Final = "primary"
NOON: Final = 1_000_000
LEASE: Final = 100
CHARGE: Final = ToolCall("call_0", "charge", "fingerprint of 500 cents")
MAIL: Final = ToolCall("call_1", "mail", "fingerprint of a mail")
RESULT: Final = {"ok": True, "text": "charged"}


class Desk:
    """The state of one turn, and the store's time."""

    def __init__(self) -> None:
        self.state = TurnState()
        self.now = NOON
        self.guard: Guard | None = None
        """Of the last append."""
        self.written: tuple[r.AnyRecord, ...] = ()
        """The records of the last put."""

    def put(self, *commands: c.Command) -> tuple[SlotAnswer | None, ...]:
        """Decide and append at the present instant; the answers. Raises what the rules raise."""
        decision = decide_all(self.state, commands, self.now)
        assert decision.guard is None or decision.guard.holds(self.now), "a guard holds at the time it was decided for"
        before = self.state.revision
        for record in decision.records:
            self.state = evolve(self.state, record, self.now)
        assert self.state.revision == before + len(decision.records), "T1.4"
        self.guard, self.written = decision.guard, decision.records
        return decision.answer

    def ask(self, command: c.SlotCommand) -> SlotAnswer:
        """Put one command on a slot."""
        (answer,) = self.put(command)
        assert answer is not None
        return answer

    def slot(self, slot_index: int = 0, round_index: int = 0) -> Slot:
        """A slot that was claimed."""
        slot = find_slot(self.state, round_index, slot_index)
        assert slot is not None
        return slot

    @property
    def phase(self) -> TurnPhase | None:
        """Where the turn stands."""
        return self.state.phase


def start(*, fingerprint: str = "inbound", deadline: int = 0, who: str = "a") -> c.Start:
    """Start the turn."""
    messages = values.freeze([{"role": "user", "content": f"prompt of {who}"}])
    return c.Start(TRACE, SCOPE, messages, values.freeze(["charge"]), values.freeze({}), fingerprint, deadline)


def reserve(round_index: int, *calls: ToolCall, who: str = "a") -> c.ReserveAssistant:
    """Reserve a decision."""
    return c.ReserveAssistant(round_index, values.freeze({"content": f"decision of {who}"}), calls)


def commit(round_index: int, *, who: str = "a", allow_ambiguous: bool = False) -> c.CommitRound:
    """Commit a round."""
    return c.CommitRound(round_index, 1, [{"content": f"transcript of {who}"}], values.freeze({}), allow_ambiguous)


def claim(
    owner: str = "a",
    *,
    round_index: int = 0,
    slot_index: int = 0,
    call: ToolCall = CHARGE,
    begin: bool = False,
    replay_safe: bool = False,
    repeat_ambiguous: bool = False,
) -> c.ClaimTool:
    """Claim a slot."""
    return c.ClaimTool(
        round_index,
        slot_index,
        operation_id(trace_hash(TRACE), SCOPE, round_index, slot_index),
        call,
        owner,
        replay_safe,
        LEASE,
        LEASE if begin else None,
        repeat_ambiguous,
    )


def begin(owner: str = "a", fence: int = 1, *, slot_index: int = 0) -> c.BeginTool:
    """Cross the barrier."""
    return c.BeginTool(0, slot_index, owner, fence, LEASE)


def complete(owner: str = "a", fence: int = 1, result: Any = RESULT, *, slot_index: int = 0) -> c.CompleteTool:
    """Complete a slot."""
    return c.CompleteTool(0, slot_index, owner, fence, values.freeze(result))


def reserved(*calls: ToolCall, deadline: int = 0) -> Desk:
    """A turn whose first decision has these calls."""
    desk = Desk()
    desk.put(start(deadline=deadline), reserve(0, *calls))
    return desk


def with_slot(state: ToolCallState | None, *, replay_safe: bool = False, deadline: int = 0) -> Desk:
    """A turn whose only slot is in that state: owned by `a` with the fence 1, its lease ending at NOON + LEASE."""
    desk = reserved(CHARGE, deadline=deadline)
    if state is None:
        return desk
    desk.put(claim(replay_safe=replay_safe))
    if state is ToolCallState.CLAIMED:
        return desk
    desk.put(begin())
    if state is ToolCallState.COMPLETED:
        desk.put(complete())
    if state is ToolCallState.AMBIGUOUS:
        desk.put(c.DoubtTool(0, 0, "a", 1, "a timeout"))
    assert desk.slot().state is state
    return desk


def in_phase(phase: TurnPhase | None, *calls: ToolCall) -> Desk:
    """A turn in that phase; the calls of its decision are completed where the phase comes later."""
    desk = Desk()
    done = [
        x for i, call in enumerate(calls) for x in (claim(slot_index=i, call=call, begin=True), complete(slot_index=i))
    ]
    for reached, commands in (
        (TurnPhase.STARTED, [start()]),
        (TurnPhase.ASSISTANT_RESERVED, [reserve(0, *calls)]),
        (TurnPhase.ROUND_COMMITTED, [*done, commit(0)]),
        (TurnPhase.FINAL_MODEL_SAVED, [c.SaveFinalModel("final of a")]),
        (TurnPhase.DELIVERY_RESERVED, [c.ReserveDelivery("key", "text of a", None)]),
        (TurnPhase.DELIVERED, [c.MarkDelivered("key", "message 1")]),
        (TurnPhase.COMPLETED, [c.MarkCompleted()]),
    ):
        if phase is None:
            break
        desk.put(*commands)
        if reached is phase:
            break
    assert desk.phase is phase
    return desk
