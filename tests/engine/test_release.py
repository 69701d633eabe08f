"""A run that died is not waited for: its leases are taken away, on every store, and the turn goes on as behind their end."""

from __future__ import annotations

import pytest

from tests.conversation.driving import state_of as conversation_of
from tests.engine.support import Ledger
from turnkeeper import Agent, Keeper, ScriptedModel, Tool, ToolContext
from turnkeeper.conversation import commands as c
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.message import Message, keep_message
from turnkeeper.conversation.records import Released
from turnkeeper.errors import ConversationError, InvalidInput, OwnerAlive, TurnCheckpointBusy, TurnCheckpointError
from turnkeeper.turn.commands import StartModel
from turnkeeper.turn.handle import TurnHandle

pytestmark = pytest.mark.anyio

DECISION = {"role": "assistant", "tool_calls": [{"id": "c", "name": "charge", "arguments": '{"cents": 500}'}]}
DEAD = "host:1:dead"
WHO = "ann"
WHY = "the machine is gone"


def agent_of(ledger: Ledger, *, replay_safe: bool) -> Agent:
    """Charges a card, and says so."""

    async def charge(cents: int, context: ToolContext) -> str:
        ledger.write(context)
        return f"charged {cents}"

    return Agent(ScriptedModel([DECISION, "It is paid."]), [Tool(charge, replay_safe=replay_safe)])


async def died(keeper: Keeper, *, replay_safe: bool, begun: bool = True) -> None:
    """A run stopped between the barrier and the result; its lease has a quarter of an hour to go."""
    session = keeper.session("order")
    await session.start([{"role": "user", "content": "pay"}])
    await session.reserve_assistant(0, dict(DECISION))
    call = ("c", "charge", '{"cents": 500}', session.logical_operation_id(0, 0))
    await session.claim_tool(0, 0, *call, replay_safe, DEAD, begin=begun)


@pytest.mark.parametrize("begun", [True, False])
async def test_what_may_run_again_is_gone_on_with_at_once(keeper: Keeper, begun: bool) -> None:
    ledger = Ledger()
    await died(keeper, replay_safe=True, begun=begun)
    with pytest.raises(TurnCheckpointBusy):
        await keeper.run(agent_of(ledger, replay_safe=True), "pay", turn_id="order", wait=False)
    with pytest.raises(OwnerAlive):
        await keeper.release("order", who=WHO, why=WHY)
    told = await keeper.events("order")
    ((lease,),) = (await keeper.release("order", who=WHO, why=WHY, force=True)).values()
    assert (lease.owner, lease.slot) == (DEAD, (0, 0))
    assert await keeper.events("order") == told, "of leases the contract knows nothing"
    result = await keeper.run(agent_of(ledger, replay_safe=True), "pay", turn_id="order", wait=False)
    assert (result.status, len(ledger.effects)) == ("success", 1)


async def test_what_may_have_happened_is_in_doubt(keeper: Keeper) -> None:
    ledger = Ledger()
    await died(keeper, replay_safe=False)
    await keeper.release("order", who=WHO, why=WHY, owner=DEAD, force=True)
    result = await keeper.run(agent_of(ledger, replay_safe=False), "pay", turn_id="order", wait=False)
    assert (result.status, result.open_slots, ledger.effects) == ("reconciliation_required", ((0, 0),), [])
    late = await keeper.session("order").complete_tool(0, 0, DEAD, 1, {"text": "charged 500"})
    assert late.action.value == "AMBIGUOUS", "kept as evidence"
    await keeper.resolve_tool("order", 0, 0, "happened", result="charged 500", who=WHO, why=WHY)
    result = await keeper.run(agent_of(ledger, replay_safe=False), "pay", turn_id="order", wait=False)
    assert (result.status, ledger.effects) == ("success", [])


async def test_only_what_was_looked_at_is_taken(keeper: Keeper) -> None:
    with pytest.raises(TurnCheckpointError, match="there is no turn"):
        await keeper.release("order", who=WHO, why=WHY)
    with pytest.raises(TurnCheckpointError, match="never started"):
        await keeper.release("order", who=WHO, why=WHY, scope="primary")
    await died(keeper, replay_safe=True)
    with pytest.raises(TurnCheckpointError, match="holds no lease"):
        await keeper.release("order", who=WHO, why=WHY, owner="another", force=True)
    with pytest.raises(InvalidInput, match="how it is known"):
        await keeper.release("order", who="ann", why=" ", force=True)
    assert (await keeper.history("order")) == (await keeper.history("order", at=3))


async def test_several_owners_have_to_be_told_apart(keeper: Keeper) -> None:
    session = keeper.session("order")
    two = [{"id": "c", "name": "charge", "arguments": "{}"}, {"id": "d", "name": "mail", "arguments": "{}"}]
    await session.start([{"role": "user", "content": "pay"}])
    await session.reserve_assistant(0, {"role": "assistant", "tool_calls": two})
    for index, (call, owner) in enumerate(zip(two, ("one", "other"), strict=True)):
        operation = session.logical_operation_id(0, index)
        await session.claim_tool(0, index, call["id"], call["name"], "{}", operation, owner_token=owner)
    with pytest.raises(InvalidInput, match="one, other"):
        await keeper.release("order", who=WHO, why=WHY, force=True)
    ((lease,),) = (await keeper.release("order", who=WHO, why=WHY, owner="other", force=True)).values()
    assert lease.slot == (0, 1)


async def test_runs_that_it_delegated_are_released_with_it(keeper: Keeper) -> None:
    await died(keeper, replay_safe=True)
    await keeper.session("order", "run_1").start([{"role": "user", "content": "go and ask"}])
    await TurnHandle(keeper.store, "order", "run_1").ask(StartModel(0, "host:1:child", 900_000))
    await keeper.session("order", "run_2").start([{"role": "user", "content": "nobody is at this one"}])
    await keeper.session("orders", "primary").start([{"role": "user", "content": "another turn"}])
    (only,) = await keeper.release("order", who=WHO, why=WHY, force=True, scope="run_1")
    assert only == "run_1"
    await TurnHandle(keeper.store, "order", "run_1").ask(StartModel(0, "host:1:again", 900_000))
    taken = await keeper.release("order", who=WHO, why=WHY, force=True)
    assert {scope: [lease.owner for lease in held] for scope, held in taken.items()} == {
        "primary": [DEAD],
        "run_1": ["host:1:again"],
    }


async def test_a_conversation(keeper: Keeper) -> None:
    """R1, R3: the old owner is told that it lost, the next one need not wait, and who did it stands in the log."""
    handle = ConversationHandle(keeper.store, "chat")
    await handle.receive("1", "text", keep_message(Message(event_id="1", text="hi")))
    start = c.Start("order", 1, "first", b"")
    (claimed,) = await handle.ask(c.Claim(DEAD, 900_000, 1, "start", start))
    assert claimed.what == "work"
    with pytest.raises(OwnerAlive):
        await keeper.release_conversation("chat", who=WHO, why=WHY)
    assert await keeper.release_conversation("chat", who=WHO, why=WHY, force=True) == DEAD
    with pytest.raises(ConversationError, match="does not own it"):
        await keeper.release_conversation("chat", who=WHO, why=WHY, owner=DEAD, force=True)
    history = await keeper.conversation("chat")
    assert history is not None
    assert history.entries[-1].record == Released(DEAD, who=WHO, why=WHY)
    (again,) = await ConversationHandle(keeper.store, "chat").ask(c.Claim("next", 900_000, 1, "start", start))
    assert (again.what, again.fence) == ("work", claimed.fence + 1)
    assert (await conversation_of(keeper.store, "chat")).owner == "next"
