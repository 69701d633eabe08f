"""T3 of journal.md, cell by cell: `claim_tool`, begin, renew, abandon, complete, doubt, resolve, and the trap."""

from __future__ import annotations

import pytest

from tests.model.desk import (
    CHARGE,
    LEASE,
    MAIL,
    NOON,
    RESULT,
    Desk,
    begin,
    claim,
    commit,
    complete,
    in_phase,
    reserve,
    reserved,
    with_slot,
)
from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import ToolCall, operation_id, trace_hash
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.snapshot import ToolCallDecision

A = ToolCallAction
S = ToolCallState
LIVE = NOON + LEASE - 1
OVER = NOON + LEASE
"""The lease is over from its end on."""


def resolve(
    resolution: Resolution, result: object = None, *, round_index: int = 0, who: str = "operator"
) -> c.ResolveTool:
    """Settle the slot."""
    frame = None if result is None else values.freeze(result)
    return c.ResolveTool(round_index, 0, resolution, who, "looked it up", frame)


# --- claim_tool ----------------------------------------------------------------------------------------------


def test_claim_1_no_log() -> None:
    """T3 `claim_tool` 1: no log -> MISSING, for every command on a slot."""
    for command in (
        claim(),
        begin(),
        c.RenewTool(0, 0, "a", 1, LEASE),
        c.AbandonTool(0, 0, "a", 1),
        complete(),
        c.DoubtTool(0, 0, "a", 1, ""),
    ):
        assert Desk().ask(command) == SlotAnswer(A.MISSING)


@pytest.mark.parametrize("phase", [p for p in TurnPhase if p is not TurnPhase.ASSISTANT_RESERVED])
def test_claim_2_other_phase(phase: TurnPhase) -> None:
    """T3 `claim_tool` 2: a phase other than ASSISTANT_RESERVED -> INVALID_STATE; a COMPLETED slot still answers CACHED."""
    desk = in_phase(phase)
    assert desk.ask(claim()).action is A.INVALID_STATE
    desk = in_phase(phase, CHARGE)
    if phase is TurnPhase.STARTED:
        assert desk.ask(claim()).action is A.INVALID_STATE
        return
    answer = desk.ask(claim("b"))
    assert answer.action is A.CACHED
    assert answer.slot is not None
    assert values.thaw(answer.slot.result or b"") == RESULT


def test_claim_2_other_round() -> None:
    """T3 `claim_tool` 2: a round other than the current one -> INVALID_STATE, but for its COMPLETED slots."""
    desk = in_phase(TurnPhase.ROUND_COMMITTED, CHARGE)
    desk.put(reserve(1, MAIL))
    assert desk.ask(claim(round_index=0)).action is A.CACHED
    assert desk.ask(claim(round_index=0, slot_index=1)).action is A.INVALID_STATE
    assert desk.ask(claim(round_index=2)).action is A.INVALID_STATE
    assert desk.ask(claim(round_index=1, call=MAIL)).action is A.ACQUIRED


WRONG = {
    "an operation id that is not the derived one": c.ClaimTool(0, 0, "op_else", CHARGE, "a", False, LEASE),
    "the operation id of another slot": c.ClaimTool(0, 0, claim(slot_index=1).operation_id, CHARGE, "a", False, LEASE),
    "a slot outside the decision": claim(slot_index=1),
    "a negative slot": claim(slot_index=-1),
    "another call id": claim(call=ToolCall("call_9", CHARGE.tool_name, CHARGE.arguments_fingerprint)),
    "no call id": claim(call=ToolCall(None, CHARGE.tool_name, CHARGE.arguments_fingerprint)),
    "another tool": claim(call=ToolCall(CHARGE.provider_call_id, "refund", CHARGE.arguments_fingerprint)),
    "other arguments": claim(call=ToolCall(CHARGE.provider_call_id, CHARGE.tool_name, "fingerprint of 900 cents")),
}


@pytest.mark.parametrize("command", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("state", [None, *S])
def test_claim_3_conflict(command: c.ClaimTool, state: ToolCallState | None) -> None:
    """T3 `claim_tool` 3: what does not match the reserved decision -> CONFLICT, in whatever state the slot is."""
    desk = with_slot(state)
    for desk.now in (LIVE, OVER):
        assert desk.ask(command).action is A.CONFLICT
        assert desk.written == ()


CLAIMS = [
    # stored, replay safe, lease, who -> action, state, fence
    (None, False, LIVE, "a", A.ACQUIRED, S.CLAIMED, 1),
    (None, False, LIVE, "b", A.ACQUIRED, S.CLAIMED, 1),
    (S.CLAIMED, False, LIVE, "a", A.ACQUIRED, S.CLAIMED, 1),
    (S.CLAIMED, False, LIVE, "b", A.BUSY, S.CLAIMED, 1),
    (S.CLAIMED, False, OVER, "a", A.RECLAIMED, S.CLAIMED, 2),
    (S.CLAIMED, False, OVER, "b", A.RECLAIMED, S.CLAIMED, 2),
    (S.EXECUTING, False, LIVE, "a", A.ALREADY_EXECUTING, S.EXECUTING, 1),
    (S.EXECUTING, False, LIVE, "b", A.BUSY, S.EXECUTING, 1),
    (S.EXECUTING, True, LIVE, "a", A.ALREADY_EXECUTING, S.EXECUTING, 1),
    (S.EXECUTING, True, LIVE, "b", A.BUSY, S.EXECUTING, 1),
    (S.EXECUTING, True, OVER, "a", A.RECLAIMED, S.CLAIMED, 2),
    (S.EXECUTING, True, OVER, "b", A.RECLAIMED, S.CLAIMED, 2),
    (S.EXECUTING, False, OVER, "a", A.AMBIGUOUS, S.AMBIGUOUS, 1),
    (S.EXECUTING, False, OVER, "b", A.AMBIGUOUS, S.AMBIGUOUS, 1),
    *((S.COMPLETED, safe, at, who, A.CACHED, S.COMPLETED, 1) for safe in (False, True) for at in (LIVE, OVER) for who in "ab"),
    *((S.AMBIGUOUS, safe, at, who, A.AMBIGUOUS, S.AMBIGUOUS, 1) for safe in (False, True) for at in (LIVE, OVER) for who in "ab"),
]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True], ids=["claim", "claim and begin"])
@pytest.mark.parametrize(("stored", "safe", "at", "who", "action", "after", "fence"), CLAIMS)
def test_claim_4_table(
    stored: ToolCallState | None,
    safe: bool,
    at: int,
    who: str,
    action: ToolCallAction,
    after: ToolCallState,
    fence: int,
    fused: bool,
) -> None:
    """T3 `claim_tool` 4, each cell; a fused begin turns what would be CLAIMED into EXECUTING, and is told BEGUN."""
    desk = with_slot(stored, replay_safe=safe)
    desk.now = at
    owned = action in (A.ACQUIRED, A.RECLAIMED)
    if fused and owned:
        action, after = A.BEGUN, S.EXECUTING
    answer = desk.ask(claim(who, replay_safe=safe, begin=fused))
    slot = desk.slot()
    assert (answer.action, slot.state, slot.fence) == (action, after, fence)
    assert (answer.owner, answer.fence) == (slot.owner, fence)
    assert bool(desk.written) is (owned or (stored is S.EXECUTING and after is S.AMBIGUOUS)), "T1.4"
    if owned:
        assert (slot.owner, slot.lease_end) == (who, at + LEASE)
    else:
        assert slot.owner == "a"


@pytest.mark.parametrize(
    ("stored", "given", "again", "action"),
    [
        (True, True, True, A.RECLAIMED),
        (True, False, False, A.AMBIGUOUS),
        (True, False, True, A.AMBIGUOUS),
        (False, True, True, A.AMBIGUOUS),
    ],
)
def test_claim_4_replay_safe_is_only_lowered(stored: bool, given: bool, again: bool, action: ToolCallAction) -> None:
    """T3 `replay_safe`, ambiguity 5: stored AND given; one claim that says no is enough for ever."""
    desk = with_slot(S.CLAIMED, replay_safe=stored)
    assert desk.ask(claim(replay_safe=given)).action is A.ACQUIRED
    assert desk.slot().replay_safe is (stored and given)
    desk.put(begin())
    desk.now = OVER
    assert desk.ask(claim("b", replay_safe=again)).action is action


def test_claim_after_a_lost_reply() -> None:
    """Ambiguity 6: the same owner claims again: same fence, the lease runs anew."""
    desk = with_slot(S.CLAIMED)
    desk.now = LIVE
    assert desk.ask(claim()).fence == 1
    desk.now = OVER
    assert desk.ask(begin()).action is A.BEGUN


# --- begin, renew, abandon, complete -------------------------------------------------------------------------

BEGINS = [
    # stored, at, owner, fence -> action, state
    (None, LIVE, "a", 1, A.MISSING, None),
    (S.CLAIMED, LIVE, "a", 1, A.BEGUN, S.EXECUTING),
    (S.CLAIMED, OVER, "a", 1, A.LEASE_EXPIRED, S.CLAIMED),
    (S.CLAIMED, LIVE, "b", 1, A.STALE_OWNER, S.CLAIMED),
    (S.CLAIMED, LIVE, "a", 2, A.STALE_OWNER, S.CLAIMED),
    (S.CLAIMED, OVER, "b", 1, A.STALE_OWNER, S.CLAIMED),
    (S.EXECUTING, LIVE, "a", 1, A.ALREADY_EXECUTING, S.EXECUTING),
    (S.EXECUTING, LIVE, "b", 1, A.STALE_OWNER, S.EXECUTING),
    (S.EXECUTING, LIVE, "a", 0, A.STALE_OWNER, S.EXECUTING),
    (S.COMPLETED, LIVE, "a", 1, A.CACHED, S.COMPLETED),
    (S.COMPLETED, LIVE, "b", 7, A.CACHED, S.COMPLETED),
    (S.AMBIGUOUS, LIVE, "a", 1, A.AMBIGUOUS, S.AMBIGUOUS),
    (S.AMBIGUOUS, LIVE, "b", 7, A.AMBIGUOUS, S.AMBIGUOUS),
]
RENEWS = [
    (None, LIVE, "a", 1, A.MISSING, None),
    (S.CLAIMED, LIVE, "a", 1, A.INVALID_STATE, S.CLAIMED),
    (S.EXECUTING, LIVE, "a", 1, A.RENEWED, S.EXECUTING),
    (S.EXECUTING, OVER, "a", 1, A.LEASE_EXPIRED, S.EXECUTING),
    (S.EXECUTING, LIVE, "b", 1, A.STALE_OWNER, S.EXECUTING),
    (S.EXECUTING, LIVE, "a", 2, A.STALE_OWNER, S.EXECUTING),
    (S.COMPLETED, LIVE, "a", 1, A.CACHED, S.COMPLETED),
    (S.AMBIGUOUS, LIVE, "a", 1, A.AMBIGUOUS, S.AMBIGUOUS),
]
ABANDONS = [
    (
        stored,
        at,
        owner,
        fence,
        A.ABANDONED if action is A.RENEWED else action,
        S.CLAIMED if action is A.RENEWED else after,
    )
    for stored, at, owner, fence, action, after in RENEWS
]
COMPLETES = [
    (None, LIVE, "a", 1, A.MISSING, None),
    (S.CLAIMED, LIVE, "a", 1, A.INVALID_STATE, S.CLAIMED),
    (S.EXECUTING, LIVE, "a", 1, A.COMPLETED, S.COMPLETED),
    (S.EXECUTING, OVER, "a", 1, A.COMPLETED, S.COMPLETED),
    (S.EXECUTING, LIVE, "b", 1, A.STALE_OWNER, S.EXECUTING),
    (S.EXECUTING, OVER, "a", 2, A.STALE_OWNER, S.EXECUTING),
    (S.COMPLETED, OVER, "a", 1, A.CACHED, S.COMPLETED),
    (S.AMBIGUOUS, OVER, "a", 1, A.AMBIGUOUS, S.AMBIGUOUS),
    (S.AMBIGUOUS, OVER, "b", 1, A.STALE_OWNER, S.AMBIGUOUS),
]
DOUBTS = [
    (stored, at, owner, fence, A.AMBIGUOUS if action is A.COMPLETED else action, S.AMBIGUOUS if action is A.COMPLETED else after)
    for stored, at, owner, fence, action, after in COMPLETES[:-1]
]  # fmt: skip
OWNED = [
    *(("begin", *row) for row in BEGINS),
    *(("renew", *row) for row in RENEWS),
    *(("abandon", *row) for row in ABANDONS),
    *(("complete", *row) for row in COMPLETES),
    *(("doubt", *row) for row in DOUBTS),
]


@pytest.mark.parametrize(("verb", "stored", "at", "owner", "fence", "action", "after"), OWNED)
def test_owned_table(
    verb: str,
    stored: ToolCallState | None,
    at: int,
    owner: str,
    fence: int,
    action: ToolCallAction,
    after: ToolCallState | None,
) -> None:
    """T3 `begin_tool`, `renew_tool`, `abandon_tool`, `complete_tool`, each row; ambiguities 3 and 4."""
    desk = with_slot(stored)
    desk.now = at
    command: c.SlotCommand = {
        "begin": begin(owner, fence),
        "renew": c.RenewTool(0, 0, owner, fence, LEASE),
        "abandon": c.AbandonTool(0, 0, owner, fence),
        "complete": complete(owner, fence),
        "doubt": c.DoubtTool(0, 0, owner, fence, "a timeout"),
    }[verb]
    answer = desk.ask(command)
    assert answer.action is action
    if after is None:
        return
    slot = desk.slot()
    assert (slot.state, slot.owner, slot.fence) == (after, "a", 1)
    if stored is not after and after in (S.EXECUTING, S.CLAIMED):
        assert slot.lease_end == (at + LEASE if after is S.EXECUTING else at)
    if action is A.RENEWED:
        assert slot.lease_end == at + LEASE
    if action is A.COMPLETED:
        assert slot.late is (at == OVER), "a completion behind the lease is marked late"


@pytest.mark.parametrize("action", A)
def test_only_begun_authorises(action: ToolCallAction) -> None:
    """T3, ambiguity 2: `should_begin` and `should_execute` are true for BEGUN alone."""
    decision = ToolCallDecision(action, S.EXECUTING, 0, 0, "op", "call", "charge", {}, "a", 1, False)
    assert decision.should_begin is decision.should_execute is (action is A.BEGUN)


@pytest.mark.parametrize("state", [None, *S])
def test_terminal_and_cached_result(state: ToolCallState | None) -> None:
    """T3: COMPLETED and AMBIGUOUS are terminal; `cached_result` is for COMPLETED alone."""
    decision = ToolCallDecision(A.CACHED, state, 0, 0, "op", "call", "charge", {}, "a", 1, False, result=RESULT)
    assert decision.terminal is (state in (S.COMPLETED, S.AMBIGUOUS))
    assert decision.cached_result == (RESULT if state is S.COMPLETED else None)


def test_begin_whose_reply_is_lost_ends_ambiguous() -> None:
    """T3 `begin_tool`: nobody is told BEGUN twice, so an unsafe slot ends in AMBIGUOUS: the intended price."""
    desk = with_slot(S.CLAIMED)
    desk.put(begin())
    assert desk.ask(begin()).action is A.ALREADY_EXECUTING
    assert desk.ask(claim(begin=True)).action is A.ALREADY_EXECUTING
    desk.now = OVER
    assert desk.ask(claim(begin=True)).action is A.AMBIGUOUS


def test_owner_that_ran_nothing_gives_the_slot_back() -> None:
    """T3 `abandon_tool`, field cases 05 and 26: CLAIMED with a lease that is over; the next claim is RECLAIMED, fence 2."""
    desk = with_slot(S.EXECUTING)
    assert desk.ask(c.AbandonTool(0, 0, "a", 1)).action is A.ABANDONED
    assert desk.ask(begin()).action is A.LEASE_EXPIRED
    answer = desk.ask(claim())
    assert (answer.action, answer.fence) == (A.RECLAIMED, 2)
    assert desk.ask(begin(fence=2)).action is A.BEGUN


def test_complete_again() -> None:
    """T3 `complete_tool`: the same result -> CACHED, whatever the order of its keys; another -> CONFLICT, the first is kept."""
    desk = with_slot(S.COMPLETED)
    for owner, fence in (("a", 1), ("b", 2)):
        assert desk.ask(complete(owner, fence)).action is A.CACHED
        assert desk.ask(complete(owner, fence, dict(reversed(RESULT.items())))).action is A.CACHED
        assert desk.ask(complete(owner, fence, {"ok": False})).action is A.CONFLICT
    assert values.thaw(desk.slot().result or b"") == RESULT


def test_complete_over_another_owner() -> None:
    """T3 `complete_tool`, field case 20 row 6: behind another owner's reclaim a completion is STALE_OWNER."""
    desk = with_slot(S.EXECUTING, replay_safe=True)
    desk.now = OVER
    assert desk.ask(claim("b", replay_safe=True)).action is A.RECLAIMED
    assert desk.ask(complete()).action is A.STALE_OWNER
    assert desk.ask(begin("b", 2)).action is A.BEGUN
    assert desk.ask(complete()).action is A.STALE_OWNER


def test_complete_of_an_ambiguous_slot_is_evidence() -> None:
    """T3 `complete_tool`: kept beside the slot, which stays AMBIGUOUS until it is reconciled; written once."""
    desk = with_slot(S.AMBIGUOUS)
    assert desk.ask(complete()).action is A.AMBIGUOUS
    assert desk.ask(complete()).action is A.AMBIGUOUS
    assert desk.written == ()
    slot = desk.slot()
    assert (slot.state, slot.result) == (S.AMBIGUOUS, None)
    assert values.thaw(slot.evidence or b"") == RESULT


# --- resolve -------------------------------------------------------------------------------------------------


def test_resolve_happened() -> None:
    """T3, ambiguity 8: COMPLETED with the result, who and why in the log; repeatable; nobody decides otherwise after it."""
    desk = with_slot(S.AMBIGUOUS)
    assert desk.ask(resolve(Resolution.HAPPENED, RESULT)).action is A.COMPLETED
    (record,) = desk.written
    assert isinstance(record, r.ToolResolved)
    assert (record.who, record.why) == ("operator", "looked it up")
    assert desk.ask(claim("b")).action is A.CACHED
    assert desk.ask(resolve(Resolution.HAPPENED, RESULT)).action is A.CACHED
    for other in (resolve(Resolution.HAPPENED, {"ok": False}), resolve(Resolution.DID_NOT_HAPPEN)):
        with pytest.raises(TurnCheckpointConflict):
            desk.put(other)
    assert desk.ask(complete(result={"ok": False})).action is A.CONFLICT


def test_resolve_did_not_happen() -> None:
    """T3, ambiguity 8: CLAIMED with a lease that is over; the next claim is RECLAIMED; the zombie's fence is old."""
    desk = with_slot(S.AMBIGUOUS)
    assert desk.ask(resolve(Resolution.DID_NOT_HAPPEN)).action is A.ABANDONED
    assert desk.ask(begin()).action is A.LEASE_EXPIRED
    assert desk.ask(complete()).action is A.INVALID_STATE
    answer = desk.ask(claim("b"))
    assert (answer.action, answer.fence) == (A.RECLAIMED, 2)
    assert desk.ask(complete()).action is A.STALE_OWNER
    assert desk.state.ambiguous == ()


def test_resolve_unknown() -> None:
    """T3, ambiguity 8: the model is told what the operator says; the slot stays AMBIGUOUS and may still be settled."""
    desk = with_slot(S.AMBIGUOUS)
    with pytest.raises(TurnCheckpointError):
        desk.put(commit(0))
    assert desk.ask(resolve(Resolution.UNKNOWN, {"told": "nobody knows"})).action is A.AMBIGUOUS
    assert desk.ask(resolve(Resolution.UNKNOWN, {"told": "nobody knows"})).action is A.AMBIGUOUS
    assert desk.written == ()
    assert desk.ask(claim("b")).action is A.AMBIGUOUS
    desk.put(commit(0))
    assert desk.ask(resolve(Resolution.HAPPENED, RESULT)).action is A.COMPLETED


@pytest.mark.parametrize("state", [None, S.CLAIMED, S.EXECUTING, S.COMPLETED])
def test_resolve_what_is_not_ambiguous(state: ToolCallState | None) -> None:
    """T3, ambiguity 8, field case 18: only AMBIGUOUS can be resolved; the refusal says what stands."""
    desk = with_slot(state)
    with pytest.raises(TurnCheckpointError, match="never claimed" if state is None else state.value):
        desk.put(resolve(Resolution.DID_NOT_HAPPEN))


def test_resolve_in_a_round_that_is_over() -> None:
    """A call of a committed round cannot run again, so it cannot be resolved as not having happened."""
    desk = with_slot(S.AMBIGUOUS)
    desk.put(commit(0, allow_ambiguous=True))
    with pytest.raises(TurnCheckpointError, match="over"):
        desk.put(resolve(Resolution.DID_NOT_HAPPEN))
    assert desk.ask(resolve(Resolution.HAPPENED, RESULT)).action is A.COMPLETED


# --- the trap ------------------------------------------------------------------------------------------------


def in_doubt(*calls: ToolCall) -> Desk:
    """Round 0 has the charge AMBIGUOUS and is reported to the model, which decides on `calls` in round 1."""
    desk = with_slot(S.AMBIGUOUS)
    desk.put(commit(0, allow_ambiguous=True), reserve(1, *calls))
    return desk


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("replay_safe", [False, True])
def test_trap_same_call_in_the_next_round(fused: bool, replay_safe: bool) -> None:
    """T3, "Trap worth a test of its own": the same call in a new slot is not made; it says which slot it would repeat."""
    again = ToolCall("another call id", CHARGE.tool_name, CHARGE.arguments_fingerprint)
    desk = in_doubt(again)
    answer = desk.ask(claim(round_index=1, call=again, begin=fused, replay_safe=replay_safe))
    assert (answer.action, answer.blocked_by, answer.slot) == (A.AMBIGUOUS, (0, 0), None)
    assert desk.written == ()


def test_trap_explicit_override() -> None:
    """T3, trap: "unless the caller passes an explicit override"."""
    desk = in_doubt(CHARGE)
    assert desk.ask(claim(round_index=1, repeat_ambiguous=True)).action is A.ACQUIRED
    assert desk.ask(claim(round_index=1)).action is A.ACQUIRED, "the slot is there now, and is claimed as any other"


def test_trap_is_about_the_call() -> None:
    """T3, trap: tool and arguments; another tool, or other arguments, are another call."""
    other = ToolCall("call_0", CHARGE.tool_name, "fingerprint of 900 cents")
    desk = in_doubt(MAIL, other)
    assert desk.ask(claim(round_index=1, call=MAIL)).action is A.ACQUIRED
    assert desk.ask(claim(round_index=1, slot_index=1, call=other)).action is A.ACQUIRED


@pytest.mark.parametrize(
    ("resolution", "action"), [(Resolution.HAPPENED, A.ACQUIRED), (Resolution.UNKNOWN, A.AMBIGUOUS)]
)
def test_trap_after_a_resolution(resolution: Resolution, action: ToolCallAction) -> None:
    """T3, trap: what is known to have happened may be asked for again on purpose; what was closed as unknown may not."""
    desk = in_doubt(CHARGE)
    desk.put(resolve(resolution, RESULT))
    assert desk.ask(claim(round_index=1)).action is action


def test_equal_calls_of_one_decision_are_two_calls() -> None:
    """Field cases 04 and 05: the model asked for both at once; an ambiguous one does not stop its twin."""
    desk = reserved(CHARGE, CHARGE)
    desk.put(claim(begin=True), c.DoubtTool(0, 0, "a", 1, "a timeout"))
    assert desk.ask(claim(slot_index=1, begin=True)).action is A.BEGUN


# --- identity ------------------------------------------------------------------------------------------------


def test_operation_ids() -> None:
    """T3 `operation_id`: from trace, scope, round and slot alone; all different, the same for ever."""
    traces = [trace_hash("trace"), trace_hash("trac"), trace_hash("trace:primary")]
    places = [(t, s, i, j) for t in traces for s in ("primary", "run", "1") for i in (0, 1, 11) for j in (0, 1, 11)]
    assert len({operation_id(*place) for place in places}) == len(places)
    # Written down: an upgrade that derives another one would repeat every effect that is under way.
    assert operation_id(trace_hash("trace"), "primary", 0, 0) == "op_6b08cd5e03ee47974de46911718bd86e"
