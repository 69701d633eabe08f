"""A run that goes on with a turn links to the run that wrote its log, in whatever process that was (flows.md F7)."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider

from tests.engine.support import Channel, asks
from tests.observe.dying import agent
from tests.observe.watching import Watched, ids, links, parent, told
from turnkeeper import Agent, EffectRefused, Keeper, ReplyPort, ScriptedModel, Telemetry, Tool
from turnkeeper.log.store import Store
from turnkeeper.observe import names
from turnkeeper.turn.records import Started, ToolBegun

pytestmark = pytest.mark.anyio


async def test_after_a_process_that_died(tmp_path: Path, watched: Watched) -> None:
    path = tmp_path / "turns.db"
    command = [sys.executable, "-m", "tests.observe.dying", str(path), "t"]
    died = await anyio.run_process(command, check=False)
    assert died.returncode == 9
    trace_id, span_id = died.stdout.decode().split()
    async with await Keeper.open(f"sqlite:///{path}", telemetry=watched.telemetry) as keeper:
        ended = await keeper.run(agent(), "q", turn_id="t")
        assert ended.status == "reconciliation_required"
        run = watched.only(names.TURN)
        assert links(run) == [(int(trace_id, 16), int(span_id, 16))]
        assert parent(run) is None
        assert watched.spans(names.EXECUTE_TOOL) == []  # it was not called again
        await keeper.resolve_tool("t", 0, 0, "happened", who="me", why="seen", result="x")
        await keeper.resume(agent(), turn_id="t")
    first, second = watched.spans(names.TURN)
    assert links(second) == [ids(first)]  # that is who wrote last
    assert told(second)[names.TURN_RESUMED] is True


async def test_each_run_links_to_the_one_before(store: Store, watched: Watched) -> None:
    """In keepers of their own. A run of a finished turn, too, which writes nothing."""
    channel = Channel(EffectRefused("a"), EffectRefused("b"))
    for _ in range(4):
        keeper = Keeper(store, telemetry=watched.telemetry)
        await keeper.run(Agent(ScriptedModel(["a"])), "q", turn_id="t", reply=ReplyPort(channel.send))
    first, second, third, fourth = watched.spans(names.TURN)
    assert [links(span) for span in (first, second, third, fourth)] == [
        [],
        [ids(first)],
        [ids(second)],
        [ids(third)],
    ]


async def test_a_step_s_call_links_where_it_is_found_by_its_write(store: Store, watched: Watched) -> None:
    """A single call reads nothing before its barrier: it learns of the run before from the write that finds it."""
    from turnkeeper.engine.single_call import call_tool
    from turnkeeper.turn.handle import TurnHandle

    async def act() -> str:
        return "done"

    for _ in range(2):
        await call_tool(TurnHandle(store, "t", telemetry=watched.telemetry), Tool(act), {})
    first, second = watched.spans(names.CALL_TURN)
    assert links(second) == [ids(first)]
    assert len(watched.spans(names.EXECUTE_TOOL)) == 1


async def test_nothing_is_written_without_telemetry(store: Store, watched: Watched) -> None:
    async def act() -> str:
        return "done"

    agent = Agent(asks([("act", {})]), [Tool(act)])
    silent, unsampled = Keeper(store), Keeper(store, telemetry=Telemetry())  # no SDK: no context to link to
    for keeper in (silent, unsampled):
        turn_id = f"{id(keeper)}"
        await keeper.run(agent, "q", turn_id=turn_id)
        history = await keeper.history(turn_id)
        assert history is not None
        assert history.state.trace is None
        assert all(getattr(entry.record, "trace", None) is None for entry in history.entries)
        # Its log is gone on with all the same, without a link.
        await Keeper(store, telemetry=watched.telemetry).run(agent, "q", turn_id=turn_id)
    assert [links(span) for span in watched.spans(names.TURN)] == [[], []]


async def test_a_run_writes_its_context_once(keeper: Keeper, watched: Watched) -> None:
    async def act() -> str:
        return "done"

    await keeper.run(Agent(asks([("act", {})], [("act", {})]), [Tool(act)]), "q", turn_id="t")
    history = await keeper.history("t")
    assert history is not None
    signed = [entry.record for entry in history.entries if getattr(entry.record, "trace", None) is not None]
    assert [type(record) for record in signed] == [Started]
    trace_id, span_id = ids(watched.only(names.TURN))
    assert history.state.trace is not None
    assert history.state.trace.traceparent.startswith(f"00-{trace_id:032x}-{span_id:016x}-")


async def test_records_of_before_are_read() -> None:
    """Arrays that end before the field."""
    import msgspec

    begun = ToolBegun(0, 0, "owner", 1, 900, False)
    array = msgspec.msgpack.decode(msgspec.msgpack.encode(begun))
    assert array[-1] is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(array[:-1]), type=ToolBegun) == begun


async def test_an_unsampled_run_is_linked_to(store: Store, watched: Watched) -> None:
    """Whether a span is kept is its trace's affair; the one that goes on with it says where to look."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    def fails(_: object) -> str:
        raise ConnectionError("503")

    unsampled = Telemetry(TracerProvider(sampler=ALWAYS_OFF))
    await Keeper(store, telemetry=unsampled).run(Agent(ScriptedModel(fails)), "q", turn_id="t")
    await Keeper(store, telemetry=watched.telemetry).run(Agent(ScriptedModel(["a"])), "q", turn_id="t")
    assert len(links(watched.only(names.TURN))) == 1
