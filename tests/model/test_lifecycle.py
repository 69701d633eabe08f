"""The lifecycle projection (journal.md T4): behind the turn or level with it, never ahead, in order, and never back."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Final

import pytest

from turnkeeper.errors import StoreFull, TurnCheckpointError
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.lifecycle import STAGES, project
from turnkeeper.turn.names import TurnPhase
from turnkeeper.turn.session import TurnCheckpointSession

pytestmark = pytest.mark.anyio

TRACE: Final = "trace"
P = TurnPhase

EXPECTED: Final = {
    P.STARTED: "PROCESSING",
    P.ASSISTANT_RESERVED: "PROCESSING",
    P.ROUND_COMMITTED: "PROCESSING",
    P.FINAL_MODEL_SAVED: "ANSWERED",
    P.DELIVERY_RESERVED: "DELIVERING",
    P.DELIVERED: "DELIVERED",
    P.COMPLETED: "DELIVERED",
}
"""T4's mapping, once more."""
CONSUMERS: Final = ("COMPLETED", "FAILED", "QUARANTINED")


class Crash(Exception):
    """The process dies here."""


class Stages:
    """The stage of one trace, as T4 asks for it: checks the predecessor, idempotent for the same stage; can crash."""

    def __init__(self, now: str | None = None, *, crash_at: int = 0, after_write: bool = False) -> None:
        self.now = now
        self.moves: list[tuple[str | None, str]] = []
        self.calls = 0
        self.crash_at = crash_at
        self.after_write = after_write

    async def stage(self, trace_id: str) -> str | None:
        """See `Lifecycle.stage`."""
        self._called()
        return self.now

    async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
        """See `Lifecycle.advance`."""
        if not self.after_write:
            self._called()
        found = self.now
        if found == predecessor:
            self.now = stage
            self.moves.append((predecessor, stage))
        if self.after_write:
            self._called()
        return found in (predecessor, stage)

    def _called(self) -> None:
        self.calls += 1
        if self.calls == self.crash_at:
            raise Crash


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """One is enough: the projection knows no store."""
    async with await SqliteStore.open(":memory:") as opened:
        yield opened


def session(store: Store, lifecycle: Stages, scope: str = "primary") -> TurnCheckpointSession:
    """A worker's session."""
    return TurnCheckpointSession(store, TRACE, scope, lifecycle=lifecycle)


async def walk(turn: TurnCheckpointSession) -> AsyncIterator[TurnPhase]:
    """A turn from start to completion, step by step."""
    yield (await turn.start([{"role": "user", "content": "hello"}], [], {})).phase
    await turn.reserve_assistant(0, {"content": "hi"})
    yield P.ASSISTANT_RESERVED
    yield (await turn.commit_round(0, [], {})).phase
    await turn.save_final_model("hi")
    yield P.FINAL_MODEL_SAVED
    yield (await turn.reserve_final_delivery("key", "hi", None)).phase
    yield (await turn.mark_delivered("key", "message")).phase
    yield (await turn.mark_completed()).phase


async def test_mapping(store: Store) -> None:
    """T4: each phase is projected; checkpoint COMPLETED is still DELIVERED, the last step is the consumer's."""
    stages = Stages()
    seen: list[TurnPhase] = []
    async for phase in walk(session(store, stages)):
        assert stages.now == EXPECTED[phase]
        seen.append(phase)
    assert seen == list(P)
    assert stages.moves == list(itertools.pairwise([None, *STAGES])), "in order, none skipped, none twice"


async def test_only_the_primary_scope_projects(store: Store) -> None:
    """T4: a delegated run moves nothing, also when asked to."""
    stages = Stages()
    delegated = session(store, stages, scope="run 1")
    async for _ in walk(delegated):
        assert stages.calls == 0
    snapshot = await delegated.reconcile_lifecycle()
    assert snapshot is not None
    assert (snapshot.completed, stages.calls) == (True, 0)


@pytest.mark.parametrize("stage", CONSUMERS)
@pytest.mark.parametrize("phase", P)
async def test_consumers_stages_are_left_alone(stage: str, phase: TurnPhase) -> None:
    """T4: COMPLETED, FAILED and QUARANTINED belong to the consumer."""
    stages = Stages(stage)
    await project(stages, TRACE, phase)
    assert (stages.now, stages.moves) == (stage, [])


@pytest.mark.parametrize("found", [None, *STAGES])
@pytest.mark.parametrize("phase", P)
async def test_from_every_stage_to_every_phase(found: str | None, phase: TurnPhase) -> None:
    """T4: walks every predecessor in between, does nothing for the same stage, and never goes back."""
    stages = Stages(found)
    await project(stages, TRACE, phase)
    order: list[str | None] = [None, *STAGES]
    before, target = order.index(found), order.index(EXPECTED[phase])
    assert stages.now == order[max(before, target)]
    assert stages.moves == list(itertools.pairwise(order[before : target + 1]))
    await project(stages, TRACE, phase)
    assert len(stages.moves) == max(target - before, 0), "idempotent"


async def test_reconcile_of_an_old_snapshot_does_not_go_back(store: Store) -> None:
    """T4: a late worker's old snapshot moves nothing."""
    stages = Stages()
    turn = session(store, stages)
    old = await turn.start([{"role": "user", "content": "hello"}], [], {})
    await turn.save_final_model("hi")
    await session(store, stages).reconcile_lifecycle(old)
    assert stages.now == "ANSWERED"


async def test_reconcile_without_a_turn(store: Store) -> None:
    """T4: nothing durable, nothing to project."""
    stages = Stages()
    assert await session(store, stages).reconcile_lifecycle() is None
    assert stages.calls == 0


@pytest.mark.parametrize("after_write", [False, True], ids=["before the move", "behind the move"])
async def test_crash_between_turn_and_projection(store: Store, after_write: bool) -> None:
    """T4: crashed at every call of the lifecycle, it lags and never leads; the next look mends it."""
    for crash_at in itertools.count(1):
        stages = Stages(crash_at=crash_at, after_write=after_write)
        trace = f"trace {crash_at}"
        crashed = await _crashing_walk(TurnCheckpointSession(store, trace, lifecycle=stages), stages)
        if not crashed:
            assert crash_at > len(P) + len(STAGES), "a look for each step, and every move"
            return
        snapshot = await TurnCheckpointSession(store, trace, lifecycle=stages).reconcile_lifecycle()
        assert snapshot is not None
        assert stages.now == EXPECTED[snapshot.phase]
        assert stages.moves == list(itertools.pairwise([None, *STAGES[: len(stages.moves)]]))


async def _crashing_walk(turn: TurnCheckpointSession, stages: Stages) -> bool:
    """Whether the walk crashed. Wherever it did, the projection was not ahead of what is durable."""
    try:
        async for _ in walk(turn):
            pass
    except Crash:
        snapshot = await turn.load()
        assert snapshot is not None, "the turn was written before its projection was touched"
        order: list[str | None] = [None, *STAGES]
        assert order.index(stages.now) <= order.index(EXPECTED[snapshot.phase])
        return True
    return False


class _Failing:
    """A store whose appends fail."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def append(self, *_: object, **__: object) -> None:
        """Nothing gets through."""
        raise StoreFull("here", "full")

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


async def test_nothing_is_projected_that_is_not_durable(store: Store) -> None:
    """T4, invariant 7: a mutation that failed, or was refused, projects nothing."""
    stages = Stages()
    broken: Store = _Failing(store)  # pyright: ignore[reportAssignmentType]
    with pytest.raises(StoreFull):
        await session(broken, stages).start([{"role": "user", "content": "hello"}], [], {})
    turn = session(store, stages)
    with pytest.raises(TurnCheckpointError):
        await turn.mark_completed()
    assert stages.calls == 0


async def test_two_workers_project_at_once() -> None:
    """T4: who finds the predecessor gone goes on from where the other one got to; the other may know less of the turn."""
    stages = Stages()

    class Interrupted(Stages):
        """Another worker goes by between the look and the move."""

        async def stage(self, trace_id: str) -> str | None:
            """See `Lifecycle.stage`."""
            return await stages.stage(trace_id)

        async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
            """See `Lifecycle.advance`."""
            if not stages.moves:
                await project(stages, trace_id, P.FINAL_MODEL_SAVED)
            return await stages.advance(trace_id, predecessor, stage)

    await project(Interrupted(), TRACE, P.DELIVERED)
    assert stages.now == "DELIVERED"
    assert stages.moves == list(itertools.pairwise([None, *STAGES]))


async def test_consumer_takes_over_in_the_middle() -> None:
    """T4: what the consumer has settled meanwhile is not moved."""

    class Settled(Stages):
        """The consumer settles between the look and the move."""

        async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
            """See `Lifecycle.advance`."""
            self.now = "QUARANTINED"
            return await super().advance(trace_id, predecessor, stage)

    stages = Settled()
    await project(stages, TRACE, P.DELIVERED)
    assert (stages.now, stages.moves) == ("QUARANTINED", [])


async def test_a_transport_that_refuses_is_not_asked_for_ever() -> None:
    """T4: where a move is refused and nothing has moved, the projection is left behind for the next look."""

    class Refusing(Stages):
        """Says no."""

        async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
            """See `Lifecycle.advance`."""
            self._called()
            return False

    stages = Refusing()
    await project(stages, TRACE, P.DELIVERED)
    assert (stages.now, stages.calls) == (None, 3)
