"""Turns that were begun by hand, through `TurnCheckpointSession` and in a chat form: the engine goes on with them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.support import ClockedStore
from tests.engine.support import Channel, Ledger, last_results, messages_of, requests_of, state_of
from turnkeeper import Agent, Keeper, ReplyPort, ScriptedModel, Tool, ToolContext, TurnCheckpointSession
from turnkeeper.errors import TurnCheckpointConflict

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "where is order 7?"}]
DECISION: dict[str, Any] = {
    "role": "assistant",
    "content": "let me see",
    "tool_calls": [
        {"id": "call_A", "type": "function", "function": {"name": "look", "arguments": '{"order": 7}'}},
        {"id": "", "name": "refund", "arguments": {"order": 7}},
    ],
}
NESTED = [
    {"id": "call_A", "type": "function", "function": {"name": "look", "arguments": '{"order": 7}'}},
    {"id": "call_0_1", "type": "function", "function": {"name": "refund", "arguments": '{"order":7}'}},
]


class Desk:
    """The agent, with a ledger of its tools."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.model = ScriptedModel([dict(DECISION), "it is late"])

    def agent(self, *, replay_safe: bool = False) -> Agent:
        """The agent."""

        async def look(order: int, context: ToolContext) -> str:
            self.ledger.write(context, "look")
            return "late"

        async def refund(order: int, context: ToolContext) -> str:
            self.ledger.write(context, "refund")
            return "refunded"

        return Agent(self.model, [Tool(look, replay_safe=replay_safe), Tool(refund)])


async def slot(session: TurnCheckpointSession, index: int, owner: str = "hand", **options: Any) -> Any:
    """Claim a slot of the first round by hand."""
    calls = [("call_A", "look", '{"order": 7}'), ("", "refund", {"order": 7})]
    return await session.claim_tool(
        0, index, *calls[index], session.logical_operation_id(0, index), owner_token=owner, **options
    )


async def test_a_started_turn_is_gone_on_with(keeper: Keeper) -> None:
    await keeper.session("t").start(ASKED)
    desk = Desk()
    result = await keeper.run(desk.agent(), "where is order 7?", turn_id="t")
    assert (result.status, result.output) == ("success", "it is late")
    assert requests_of(desk.model) == [(0, 0), (1, 0)]


async def test_a_reserved_decision_is_used_and_the_model_is_not_asked(keeper: Keeper) -> None:
    session = keeper.session("t")
    await session.start(ASKED)
    await session.reserve_assistant(0, dict(DECISION))
    desk = Desk()
    result = await keeper.run(desk.agent(), ASKED, turn_id="t")
    assert result.status == "success"
    assert requests_of(desk.model) == [(1, 0)]
    assert sorted(desk.ledger.told) == ["look", "refund"]
    messages = await messages_of(keeper)
    assert [message.role.value for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1].text == "let me see"
    assert messages[1].metadata["tool_calls"] == NESTED
    assert [message.metadata["tool_call_id"] for message in messages[2:4]] == ["call_A", "call_0_1"]


async def test_what_was_done_by_hand_is_not_done_again(keeper: Keeper) -> None:
    session = keeper.session("t")
    await session.start(ASKED)
    await session.reserve_assistant(0, dict(DECISION))
    claimed = await slot(session, 0, begin=True)
    await session.complete_tool(0, 0, "hand", claimed.fence, {"content": "on its way"})
    desk = Desk()
    assert (await keeper.run(desk.agent(), ASKED, turn_id="t")).status == "success"
    assert desk.ledger.told == ["refund"]
    assert last_results(desk.model.requests[0]) == ["on its way", "refunded"]


async def test_what_was_begun_by_hand_is_in_doubt_once_its_lease_is_over(keeper: Keeper, store: ClockedStore) -> None:
    session = keeper.session("t")
    await session.start(ASKED)
    await session.reserve_assistant(0, dict(DECISION))
    await slot(session, 0)  # claimed, and never begun
    await slot(session, 1, begin=True)
    await store.advance_clock(900_000)
    desk = Desk()
    result = await keeper.run(desk.agent(), ASKED, turn_id="t", wait=False)
    assert (result.status, result.open_slots) == ("reconciliation_required", ((0, 1),))
    await session.resolve_tool(0, 1, "happened", who="ann", why="looked", result_record={"content": "refunded before"})
    assert (await keeper.run(desk.agent(), ASKED, turn_id="t")).status == "success"
    assert desk.ledger.told == ["look"]
    assert last_results(desk.model.requests[0]) == ["late", "refunded before"]


async def test_a_committed_round_is_gone_on_from(keeper: Keeper) -> None:
    session = keeper.session("t")
    await session.start(ASKED)
    decision = {"role": "assistant", "content": "", "tool_calls": [DECISION["tool_calls"][0]]}
    await session.reserve_assistant(0, decision)
    claimed = await slot(session, 0, begin=True)
    await session.complete_tool(0, 0, "hand", claimed.fence, {"content": "late"})
    result = {"role": "tool", "tool_call_id": "call_A", "content": "late"}
    await session.commit_round(0, [*ASKED, decision, result], {"step": 1})
    desk = Desk()
    assert (await keeper.run(desk.agent(), ASKED, turn_id="t")).output == "it is late"
    assert requests_of(desk.model) == [(1, 0)]
    assert last_results(desk.model.requests[0]) == ["late"]
    snapshot = await session.load()
    assert snapshot is not None
    assert snapshot.runtime == {"step": 1}


@pytest.mark.parametrize("committed", [False, True])
async def test_a_final_decision_is_brought_to_its_end(keeper: Keeper, *, committed: bool) -> None:
    session = keeper.session("t")
    final = {"role": "assistant", "content": "it is late"}
    await session.start(ASKED)
    await session.reserve_assistant(0, final)
    if committed:
        await session.commit_round(0, [*ASKED, final], {})
    desk, channel = Desk(), Channel()
    result = await keeper.run(desk.agent(), ASKED, turn_id="t", reply=ReplyPort(channel.send))
    assert (result.status, result.output) == ("success", "it is late")
    assert desk.model.requests == []
    assert [reply.text for reply in channel.sent] == ["it is late"]
    assert [message.text for message in await messages_of(keeper)] == ["where is order 7?", "it is late"]


async def test_a_saved_final_text_is_what_is_sent(keeper: Keeper) -> None:
    session = keeper.session("t")
    await session.start(ASKED)
    await session.save_final_model("it is late")
    channel = Channel()
    result = await keeper.run(Desk().agent(), ASKED, turn_id="t", reply=ReplyPort(channel.send))
    assert result.output == "it is late"
    assert [reply.text for reply in channel.sent] == ["it is late"]


async def test_a_reply_reserved_by_hand_may_be_out(keeper: Keeper) -> None:
    """Nobody knows whether whoever reserved it has sent it, so only a channel that can tell gets it again."""
    session = keeper.session("t")
    await session.start(ASKED)
    await session.save_final_model("it is late")
    await session.reserve_final_delivery("my key", "It is late!")
    channel = Channel()
    result = await keeper.run(Desk().agent(), ASKED, turn_id="t", reply=ReplyPort(channel.send))
    assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
    assert channel.tries == []
    await keeper.resolve_delivery("t", None, who="ann", why="looked")
    result = await keeper.run(Desk().agent(), ASKED, turn_id="t", reply=ReplyPort(channel.send))
    assert result.status == "success"
    assert [(reply.key, reply.text) for reply in channel.sent] == [("my key", "It is late!")]


async def test_a_turn_of_the_engine_is_gone_on_with_by_hand(keeper: Keeper) -> None:
    desk = Desk()
    agent = Agent(desk.model, desk.agent().tools, max_rounds=1)
    assert (await keeper.run(agent, ASKED, turn_id="t")).error_kind == "max_iterations"
    session = keeper.session("t")
    snapshot = await session.start(ASKED)
    assert snapshot.current_round == 0
    assert len(snapshot.messages) == 4
    assert await session.save_final_model("we call you back") == "we call you back"
    await session.mark_completed(allow_no_output=True)
    assert (await keeper.run(agent, ASKED, turn_id="t")).output == "we call you back"
    assert (await state_of(keeper)).completed


async def test_another_message_is_another_turn_by_hand_as_well(keeper: Keeper) -> None:
    await keeper.session("t").start(ASKED)
    with pytest.raises(TurnCheckpointConflict):
        await keeper.run(Desk().agent(), "where is order 8?", turn_id="t")
