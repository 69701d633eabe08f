"""A turn killed at every boundary, or again and again at random ones, comes to the end that it would have had undisturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.crash.places import STORES, TRANSACTIONAL, Case, Stage
from tests.crash.scenario import ROUNDS
from turnkeeper.engine.tools import Policy
from turnkeeper.turn.identity import operation_id, reply_key, trace_hash

MODEL_CALLS = len(ROUNDS) + 1
TOOLS = sum(ROUNDS)
FARTHEST = 14
"""The last boundary that a process gets to where it is killed again and again: a transactional tool is behind 11."""
SLOTS = [[round_index, slot_index] for round_index, tools in enumerate(ROUNDS) for slot_index in range(tools)]
SEEDS = (1, 2)
"""Of the test that kills again and again."""
ON_SERVERS = {
    "postgres": ((Policy.FAIL_CLOSED, True), (Policy.TRANSACTIONAL, False)),
    "redis": ((Policy.FAIL_CLOSED, True), (Policy.REPLAY_SAFE, False)),
    "redis resp3": ((Policy.REPLAY_SAFE, True),),
    "redis cluster": ((Policy.RECONCILE, True),),
}
"""Policies, and whether tools run in parallel, of every run; the others are in `make soak`. On a file all are killed every time:
what is different on a server is its store, and that knows neither policies nor tools."""


def every_policy_on_every_store(*, seeds: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Parameters `stage`, `policy`, `parallel`, and `seed` if there are any: on servers the first of them."""
    cases: list[Any] = []
    for store, policy, parallel in product(STORES, Policy, (True, False)):
        if policy is Policy.TRANSACTIONAL and store not in TRANSACTIONAL:
            continue
        on_server = store in ON_SERVERS
        later = on_server and (policy, parallel) not in ON_SERVERS[store]
        for more in [[seed] for seed in seeds[: 1 if on_server else None]] if seeds else [[]]:
            name = [store, policy.value, "parallel" if parallel else "in sequence", *map(str, more)]
            marks = [pytest.mark.soak] if later else []
            cases.append(pytest.param(store, policy, parallel, *more, id="-".join(name), marks=marks))
    names = ("stage", "policy", "parallel", *["seed"] * bool(seeds))
    return pytest.mark.parametrize(names, cases, indirect=["stage"])


def check(case: Case, end: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """Nothing happened twice, nothing was lost, and it is told as if nobody had died."""
    found = case.ledger.rows("found")
    assert len(found) == case.lives
    trace = trace_hash(case.turn)
    slots = {operation_id(trace, "primary", *slot): slot for slot in SLOTS}
    effects = Counter(case.effects(list(slots)))
    assert effects.keys() == slots.keys()
    for operation, times in effects.items():
        # Only between a slot's barrier and its completion may its effect have to be run again.
        interrupted = sum(slots[operation] in life["executing"] for life in found)
        assert times == 1 or (case.policy is Policy.REPLAY_SAFE and times <= 1 + interrupted), (operation, times)

    sends = case.ledger.rows("send")
    keyed = case.policy in (Policy.REPLAY_SAFE, Policy.TRANSACTIONAL)
    assert {(send["key"], send["text"]) for send in sends} == {(reply_key(trace, "primary"), undisturbed["text"])}
    assert len(sends) == 1 or (keyed and len(sends) <= 1 + sum(life["sending"] for life in found))
    assert end["sent"] == sends[0]["message"]

    asked = Counter((row["life"], row["round"]) for row in case.ledger.rows("model"))
    assert max(asked.values()) == 1
    assert {round_index for _, round_index in asked} == set(range(MODEL_CALLS))
    for life, round_index in asked:
        assert round_index >= found[life]["decided"], "a decision that was durable was asked for again"

    assert end["sequences"] == list(range(1, end["revision"] + 1))
    assert end["decisions"] == MODEL_CALLS
    assert max(Counter((at, slot) for at, slot in end["completions"]).values()) == 1
    for same in ("phase", "transcript", "text"):
        assert end[same] == undisturbed[same], same


def undisturbed(stage: Stage, policy: Policy, *, parallel: bool) -> dict[str, Any]:
    """What a process tells of the turn that was there alone, and did not die."""
    with stage.case("undisturbed", policy, parallel=parallel) as case:
        ended = case.live()
        assert ended.killed_by is None
        end = ended.answer["end"]
        assert end["phase"] == "COMPLETED"
        assert len(end["transcript"]) == 1 + sum(1 + tools for tools in ROUNDS) + 1
        assert sorted(end["completions"]) == SLOTS
        check(case, end, end)
        return ended.answer


def around(what: str) -> tuple[str, str]:
    """Before and behind it."""
    return f"before {what}", f"behind {what}"


def in_sequence(policy: Policy) -> list[str]:
    """The boundaries of the undisturbed turn where its tools run one behind the other, in order: the same on every store."""
    append, model_call, effect, send = map(around, ("an append", "a model call", "an effect", "a send"))
    tool = (*append, *effect)
    if policy is Policy.TRANSACTIONAL:
        tool = (append[0], *effect, "within a transaction", append[1])
    order: list[str] = []
    for tools in (*ROUNDS, 0):
        order += (*append, *model_call, *tool * tools)
    return [*order, *append, *send, *append]


@every_policy_on_every_store()
def test_killed_at_every_boundary(stage: Stage, policy: Policy, *, parallel: bool) -> None:
    """LOG-1, T5, invariants 1 and 2: whatever a process did last, the one behind it comes to the same end."""
    alone = undisturbed(stage, policy, parallel=parallel)
    boundaries: list[str] = alone["boundaries"]
    print(f"{stage.name}, {policy.value}, {'parallel' if parallel else 'in sequence'}: {len(boundaries)} boundaries")
    usual = in_sequence(policy)
    assert len(usual) == 46 + TOOLS * (policy is Policy.TRANSACTIONAL)
    fewest = len(usual)
    if parallel:
        # Two of the three tools in a round may end so close together that one append takes both results.
        fewest -= 2
        assert Counter(boundaries) in (Counter(usual), Counter(usual) - Counter(around("an append")))
    else:
        assert boundaries == usual

    def die_at(boundary: int) -> None:
        with stage.case(str(boundary), policy, parallel=parallel) as case:
            ended = case.live(boundary)
            assert ended.killed_by or boundary > fewest, f"boundary {boundary} was not reached"
            ended = case.live() if ended.killed_by else ended
            assert ended.killed_by is None
            check(case, ended.answer["end"], alone["end"])

    for _ in stage.lanes.threads.map(die_at, range(1, len(boundaries) + 1)):
        pass


@every_policy_on_every_store(seeds=SEEDS)
def test_killed_again_and_again(stage: Stage, policy: Policy, seed: int, *, parallel: bool) -> None:
    """T5, invariants 1 and 2: also where no process gets far."""
    alone = undisturbed(stage, policy, parallel=parallel)
    chance = random.Random(seed)
    with stage.case("killed", policy, parallel=parallel) as case:
        while (ended := case.live(chance.randint(1, FARTHEST))).killed_by:
            assert case.lives < 100, "the turn does not get on"
        assert case.lives > 4
        check(case, ended.answer["end"], alone["end"])
