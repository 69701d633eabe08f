"""Delegated runs (engine-contract.md 2.14): a log of their own, found again, paused and cancelled with their parent; budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from tests.conformance.support import ClockedStore
from tests.engine.support import Ledger, last_results
from turnkeeper import Agent, Keeper, ModelInvocationResponse, ScriptedModel, Tool, ToolContext
from turnkeeper.engine.delegation import subagent
from turnkeeper.engine.permissions import HumanApproval
from turnkeeper.engine.usage import Budget
from turnkeeper.engine.wire import InvocationUsage
from turnkeeper.errors import InvalidInput
from turnkeeper.models.scripted import calls, text

pytestmark = pytest.mark.anyio


def used(response: ModelInvocationResponse, tokens: int) -> ModelInvocationResponse:
    """A response with its usage told."""
    usage = InvocationUsage(input_tokens=tokens - 1, output_tokens=1, total_tokens=tokens)
    return ModelInvocationResponse(
        output=response.output,
        assistant_messages=response.assistant_messages,
        tool_requests=response.tool_requests,
        usage=usage,
    )


def child(ledger: Ledger, **options: Any) -> Agent:
    """An agent that pays once."""

    async def pay(context: ToolContext) -> str:
        ledger.write(context, context.turn_id)
        return "paid"

    return Agent(ScriptedModel([calls(("pay", {})), "all is paid"]), [Tool(pay)], **options)


def parent(tools: Sequence[Tool], *more: tuple[str, Any], **options: Any) -> Agent:
    """An agent that delegates, and does some other things in the same round."""
    return Agent(ScriptedModel([calls(("clerk", {"task": "pay it"}), *more), "done"]), tools, **options)


def clerk(agent: Agent) -> Tool:
    """The child as a tool."""
    return subagent(agent, name="clerk", description="Pays.")


async def scopes(keeper: Keeper) -> list[str]:
    """The scopes of the turn's logs."""
    return sorted([head.labels["scope"] async for head in keeper.turns()])


async def test_a_child_has_a_log_of_its_own(keeper: Keeper) -> None:
    """Section 7, row 29: same session, parent and depth on every event and checkpoint; its own sequence."""
    ledger = Ledger()
    agent = parent([clerk(child(ledger))])
    assert (await keeper.run(agent, "go", turn_id="t", session_id="s")).status == "success"
    model: Any = agent.model
    assert last_results(model.requests[1]) == ["all is paid"]
    assert ledger.once(1)
    (_, scope) = await scopes(keeper)
    mine, other = await keeper.checkpoint("t"), await keeper.checkpoint("t", scope)
    assert mine is not None
    assert other is not None
    assert (other.session_id, other.parent_run_id, other.delegation_depth) == ("s", mine.run_id, 1)
    assert (mine.session_id, mine.parent_run_id, mine.delegation_depth) == ("s", None, 0)
    events = await keeper.events("t", scope)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert {(event.run_id, event.parent_run_id, event.delegation_depth) for event in events} == {
        (scope, mine.run_id, 1)
    }


async def test_a_resumed_parent_finds_the_same_child(keeper: Keeper, store: ClockedStore) -> None:
    """The child is named after the parent's slot: what it has done is done, and it goes on from there."""
    ledger = Ledger()

    class DiesBehindTheEffect(ScriptedModel):
        async def invoke(self, request: Any) -> ModelInvocationResponse:
            if request.round_index == 1:
                dead.cancel()
                await anyio.sleep_forever()
            return await super().invoke(request)

    dying = child(ledger)
    with anyio.CancelScope() as dead:
        dead_agent = Agent(DiesBehindTheEffect([calls(("pay", {})), "never"]), dying.tools)
        await keeper.run(parent([clerk(dead_agent)]), "go", turn_id="t")
    assert ledger.once(1)
    await store.advance_clock(60_000)
    assert (await keeper.run(parent([clerk(child(ledger))]), "go", turn_id="t")).status == "success"
    assert ledger.once(1)
    assert len(await scopes(keeper)) == 2


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_child_that_waits_lets_its_parent_wait(keeper: Keeper, *, parallel: bool) -> None:
    """Siblings that finished stay finished; decided in the child's log, the parent goes on."""
    ledger, others = Ledger(), Ledger()

    async def mail(context: ToolContext) -> str:
        others.write(context)
        return "mailed"

    def agent() -> Agent:
        needs = HumanApproval(lambda request: request.name == "pay")
        tools = [clerk(child(ledger, permission=needs)), Tool(mail)]
        return parent(tools, ("mail", {}), parallel_tools=parallel)

    for _ in range(2):
        result = await keeper.run(agent(), "go", turn_id="t")
        assert (result.status, result.error_kind, result.open_slots) == ("parked", "approval_needed", ((0, 0),))
        assert others.once(1)
    (_, scope) = await scopes(keeper)
    await keeper.decide_permission("t", 0, 0, True, who="ann", scope=scope)
    assert (await keeper.run(agent(), "go", turn_id="t")).status == "success"
    assert ledger.once(1)
    assert others.once(1)


async def test_a_child_in_doubt_stops_its_parent(keeper: Keeper) -> None:
    """Nothing is guessed for the parent's model; the open call is the child's."""

    async def pay() -> str:
        raise TimeoutError

    def agent() -> Agent:
        return parent([clerk(Agent(ScriptedModel([calls(("pay", {})), "all is paid"]), [Tool(pay)]))])

    result = await keeper.run(agent(), "go", turn_id="t")
    assert (result.status, result.error_kind) == ("reconciliation_required", "effect_outcome_unknown")
    (_, scope) = await scopes(keeper)
    await keeper.resolve_tool("t", 0, 0, "happened", who="ann", why="looked", result="paid", fence=1, scope=scope)
    assert (await keeper.run(agent(), "go", turn_id="t")).status == "success"


async def test_a_child_that_fails_is_told_to_the_model(keeper: Keeper) -> None:
    """It failed for good: its parent's model decides what to do."""
    broken = Agent(ScriptedModel([calls(("nothing", {}))] * 3), max_rounds=2)
    agent = parent([clerk(broken)])
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    model: Any = agent.model
    (told,) = last_results(model.requests[1])
    assert "clerk failed" in told
    checkpoint = await keeper.checkpoint("t")
    assert checkpoint is not None
    assert [one.error_kind for one in checkpoint.completed_tool_results] == ["max_iterations"]


async def test_there_is_a_limit_to_the_depth(keeper: Keeper) -> None:
    """5.1, 14: refused with a kind of its own, and no log is begun below the limit."""

    def nested(depth: int) -> Agent:
        tools = [clerk(nested(depth - 1))] if depth else []
        script = [calls(("clerk", {"task": "deeper"})), text("back")] if depth else [text("bottom")]
        return Agent(ScriptedModel(script), tools, max_depth=2)

    assert (await keeper.run(nested(4), "go", turn_id="t")).status == "success"
    found = await scopes(keeper)
    assert len(found) == 3
    kinds: list[str] = []
    for scope in found:
        checkpoint = await keeper.checkpoint("t", scope)
        assert checkpoint is not None
        kinds += [one.error_kind for one in checkpoint.completed_tool_results if one.error_kind]
    assert kinds == ["delegation_too_deep"]


async def test_a_child_is_cancelled_with_its_parent(keeper: Keeper) -> None:
    """Cancellation is inherited; nothing runs on."""
    began, over = anyio.Event(), anyio.Event()

    async def wait(context: ToolContext) -> str:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            over.set()
        return ""

    below = Agent(ScriptedModel([calls(("wait", {})), "never"]), [Tool(wait, replay_safe=True)])
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await keeper.run(parent([clerk(below)]), "go", turn_id="t")

        tasks.start_soon(run)
        await began.wait()
        tasks.cancel_scope.cancel()
    assert over.is_set()


# --- usage and budgets ---------------------------------------------------------------------------------------


async def test_usage_is_counted_once_over_resumes(keeper: Keeper) -> None:
    """Issue C, 7: it stands in the checkpoint, also of a run that failed in between and was imported elsewhere."""

    def act() -> str:
        return "acted"

    script = [used(calls(("act", {})), 10), used(calls(("act", {})), 20), used(text("done"), 30)]
    few = Agent(ScriptedModel(script), [Tool(act)], max_rounds=2)
    assert (await keeper.run(few, "go", turn_id="t")).error_kind == "max_iterations"
    exported = await keeper.checkpoint("t")
    assert exported is not None
    assert exported.metadata == {"turnkeeper": {"usage": {"inputTokens": 28, "outputTokens": 2, "totalTokens": 30}}}
    assert (await keeper.run(Agent(ScriptedModel(script), [Tool(act)]), "go", turn_id="t")).status == "success"
    final = await keeper.checkpoint("t")
    async with await Keeper.open("sqlite:///:memory:") as other:
        await other.adopt(exported)
        await other.resume(Agent(ScriptedModel(script), [Tool(act)]), turn_id="t")
        moved = await other.checkpoint("t")
    assert final is not None
    assert moved is not None
    assert final.metadata == moved.metadata
    assert final.metadata == {"turnkeeper": {"usage": {"inputTokens": 57, "outputTokens": 3, "totalTokens": 60}}}


async def test_a_budget_stops_the_turn_cleanly(keeper: Keeper) -> None:
    """Before the call that it does not allow; with more, the turn goes on, and nothing is done again."""
    ledger = Ledger()

    def act(context: ToolContext) -> str:
        ledger.write(context)
        return "acted"

    script = [used(calls(("act", {})), 10), used(calls(("act", {})), 20), used(text("done"), 30)]

    def agent(budget: Budget) -> Agent:
        return Agent(ScriptedModel(script), [Tool(act)], budget=budget)

    for budget in (Budget(max_tokens=15), Budget(max_cost=3.0, cost=lambda usage: usage.total_tokens / 10)):
        result = await keeper.run(agent(budget), "go", turn_id="t")
        assert (result.status, result.error_kind, result.rounds) == ("failed", "budget_exhausted", 2)
    assert (await keeper.run(agent(Budget(max_tokens=31)), "go", turn_id="t")).status == "success"
    assert len(ledger.told) == 2
    with pytest.raises(InvalidInput):
        Budget(max_cost=1.0)


async def test_a_child_takes_from_its_parents_budget(keeper: Keeper) -> None:
    """Issue C, 5: the budget is inherited."""
    below = Agent(ScriptedModel([used(calls(("nothing", {})), 50), used(text("done"), 1)]))
    script = [used(calls(("clerk", {"task": "x"})), 10), used(text("done"), 1)]
    agent = Agent(ScriptedModel(script), [clerk(below)], budget=Budget(max_tokens=40))
    result = await keeper.run(agent, "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "budget_exhausted")
    checkpoint = await keeper.checkpoint("t")
    assert checkpoint is not None
    assert [one.error_kind for one in checkpoint.completed_tool_results] == ["budget_exhausted"]
