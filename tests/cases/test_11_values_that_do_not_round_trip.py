"""Field case 11: every value is exact after a reload or refused by the first call that takes it; nothing in between."""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest

from tests.cases.script import records
from tests.conformance.support import ClockedStore
from tests.conftest import shared_json
from turnkeeper.errors import InvalidInput
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn_checkpoint import ToolCallAction, ToolCallState, TurnCheckpointSession, TurnPhase

pytestmark = pytest.mark.anyio

CASE: Final = "cases/11-values-that-do-not-round-trip.json"


def _nested(depth: str) -> Any:
    nested: list[Any] = []
    for _ in range(int(depth) - 1):
        nested = [nested]
    return nested


TAGS: Final[dict[str, Callable[[Any], Any]]] = {
    "$int": int,
    "$float": float,
    "$bytes": base64.b64decode,
    "$datetime": datetime.datetime.fromisoformat,
    "$decimal": decimal.Decimal,
    "$tuple": tuple,
    "$set": set,
    "$uuid": uuid.UUID,
    "$map": dict,
    "$nest": _nested,
}


def built(tagged: Any) -> Any:
    """A value of the data file, whose tags stand for what JSON cannot say."""
    if not isinstance(tagged, dict):
        return tagged
    fields = cast("dict[str, Any]", tagged)
    tag = next(iter(fields), "")
    return TAGS[tag](fields[tag]) if tag in TAGS else fields


class Row(NamedTuple):
    """One row of the data file."""

    name: str
    value: Any
    expect: str


def rows() -> list[Row]:
    """The rows of the data file."""
    found = [Row(repr(row["v"]), built(row["v"]), row["expect"]) for row in shared_json(CASE)["values"]]
    assert len(found) == 31
    return found


def equal(one: Any, other: Any) -> bool:
    """The same value and type, all the way down, without recursion."""
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            if list(a) != list(b):  # pyright: ignore[reportUnknownArgumentType]
                return False
            pairs += [(a[key], b[key]) for key in a]  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(a, list):
            if len(a) != len(b):  # pyright: ignore[reportUnknownArgumentType]
                return False
            pairs += zip(a, b, strict=True)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(a, float):
            if a != b or math.copysign(1, a) != math.copysign(1, b):
                return False
        elif a != b:
            return False
    return True


# --- places ----------------------------------------------------------------------------------------------------

CALL: Final = {"id": "c", "function": {"name": "t", "arguments": "{}"}}
Read = Callable[[TurnCheckpointSession], Awaitable[Any]]


async def _snapshot_of(session: TurnCheckpointSession) -> Any:
    snapshot = await session.load()
    assert snapshot is not None
    return snapshot


async def _as_input(session: TurnCheckpointSession, value: Any) -> Read:
    await session.start([{"role": "user", "content": value}])

    async def read(later: TurnCheckpointSession) -> Any:
        return (await _snapshot_of(later)).messages[0]["content"]

    return read


async def _as_inbound(session: TurnCheckpointSession, value: Any) -> Read:
    await session.start([], None, {"inbound": value})

    async def read(later: TurnCheckpointSession) -> Any:
        return (await _snapshot_of(later)).runtime["inbound"]

    return read


async def _as_runtime(session: TurnCheckpointSession, value: Any) -> Read:
    await session.start([], None, {"state": [value]})

    async def read(later: TurnCheckpointSession) -> Any:
        return (await _snapshot_of(later)).runtime["state"][0]

    return read


async def _as_metadata(session: TurnCheckpointSession, value: Any) -> Read:
    await session.start([])
    await session.save_final_model("done")
    await session.reserve_final_delivery("key", "done", {"meta": value})

    async def read(later: TurnCheckpointSession) -> Any:
        return (await _snapshot_of(later)).final_delivery["meta"]

    return read


async def _as_arguments(session: TurnCheckpointSession, value: Any) -> Read:
    await session.start([])
    await session.reserve_assistant(0, {"tool_calls": [{"id": "c", "name": "t", "arguments": value}]})
    operation = session.logical_operation_id(0, 0)
    claimed = await session.claim_tool(0, 0, "c", "t", value, operation, owner_token="w")
    assert claimed.action is ToolCallAction.ACQUIRED

    async def read(later: TurnCheckpointSession) -> Any:
        slot = await later.get_tool(0, 0)
        assert slot is not None
        return slot.raw_arguments

    return read


async def _executing(session: TurnCheckpointSession) -> None:
    await session.start([])
    await session.reserve_assistant(0, {"tool_calls": [CALL]})
    operation = session.logical_operation_id(0, 0)
    begun = await session.claim_tool(0, 0, "c", "t", "{}", operation, owner_token="w", begin=True)
    assert begun.should_begin


async def _as_result(session: TurnCheckpointSession, value: Any) -> Read:
    await _executing(session)
    await session.complete_tool(0, 0, "w", 1, {"value": value})

    async def read(later: TurnCheckpointSession) -> Any:
        slot = await later.get_tool(0, 0)
        assert slot is not None
        assert slot.result is not None
        return slot.result["value"]

    return read


async def _as_transcript(session: TurnCheckpointSession, value: Any) -> Read:
    await _executing(session)
    await session.complete_tool(0, 0, "w", 1, {"ok": True})
    await session.commit_round(0, [{"role": "tool", "content": value}], {})

    async def read(later: TurnCheckpointSession) -> Any:
        return (await _snapshot_of(later)).messages[0]["content"]

    return read


PLACES: Final[dict[str, Callable[[TurnCheckpointSession, Any], Awaitable[Read]]]] = {
    "tool result": _as_result,
    "turn input": _as_input,
    "inbound identity": _as_inbound,
    "runtime value": _as_runtime,
    "metadata": _as_metadata,
    "tool arguments": _as_arguments,
    "transcript": _as_transcript,
}


async def _verdict(store: Store, place: str, trace: str, row: Row) -> str:
    """What becomes of a value in a place: `exact`, `list`, `refused`, `CHANGED` or `UNLOADABLE`."""
    session = TurnCheckpointSession(store, trace)
    try:
        read = await PLACES[place](session, row.value)
    except InvalidInput as e:
        # The path goes into the value, but where the value is the whole argument.
        inside = "[" in e.field or "." in e.field or place == "tool arguments"
        return "refused" if inside else f"refused without a path ({e.field})"
    try:
        found = await read(TurnCheckpointSession(store, trace))
    except Exception as e:
        return f"UNLOADABLE ({type(e).__name__})"
    if equal(found, row.value):
        return "exact"
    return "list" if type(found) is list and (*found,) == row.value else f"CHANGED to {found!r:.50}"


def _right(row: Row, verdict: str) -> bool:
    """Whether a verdict is what the data file expects."""
    if verdict == "exact":
        return not row.expect.startswith("refused")
    if verdict == "list":
        return "list on every backend" in row.expect
    return verdict == "refused" and "refused" in row.expect


@pytest.mark.parametrize("place", PLACES)
async def test_the_table(store: ClockedStore, place: str) -> None:
    """One line for each row: CHANGED and UNLOADABLE are 0, and what has to be exact is not refused."""
    table = [(row, await _verdict(store, place, f"t{number}", row)) for number, row in enumerate(rows())]
    wrong = [(row.name, row.expect, verdict) for row, verdict in table if not _right(row, verdict)]
    assert not wrong
    verdicts = [verdict for _, verdict in table]
    assert verdicts.count("exact") >= 18
    assert verdicts.count("refused") >= 11


async def test_after_a_restart(tmp_path: Path) -> None:
    """The same from a file that another process opens: everything exact in one turn."""
    path = tmp_path / "turns.db"
    exact = [row.value for row in rows() if row.expect.startswith("exact") and "or" not in row.expect.split()]
    assert len(exact) >= 17
    async with await SqliteStore.open(path) as store:
        await TurnCheckpointSession(store, "t").start([{"role": "user", "content": exact}], None, {"values": exact})
    async with await SqliteStore.open(path) as store:
        snapshot = await _snapshot_of(TurnCheckpointSession(store, "t"))
        assert equal(snapshot.messages[0]["content"], exact)
        assert equal(snapshot.runtime["values"], exact)


async def test_nothing_is_written_of_a_refused_value(store: ClockedStore) -> None:
    """The first call that takes it raises, names the path inside the value, and the log has not grown."""
    bad = {"ok": [1, {"deep": math.nan}]}
    session = TurnCheckpointSession(store, "t")

    async def refused(field: str, call: Callable[[], Awaitable[Any]]) -> None:
        before = await records(store, session.key)
        with pytest.raises(InvalidInput) as raised:
            await call()
        assert raised.value.field == field
        assert await records(store, session.key) == before

    await refused("messages[0].content.ok[1].deep", lambda: session.start([{"role": "user", "content": bad}]))
    await refused("tool_names[0]", lambda: session.start([], [math.nan]))  # pyright: ignore[reportArgumentType]
    await refused("runtime.a.ok[1].deep", lambda: session.start([], [], {"a": bad}))
    await session.start([])
    await refused("response.content.ok[1].deep", lambda: session.reserve_assistant(0, {"content": bad}))
    await session.reserve_assistant(0, {"tool_calls": [CALL]})
    operation = session.logical_operation_id(0, 0)
    await refused("raw_arguments.ok[1].deep", lambda: session.claim_tool(0, 0, "c", "t", bad, operation))
    await session.claim_tool(0, 0, "c", "t", "{}", operation, owner_token="w", begin=True)
    await refused(
        "result of round 0 slot 0.value.ok[1].deep", lambda: session.complete_tool(0, 0, "w", 1, {"value": bad})
    )
    await session.complete_tool(0, 0, "w", 1, {})
    await refused("messages[0].ok[1].deep", lambda: session.commit_round(0, [bad], {}))
    await refused("runtime.a.ok[1].deep", lambda: session.commit_round(0, [], {"a": bad}))
    await session.commit_round(0, [], {})
    await refused("content", lambda: session.save_final_model(math.nan))  # pyright: ignore[reportArgumentType]
    await session.save_final_model("done")
    await refused("text", lambda: session.reserve_final_delivery("key", None))  # pyright: ignore[reportArgumentType]
    await refused("delivery.a.ok[1].deep", lambda: session.reserve_final_delivery("key", "done", {"a": bad}))
    assert (await session.reserve_final_delivery("key", "done")).phase is TurnPhase.DELIVERY_RESERVED


@pytest.mark.parametrize(
    "value",
    [math.nan, {1: "a"}, {1, 2}, decimal.Decimal("1.10"), object()],
    ids=["nan", "int key", "set", "decimal", "object"],
)
async def test_a_refused_result_does_not_cost_the_effect(store: ClockedStore, value: Any) -> None:
    """The effect has happened, its result cannot be kept: its owner completes with a stand-in; nothing is run again."""
    session = TurnCheckpointSession(store, "t", execution_lease_seconds=900)
    await _executing(session)
    for _ in range(3):
        with pytest.raises(InvalidInput):
            await session.complete_tool(0, 0, "w", 1, {"value": value})
    operation = session.logical_operation_id(0, 0)
    for reader in (session, TurnCheckpointSession(store, "t")):
        slot = await reader.get_tool(0, 0)
        assert slot is not None
        assert (slot.state, slot.owner_token, slot.fence) == (ToolCallState.EXECUTING, "w", 1)
    rival = TurnCheckpointSession(store, "t")
    answer = await rival.claim_tool(0, 0, "c", "t", "{}", operation, owner_token="rival", begin=True)
    assert (answer.action, answer.should_begin) == (ToolCallAction.BUSY, False)
    await store.advance_clock(899_000)
    await session.renew_tool(0, 0, "w", 1)
    await store.advance_clock(899_000)
    stand_in = {"error": "the result could not be kept", "type": type(value).__name__}
    assert (await session.complete_tool(0, 0, "w", 1, stand_in)).action is ToolCallAction.COMPLETED
    answer = await rival.claim_tool(0, 0, "c", "t", "{}", operation, owner_token="rival", begin=True)
    assert (answer.action, answer.cached_result) == (ToolCallAction.CACHED, stand_in)


# --- silently different ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True], ids=["same session", "new session"])
async def test_a_changed_transcript_is_stored_as_it_was_said(store: ClockedStore, fresh: bool) -> None:
    """A commit writes what differs from before; 1, 1.0 and True differ, though Python calls them equal."""
    alike: list[Any] = [1, True, 1.0, 0.0, -0.0, 2**64, float(2**64), "1", b"1", {"a": 1}, {"a": True}]
    for number, first in enumerate(alike):
        for second in alike:
            session = TurnCheckpointSession(store, f"t{number} {second!r}")
            start = [{"role": "system", "n": first}, {"role": "user", "content": "hi"}]
            after: list[Any] = [{"role": "system", "n": second}, *start[1:], {"role": "assistant", "n": first}]
            await session.start(start)
            if fresh:
                session = TurnCheckpointSession(store, f"t{number} {second!r}")
            await session.reserve_assistant(0, {"content": "hm"})
            assert equal((await session.commit_round(0, after, {})).messages, after)
            later = TurnCheckpointSession(store, f"t{number} {second!r}")
            assert equal((await _snapshot_of(later)).messages, after)


async def test_what_did_not_change_is_not_written_again(store: ClockedStore) -> None:
    """A transcript of anything that can be kept, huge integers too, is stored once, also by a process that came later."""
    messages: list[Any] = [{"n": [10**40, -(2**70), 1.5, b"x", "\ud83d", ("a", 1)]} for _ in range(5)]
    await TurnCheckpointSession(store, "t").start(messages)
    for index in range(3):
        session = TurnCheckpointSession(store, "t")
        await session.reserve_assistant(index, {"content": "hm"})
        messages.append({"role": "assistant", "n": 10**30 + index})
        await session.commit_round(index, messages, {})
        assert session.log.cached.transcript is not None
        assert session.log.cached.transcript.keep == 5 + index


async def test_the_same_result_in_another_form(store: ClockedStore) -> None:
    """A repeated completion is the same result whatever the order of its keys; 1 and True are not the same."""
    session = TurnCheckpointSession(store, "t")
    await _executing(session)
    await session.complete_tool(0, 0, "w", 1, {"a": 1, "b": (2, "\ud83d")})
    again = await session.complete_tool(0, 0, "w", 1, {"b": [2, "\ufffd"], "a": 1})
    assert again.action is ToolCallAction.CACHED
    for other in ({"a": True, "b": [2, "\ufffd"]}, {"a": 1.0, "b": [2, "\ufffd"]}, {"a": 1}):
        assert (await session.complete_tool(0, 0, "w", 1, other)).action is ToolCallAction.CONFLICT
