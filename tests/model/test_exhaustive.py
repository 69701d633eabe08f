"""The real rules in every state of small worlds: every interleaving, crash, lease end, lost answer and zombie (flows.md).

Each exploration has a lower bound on the states it must come to, so that it cannot become trivial unseen; and mutants show
that it finds what it looks for. Where workers are interchangeable, their names in a printed way may change from one event to
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.model.anarchy import Anarchy, Menu
from tests.model.audits import audit
from tests.model.leases_world import Leases, ModelCalls, Replies
from tests.model.phases_world import Race
from tests.model.slots_world import Settings, Slots
from tests.model.world import Book, Broken, Explored, explore
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.names import Resolution, ToolCallAction, ToolCallState
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import TurnState, find_slot


def report(found: Explored[Any], at_least: int) -> None:
    """Say how far an exploration came, and insist on it."""
    print(f"{found.states} states, {found.transitions} transitions, depth {found.depth}")
    assert found.states >= at_least


SLOTS = {
    "not replay safe, a lease that is renewed by claiming": (Settings(most_fences=4, execution_lease=2), 8_000),
    "replay safe": (Settings(replay_safe=True), 7_000),
    "ambiguous, being resolved": (Settings(operator=True), 7_000),
    "abandoned, doubted and resolved": (Settings(operator=True, doubts=True, abandons=True), 25_000),
    "leases taken from the living and the dead, resolved": (
        Settings(workers=2, releases=True, operator=True, claim_lease=2, execution_lease=2),
        3_500,
    ),
    "appends that land late": (Settings(lands_late=True, finds_out=False), 10_000),
    "appends that land late, abandoned and resolved": (
        Settings(workers=2, lands_late=True, finds_out=False, operator=True, abandons=True),
        8_000,
    ),
    "two slots, completion and next begin in one append": (Settings(slots=2, fused=True), 18_000),
}


@pytest.mark.parametrize(("settings", "at_least"), SLOTS.values(), ids=SLOTS.keys())
def test_slots_of_racing_workers(settings: Settings, at_least: int) -> None:
    """Invariants 2, 5, 6, 8, 12 of flows.md hold in every state, and every state can still come to a good end (T3)."""
    world = Slots(settings)
    found = explore(world.initial(), world.successors, world.check, goal=world.settled)
    assert max(max(state.effects) for state in found.seen) == 1, "effects do happen"
    report(found, at_least)


@pytest.mark.soak
def test_two_slots_and_the_commit_of_their_round() -> None:
    """As `test_slots_of_racing_workers`, in a larger world."""
    world = Slots(Settings(workers=2, slots=2, most_fences=2, finds_out=False))
    report(explore(world.initial(), world.successors, world.check, goal=world.settled), 40_000)


def reclaims_unsafe(
    state: TurnState, commands: Sequence[c.Command], now: int
) -> Decision[r.AnyRecord, tuple[SlotAnswer | None, ...]]:
    """Mutant: an EXECUTING slot whose lease is over is reclaimed, whether it is replay safe or not."""
    command = commands[0]
    if isinstance(command, c.ClaimTool):
        slot = find_slot(state, command.round_index, command.slot_index)
        if slot is not None and slot.state is ToolCallState.EXECUTING and now >= slot.lease_end:
            fence = slot.fence + 1
            record = r.ToolClaimed(command.round_index, command.slot_index, command.owner, fence, 1, replay_safe=False)
            answer = SlotAnswer(ToolCallAction.RECLAIMED, slot, command.owner, fence)
            return Decision((answer,), (record,), Guard(not_before=slot.lease_end))
    return decide_all(state, commands, now)


MUTANTS = {
    "an expired EXECUTING slot is reclaimed": Settings(rules=reclaims_unsafe, audited=False),
    "abandon while the call may still run": Settings(abandons=True, abandons_running=True, audited=False),
    "an operator who guesses": Settings(workers=2, operator=True, operator_guesses=True, audited=False),
}


@pytest.mark.parametrize("settings", MUTANTS.values(), ids=MUTANTS.keys())
def test_mutants_reach_three_effects(settings: Settings) -> None:
    """The exploration can fail: as many effects as workers, as in "What the small models showed" of flows.md."""
    world = Slots(settings._replace(tolerated=2))
    with pytest.raises(Broken, match="at most one effect") as found:
        explore(world.initial(), world.successors, world.check)
    assert "(3,)" in str(found.value)


def test_mutant_is_caught_by_the_audit_at_once() -> None:
    """The audits see the broken rule itself, before any effect is repeated."""
    world = Slots(Settings(rules=reclaims_unsafe))
    with pytest.raises(Broken, match="freed behind its barrier only by abandoning or resolving"):
        explore(world.initial(), world.successors, world.check)


def test_mutant_store_that_does_not_compare_the_tail() -> None:
    """Without LOG-2 two workers own one slot: the stale views of this model are real."""
    world = Slots(Settings(workers=2, fenced=False, audited=False))
    with pytest.raises(Broken, match="at most one effect"):
        explore(world.initial(), world.successors, world.check)


MENUS = {
    "phases and delivery": (Menu(calls=(0, 0)), 150),
    "one slot": (Menu(calls=(1,), deliveries=False, replay_safe=(False, True)), 2_000),
    "the call in doubt is asked for again": (
        Menu(
            calls=(1, 1),
            owners=("a",),
            fences=1,
            verbs=("claim and begin", "complete"),
            deliveries=False,
            allow_ambiguous=(True,),
            repeat_ambiguous=(False, True),
            resolutions=(Resolution.UNKNOWN,),
        ),
        1_500,
    ),
}


@pytest.mark.parametrize(("menu", "at_least"), MENUS.values(), ids=MENUS.keys())
def test_any_command_at_any_time(menu: Menu, at_least: int) -> None:
    """Whatever anybody asks, in whatever order, every accepted append keeps T2's and T3's tables (`audits.py`)."""
    book = Book(audits=(audit,), remembers=False)
    world = Anarchy(book, menu)
    report(explore(book.number(TurnState()), world.successors), at_least)


STEPS = {"start to decision": (0, 4), "commit to reply": (2, 6), "final text to completion": (4, 8)}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_phases_of_racing_workers(steps: tuple[int, int]) -> None:
    """T2, repeat rules: the first writer wins, canonical values never change, and both workers come to the end."""
    world = Race(*steps)
    report(explore(world.first, world.successors, goal=world.finished), 5_000)


LEASES: dict[str, tuple[Callable[[], Leases], int]] = {
    "model call": (lambda: ModelCalls(3), 7_000),
    "reply on a channel with keys": (lambda: Replies(2, keyed=True), 3_000),
    "reply on a channel without keys": (lambda: Replies(2, keyed=False), 3_000),
    "model call, taken from the dead": (lambda: ModelCalls(2, releases=True), 1_000),
    "reply, taken from the dead": (lambda: Replies(2, keyed=False, releases=True), 3_000),
}


@pytest.mark.parametrize(("world", "at_least"), LEASES.values(), ids=LEASES.keys())
def test_leases_of_racing_workers(world: Callable[[], Leases], at_least: int) -> None:
    """No two live owners at once; on a channel without keys the reply is sent once (flows.md, adapter contract)."""
    report(world().explored(), at_least)


UNGUARDED: dict[str, Callable[[], Leases]] = {
    "model call": lambda: ModelCalls(2, guarded=False),
    "reply": lambda: Replies(2, keyed=True, guarded=False),
}


@pytest.mark.parametrize("world", UNGUARDED.values(), ids=UNGUARDED.keys())
def test_mutant_store_that_does_not_judge_guards(world: Callable[[], Leases]) -> None:
    """Without LOG-4 a worker whose clock is ahead takes over from a live one."""
    with pytest.raises(Broken, match="no two live owners at once"):
        world().explored()


def test_mutant_worker_that_acts_on_what_it_saw_before() -> None:
    """Taking a reply over because it *was* surely not sent sends it twice: that has to be a condition of the append."""
    with pytest.raises(Broken, match="a channel without keys gets one message"):
        Replies(2, keyed=False, careful=False).explored()
