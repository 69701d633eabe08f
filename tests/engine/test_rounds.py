"""The tools of a round: together or one behind the other, in threads, refused before they run, and what the model is told."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from tests.engine.support import Ledger, asks, asks_once, last_results, messages_of, records_of, slot_of, until
from turnkeeper import Agent, EffectRefused, Keeper, ModelInvocationResponse, NotSent, ScriptedModel, ToolContext, tool
from turnkeeper.engine.stored import stored_result
from turnkeeper.engine.wire import Outcome
from turnkeeper.models.scripted import calls
from turnkeeper.turn import records as r
from turnkeeper.turn.names import ToolCallState

pytestmark = pytest.mark.anyio


# --- order and simultaneity ----------------------------------------------------------------------------------


async def test_results_commit_in_request_order_though_they_finish_in_another(keeper: Keeper) -> None:
    done = [anyio.Event() for _ in range(4)]
    done[3].set()

    @tool
    async def act(n: int) -> int:
        await done[n + 1].wait()  # the last one finishes first
        done[n].set()
        return n

    model = asks_once(*[("act", {"n": n}) for n in range(3)])
    with anyio.fail_after(10):
        await keeper.run(Agent(model, [act]), "go", turn_id="t")
    assert last_results(model.requests[1]) == ["0", "1", "2"]
    assert [record.slot_index for record in await records_of(keeper, r.ToolCompleted)] == [2, 1, 0]
    calls_and_results = [message.metadata for message in (await messages_of(keeper))[1:5]]
    asked = [call["id"] for call in calls_and_results[0]["tool_calls"]]
    assert asked == [result["tool_call_id"] for result in calls_and_results[1:]]


async def test_async_tools_of_a_round_run_at_the_same_time(keeper: Keeper) -> None:
    running = 0
    all_there = anyio.Event()

    @tool
    async def act() -> None:
        nonlocal running
        running += 1
        if running == 3:
            all_there.set()
        await all_there.wait()

    with anyio.fail_after(10):
        result = await keeper.run(Agent(asks_once(*[("act", "")] * 3), [act]), "go", turn_id="t")
    assert result.status == "success"


async def test_plain_functions_run_in_threads_at_the_same_time(keeper: Keeper) -> None:
    together = threading.Barrier(3)
    threads: set[int] = set()

    @tool
    def act() -> None:
        threads.add(threading.get_ident())
        together.wait(10)  # raises where the three are not in it at the same time

    result = await keeper.run(Agent(asks_once(*[("act", "")] * 3), [act]), "go", turn_id="t")
    assert result.status == "success"
    assert len(threads) == 3
    assert threading.get_ident() not in threads


async def test_without_parallel_tools_one_runs_behind_the_other(keeper: Keeper) -> None:
    running: list[int] = []
    seen: list[list[int]] = []

    @tool
    async def act(n: int) -> None:
        running.append(n)
        await anyio.lowlevel.checkpoint()
        seen.append(list(running))
        running.remove(n)

    model = asks_once(*[("act", {"n": n}) for n in range(3)])
    await keeper.run(Agent(model, [act], parallel_tools=False), "go", turn_id="t")
    assert seen == [[0], [1], [2]]


async def test_what_goes_wrong_with_one_call_neither_stops_nor_hides_the_others(keeper: Keeper) -> None:
    """A call in doubt stops the turn, behind its siblings' ends and with their results."""
    ledger = Ledger()
    failed = anyio.Event()

    @tool
    async def fail(context: ToolContext) -> None:
        ledger.write(context)
        failed.set()
        raise TimeoutError

    @tool
    async def act(context: ToolContext) -> str:
        await failed.wait()
        await anyio.lowlevel.checkpoint()
        ledger.write(context)
        return "acted"

    result = await keeper.run(Agent(asks_once(("fail", ""), ("act", "")), [fail, act]), "go", turn_id="t")
    assert result.status == "reconciliation_required"
    assert result.open_slots == ((0, 0),)
    assert ledger.once(2)
    kept = await slot_of(keeper, 0, 1)
    assert kept is not None
    assert kept.state is ToolCallState.COMPLETED


# --- calls that are not run ----------------------------------------------------------------------------------


@tool
async def add(one: int, other: int = 1) -> int:
    """Add."""
    return one + other


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"one": 1}', "2"),
        ('{"one": 1, "other": 2}', "3"),
        ({"one": 1}, "2"),
        ("", "one"),
        ('{"one": "1"}', "one"),
        ('{"one": 1, "third": 3}', "third"),
        ('{"one": 1', "not a complete JSON object"),
        ("[1]", "must be a JSON object, not list"),
    ],
)
async def test_arguments_are_checked_before_the_tool_runs(keeper: Keeper, arguments: Any, told: str) -> None:
    model = asks_once(("add", arguments))
    assert (await keeper.run(Agent(model, [add]), "go", turn_id="t")).status == "success"
    assert told in last_results(model.requests[1])[0]
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert slot.result is not None
    result = stored_result(slot.result, "", "add")
    assert (result.outcome, result.error_kind) == (
        (Outcome.SUCCESS, None) if told.isdigit() else (Outcome.FAILED, "invalid_arguments")
    )


async def test_an_unknown_tool_is_told_to_the_model(keeper: Keeper) -> None:
    model = asks_once(("subtract", '{"one": 1}'), ("add", '{"one": 1}'))
    assert (await keeper.run(Agent(model, [add]), "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == ["There is no tool 'subtract'. Tools: add.", "2"]


async def test_no_call_of_an_answer_that_was_cut_is_run(keeper: Keeper) -> None:
    ledger = Ledger()

    @tool
    async def act(context: ToolContext) -> None:
        ledger.write(context)

    cut = calls(("act", "{}"), ("act", ""))
    answer = ModelInvocationResponse(tool_requests=cut.tool_requests, metadata={"finishReason": "length"})
    model = ScriptedModel([answer, "done"])
    assert (await keeper.run(Agent(model, [act]), "go", turn_id="t")).status == "success"
    assert ledger.effects == []
    assert all("cut" in told for told in last_results(model.requests[1]))


# --- what a tool raises --------------------------------------------------------------------------------------


class CardDeclined(Exception):
    """The bank says no."""


@pytest.mark.parametrize(
    ("error", "told", "kind"),
    [
        (EffectRefused("no seats left", kind="full"), "no seats left", "full"),
        (CardDeclined("card declined"), "card declined", "tool_error"),
        (CardDeclined(), "CardDeclined", "tool_error"),
    ],
)
async def test_a_refusal_is_a_result(keeper: Keeper, error: Exception, told: str, kind: str) -> None:
    ledger = Ledger()

    @tool(refusals=(CardDeclined,))
    async def pay(context: ToolContext) -> None:
        ledger.write(context)
        raise error

    model = asks_once(("pay", ""))
    assert (await keeper.run(Agent(model, [pay]), "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == [told]
    assert ledger.once(1)
    (completed,) = await records_of(keeper, r.ToolCompleted)
    result = stored_result(completed.result, "", "pay")
    assert (result.outcome, result.error_kind) == (Outcome.FAILED, kind)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("error", [NotSent("no route"), ConnectionRefusedError("refused")])
async def test_what_was_not_sent_is_given_back_and_taken_again(
    keeper: Keeper, error: Exception, *, parallel: bool
) -> None:
    tries: list[tuple[int, str]] = []

    @tool
    async def pay(context: ToolContext) -> str:
        if context.slot_index == 0:
            tries.append((context.fence, context.operation_id))
            if len(tries) < 3:
                raise error
        return "paid"

    model = asks_once(("pay", ""), ("pay", ""))
    agent = Agent(model, [pay], parallel_tools=parallel)
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert [fence for fence, _ in tries] == [1, 2, 3]
    assert len({operation_id for _, operation_id in tries}) == 1
    assert len(await records_of(keeper, r.ToolAbandoned)) == 2
    assert last_results(model.requests[1]) == ["paid", "paid"]


async def test_nothing_is_under_way_while_a_call_waits_to_be_tried_again(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies in that pause leaves no doubt behind: the slot was given back before it."""
    monkeypatch.setattr("turnkeeper.engine.rounds._PAUSE", 3600)
    failed = anyio.Event()

    @tool
    async def pay() -> None:
        failed.set()
        raise NotSent("no route")

    async def given_back() -> bool:
        slot = await slot_of(keeper, 0, 0)
        return slot is not None and slot.state is ToolCallState.CLAIMED

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(Agent(asks_once(("pay", "")), [pay]), "go", turn_id="t"))
        await failed.wait()
        await until(given_back)
        tasks.cancel_scope.cancel()


async def test_what_is_never_sent_is_told_to_the_model(keeper: Keeper) -> None:
    @tool
    async def pay() -> None:
        raise NotSent("no route")

    model = asks_once(("pay", ""))
    assert (await keeper.run(Agent(model, [pay]), "go", turn_id="t")).status == "success"
    (told,) = last_results(model.requests[1])
    assert "no route" in told
    (completed,) = await records_of(keeper, r.ToolCompleted)
    assert stored_result(completed.result, "", "pay").error_kind == "not_sent"


async def test_a_replay_safe_tool_that_fails_is_run_again_with_the_same_operation_id(keeper: Keeper) -> None:
    ledger = Ledger()

    @tool(replay_safe=True)
    async def read(context: ToolContext) -> str:
        ledger.write(context, context.fence)
        if context.fence < 3:
            raise TimeoutError
        return "read"

    model = asks_once(("read", ""))
    assert (await keeper.run(Agent(model, [read]), "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == ["read"]
    assert ledger.told == [1, 2, 3]
    assert len(set(ledger.effects)) == 1


async def test_a_replay_safe_tool_that_keeps_failing_is_told_to_the_model(keeper: Keeper) -> None:
    @tool(replay_safe=True)
    async def read() -> None:
        raise KeyError("nothing there")

    model = asks(*[[("read", "")]] * 2)
    assert (await keeper.run(Agent(model, [read]), "go", turn_id="t")).status == "success"
    # The model may ask again: nobody is in doubt about a tool that may run again.
    assert all("nothing there" in last_results(request)[0] for request in model.requests[1:])


# --- the operation id ----------------------------------------------------------------------------------------


async def test_operation_ids_come_from_the_slot_alone(keeper: Keeper) -> None:
    """Equal calls with equal provider ids are two effects; another scope or turn has ids of its own."""
    ledger = Ledger()

    @tool
    async def act(context: ToolContext) -> None:
        ledger.write(context, (context.turn_id, context.round_index, context.slot_index, context.call_id))

    model = asks([("act", "{}"), ("act", "{}")], [("act", "{}")])
    for turn_id, scope in (("t", "primary"), ("t", "helper"), ("u", "primary")):
        await keeper.run(Agent(model, [act], parallel_tools=False), "go", turn_id=turn_id, scope=scope)
    assert ledger.once(9)
    assert ledger.told[:3] == [("t", 0, 0, "call_0"), ("t", 0, 1, "call_1"), ("t", 1, 0, "call_0")]
    session = keeper.session("t")
    assert ledger.effects[:3] == [session.logical_operation_id(*slot) for slot in ((0, 0), (0, 1), (1, 0))]
