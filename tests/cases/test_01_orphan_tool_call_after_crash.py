"""Field case 01: a crash leaves a tool call with no result; the next message wedges the conversation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import shared_json
from turnkeeper import Agent, Keeper, ScriptedModel, tool
from turnkeeper.engine.stored import stored_messages
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.names import ToolCallAction, ToolCallState, TurnPhase

CASE: dict[str, Any] = shared_json("cases/01-orphan-tool-call-after-crash.json")
TURN = CASE["turn1"]


class Shop:
    """The tools, and the ledger of refunds."""

    def __init__(self) -> None:
        self.refunds: list[int] = []
        self.model = ScriptedModel([TURN["assistant_round_0"], "It is late; whether it was refunded is being checked."])

        @tool(replay_safe=True)
        def lookup_order(order: int) -> dict[str, str]:
            return {"status": "late"}

        @tool
        def refund(order: int, cents: int) -> str:
            self.refunds.append(order)
            return "refunded"

        self.agent = Agent(self.model, [lookup_order, refund], lease_seconds=10)


async def _until_the_crash(store: SqliteStore, shop: Shop) -> None:
    """Slot 0 is complete; slot 1 has begun, its refund is in the ledger, and its process is gone."""
    session = Keeper(store).session("turn-1", execution_lease_seconds=10)
    await session.start(TURN["messages"], ["lookup_order", "refund"], {})
    await session.reserve_assistant(0, TURN["assistant_round_0"])
    for slot, call in enumerate(TURN["assistant_round_0"]["tool_calls"]):
        operation = session.logical_operation_id(0, slot)
        arguments = (0, slot, call["id"], call["name"], call["arguments"], operation)
        claim = await session.claim_tool(*arguments, replay_safe=slot == 0, owner_token="dead")
        await session.begin_tool(0, slot, "dead", claim.fence)
        if slot == 0:
            await session.complete_tool(0, 0, "dead", claim.fence, {"content": '{"status":"late"}'})
    shop.refunds.append(7)


@pytest.mark.anyio
async def test_the_refund_is_not_repeated_and_the_transcript_pairs_up(store: SqliteStore) -> None:
    shop, keeper = Shop(), Keeper(store)
    await _until_the_crash(store, shop)
    await store.advance_clock(10_000)

    stopped = await keeper.run(shop.agent, TURN["messages"], turn_id="turn-1")
    assert stopped.status == "reconciliation_required"
    assert stopped.open_slots == ((0, 1),)
    session = keeper.session("turn-1")
    slot = await session.get_tool(0, 1)
    assert slot is not None
    assert slot.state is ToolCallState.AMBIGUOUS
    assert shop.refunds == [7]
    assert shop.model.requests == []  # no model call during recovery before the decision

    with pytest.raises(TurnCheckpointError, match=r"slots \[1\] have no result"):
        await session.commit_round(0, TURN["messages"], {})
    snapshot = await session.load()
    assert snapshot is not None
    assert snapshot.phase is TurnPhase.ASSISTANT_RESERVED

    await keeper.resolve_tool("turn-1", 0, 1, "unknown", who="ann", why="the bank cannot tell before Monday")
    done = await keeper.run(shop.agent, TURN["messages"], turn_id="turn-1")
    assert done.status == "success"
    history = await keeper.history("turn-1")
    assert history is not None
    messages = stored_messages(history.state)
    check_pairs(messages)
    expected = CASE["expected_after_slot1_resolved_as_unknown"]
    assert [message.role.value for message in messages] == [
        role.removesuffix("(final of turn 1)") for role in expected["roles"][:5]
    ]
    assert [m.metadata["tool_call_id"] for m in messages if m.role.value == "tool"] == expected["tool_ids_in_order"]
    assert "not known" in messages[3].text
    assert shop.refunds == [7]


@pytest.mark.anyio
async def test_a_second_message_is_never_put_into_the_open_round(store: SqliteStore) -> None:
    shop, keeper = Shop(), Keeper(store)
    await _until_the_crash(store, shop)
    newer = [*TURN["messages"], CASE["turn2"]["inbound"]]
    with pytest.raises(TurnCheckpointConflict, match="another input"):
        await keeper.run(shop.agent, newer, turn_id="turn-1", wait=False)
    # As a turn of its own it needs the whole transcript of the first: an open call in it is refused before any model call.
    for forbidden in CASE["forbidden_provider_inputs"]:
        with pytest.raises(InvalidInput, match=r"comes before the result of the call 'call_B'"):
            await keeper.run(shop.agent, forbidden, turn_id="turn-2")
    assert shop.model.requests == []


@pytest.mark.anyio
async def test_every_snapshot_on_the_way_pairs_up(store: SqliteStore) -> None:
    """At every sequence number, what is handed out holds no call without its result behind it."""
    shop, keeper = Shop(), Keeper(store)
    await _until_the_crash(store, shop)
    await store.advance_clock(10_000)
    session = keeper.session("turn-1")
    call = TURN["assistant_round_0"]["tool_calls"][1]
    claim = await session.claim_tool(
        0, 1, call["id"], call["name"], call["arguments"], session.logical_operation_id(0, 1)
    )
    assert claim.action is ToolCallAction.AMBIGUOUS
    await keeper.resolve_tool("turn-1", 0, 1, "happened", who="ann", why="ledger row", result="refunded")
    assert (await keeper.run(shop.agent, TURN["messages"], turn_id="turn-1")).status == "success"
    tail = await keeper.history("turn-1")
    assert tail is not None
    for at in range(1, tail.tail + 1):
        history = await keeper.history("turn-1", at=at)
        assert history is not None
        check_pairs(stored_messages(history.state))
    for request in shop.model.requests:
        check_pairs(request.messages)
    assert shop.refunds == [7]
