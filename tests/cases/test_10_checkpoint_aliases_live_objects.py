"""Field case 10: changing one's own lists and dicts, before or after, changes neither the stored turn nor another's copy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.conformance.support import ClockedStore, listed
from turnkeeper.turn_checkpoint import TurnCheckpointConflict, TurnCheckpointSession, TurnSnapshot

pytestmark = pytest.mark.anyio

CALL = {"id": "c", "function": {"name": "t", "arguments": {"q": [1]}}}


async def loaded(session: TurnCheckpointSession) -> TurnSnapshot:
    """The turn as the session loads it."""
    snapshot = await session.load()
    assert snapshot is not None
    return snapshot


async def test_the_cases_own_sequence(store: ClockedStore) -> None:
    """Step by step as the case tells it, in one session and as another process sees it."""
    session = TurnCheckpointSession(store, "trace")
    messages: list[Any] = [{"role": "user", "content": "a"}]
    runtime: dict[str, Any] = {"n": [1]}
    await session.start(messages, ["t"], runtime)
    messages.append({"role": "user", "content": "b"})
    messages[0]["content"] = "changed"
    s1 = await loaded(session)
    s1.messages.append("x")
    s1.runtime["n"].append(2)
    s2 = await loaded(session)
    assert s2.messages == [{"role": "user", "content": "a"}]
    assert s2.runtime == {"n": [1]}

    await session.reserve_assistant(0, {"tool_calls": [CALL]})
    operation = session.logical_operation_id(0, 0)
    claimed = await session.claim_tool(0, 0, "c", "t", {"q": [1]}, operation, owner_token="w", begin=True)
    result: dict[str, Any] = {"ok": [1]}
    await session.complete_tool(0, 0, "w", claimed.fence, result)
    result["ok"].append(2)
    for reader in (session, TurnCheckpointSession(store, "trace")):
        slot = await reader.get_tool(0, 0)
        assert slot is not None
        assert slot.result == {"ok": [1]}

    original: list[Any] = [{"role": "user", "content": "a"}]
    for starter in (session, TurnCheckpointSession(store, "trace")):
        assert (await starter.start(original, ["t"], {"n": [1]})).messages == original
        with pytest.raises(TurnCheckpointConflict):
            await starter.start(messages, ["t"], {"n": [1]})


class Spoiler:
    """Keeps everything that was handed in or out, and changes all of it in every way it can."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def give(self, value: Any) -> Any:
        """A copy to hand in, which will be changed afterwards."""
        copied = deepcopy(value)
        self.kept.append(copied)
        return copied

    def take(self, value: Any) -> Any:
        """A copy of what was handed out, which will itself be changed."""
        copied = deepcopy(value)
        self.kept.append(value)
        return copied

    def spoil(self) -> None:
        """Change it all."""
        for value in self.kept:
            _spoil(value)
        self.kept.clear()


def _spoil(value: Any) -> None:
    if isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _spoil(item)
        value.append("spoilt")  # pyright: ignore[reportUnknownMemberType]
    elif isinstance(value, dict):
        for item in list(value.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            _spoil(item)
        value["spoilt"] = True
        value.pop("content", None)  # pyright: ignore[reportUnknownMemberType]


FIELDS = ("messages", "tool_names", "runtime", "final_delivery", "assistant_responses")


async def test_nothing_that_is_handed_in_or_out_is_shared(store: ClockedStore) -> None:
    """Every argument and every answer of a whole turn is changed after each call; the turn is as it was said."""
    spoiler = Spoiler()
    labels = {"who": "me"}
    session = TurnCheckpointSession(store, "trace", labels=labels)
    labels["who"] = "spoilt"
    user: list[Any] = [{"role": "user", "content": "a", "parts": [{"n": [1]}]}]
    decision: dict[str, Any] = {"content": None, "tool_calls": [CALL]}
    result: dict[str, Any] = {"ok": [1], "deep": {"a": [{"b": []}]}}
    transcript: list[Any] = [*user, {"role": "assistant", **decision}, {"role": "tool", "content": result}]
    arguments = CALL["function"]["arguments"]  # pyright: ignore[reportArgumentType]

    def expect(snapshot: TurnSnapshot, messages: list[Any], runtime: dict[str, Any]) -> None:
        assert spoiler.take(snapshot.messages) == messages
        assert spoiler.take(snapshot.tool_names) == ["t"]
        assert spoiler.take(snapshot.runtime) == runtime
        for name in FIELDS:
            spoiler.take(getattr(snapshot, name))
        spoiler.spoil()

    expect(await session.start(spoiler.give(user), spoiler.give(["t"]), spoiler.give({"n": [1]})), user, {"n": [1]})
    expect(await loaded(session), user, {"n": [1]})
    assert spoiler.take(await session.reserve_assistant(0, spoiler.give(decision))) == decision
    spoiler.spoil()
    assert spoiler.take(await session.get_assistant(0)) == decision
    spoiler.spoil()
    operation = session.logical_operation_id(0, 0)
    for _ in range(2):
        claimed = await session.claim_tool(0, 0, "c", "t", spoiler.give(arguments), operation, owner_token="w")
        assert spoiler.take(claimed.raw_arguments) == arguments
        spoiler.spoil()
    await session.begin_tool(0, 0, "w", 1)
    for _ in range(2):
        completed = await session.complete_tool(0, 0, "w", 1, spoiler.give(result))
        assert spoiler.take(completed.result) == result
        spoiler.spoil()
    slot = await session.get_tool(0, 0)
    assert slot is not None
    assert (spoiler.take(slot.result), spoiler.take(slot.raw_arguments)) == (result, arguments)
    spoiler.spoil()
    expect(await session.commit_round(0, spoiler.give(transcript), spoiler.give({"n": [2]})), transcript, {"n": [2]})
    # A next round, so that a spoilt copy of the transcript would show as the prefix that it is compared with.
    await session.reserve_assistant(1, spoiler.give({"content": "more"}))
    longer = [*transcript, {"role": "assistant", "content": "more"}]
    expect(await session.commit_round(1, spoiler.give(longer), spoiler.give({"n": [3]})), longer, {"n": [3]})
    await session.save_final_model("done")
    reserved = await session.reserve_final_delivery("key", "done", spoiler.give({"buttons": ["a"]}))
    assert spoiler.take(reserved.final_delivery) == {"buttons": ["a"]}
    spoiler.spoil()
    await session.mark_delivered("key", "message")
    await session.mark_completed()
    for reader in (session, TurnCheckpointSession(store, "trace")):
        snapshot = await loaded(reader)
        assert snapshot.assistant_responses == {0: decision, 1: {"content": "more"}}
        assert snapshot.final_delivery == {"buttons": ["a"]}
        expect(snapshot, longer, {"n": [3]})
    assert [head.labels["who"] for head in await listed(store)] == ["me"]


async def test_snapshots_do_not_share(store: ClockedStore) -> None:
    """Two snapshots of one moment are independent, and one that was read earlier stays what it was."""
    session = TurnCheckpointSession(store, "trace")
    await session.start([{"role": "user", "content": "a"}], ["t"], {"n": [1]})
    early = await loaded(session)
    twin = await loaded(session)
    twin.messages.append("x")
    twin.messages.append("y")
    assert twin.messages[1:] == ["x", "y"]  # its own from the first look on
    await session.reserve_assistant(0, {"content": "hm"})
    await session.commit_round(0, [{"role": "user", "content": "a"}, "new"], {"n": [2]})
    assert early.messages == [{"role": "user", "content": "a"}]
    assert early.runtime == {"n": [1]}
    assert (await loaded(session)).messages == [{"role": "user", "content": "a"}, "new"]


async def test_evidence_and_resolutions_do_not_share(store: ClockedStore) -> None:
    """The same for what is kept beside an ambiguous slot, and for what settles it."""
    session = TurnCheckpointSession(store, "trace")
    await session.start([{"role": "user", "content": "a"}])
    await session.reserve_assistant(0, {"tool_calls": [CALL]})
    operation = session.logical_operation_id(0, 0)
    arguments = {"q": [1]}
    await session.claim_tool(0, 0, "c", "t", arguments, operation, owner_token="w", begin=True)
    await store.advance_clock(3_600_000)
    await session.claim_tool(0, 0, "c", "t", arguments, operation, owner_token="other")
    late: dict[str, Any] = {"late": [1]}
    answered = await session.complete_tool(0, 0, "w", 1, late)
    late["late"].append(2)
    assert answered.evidence is None or answered.evidence == {"late": [1]}
    slot = await session.get_tool(0, 0)
    assert slot is not None
    assert slot.evidence is not None
    assert slot.evidence == {"late": [1]}
    slot.evidence["late"].append(3)
    settled: dict[str, Any] = {"settled": [1]}
    await session.resolve_tool(0, 0, "happened", who="me", why="seen", result_record=settled)
    settled["settled"].append(2)
    for reader in (session, TurnCheckpointSession(store, "trace")):
        slot = await reader.get_tool(0, 0)
        assert slot is not None
        assert slot.evidence == {"late": [1]}
        assert slot.result == {"settled": [1]}
