"""What of the tables can only be seen through a session on a store: unknown records, canonical values, double sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import pytest

from turnkeeper.errors import TurnCheckpointConflict, TurnSchemaConflict
from turnkeeper.log.record import NOWHERE, Appended, Head
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.names import ToolCallAction, ToolCallState, TurnPhase
from turnkeeper.turn.session import TurnCheckpointSession

pytestmark = pytest.mark.anyio

USER: Final = {"role": "user", "content": "charge it"}
CALL: Final = {"id": "call_0", "name": "charge", "arguments": {"cents": 500}}


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """One is enough: that all stores are alike is the conformance suite's."""
    async with await SqliteStore.open(":memory:") as opened:
        yield opened


async def begun(store: Store) -> TurnCheckpointSession:
    """A turn whose decision has one call."""
    turn = TurnCheckpointSession(store, "trace")
    await turn.start([USER], ["charge"], {})
    await turn.reserve_assistant(0, {"tool_calls": [CALL]})
    return turn


@pytest.mark.parametrize("body", [b"\x7fwhatever", b"\x01\x92\xc4\x00\x91\xa9teleported"], ids=["frame", "record"])
async def test_claim_1_unknown_schema(store: Store, body: bytes) -> None:
    """T3 `claim_tool` 1, ambiguity 24: what a newer version wrote -> SCHEMA_CONFLICT, and it is left as it is."""
    turn = await begun(store)
    tail = await store.read(turn.key, after=NOWHERE)
    outcome = await store.append(turn.key, [body], expected=tail.position, head=Head(kind="turn", phase=""))
    assert isinstance(outcome, Appended)
    for worker in (turn, TurnCheckpointSession(store, "trace")):
        operation_id = worker.logical_operation_id(0, 0)
        decision = await worker.claim_tool(0, 0, "call_0", "charge", CALL["arguments"], operation_id, begin=True)
        assert decision.action is ToolCallAction.SCHEMA_CONFLICT
        assert not decision.should_begin
        with pytest.raises(TurnSchemaConflict):
            await worker.load()
        with pytest.raises(TurnSchemaConflict):
            await worker.start([USER], ["charge"], {"inbound": "new"})
    assert (await store.read(turn.key, after=NOWHERE)).position == outcome.position


async def test_claims_match_by_value(store: Store) -> None:
    """T3 `claim_tool` 3: arguments are compared as values, whatever the order of their keys; other types are others."""
    turn = TurnCheckpointSession(store, "trace")
    await turn.start([USER], ["charge"], {})
    call = {"id": None, "name": "charge", "arguments": {"cents": 1, "to": ["a"]}}
    await turn.reserve_assistant(0, {"tool_calls": [call]})
    operation_id = turn.logical_operation_id(0, 0)
    for arguments in ({"cents": "1", "to": ["a"]}, {"cents": 1}, {"cents": 1, "to": ["b"]}, None):
        decision = await turn.claim_tool(0, 0, None, "charge", arguments, operation_id)
        assert decision.action is ToolCallAction.CONFLICT
    decision = await turn.claim_tool(0, 0, None, "charge", {"to": ("a",), "cents": 1}, operation_id, owner_token="a")
    assert (decision.action, decision.raw_arguments) == (ToolCallAction.ACQUIRED, call["arguments"])


async def test_first_prompt_is_canonical(store: Store) -> None:
    """T2 `start`, ambiguity 1: another prompt around the same message is silently replaced by the first one."""
    first = await TurnCheckpointSession(store, "trace").start([{"role": "system", "content": "nine"}, USER], ["a"], {})
    later = TurnCheckpointSession(store, "trace")
    second = await later.start([{"role": "system", "content": "ten"}, USER], ["b"], {"host": "b"})
    assert (second.messages, second.tool_names, second.runtime) == (first.messages, first.tool_names, first.runtime)
    assert second.revision == first.revision == 1
    with pytest.raises(TurnCheckpointConflict):
        await later.start([{"role": "user", "content": "another"}], ["a"], {})


async def test_second_message_id_is_told_and_kept(store: Store) -> None:
    """T2 `mark_delivered`: another message id is a conflict for its caller, and evidence in the log for ever."""
    turn = TurnCheckpointSession(store, "trace")
    await turn.start([USER], [], {})
    await turn.save_final_model("done")
    await turn.reserve_final_delivery("key", "done", None)
    await turn.mark_delivered("key", "message 1")
    assert (await turn.mark_delivered("key", "message 1")).phase is TurnPhase.DELIVERED
    for _ in range(2):
        with pytest.raises(TurnCheckpointConflict, match=r"message 1.*message 2"):
            await TurnCheckpointSession(store, "trace").mark_delivered("key", "message 2")
    snapshot = await turn.load()
    assert snapshot is not None
    assert (snapshot.sent_message_id, snapshot.revision) == ("message 1", 5)
    assert (await turn.log.read()).disputed_message_ids == ("message 2",)
    (head,) = [head async for head in store.heads()]
    assert head.attention == "double_send"


async def test_slot_of_another_worker_is_seen(store: Store) -> None:
    """T3: what one worker completed, another finds CACHED, though its own view is older; `get_tool` changes nothing."""
    turn = await begun(store)
    other = TurnCheckpointSession(store, "trace")
    assert await other.get_tool(0, 0) is None
    operation_id = turn.logical_operation_id(0, 0)
    claim = (0, 0, "call_0", "charge", CALL["arguments"], operation_id)
    decision = await turn.claim_tool(*claim, owner_token="a", begin=True)
    assert decision.should_begin
    assert (await other.claim_tool(*claim, owner_token="b", begin=True)).action is ToolCallAction.BUSY
    await turn.complete_tool(0, 0, "a", decision.fence, {"ok": True})
    found = await other.claim_tool(*claim, owner_token="b", begin=True)
    assert (found.action, found.cached_result, found.state) == (
        ToolCallAction.CACHED,
        {"ok": True},
        ToolCallState.COMPLETED,
    )
    revision = (await turn.log.read()).revision
    seen = await other.get_tool(0, 0)
    assert seen is not None
    assert (seen.action, seen.operation_id) == (ToolCallAction.CACHED, operation_id)
    assert (await turn.log.read()).revision == revision
