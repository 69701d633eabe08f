"""T2 of journal.md, cell by cell: which command is taken in which phase, the repeat rules, model calls, and the delivery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.model.desk import (
    CHARGE,
    LEASE,
    MAIL,
    NOON,
    Desk,
    claim,
    commit,
    complete,
    in_phase,
    reserve,
    reserved,
    start,
    with_slot,
)
from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import disputes
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.identity import input_fingerprint
from turnkeeper.turn.names import Resolution, ToolCallState, TurnPhase
from turnkeeper.turn.state import final_model, final_text, find_round, thaw_messages

P = TurnPhase
OVER = NOON + LEASE

COMMANDS: dict[str, c.Command] = {
    "start": start(who="b"),
    "reserve 0": reserve(0, who="b"),
    "reserve 1": reserve(1, who="b"),
    "reserve 2": reserve(2, who="b"),
    "reserve -1": reserve(-1, who="b"),
    "commit 0": commit(0, who="b"),
    "commit 1": commit(1, who="b"),
    "commit -1": commit(-1, who="b"),
    "final": c.SaveFinalModel("final of b"),
    "reply": c.ReserveDelivery("key", "text of b", values.freeze({"of": "b"})),
    "delivered": c.MarkDelivered("key", "message 1"),
    "complete": c.MarkCompleted(),
    "complete without output": c.MarkCompleted(allow_no_output=True),
}
"""For a turn without tool calls, by somebody who comes second."""

TAKEN: dict[TurnPhase | None, dict[str, TurnPhase]] = {
    None: {"start": P.STARTED},
    P.STARTED: {
        "reserve 0": P.ASSISTANT_RESERVED,
        "final": P.FINAL_MODEL_SAVED,
        "complete without output": P.COMPLETED,
    },
    P.ASSISTANT_RESERVED: {
        "commit 0": P.ROUND_COMMITTED,
        "final": P.FINAL_MODEL_SAVED,
        "complete without output": P.COMPLETED,
    },
    P.ROUND_COMMITTED: {
        "reserve 1": P.ASSISTANT_RESERVED,
        "final": P.FINAL_MODEL_SAVED,
        "complete without output": P.COMPLETED,
    },
    P.FINAL_MODEL_SAVED: {"reply": P.DELIVERY_RESERVED, "complete without output": P.COMPLETED},
    P.DELIVERY_RESERVED: {"delivered": P.DELIVERED},  # never closed without output: a send may be out (ambiguity 9)
    P.DELIVERED: {"complete": P.COMPLETED, "complete without output": P.COMPLETED},
    P.COMPLETED: {},
}
"""T2's table: what changes the turn, and how."""

REPEATED: dict[TurnPhase | None, set[str]] = {
    None: set(),
    P.STARTED: {"start"},
    P.ASSISTANT_RESERVED: {"start", "reserve 0"},
    P.ROUND_COMMITTED: {"start", "reserve 0", "commit 0"},
    P.FINAL_MODEL_SAVED: {"start", "reserve 0", "commit 0", "final"},
    P.DELIVERY_RESERVED: {"start", "reserve 0", "commit 0", "final", "reply"},
    P.DELIVERED: {"start", "reserve 0", "commit 0", "final", "reply", "delivered"},
    P.COMPLETED: {"start", "reserve 0", "final", "reply", "delivered", "complete", "complete without output"},
}
"""T2's repeat rules: what is taken and changes nothing. All else is refused."""


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("phase", [None, *P])
def test_phase_table(phase: TurnPhase | None, name: str) -> None:
    """T2, each cell: a command moves the turn, or repeats what is there, or is refused and changes nothing."""
    desk = in_phase(phase)
    before = desk.state
    if name in TAKEN[phase]:
        desk.put(COMMANDS[name])
        assert desk.phase is TAKEN[phase][name]
        assert desk.state.revision == before.revision + 1, "T1.4"
        desk.put(COMMANDS[name])
        assert desk.written == (), "an idempotent repeat"
    elif name in REPEATED[phase]:
        desk.put(COMMANDS[name])
        assert desk.state == before
    else:
        with pytest.raises(TurnCheckpointError):
            desk.put(COMMANDS[name])
        assert desk.state == before


def test_start_gives_revision_1() -> None:
    """T2 STARTED: current_round -1, revision 1."""
    desk = in_phase(P.STARTED)
    assert (desk.state.revision, desk.state.current_round) == (1, -1)


def test_canonical_values_are_the_first_writers() -> None:
    """T2, repeat rules: whoever comes second gets the first one's prompt, decision, transcript, final text and reply."""
    desk = in_phase(P.DELIVERED)
    for name in ("start", "reserve 0", "commit 0", "final", "reply", "delivered"):
        desk.put(COMMANDS[name])
    state = desk.state
    round_ = find_round(state, 0)
    assert round_ is not None
    assert values.thaw(round_.response) == {"content": "decision of a"}
    assert [m["content"] for m in thaw_messages(state.transcript)] == ["prompt of a", "transcript of a"]
    assert (final_model(state), final_text(state)) == ("final of a", "text of a")
    assert state.delivery is not None
    assert state.delivery.presentation is None


# --- start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*P])
def test_start_with_another_input(phase: TurnPhase) -> None:
    """T2 `start`, ambiguity 1: another inbound message under the same trace is a conflict, at any time."""
    desk = in_phase(phase)
    with pytest.raises(TurnCheckpointConflict):
        desk.put(start(fingerprint="another"))


USER = {"role": "user", "content": "hello"}
OLD = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "indeed"}]
SYSTEM = {"role": "system", "content": "it is nine o'clock"}

SAME_INPUT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "another system prompt": ([SYSTEM, *OLD, USER], {}),
    "a longer memory": ([*OLD, *OLD, USER], {}),
    "a memory behind the message": ([*OLD, USER, SYSTEM], {}),
    "another runtime": ([*OLD, USER], {"host": "b"}),
}
OTHER_INPUT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "another message": ([*OLD, {"role": "user", "content": "goodbye"}], {}),
    "a second message": ([*OLD, USER, USER], {}),
    "a message with an id": ([*OLD, {**USER, "id": "2"}], {}),
    "what the host says": ([*OLD, USER], {"inbound": {"id": "m1"}}),
}


@pytest.mark.parametrize(("messages", "runtime"), SAME_INPUT.values(), ids=SAME_INPUT.keys())
def test_fingerprint_of_the_same_input(messages: list[Any], runtime: dict[str, Any]) -> None:
    """T2 `start`: over the user messages behind the last assistant message; what is assembled around them does not count."""
    assert input_fingerprint(messages, runtime) == input_fingerprint([*OLD, USER], {})


@pytest.mark.parametrize(("messages", "runtime"), OTHER_INPUT.values(), ids=OTHER_INPUT.keys())
def test_fingerprint_of_another_input(messages: list[Any], runtime: dict[str, Any]) -> None:
    """T2 `start`: another content, another number of messages, or an identity given by the host."""
    assert input_fingerprint(messages, runtime) != input_fingerprint([*OLD, USER], {})


def test_fingerprint_of_what_the_host_says() -> None:
    """T2 `start`: over `runtime["inbound"]` where the host gives it, whatever the messages are; also where it says None."""
    one = input_fingerprint([USER], {"inbound": {"id": "m1", "text": "x"}, "host": "a"})
    assert one == input_fingerprint(OLD, {"inbound": {"text": "x", "id": "m1"}, "host": "b"})
    assert one != input_fingerprint([USER], {"inbound": {"id": "m2", "text": "x"}})
    assert input_fingerprint([USER], {"inbound": None}) == input_fingerprint(OLD, {"inbound": None})


# --- rounds --------------------------------------------------------------------------------------------------

UNDECIDED: dict[str, Callable[[], Desk]] = {
    "never claimed": lambda: with_slot(None),
    "claimed": lambda: with_slot(ToolCallState.CLAIMED),
    "executing": lambda: with_slot(ToolCallState.EXECUTING),
}


@pytest.mark.parametrize("desk", UNDECIDED.values(), ids=UNDECIDED.keys())
@pytest.mark.parametrize("allow_ambiguous", [False, True])
def test_commit_waits_for_every_slot(desk: Callable[[], Desk], allow_ambiguous: bool) -> None:
    """T2 ROUND_COMMITTED, field cases 01 and 04: every slot of the decision terminal."""
    with pytest.raises(TurnCheckpointError, match=r"\[0\] have no result"):
        desk().put(commit(0, allow_ambiguous=allow_ambiguous))
    two = reserved(CHARGE, MAIL)
    two.put(claim(slot_index=1, call=MAIL, begin=True), complete(slot_index=1))
    with pytest.raises(TurnCheckpointError, match=r"\[0\] have no result"):
        two.put(commit(0, allow_ambiguous=allow_ambiguous))


def test_commit_of_a_completed_slot() -> None:
    """T2 ROUND_COMMITTED."""
    desk = with_slot(ToolCallState.COMPLETED)
    desk.put(commit(0))
    assert desk.phase is P.ROUND_COMMITTED


def test_commit_over_an_ambiguous_slot() -> None:
    """Ambiguity 7: an open question blocks by default; with `report` the model is told; settled, it does not block."""
    desk = with_slot(ToolCallState.AMBIGUOUS)
    with pytest.raises(TurnCheckpointError):
        desk.put(commit(0))
    desk.put(commit(0, allow_ambiguous=True))
    assert desk.phase is P.ROUND_COMMITTED
    assert desk.state.attention == "ambiguous_tool", "still a question for a person (T4)"
    settled = with_slot(ToolCallState.AMBIGUOUS)
    settled.put(c.ResolveTool(0, 0, Resolution.HAPPENED, "operator", "looked", values.freeze({})), commit(0))
    assert settled.phase is P.ROUND_COMMITTED


def test_commit_again_behind_later_rounds() -> None:
    """T2: a round that was committed is committed; what never was is out of order."""
    desk = in_phase(P.ROUND_COMMITTED)
    desk.put(reserve(1))
    desk.put(commit(0, who="b"))
    assert desk.written == ()
    desk.put(commit(1))
    desk.put(commit(0, who="b"))
    assert desk.written == ()
    for index in (-1, 2):
        with pytest.raises(TurnCheckpointError):
            desk.put(commit(index))


def test_final_behind_calls_that_are_not_committed() -> None:
    """T2 FINAL_MODEL_SAVED: from ASSISTANT_RESERVED only if its decision has no tool calls."""
    desk = with_slot(ToolCallState.COMPLETED)
    with pytest.raises(TurnCheckpointError):
        desk.put(c.SaveFinalModel("final"))
    desk.put(commit(0), c.SaveFinalModel("final"))
    assert desk.phase is P.FINAL_MODEL_SAVED


# --- the end -------------------------------------------------------------------------------------------------


def test_reply_under_another_key() -> None:
    """T2 `reserve_final_delivery`, `mark_delivered`: another key is a conflict, in every phase that knows one."""
    for phase in (P.DELIVERY_RESERVED, P.DELIVERED, P.COMPLETED):
        desk = in_phase(phase)
        for command in (c.ReserveDelivery("other", "text of a", None), c.MarkDelivered("other", "message 1")):
            with pytest.raises(TurnCheckpointConflict):
                desk.put(command)


@pytest.mark.parametrize("phase", [P.DELIVERED, P.COMPLETED])
def test_second_message_id_is_kept(phase: TurnPhase) -> None:
    """T2 `mark_delivered`: both ids are kept for audit, the first stays; the same one twice is written once."""
    desk = in_phase(phase)
    for message, written in (("message 1", 0), ("message 2", 1), ("message 2", 0), ("message 3", 1)):
        decision = disputes(desk.state, c.MarkDelivered("key", message))
        assert len(decision.records) == written
        for record in decision.records:
            assert isinstance(record, r.DeliveryDisputed)
            desk.state = evolve(desk.state, record, desk.now)
    assert desk.state.sent_message_id == "message 1"
    assert desk.state.disputed_message_ids == ("message 2", "message 3")
    assert desk.state.attention == "double_send"


@pytest.mark.parametrize("state", [None, *ToolCallState])
def test_close_without_output(state: ToolCallState | None) -> None:
    """T2 COMPLETED: all slots terminal; ambiguous is terminal, never claimed is not."""
    desk = with_slot(state)
    if state in (ToolCallState.COMPLETED, ToolCallState.AMBIGUOUS):
        desk.put(c.MarkCompleted(allow_no_output=True))
        assert desk.state.completed
    else:
        with pytest.raises(TurnCheckpointError, match="not terminal"):
            desk.put(c.MarkCompleted(allow_no_output=True))


def test_nothing_moves_a_finished_turn() -> None:
    """T2: any mutation after COMPLETED is refused, also of what was under way when it was closed without output."""
    desk = in_phase(P.STARTED)
    desk.put(c.StartModel(0, "a", LEASE))
    assert desk.state.model is not None
    call = desk.state.model.invocation_id
    desk.put(c.MarkCompleted(allow_no_output=True))
    for command in (
        c.RenewModel(call, "a", LEASE),
        c.FailModel(call, "a", "refused"),
        c.StartModel(0, "a", LEASE),
        c.ClaimDelivery("a", LEASE),
        c.DoubtDelivery("a", "a timeout"),
        c.ResolveDelivery(None, "a", "looked"),
        c.SaveFinalModel("final"),
        c.ReserveDelivery("key", "text", None),
    ):
        with pytest.raises(TurnCheckpointError):
            desk.put(command)
