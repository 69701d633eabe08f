"""Folding many records at once (`turn/state.py`) gives the state that evolving record after record gives."""

from __future__ import annotations

import random

import pytest

from turnkeeper.observe.contexts import TraceContext
from turnkeeper.turn import records as r
from turnkeeper.turn.evolve import evolve, fold
from turnkeeper.turn.identity import ToolCall
from turnkeeper.turn.names import Resolution, ToolCallState
from turnkeeper.turn.state import TurnState, find_slot

Entry = tuple[r.AnyRecord, int]


class _Turn:
    """Makes records that may follow one another, whatever order the rules would allow them in."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.state = TurnState()
        self.entries: list[Entry] = []

    def add(self, record: r.AnyRecord) -> None:
        at = 1000 + 7 * len(self.entries)
        self.entries.append((record, at))
        self.state = evolve(self.state, record, at)

    def trace(self) -> TraceContext | None:
        """Of a run with telemetry, or none."""
        return self.random.choice([None, TraceContext(f"trace {self.random.random()}")])

    def slot_record(self, round_index: int, slot_index: int) -> r.AnyRecord:
        """Any record that the slot can take."""
        here = (round_index, slot_index)
        owner, fence = self.random.choice(["a", "b"]), self.random.randint(1, 9)
        slot = find_slot(self.state, *here)
        begun = r.ToolBegun(*here, owner, fence, 900, True, trace=self.trace())
        owned = [r.ToolClaimed(*here, owner, fence, 30, False), begun]
        if slot is None:
            return self.random.choice(owned)
        more: list[r.AnyRecord] = [
            r.ToolRenewed(*here, 40),
            r.ToolAbandoned(*here),
            r.ToolCompleted(*here, b"result", late=self.random.random() < 0.5),
            r.ToolEvidence(*here, owner, fence, b"evidence"),
        ]
        if slot.state is ToolCallState.AMBIGUOUS:
            how = self.random.choice(list(Resolution))
            more.append(r.ToolResolved(*here, how, "who", "why", None if how is Resolution.DID_NOT_HAPPEN else b"told"))
        else:
            more.append(r.ToolAmbiguous(*here))
        return self.random.choice([*owned, *more])

    def round(self, index: int) -> None:
        if self.random.random() < 0.5:
            self.add(r.ModelStarted(index, f"invocation {index}", "a", 60, self.trace()))
        calls = tuple(ToolCall(f"call {n}", "tool", f"{n}") for n in range(self.random.randint(0, 3)))
        self.add(r.AssistantReserved(index, b"decision", calls))
        for _ in range(self.random.randint(0, 9)):
            round_index = self.random.randint(0, index) if self.random.random() < 0.2 else index
            reserved = next(
                e for e, _ in self.entries if isinstance(e, r.AssistantReserved) and e.round_index == round_index
            )
            if reserved.calls:
                self.add(self.slot_record(round_index, self.random.randrange(len(reserved.calls))))
        self.add(r.RoundCommitted(index, index, b"messages", self.random.choice([None, b"runtime"])))


@pytest.mark.parametrize("seed", range(60))
def test_fold_is_evolve_for_each(seed: int) -> None:
    """At once, and in two parts that are cut anywhere: also in the middle of a round, or of a run of one round's slots."""
    turn = _Turn(seed)
    turn.add(r.Started("trace", "primary", b"messages", b"tools", b"runtime", "input"))
    for index in range(turn.random.randint(1, 5)):
        turn.round(index)
    assert fold(TurnState(), turn.entries) == turn.state
    for cut in range(len(turn.entries)):
        assert fold(fold(TurnState(), turn.entries[:cut]), iter(turn.entries[cut:])) == turn.state


def test_fold_leaves_the_state_before_it_alone() -> None:
    """A state is never changed: who holds one, holds it as it was."""
    start: list[Entry] = [
        (r.Started("trace", "primary", b"messages", b"tools", b"runtime", "input"), 1),
        (r.AssistantReserved(0, b"decision", (ToolCall("call", "tool", "0"),)), 2),
    ]
    before = fold(TurnState(), start)
    assert fold(before, []) is before
    after = fold(before, [(r.ToolBegun(0, 0, "a", 1, 900, False), 3)])
    assert find_slot(before, 0, 0) is None
    assert find_slot(after, 0, 0) is not None
    assert before == fold(TurnState(), start)
