"""Permission to run a tool: a port that says yes or no, and a person who takes his time (engine-contract.md 2.13)."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.conformance.support import ClockedStore
from tests.engine.support import Ledger, asks_once, last_results, records_of, state_of
from turnkeeper import Agent, Keeper, Tool, ToolContext, TurnResult
from turnkeeper.engine.permissions import HumanApproval
from turnkeeper.engine.wire import EnginePermissionDecision, ModelToolRequest
from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.turn import records as r

pytestmark = pytest.mark.anyio


def agent_of(ledger: Ledger, permission: Any, *, parallel: bool = True) -> Agent:
    """An agent that pays and mails at once, and needs to be permitted."""

    async def pay(context: ToolContext, cents: int) -> str:
        ledger.write(context, "pay")
        return f"paid {cents}"

    async def mail(context: ToolContext) -> str:
        ledger.write(context, "mail")
        return "mailed"

    model = asks_once(("pay", {"cents": 5}), ("mail", {}))
    return Agent(model, [Tool(pay), Tool(mail)], permission=permission, parallel_tools=parallel)


def needs_a_person(request: ModelToolRequest) -> bool:
    """Only paying does."""
    return request.name == "pay"


async def run(keeper: Keeper, agent: Agent) -> TurnResult:
    """Run the turn."""
    return await keeper.run(agent, "go", turn_id="t")


class Answers:
    """A port that answers by the tool's name."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.asked: list[ModelToolRequest] = []

    async def authorize(self, request: ModelToolRequest) -> EnginePermissionDecision:
        """See `EnginePermissionPort`."""
        self.asked.append(request)
        answer = self._answers[request.name]
        if isinstance(answer, Exception):
            raise answer
        return answer


YES = EnginePermissionDecision(approved=True)


@pytest.mark.parametrize("parallel", [True, False])
async def test_what_the_port_denies_does_not_run_and_the_model_is_told(keeper: Keeper, *, parallel: bool) -> None:
    """2.13, section 7 row 2."""
    no = EnginePermissionDecision(
        approved=False, reason="over the limit", metadata={"errorKind": "limit", "by": [1, None]}
    )
    ledger, port = Ledger(), Answers(pay=no, mail=YES)
    agent = agent_of(ledger, port, parallel=parallel)
    assert (await run(keeper, agent)).status == "success"
    assert ledger.told == ["mail"]
    model: Any = agent.model
    assert last_results(model.requests[1]) == ["over the limit", "mailed"]
    assert [(one.name, one.arguments) for one in port.asked] == [("pay", {"cents": 5}), ("mail", {})]
    final = await keeper.checkpoint("t")
    assert final is not None
    (denied, _) = final.completed_tool_results
    assert (denied.error_kind, denied.metadata) == ("limit", {"errorKind": "limit", "by": [1, None]})
    assert (await run(keeper, agent)).status == "success"
    assert len(port.asked) == 2


@pytest.mark.parametrize("answer", [RuntimeError("down"), "yes"])
async def test_a_port_that_fails_fails_the_run_and_is_asked_again(keeper: Keeper, answer: Any) -> None:
    """2.16 `permission_error`; the turn stays resumable, and nothing has run."""
    ledger = Ledger()
    result = await run(keeper, agent_of(ledger, Answers(pay=answer, mail=YES)))
    assert (result.status, result.error_kind) == ("failed", "permission_error")
    assert ledger.told == []
    assert (await run(keeper, agent_of(ledger, Answers(pay=YES, mail=YES)))).status == "success"
    assert sorted(ledger.told) == ["mail", "pay"]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("approved", [True, False])
async def test_a_turn_is_parked_until_a_person_decides(keeper: Keeper, *, parallel: bool, approved: bool) -> None:
    """Siblings that need nobody are done meanwhile, once; another process goes on when it is decided."""
    ledger = Ledger()
    for _ in range(2):
        result = await run(keeper, agent_of(ledger, HumanApproval(needs_a_person), parallel=parallel))
        assert (result.status, result.error_kind, result.open_slots) == ("parked", "approval_needed", ((0, 0),))
        assert ledger.told == ["mail"]
    assert [head.attention async for head in keeper.turns(attention=True)] == ["approval"]
    await keeper.decide_permission("t", 0, 0, approved, who="ann", why="she asked me")
    agent = agent_of(ledger, HumanApproval(needs_a_person), parallel=parallel)
    assert (await run(keeper, agent)).status == "success"
    model: Any = agent.model
    assert last_results(model.requests[0]) == ["paid 5" if approved else "she asked me", "mailed"]
    assert ledger.told == ["mail", "pay"][: 1 + approved]
    assert (await state_of(keeper)).attention is None
    (mine,) = [record for record in await records_of(keeper, r.PermissionResolved) if record.who == "ann"]
    assert mine.approved is approved


async def test_of_two_decisions_one_wins_and_the_other_is_told(keeper: Keeper) -> None:
    """Issue C, 6: whoever comes second learns who decided, and how."""
    await run(keeper, agent_of(Ledger(), HumanApproval()))
    told: list[str] = []

    async def decide(who: str, approved: bool) -> None:
        try:
            await keeper.decide_permission("t", 0, 0, approved, who=who)
        except TurnCheckpointConflict as e:
            told.append(str(e))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(decide, "ann", True)
        tasks.start_soon(decide, "bob", False)
    (record,) = await records_of(keeper, r.PermissionResolved)
    (message,) = told
    assert f"{record.who} has {'approved' if record.approved else 'denied'} it already" in message
    await keeper.decide_permission("t", 0, 0, record.approved, who=record.who)


async def test_an_approval_that_is_over_has_to_be_given_again(keeper: Keeper, store: ClockedStore) -> None:
    """An approval may expire; a call that had begun under it goes on."""
    ledger = Ledger()
    await run(keeper, agent_of(ledger, HumanApproval(needs_a_person)))
    await keeper.decide_permission("t", 0, 0, True, who="ann", valid_seconds=60)
    await store.advance_clock(60_000)
    assert (await run(keeper, agent_of(ledger, HumanApproval(needs_a_person)))).status == "parked"
    assert ledger.told == ["mail"]
    await keeper.decide_permission("t", 0, 0, True, who="ann", valid_seconds=60)
    await store.advance_clock(59_000)
    assert (await run(keeper, agent_of(ledger, HumanApproval(needs_a_person)))).status == "success"
    assert ledger.told == ["mail", "pay"]


async def test_only_what_is_asked_for_can_be_decided(keeper: Keeper) -> None:
    """No approval in advance, none of a call that is not there, and none behind the round."""
    ledger = Ledger()
    await run(keeper, agent_of(ledger, HumanApproval(needs_a_person)))
    for slot in (2, -1):
        with pytest.raises(TurnCheckpointError):
            await keeper.decide_permission("t", 0, slot, True, who="ann")
    with pytest.raises(TurnCheckpointError):
        await keeper.decide_permission("t", 1, 0, True, who="ann")
    await keeper.decide_permission("t", 0, 0, True, who="ann")
    await run(keeper, agent_of(ledger, HumanApproval(needs_a_person)))
    with pytest.raises(TurnCheckpointError):
        await keeper.decide_permission("t", 0, 0, True, who="ann")
