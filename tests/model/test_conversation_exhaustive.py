"""The race of two replicas through one conversation, in every state of small worlds (flows.md: F2 to F5, its invariants).

Every interleaving, any one or two (and in `make soak` three) of: a crash, a lease that ends under its owner, a lost reply of
the store or of the platform. Each exploration has a lower bound on its states, and mutants show that it can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.model.conversations_book import DecideAll
from tests.model.conversations_replica import Settings
from tests.model.conversations_world import Conversation
from tests.model.world import Broken, explore
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import decide_all
from turnkeeper.conversation.state import ConversationState
from turnkeeper.log.decision import Decision

THREE = ("text", "text", "text")
SEED = ("asas", "s")
"""The flow of "What the small models showed": send and ask, send, ask, next step sends."""


def explored(settings: Settings, at_least: int) -> None:
    """Explore, say how far that came, and insist on it."""
    world = Conversation(settings)
    found = explore(world.initial(), world.successors, world.check, goal=world.finished)
    print(f"{found.states} states, {found.transitions} transitions, depth {found.depth}, {len(world.book)} logs")
    assert found.states >= at_least
    assert any(state.out for state in found.seen), "messages do go out"


SMALL = {
    "a platform that drops a second one": (Settings("dedups"), 20_000),
    "a platform that knows nothing": (Settings("neither"), 28_000),
    "first-wait mode": (Settings("dedups", ("aas",), THREE, first_wait=True, faults=1), 20_000),
    "a word that ends the flow": (Settings(messages=("text", "cancel", "text"), faults=1), 8_000),
    "an edit, and a word that begins anew": (Settings(messages=("text", "edit", "restart"), faults=1), 8_000),
    "replicas that come back under their old names": (Settings("neither", same_name=True, faults=1), 2_500),
    "a poisonous message that holds": (Settings(poison=True, operator=True, faults=1), 1_000),
    "a poisonous message that is skipped": (
        Settings("neither", poison=True, on_poison="skip", operator=True, faults=1),
        1_500,
    ),
    "taken from the living and the dead": (Settings("neither", releases=True, operator=True, faults=1), 3_000),
    "taken from one that comes back under its name": (
        Settings("neither", releases=True, same_name=True, faults=2),
        5_000,
    ),
    "unknown sends that somebody settles": (Settings("neither", operator=True, faults=1), 3_000),
}


@pytest.mark.parametrize(("settings", "at_least"), SMALL.values(), ids=SMALL.keys())
def test_racing_replicas(settings: Settings, at_least: int) -> None:
    """Invariants 1, 3, 4, 5, 6, 8, 9, 10, 11, 12, J1, J2, J4, R1 and O3 in every state, and a good end from each of them."""
    explored(settings, at_least)


LARGE = {
    "a platform that can be searched": (Settings("finds"), 25_000),
    "the seed's flow, a platform that drops a second one": (Settings("dedups", SEED, THREE), 150_000),
    "the seed's flow, a platform that can be searched": (Settings("finds", SEED, THREE), 250_000),
    "the seed's flow, a platform that knows nothing": (Settings("neither", SEED, THREE), 250_000),
    "the seed's flow in first-wait mode": (Settings("dedups", SEED, THREE, first_wait=True, faults=1), 30_000),
    "first-wait mode, two faults": (Settings("dedups", ("aas",), THREE, first_wait=True), 150_000),
    "three faults": (Settings("finds", faults=3), 100_000),
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("settings", "at_least"), LARGE.values(), ids=LARGE.keys())
def test_racing_replicas_at_length(settings: Settings, at_least: int) -> None:
    """As `test_racing_replicas`, in larger worlds."""
    explored(settings, at_least)


Decided = Decision[r.AnyRecord, list[Any]]


def without_fences(state: ConversationState, commands: Sequence[c.Command], now: int) -> Decided:
    """Mutant: whoever calls himself the owner is taken for it."""
    mine = [
        replace(one, owner=state.owner, fence=state.fence) if isinstance(one, c.OwnerCommand) else one
        for one in commands
    ]
    return decide_all(state, mine, now) if state.owner else decide_all(state, commands, now)


def without_guards(state: ConversationState, commands: Sequence[c.Command], now: int) -> Decided:
    """Mutant: what a process takes for the time is believed."""
    return decide_all(state, commands, now)._replace(guard=None)


def settles_early(state: ConversationState, commands: Sequence[c.Command], now: int) -> Decided:
    """Mutant: a message is DONE although what it sends is not settled."""
    if isinstance(commands[-1], c.Settle):
        commands = [one for one in commands if not isinstance(one, c.SettleSend)]
        return decide_all(replace(state, sends=()), commands, now)
    return decide_all(state, commands, now)


def forgets_events(state: ConversationState, commands: Sequence[c.Command], now: int) -> Decided:
    """Mutant: a repeated event is taken for a new one."""
    return decide_all(replace(state, events=()), commands, now)


def sends_anew(state: ConversationState, commands: Sequence[c.Command], now: int) -> Decided:
    """Mutant: what is SENT is sent again."""
    if isinstance(commands[-1], c.BeginSend):
        begin = commands[-1]
        sends = tuple(one for one in state.sends if one.key != begin.key)
        return decide_all(replace(state, sends=sends), commands, now)
    return decide_all(state, commands, now)


RULES: dict[str, tuple[DecideAll, str]] = {
    "no fences": (without_fences, "invariant 6"),
    "no guards": (without_guards, "R1"),
    "DONE before SENT": (settles_early, "J4"),
    "events are forgotten": (forgets_events, "invariant 10"),
    "sends are forgotten": (sends_anew, "invariant 8"),
}


@pytest.mark.parametrize(("rules", "broken"), RULES.values(), ids=RULES.keys())
def test_mutant_rules_are_found(rules: DecideAll, broken: str) -> None:
    """The exploration can fail: each broken rule is seen, under its name."""
    world = Conversation(Settings("neither", rules=rules))
    with pytest.raises(Broken, match=broken):
        explore(world.initial(), world.successors, world.check)


def test_mutant_search_that_takes_absence_for_conclusive() -> None:
    """R5: while a zombie's send may still be under way, only its key keeps it from being a second one."""
    world = Conversation(Settings("finds", careless=True))
    with pytest.raises(Broken, match="invariant 1"):
        explore(world.initial(), world.successors, world.check)


def test_mutant_that_sends_again_what_may_be_out() -> None:
    """Adapter contract, 3: on a channel without keys that cannot be searched, a doubtful send is not repeated."""
    world = Conversation(Settings("neither", resends=True))
    with pytest.raises(Broken, match="invariant 1"):
        explore(world.initial(), world.successors, world.check)
