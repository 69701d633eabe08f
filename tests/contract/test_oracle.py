"""Everything that our own turns say is held against another implementation, and against the contract's rules (3.8)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import prompty.model as theirs
import pytest
from msgspec.structs import replace

from tests.contract.material import without_empty_lists
from tests.contract.our_turns import (
    Turn,
    World,
    every_turn,
    killed_in_a_tool,
)
from turnkeeper import Keeper
from turnkeeper.engine.checkpoint_rules import checkpoint_problems
from turnkeeper.engine.documents import from_json, to_json, to_tree
from turnkeeper.engine.events import Projection, Write, last_checkpoint, writes_of
from turnkeeper.engine.wire import EngineCheckpoint, EngineEvent, EngineEventKind, TurnCommit
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.history import Entry

pytestmark = pytest.mark.anyio

Kind = EngineEventKind
TERMINAL = {
    Kind.TURN_COMMITTED,
    Kind.TURN_FAILED,
    Kind.TURN_CANCELLED,
    Kind.TURN_RECONCILIATION_REQUIRED,
}
POST_COMMIT = {Kind.POST_COMMIT_STARTED, Kind.POST_COMMIT_COMPLETED, Kind.POST_COMMIT_FAILED}


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A store of its own, without pauses between attempts."""
    for module in ("model_calls", "rounds", "delivery"):
        monkeypatch.setattr(f"turnkeeper.engine.{module}._PAUSE", 0.001)
    store = await SqliteStore.open(":memory:")
    yield World(store)
    await store.close()


async def entries_of(world: World) -> list[Entry]:
    """The log of the turn."""
    history = await world.keeper.history("t")
    assert history is not None
    return list(history.entries)


async def writes_in(world: World, turn: Turn) -> list[Write]:
    """What a turn's log means to a durability port."""
    await turn(world)
    return writes_of(await entries_of(world))


def checkpoints_of(writes: list[Write]) -> list[EngineCheckpoint]:
    """All checkpoints."""
    return [write.checkpoint for write in writes if write.checkpoint is not None]


def events_of(writes: list[Write]) -> list[EngineEvent]:
    """All events."""
    return [event for write in writes for event in write.events]


@every_turn
async def test_another_implementation_reads_all_of_it_and_writes_it_the_same(world: World, turn: Turn) -> None:
    """3.8: PyPI prompty loses nothing of a checkpoint, an event or a commit; nor do we of our own documents."""
    writes = await writes_in(world, turn)
    for checkpoint in checkpoints_of(writes):
        written = to_tree(checkpoint)
        assert theirs.EngineCheckpoint.load(written).save() == written
        assert from_json(EngineCheckpoint, to_json(checkpoint), strict=True).value == checkpoint
        assert list(checkpoint_problems(checkpoint)) == []
    for event in events_of(writes):
        written = to_tree(event)
        assert theirs.EngineEvent.load(written).save() == written
        assert from_json(EngineEvent, to_json(event), strict=True).value == event
    projection = Projection()
    assert list(projection.follow(await entries_of(world)))
    commit = to_tree(projection.commit())
    assert theirs.TurnCommit.load(commit).save() == commit
    assert from_json(TurnCommit, json.dumps(commit), strict=True).value == projection.commit()


@every_turn
async def test_events_are_numbered_and_named_without_gaps_and_repetitions(world: World, turn: Turn) -> None:
    """2.5: gapless over all lives of the run, ids that never repeat, and one identity."""
    writes = await writes_in(world, turn)
    events, checkpoints = events_of(writes), checkpoints_of(writes)
    first = events[0].sequence
    assert [event.sequence for event in events] == list(range(first, first + len(events)))
    assert first == 1 or turn.__name__.startswith("imported")
    assert max(Counter(event.id for event in events).values()) == 1
    assert max(Counter(checkpoint.id for checkpoint in checkpoints).values()) == 1
    assert {(event.session_id, event.turn_id, event.run_id) for event in events} == {
        (checkpoint.session_id, checkpoint.turn_id, checkpoint.run_id) for checkpoint in checkpoints
    }
    assert len({event.run_id for event in events}) == 1
    times = [event.timestamp for event in events]
    assert times == sorted(times)


@every_turn
async def test_each_checkpoint_is_told_by_its_last_event(world: World, turn: Turn) -> None:
    """2.4: the events of a write lead to its checkpoint, and `checkpoint_created` is the last of them (but 5.2, 1)."""
    for write in await writes_in(world, turn):
        *_, last = write.events
        if write.checkpoint is None:
            assert len(write.events) == 1
            assert last.kind is not Kind.CHECKPOINT_CREATED
            continue
        if write.kinds == (Kind.TURN_STARTED,):
            assert write.checkpoint.last_sequence == last.sequence
            continue
        assert write.kinds.count(Kind.CHECKPOINT_CREATED) == 1
        told = {"checkpointId": write.checkpoint.id, "includedThroughSequence": write.checkpoint.last_sequence}
        assert (last.kind, last.payload) == (Kind.CHECKPOINT_CREATED, told)
        assert last.sequence == write.checkpoint.last_sequence + 1


@every_turn
async def test_each_life_begins_with_one_event_and_ends_with_at_most_one(world: World, turn: Turn) -> None:
    """2.3, 2.5: every run appends `turn_started`; behind a terminal event comes the next life, or what follows a commit."""
    events = events_of(await writes_in(world, turn))
    assert events[0].kind is Kind.TURN_STARTED
    ended = committed = False
    for event in events:
        if event.kind is Kind.TURN_STARTED:
            ended = False
            assert (event.iteration, event.invocation_id) == (None, None)
            continue
        assert not ended or event.kind in POST_COMMIT, event.kind
        assert not committed or event.kind in POST_COMMIT, event.kind
        ended = ended or event.kind in TERMINAL
        committed = committed or event.kind is Kind.TURN_COMMITTED
        assert event.iteration is not None
        placed = event.kind not in TERMINAL | POST_COMMIT
        assert placed == (event.invocation_id is not None), event.kind


@every_turn
async def test_what_was_told_is_not_told_differently_later(world: World, turn: Turn) -> None:
    """A prefix of the log means a prefix of what the whole log means, at every cut: so a port can be handed the rest."""
    await turn(world)
    entries = await entries_of(world)
    whole = [_as_documents(write) for write in writes_of(entries)]
    for cut in range(1, len(entries) + 1):
        told = [_as_documents(write) for write in writes_of(entries[:cut])]
        assert told == whole[: len(told)], f"cut behind {entries[cut - 1].record}"


@every_turn
async def test_the_last_checkpoint_alone_is_that_of_the_whole_projection(world: World, turn: Turn) -> None:
    """Whoever wants no events gets the same: their numbers are counted all the same."""
    await turn(world)
    entries = await entries_of(world)
    for cut in range(1, len(entries) + 1):
        expected = checkpoints_of(writes_of(entries[:cut]))[-1]
        alone = last_checkpoint(entries[:cut])
        assert alone is not None
        assert to_tree(alone) == to_tree(expected), f"cut behind {entries[cut - 1].record}"


def _as_documents(write: Write) -> Any:
    checkpoint = None if write.checkpoint is None else to_tree(write.checkpoint)
    return (write.seq, [to_tree(event) for event in write.events], checkpoint)


@every_turn
async def test_every_checkpoint_can_be_gone_on_from_and_says_the_same_there(world: World, turn: Turn) -> None:
    """2.7: begun with any of them, a turn stands where that one stood."""
    for checkpoint in checkpoints_of(await writes_in(world, turn)):
        async with await Keeper.open("sqlite:///:memory:") as elsewhere:
            await elsewhere.adopt(checkpoint)
            adopted = await elsewhere.checkpoint("t")
            assert adopted is not None
            named = replace(adopted, id=checkpoint.id, last_sequence=checkpoint.last_sequence)
            assert without_empty_lists(to_tree(named)) == without_empty_lists(to_tree(checkpoint))


async def test_another_workers_life_goes_on_with_the_numbers(world: World) -> None:
    """2.5: a resume by another worker continues the sequence, and repeats no id."""
    events = events_of(await writes_in(world, killed_in_a_tool))
    started = [event for event in events if event.kind is Kind.TURN_STARTED]
    # Of the second life only what it found was written: that a call of the first one is in doubt.
    assert [event.payload["startIteration"] for event in started] == [0, 0, 0]
    doubts = [
        e.sequence for e in events if to_tree(e)["payload"].get("toolResult", {}).get("outcome") == "indeterminate"
    ]
    assert started[1].sequence == doubts[0] - 1
    assert [event.kind for event in events].count(Kind.TURN_RECONCILIATION_REQUIRED) == 1
    assert (await world.run(world.agent())).status == "success"
    assert events_of(writes_of(await entries_of(world))) == events
