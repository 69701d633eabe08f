"""FlowCheckpoint and its conditional store, for hosts with a flow runtime of their own (F1, F6, F8, R2), on every store."""

from __future__ import annotations

from typing import Any, cast

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from turnkeeper.conversation.checkpoint import (
    Cause,
    FlowCheckpoint,
    FlowCheckpoints,
    HandoverMark,
    Trace,
    load_checkpoint,
    save_checkpoint,
)
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.errors import FlowCheckpointConflict, FlowUnknown, InvalidInput
from turnkeeper.log.store import Store

pytestmark = pytest.mark.anyio

WHOLE = FlowCheckpoint(
    flow="order",
    step="address",
    version=3,
    state={"pizza": ["large", 2], "paid": None},
    parked=True,
    inbound="telegram:17",
    cause=Cause("telegram:17", 2),
    answer={"text": "Main Street"},
    trace=Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1"),
    data={"host": "own"},
)


@pytest.fixture
def checkpoints(store: Store) -> FlowCheckpoints:
    """Of the store that the test runs on."""
    return FlowCheckpoints(store)


async def test_kept_as_it_was_given(checkpoints: FlowCheckpoints) -> None:
    """F1: all fields but `revision` are opaque."""
    assert await checkpoints.get("c") is None
    revision = await checkpoints.set_if("c", WHOLE, 0)
    assert await checkpoints.get("c") == replace(WHOLE, revision=revision)
    await checkpoints.set("c", WHOLE)
    assert await checkpoints.get("c") == WHOLE


async def test_compare_and_set(checkpoints: FlowCheckpoints) -> None:
    """R2: it succeeds over exactly the revision that is expected; of two writers one wins, the other is told (R3)."""
    first = await checkpoints.set_if("c", WHOLE, 0)
    with pytest.raises(FlowCheckpointConflict) as told:
        await checkpoints.set_if("c", WHOLE, 0)
    assert (told.value.expected, told.value.found) == (0, first)
    assert await checkpoints.set_if("c", replace(WHOLE, step="pay"), first) == first + 1
    outcomes: list[Any] = []

    async def write(step: str) -> None:
        try:
            outcomes.append(await checkpoints.set_if("c", replace(WHOLE, step=step), first + 1))
        except FlowCheckpointConflict as e:
            outcomes.append(e)

    async with anyio.create_task_group() as tasks:
        for step in ("a", "b", "d"):
            tasks.start_soon(write, step)
    assert [one for one in outcomes if isinstance(one, int)] == [first + 2]
    assert len(outcomes) == 3


async def test_revision_0(checkpoints: FlowCheckpoints) -> None:
    """R2: no row, and one that was set without a condition, both match 0; and such a one beats an older revision."""
    revision = await checkpoints.set_if("c", WHOLE, 0)
    await checkpoints.set("c", replace(WHOLE, step="plain"))
    with pytest.raises(FlowCheckpointConflict):
        await checkpoints.set_if("c", WHOLE, revision)
    assert await checkpoints.set_if("c", WHOLE, 0) > revision


async def test_revisions_survive_deletion(checkpoints: FlowCheckpoints) -> None:
    """R2, invariant 5: a replica that knew the row before it was deleted cannot overwrite the one that came after (ABA)."""
    old = await checkpoints.set_if("c", WHOLE, 0)
    with pytest.raises(FlowCheckpointConflict):
        await checkpoints.delete_if("c", old + 1)
    await checkpoints.delete_if("c", old)
    assert await checkpoints.get("c") is None
    new = await checkpoints.set_if("c", WHOLE, 0)
    assert new > old
    for stale in range(new):
        with pytest.raises(FlowCheckpointConflict):
            await checkpoints.set_if("c", WHOLE, stale)
    await checkpoints.delete("c")
    await checkpoints.delete("c")
    assert await checkpoints.get("c") is None


async def test_ephemeral_hand_over(checkpoints: FlowCheckpoints, store: Store) -> None:
    """F6: a whole row is adopted once; one that has expired is absent."""
    revision = await checkpoints.set_if("c", WHOLE, 0)
    held = replace(WHOLE, revision=revision)
    await checkpoints.hand_over("c", held, replica="old", keep_seconds=60)
    left = await checkpoints.get("c")
    assert left is not None
    assert left.handover is not None
    assert (left.handover.kind, left.handover.source) == ("ephemeral", "old")
    with pytest.raises(FlowCheckpointConflict):  # who has handed over owns nothing any more
        await checkpoints.set_if("c", WHOLE, revision)
    outcomes: list[Any] = []

    async def adopt() -> None:
        try:
            outcomes.append(await FlowCheckpoints(store).adopt("c"))
        except FlowCheckpointConflict as e:
            outcomes.append(e)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(adopt)
        tasks.start_soon(adopt)
    # The slower one was told, or came when it was a row as any other.
    adopted = [one for one in outcomes if not isinstance(one, FlowCheckpointConflict)]
    assert {one.checkpoint for one in map(_hashable, adopted)} == {_plain(replace(WHOLE, revision=revision + 2))}
    await checkpoints.hand_over("c", adopted[0].checkpoint, replica="new", keep_seconds=60)
    await cast("Any", store).advance_clock(61_000)
    assert await checkpoints.get("c") is None
    assert (await checkpoints.adopt("c")).checkpoint is None


def _plain(checkpoint: FlowCheckpoint) -> str:
    return save_checkpoint(checkpoint)


def _hashable(adopted: Any) -> Any:
    return adopted._replace(checkpoint=_plain(adopted.checkpoint))


async def test_stub(checkpoints: FlowCheckpoints) -> None:
    """F6: a flow whose state did not travel is over; whoever tells its user does so under one key; no step is guessed."""
    revision = await checkpoints.set_if("c", WHOLE, 0)
    await checkpoints.hand_over("c", replace(WHOLE, revision=revision), replica="old", keep_seconds=60, stub=True)
    left = await checkpoints.get("c")
    assert left is not None
    assert (left.state, left.answer, left.data) == (None, None, {})
    adopted = await checkpoints.adopt("c")
    assert (adopted.checkpoint, adopted.interrupted) == (None, True)
    assert adopted.notice_key.startswith("msg_")
    again = await checkpoints.adopt("c")
    assert (again.checkpoint, again.interrupted) == (None, False)


async def test_our_own_rows_are_read_in_the_portable_form(checkpoints: FlowCheckpoints, store: Store) -> None:
    """`answer` is written for a single wait, so that both modes read each other."""
    for resume in ("all-answers", "first-wait"):
        flow = Flow("order", resume=resume)  # pyright: ignore[reportArgumentType]
        seen: list[FlowCheckpoint | None] = []

        @flow.step
        async def only(c: FlowContext, seen: list[FlowCheckpoint | None] = seen) -> None:
            await c.send("Hello.")
            name = await c.ask("Name?")
            seen.append(await checkpoints.get(c.conversation_id))
            await c.ask(f"{name}?")

        async with replica(store, flow, Platform()) as person:
            person.conversation_id = resume
            await person.says("hi")
            parked = await checkpoints.get(resume)
            await person.says("Ann")
            later = await checkpoints.get(resume)
        assert parked is not None
        assert (parked.step, parked.parked, parked.inbound, parked.cause) == ("only", True, 1, Cause(1, 0))
        assert seen[0] is not None
        assert seen[0].answer["message"]["text"] == "Ann"
        assert (seen[0].parked, seen[0].inbound, seen[0].cause) == (False, 2, Cause(1, 0))
        assert later is not None
        if resume == "first-wait":
            assert (later.parked, later.answer, later.cause) == (False, None, Cause(2, 1))
        else:
            assert (later.parked, later.answers and len(later.answers), later.cause) == (True, 1, Cause(1, 0))


async def test_our_runtime_leaves_a_hosts_row_alone(checkpoints: FlowCheckpoints, store: Store) -> None:
    flow = Flow("order")

    @flow.step
    async def address(c: FlowContext) -> None:
        await c.send("?")

    await checkpoints.set_if("c", WHOLE, 0)
    async with replica(store, flow, Platform()) as person:
        with pytest.raises(FlowUnknown):
            await person.says("hi")
    assert (await checkpoints.get("c")) is not None


def test_as_a_document() -> None:
    marked = replace(WHOLE, handover=HandoverMark("ephemeral", "r1", 5, 9), revision=4)
    text = save_checkpoint(marked)
    assert load_checkpoint(text) == marked
    plain = msgspec.json.decode(text)
    assert plain["handover"] == {"kind": "ephemeral", "from": "r1", "at": 5, "expires": 9}
    assert plain["cause"] == {"record": "telegram:17", "seq": 2}
    for bad, where in [("{", "checkpoint"), ('{"flow": 1, "step": "x"}', r"\$\.flow"), ('{"flow": "f"}', "step")]:
        with pytest.raises(InvalidInput, match=where):
            load_checkpoint(bad)


async def test_a_hosts_write_is_not_written_over(checkpoints: FlowCheckpoints, store: Store) -> None:
    """R2, R3: whoever finds another revision than its own stops, also where it has seen the other one."""
    flow = Flow("order")

    @flow.step
    async def only(c: FlowContext) -> None:
        await checkpoints.set(c.conversation_id, WHOLE)
        await c.send("Seen.")
        await c.ask("Name?")

    async with replica(store, flow, Platform()) as person:
        with pytest.raises(FlowUnknown):
            await person.says("hi")
    assert await checkpoints.get("c") == WHOLE
