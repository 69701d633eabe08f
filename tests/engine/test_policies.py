"""Effects whose outcome is unknown: what each policy does about them, and that nothing is repeated on a guess."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.engine.support import Ledger, asks, asks_once, last_results, records_of, requests_of, slot_of, state_of
from turnkeeper import (
    Agent,
    DidNotHappen,
    Happened,
    Keeper,
    OutcomeUnknown,
    StillUnknown,
    Tool,
    ToolContext,
    TurnResult,
    tool,
)
from turnkeeper.engine.stored import UNKNOWN_TEXT
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.turn import records as r
from turnkeeper.turn.names import Resolution, ToolCallState

pytestmark = pytest.mark.anyio


def doubtful(ledger: Ledger, error: Exception | None = None, **options: Any) -> Tool:
    """A tool whose first run leaves its outcome unknown, and whose second would be seen in the ledger."""
    errors = [error or TimeoutError("no answer")]

    async def pay(context: ToolContext) -> str:
        ledger.write(context, context.fence)
        if errors:
            raise errors.pop()
        return "paid"

    return Tool(pay, **options)


@pytest.mark.parametrize("error", [TimeoutError(), OutcomeUnknown("cut"), ConnectionResetError(), ValueError("bug?")])
async def test_an_exception_that_proves_nothing_stops_the_turn(keeper: Keeper, error: Exception) -> None:
    ledger = Ledger()
    model = asks_once(("pay", "{}"))
    agent = Agent(model, [doubtful(ledger, error)])
    for _ in range(2):  # running it again changes nothing
        result = await keeper.run(agent, "go", turn_id="t")
        assert (result.status, result.error_kind) == ("reconciliation_required", "effect_outcome_unknown")
        assert result.open_slots == ((0, 0),)
        assert ledger.once(1)
    assert len(model.requests) == 1
    assert [head.attention async for head in keeper.turns(attention=True)] == ["ambiguous_tool"]
    (doubt,) = await records_of(keeper, r.ToolAmbiguous)
    assert type(error).__name__ in doubt.reason


@pytest.mark.parametrize(
    ("resolution", "result", "told", "effects"),
    [
        (Resolution.HAPPENED, "found in the books", "found in the books", 1),
        (Resolution.DID_NOT_HAPPEN, None, "paid", 2),
        (Resolution.UNKNOWN, None, UNKNOWN_TEXT, 1),
    ],
)
async def test_what_an_operator_says_is_done(
    keeper: Keeper, resolution: Resolution, result: Any, told: str, effects: int
) -> None:
    ledger = Ledger()
    model = asks_once(("pay", "{}"))
    agent = Agent(model, [doubtful(ledger)])
    await keeper.run(agent, "go", turn_id="t")
    await keeper.resolve_tool("t", 0, 0, resolution, who="ann", why="looked", result=result)
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == [told]
    assert ledger.told == [1, 2][:effects]
    assert len(set(ledger.effects)) == 1
    (resolved,) = await records_of(keeper, r.ToolResolved)
    assert (resolved.resolution, resolved.who, resolved.why) == (resolution, "ann", "looked")
    assert (await state_of(keeper)).attention is None


async def test_only_what_is_in_doubt_can_be_settled(keeper: Keeper) -> None:
    ledger = Ledger()
    agent = Agent(asks_once(("pay", "{}")), [doubtful(ledger)])
    await keeper.run(agent, "go", turn_id="t")
    for nowhere in ((0, 1), (1, 0), (0, -1)):
        with pytest.raises(TurnCheckpointError):
            await keeper.resolve_tool("t", *nowhere, "unknown", who="ann", why="looked")
    with pytest.raises(ValueError, match="evidence"):
        await keeper.resolve_tool("t", 0, 0, "unknown", who="ann", why=" ")
    await keeper.resolve_tool("t", 0, 0, "happened", who="ann", why="looked", result="paid")
    with pytest.raises(TurnCheckpointConflict):
        await keeper.resolve_tool("t", 0, 0, "did_not_happen", who="bob", why="looked as well")
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    with pytest.raises(TurnCheckpointConflict):
        await keeper.resolve_tool("t", 0, 0, "did_not_happen", who="bob", why="looked as well")
    assert ledger.once(1)


async def test_evidence_about_a_run_is_none_about_the_next(keeper: Keeper) -> None:
    """Two operators looked at the same time. One said that nothing happened, so it ran again: the other comes too late."""
    ledger = Ledger()

    async def pay(context: ToolContext) -> str:
        ledger.write(context, context.fence)
        raise TimeoutError

    agent = Agent(asks_once(("pay", "{}")), [Tool(pay)])
    await keeper.run(agent, "go", turn_id="t")
    await keeper.resolve_tool("t", 0, 0, "did_not_happen", who="ann", why="looked", fence=1)
    await keeper.run(agent, "go", turn_id="t")
    for resolution in ("did_not_happen", "happened", "unknown"):
        with pytest.raises(TurnCheckpointConflict, match="fence 1, it now has fence 2"):
            await keeper.resolve_tool("t", 0, 0, resolution, who="bob", why="looked", result="paid", fence=1)
    assert (await keeper.run(agent, "go", turn_id="t")).status == "reconciliation_required"
    assert ledger.told == [1, 2]


@pytest.mark.parametrize("again", ['{"cents": 5, "to": "ann"}', '{"to":"ann","cents":5}', {"to": "ann", "cents": 5}])
async def test_a_call_in_doubt_is_the_same_however_it_is_written(keeper: Keeper, again: Any) -> None:
    """T3, "Trap worth a test of its own": the model asks again, and spaces or orders its JSON in another way."""
    ledger = Ledger()

    async def pay(context: ToolContext, cents: int, to: str) -> str:
        ledger.write(context, context.fence)
        raise TimeoutError

    model = asks([("pay", '{"cents":5,"to":"ann"}')], [("pay", again)])
    agent = Agent(model, [Tool(pay)], on_ambiguous="report")
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    (told,) = last_results(model.requests[2])
    assert "It was not run again" in told
    assert ledger.told == [1]


async def test_a_result_that_cannot_be_kept_settles_nothing(keeper: Keeper) -> None:
    """Field case 11: it is refused with its path, and not kept as something else."""
    agent = Agent(asks_once(("pay", "{}")), [doubtful(Ledger())])
    await keeper.run(agent, "go", turn_id="t")
    with pytest.raises(InvalidInput, match="set"):
        await keeper.resolve_tool("t", 0, 0, "happened", who="ann", why="looked", result={"seats": {1, 2}})
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert slot.state is ToolCallState.AMBIGUOUS


# --- look-ups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "told", "effects"), [(Happened("paid before"), "paid before", 1), (DidNotHappen(), "paid", 2)]
)
async def test_a_look_up_settles_what_is_in_doubt(
    keeper: Keeper, found: Happened | DidNotHappen, told: str, effects: int
) -> None:
    ledger = Ledger()
    asked: list[str] = []

    async def look_up(context: ToolContext) -> Happened | DidNotHappen:
        asked.append(context.operation_id)
        return found

    model = asks_once(("pay", "{}"))
    agent = Agent(model, [doubtful(ledger, reconcile=look_up)])
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == [told]
    assert ledger.told == [1, 2][:effects]
    assert asked == ledger.effects[:1]
    (resolved,) = await records_of(keeper, r.ToolResolved)
    assert (resolved.who, resolved.why) == ("look-up of pay", found.evidence)


async def test_a_look_up_that_cannot_tell_leaves_the_question_open(keeper: Keeper) -> None:
    ledger = Ledger()
    answers: list[Any] = [StillUnknown(), ConnectionError("the look-up is down"), Happened("found at last")]

    async def look_up(context: ToolContext) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    model = asks_once(("pay", "{}"))
    agent = Agent(model, [doubtful(ledger, reconcile=look_up)])
    assert (await keeper.run(agent, "go", turn_id="t")).open_slots == ((0, 0),)
    assert (await keeper.run(agent, "go", turn_id="t")).open_slots == ((0, 0),)
    # Looked at again with each run, until there is an answer.
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == ["found at last"]
    assert ledger.once(1)


async def test_a_look_up_that_fails_is_no_reason_to_report_the_outcome_as_unknown(keeper: Keeper) -> None:
    async def look_up(context: ToolContext) -> Happened:
        raise ConnectionError("the look-up is down")

    agent = Agent(asks_once(("pay", "{}")), [doubtful(Ledger(), reconcile=look_up)], on_ambiguous="report")
    assert (await keeper.run(agent, "go", turn_id="t")).status == "reconciliation_required"


async def test_what_a_look_up_finds_may_not_be_storable_either(keeper: Keeper) -> None:
    ledger = Ledger()

    async def look_up(context: ToolContext) -> Happened:
        return Happened({"a", "set"})

    model = asks_once(("pay", "{}"))
    agent = Agent(model, [doubtful(ledger, reconcile=look_up)])
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert "cannot be kept" in last_results(model.requests[1])[0]
    assert ledger.once(1)


async def test_an_effect_that_never_happens_is_not_tried_for_ever(keeper: Keeper) -> None:
    tries: list[int] = []

    async def look_up(context: ToolContext) -> DidNotHappen:
        return DidNotHappen()

    @tool(reconcile=look_up)
    async def pay(context: ToolContext) -> None:
        tries.append(context.fence)
        raise TimeoutError

    model = asks_once(("pay", "{}"))
    assert (await keeper.run(Agent(model, [pay]), "go", turn_id="t")).status == "success"
    assert tries == list(range(1, 11))
    assert "10 times" in last_results(model.requests[1])[0]


async def test_a_look_up_that_is_out_of_date_settles_nothing(keeper: Keeper) -> None:
    """What it found was true of the first run. Meanwhile the effect was run again, and it is *that* run that is in doubt."""
    ledger = Ledger()
    looking, go_on = anyio.Event(), anyio.Event()

    async def look_up(context: ToolContext) -> DidNotHappen | Happened:
        if ledger.effects:
            return Happened("paid")
        looking.set()
        await go_on.wait()
        return DidNotHappen()

    @tool
    async def pay(context: ToolContext) -> None:
        if context.fence > 1:
            ledger.write(context)
        raise TimeoutError

    model = asks_once(("pay", "{}"))
    results: list[TurnResult] = []

    async def run(pay: Tool) -> None:
        results.append(await keeper.run(Agent(model, [pay]), "go", turn_id="t"))

    await run(pay)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, Tool(pay.function, name="pay", reconcile=look_up))
        await looking.wait()
        await keeper.resolve_tool("t", 0, 0, "did_not_happen", who="ann", why="looked")
        await run(pay)
        assert ledger.once(1)
        go_on.set()
    assert [result.status for result in results] == ["reconciliation_required"] * 2 + ["success"]
    assert last_results(model.requests[1]) == ["paid"]
    assert ledger.once(1)


async def test_report_tells_the_model_and_goes_on(keeper: Keeper) -> None:
    ledger = Ledger()
    model = asks_once(("pay", "{}"))
    agent = Agent(model, [doubtful(ledger)], on_ambiguous="report")
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert last_results(model.requests[1]) == [UNKNOWN_TEXT]
    assert ledger.once(1)
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert (slot.state, slot.resolution) == (ToolCallState.AMBIGUOUS, Resolution.UNKNOWN)


# --- the trap: the model asks for the same call again ---------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("by", ["report", "operator"])
async def test_the_same_call_in_a_later_round_is_not_run_while_the_first_is_unknown(
    keeper: Keeper, by: str, *, parallel: bool
) -> None:
    ledger = Ledger()

    @tool
    async def look(n: int) -> int:
        return n

    @tool
    async def pay(cents: int, context: ToolContext) -> None:
        ledger.write(context)
        raise TimeoutError

    again = ("pay", '{"cents": 5}')
    model = asks([again], [("look", {"n": 1}), again, ("look", {"n": 2})], [again])
    tools = [pay, look]
    agent = Agent(model, tools, parallel_tools=parallel, on_ambiguous="report" if by == "report" else "stop")
    if by == "operator":
        assert (await keeper.run(agent, "go", turn_id="t")).status == "reconciliation_required"
        await keeper.resolve_tool("t", 0, 0, "unknown", who="ann", why="the bank does not answer")
    result = await keeper.run(agent, "go", turn_id="t")
    assert result.status == "success"
    assert ledger.once(1)
    told = last_results(model.requests[2])
    assert (told[0], told[2]) == ("1", "2")
    assert "not run again" in told[1]
    assert "not run again" in last_results(model.requests[3])[0]
    assert requests_of(model) == [(0, 0), (1, 0), (2, 0), (3, 0)]


async def test_another_call_of_the_same_tool_is_run(keeper: Keeper) -> None:
    ledger = Ledger()
    failing = [TimeoutError()]

    @tool
    async def pay(cents: int, context: ToolContext) -> str:
        ledger.write(context)
        if failing:
            raise failing.pop()
        return "paid"

    model = asks([("pay", '{"cents": 5}')], [("pay", '{"cents": 6}')])
    agent = Agent(model, [pay], on_ambiguous="report")
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert ledger.once(2)
    assert last_results(model.requests[2]) == ["paid"]


async def test_the_same_call_may_be_made_again_once_it_is_known_that_it_did_not_happen(keeper: Keeper) -> None:
    ledger = Ledger()

    async def look_up(context: ToolContext) -> Happened:
        return Happened("paid")

    model = asks([("pay", "{}")], [("pay", "{}")])
    agent = Agent(model, [doubtful(ledger, reconcile=look_up)])
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert ledger.once(2)
