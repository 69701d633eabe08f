"""A turn killed at every boundary, or again and again at random ones, comes to the end that it would have had undisturbed."""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.crash.ledger import Ledger
from tests.crash.nursery import Ended, Nursery
from tests.crash.scenario import ROUNDS, TURN
from turnkeeper.engine.tools import Policy
from turnkeeper.turn.identity import operation_id, trace_hash

MODEL_CALLS = len(ROUNDS) + 1
TOOLS = sum(ROUNDS)
EFFECTS = MODEL_CALLS + TOOLS + 1
APPENDS = EFFECTS + 1
BOUNDARIES = 2 * (APPENDS + EFFECTS)
"""Before and behind each append and each effect of the undisturbed turn: 46.

Two fewer where tools run in parallel and two of the three in a round end so close together that one append takes both results.
"""
FARTHEST = 14
"""The last boundary that a process gets to where it is killed again and again: a transactional tool is behind 11."""
SLOTS = {
    operation_id(trace_hash(TURN), "primary", round_index, slot_index): [round_index, slot_index]
    for round_index, tools in enumerate(ROUNDS)
    for slot_index in range(tools)
}

every_policy = pytest.mark.parametrize("policy", list(Policy), ids=lambda policy: policy.value)
both_ways = pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "in sequence"])


class Nurseries:
    """Two helpers, so that jobs run two at a time."""

    def __init__(self, helpers: list[Nursery]) -> None:
        self._free: SimpleQueue[Nursery] = SimpleQueue()
        for helper in helpers:
            self._free.put(helper)
        self.threads = ThreadPoolExecutor(len(helpers))

    def run(self, job: dict[str, Any]) -> Ended:
        """See `Nursery.run`."""
        helper = self._free.get()
        try:
            return helper.run(job)
        finally:
            self._free.put(helper)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for the files. In memory where the system has such a one: a killed process's writes are kept there as well."""
    shared_memory = Path("/dev/shm")
    if not os.access(shared_memory, os.W_OK):
        yield tmp_path
    else:
        with TemporaryDirectory(dir=shared_memory, prefix="turnkeeper-") as made:
            yield Path(made)


@pytest.fixture(scope="module")
def nurseries() -> Iterator[Nurseries]:
    with ExitStack() as stack:
        helpers = [stack.enter_context(closing(Nursery())) for _ in range(2)]
        both = Nurseries(helpers)
        stack.enter_context(both.threads)
        yield both


class Case:
    """A turn in a file of its own, and the processes that are at it one behind the other."""

    def __init__(self, nurseries: Nurseries, place: Path, policy: Policy, *, parallel: bool) -> None:
        place.mkdir()
        self._nurseries = nurseries
        self._path = place / "turns.db"
        self._policy = policy
        self._job = {"path": str(self._path), "ledger": str(place / "ledger"), "policy": policy, "parallel": parallel}
        self.ledger = Ledger(place / "ledger")
        self.lives = 0

    def live(self, die_at: int = 0) -> Ended:
        """Let a process at the turn; it dies at that boundary."""
        ended = self._nurseries.run({**self._job, "life": self.lives, "die_at": die_at})
        self.lives += 1
        return ended

    def _effects(self) -> list[str]:
        """The operation ids of the effects that happened."""
        if self._policy is not Policy.TRANSACTIONAL:
            return [row["operation_id"] for row in self.ledger.rows("effect")]
        with closing(sqlite3.connect(self._path)) as connection:
            return [row[0] for row in connection.execute("SELECT operation_id FROM effects")]

    def check(self, end: dict[str, Any], undisturbed: dict[str, Any]) -> None:
        """Nothing happened twice, nothing was lost, and it is told as if nobody had died."""
        found = self.ledger.rows("found")
        assert len(found) == self.lives
        effects = Counter(self._effects())
        assert effects.keys() == SLOTS.keys()
        for operation, times in effects.items():
            # Only between a slot's barrier and its completion may its effect have to be run again.
            interrupted = sum(SLOTS[operation] in life["executing"] for life in found)
            assert times == 1 or (self._policy is Policy.REPLAY_SAFE and times <= 1 + interrupted), (operation, times)

        sends = self.ledger.rows("send")
        keyed = self._policy in (Policy.REPLAY_SAFE, Policy.TRANSACTIONAL)
        assert {(send["key"], send["text"]) for send in sends} == {(sends[0]["key"], undisturbed["text"])}
        assert len(sends) == 1 or (keyed and len(sends) <= 1 + sum(life["sending"] for life in found))
        assert end["sent"] == sends[0]["message"]

        asked = Counter((row["life"], row["round"]) for row in self.ledger.rows("model"))
        assert max(asked.values()) == 1
        assert {round_index for _, round_index in asked} == set(range(MODEL_CALLS))
        for life, round_index in asked:
            assert round_index >= found[life]["decided"], "a decision that was durable was asked for again"

        assert end["sequences"] == list(range(1, end["revision"] + 1))
        assert end["decisions"] == MODEL_CALLS
        assert max(Counter((at, slot) for at, slot in end["completions"]).values()) == 1
        for same in ("phase", "transcript", "text", "sent"):
            assert end[same] == undisturbed[same], same


def _undisturbed(nurseries: Nurseries, folder: Path, policy: Policy, *, parallel: bool) -> dict[str, Any]:
    case = Case(nurseries, folder / "undisturbed", policy, parallel=parallel)
    ended = case.live()
    assert ended.killed_by is None
    end = ended.answer["end"]
    assert end["phase"] == "COMPLETED"
    assert len(end["transcript"]) == 1 + sum(1 + tools for tools in ROUNDS) + 1
    assert sorted(end["completions"]) == sorted(SLOTS.values())
    case.check(end, end)
    return ended.answer


@every_policy
@both_ways
def test_killed_at_every_boundary(nurseries: Nurseries, folder: Path, policy: Policy, *, parallel: bool) -> None:
    undisturbed = _undisturbed(nurseries, folder, policy, parallel=parallel)
    boundaries = undisturbed["boundaries"]
    print(f"{policy.value}, {'parallel' if parallel else 'in sequence'}: {len(boundaries)} boundaries")
    within = TOOLS if policy is Policy.TRANSACTIONAL else 0
    fewest = BOUNDARIES + within - 2 * parallel
    assert 44 <= fewest <= len(boundaries) <= BOUNDARIES + within
    appends = Counter(boundaries)["before an append"]
    assert Counter(boundaries) == Counter(
        {
            **dict.fromkeys(("before an append", "behind an append"), appends),
            **dict.fromkeys(("before an effect", "behind an effect"), TOOLS),
            "within a transaction": within,
            **dict.fromkeys(("before a model call", "behind a model call"), MODEL_CALLS),
            **dict.fromkeys(("before a send", "behind a send"), 1),
        }
    )

    def die_at(boundary: int) -> None:
        case = Case(nurseries, folder / str(boundary), policy, parallel=parallel)
        ended = case.live(boundary)
        assert ended.killed_by or boundary > fewest, f"boundary {boundary} was not reached"
        ended = case.live() if ended.killed_by else ended
        assert ended.killed_by is None
        case.check(ended.answer["end"], undisturbed["end"])

    for _ in nurseries.threads.map(die_at, range(1, len(boundaries) + 1)):
        pass


@every_policy
@both_ways
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_and_again(
    nurseries: Nurseries, folder: Path, policy: Policy, seed: int, *, parallel: bool
) -> None:
    undisturbed = _undisturbed(nurseries, folder, policy, parallel=parallel)
    chance = random.Random(seed)
    case = Case(nurseries, folder / "killed", policy, parallel=parallel)
    while (ended := case.live(chance.randint(1, FARTHEST))).killed_by:
        assert case.lives < 100, "the turn does not get on"
    assert case.lives > 4
    case.check(ended.answer["end"], undisturbed["end"])
