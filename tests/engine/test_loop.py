"""The loop: what it writes and how often, what it asks the model, when it stops, and that nothing is asked or done again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.conformance.support import ClockedStore
from tests.engine.support import (
    Channel,
    Ledger,
    asks,
    asks_once,
    last_results,
    messages_of,
    records_of,
    requests_of,
    state_of,
)
from tests.engine.wrapped import CountingStore, FailingStore
from turnkeeper import (
    Agent,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    OutcomeUnknown,
    ReplyPort,
    ScriptedModel,
    Tool,
    ToolContext,
    tool,
)
from turnkeeper.engine.tools import Policy
from turnkeeper.engine.wire import Role
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict
from turnkeeper.log.store import TransactionalStore
from turnkeeper.models.scripted import calls, text
from turnkeeper.turn import records as r
from turnkeeper.turn.names import TurnPhase

pytestmark = pytest.mark.anyio


def act_with(ledger: Ledger, policy: Policy, name: str = "act") -> Tool:
    """A tool of that policy."""

    async def look_up(context: ToolContext) -> Any:
        raise AssertionError("nothing is in doubt")

    def act(n: int, context: ToolContext) -> int:
        ledger.write(context, n)
        return n

    return Tool(
        act,
        name=name,
        replay_safe=policy is Policy.REPLAY_SAFE,
        reconcile=look_up if policy is Policy.RECONCILE else None,
        transactional=policy is Policy.TRANSACTIONAL,
    )


def rounds(*sizes: int, names: Sequence[str] = ("act",)) -> ScriptedModel:
    """A model that asks for so many tools in each round."""
    return asks(*[[(names[n % len(names)], f'{{"n": {n}}}') for n in range(size)] for size in sizes])


# --- durable writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("sizes", [(), (1,), (1, 3, 2), (5,)])
async def test_durable_writes_are_at_most_effects_and_two(
    keeper: Keeper, counted: CountingStore, policy: Policy, sizes: tuple[int, ...], *, parallel: bool
) -> None:
    if policy is Policy.TRANSACTIONAL and not isinstance(counted.inner, TransactionalStore):
        pytest.skip("this store's transaction cannot hold a tool's effect")
    ledger, channel = Ledger(), Channel()
    agent = Agent(rounds(*sizes), [act_with(ledger, policy)], parallel_tools=parallel)
    result = await keeper.run(agent, "go", turn_id="t", reply=ReplyPort(channel.send))
    assert result.status == "success"
    assert ledger.once(sum(sizes))
    effects = (len(sizes) + 1) + sum(sizes) + 1
    assert counted.writes <= effects + 2


@pytest.mark.parametrize("parallel", [True, False])
async def test_durable_writes_of_mixed_policies(keeper: Keeper, counted: CountingStore, *, parallel: bool) -> None:
    ledger = Ledger()
    transactional = isinstance(counted.inner, TransactionalStore)
    names = [policy.value for policy in Policy if transactional or policy is not Policy.TRANSACTIONAL]
    tools = [act_with(ledger, Policy(name), name) for name in names]
    agent = Agent(rounds(4, 4, names=names), tools, parallel_tools=parallel)
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert ledger.once(8)
    assert counted.writes <= 3 + 8 + 2


async def test_calls_that_are_not_run_cost_no_writes(keeper: Keeper, counted: CountingStore) -> None:
    """They are refused in the append that takes the others, so nothing is written for them alone."""
    agent = Agent(asks_once(*[("unknown", "{}")] * 5))
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert counted.writes <= 2 + 2


# --- the same turn again -------------------------------------------------------------------------------------


async def test_the_same_turn_id_again_gives_the_recorded_result(keeper: Keeper, counted: CountingStore) -> None:
    ledger, channel = Ledger(), Channel()
    model = rounds(2)
    agent = Agent(model, [act_with(ledger, Policy.FAIL_CLOSED)])
    first = await keeper.run(agent, "go", turn_id="t", reply=ReplyPort(channel.send))
    writes = counted.writes
    # By the same Keeper, and by one that has to read the log first.
    for again in (keeper, Keeper(counted)):
        assert await again.run(agent, "go", turn_id="t", reply=ReplyPort(channel.send)) == first
    assert first.output == "done"
    assert first.sent_message_id == "m1"
    assert (first.rounds, first.model_calls) == (2, 2)
    assert len(model.requests) == 2
    assert ledger.once(2)
    assert len(channel.tries) == 1
    assert counted.writes == writes


async def test_another_input_under_the_same_turn_id_is_refused(keeper: Keeper, counted: CountingStore) -> None:
    model = ScriptedModel(["done"])
    await keeper.run(Agent(model), "go", turn_id="t")
    writes = counted.writes
    with pytest.raises(TurnCheckpointConflict):
        await keeper.run(Agent(model), "go somewhere else", turn_id="t")
    assert len(model.requests) == 1
    assert counted.writes == writes


async def test_another_scope_is_another_turn(keeper: Keeper) -> None:
    model = ScriptedModel(["done"])
    await keeper.run(Agent(model), "go", turn_id="t")
    await keeper.run(Agent(model), "another task", turn_id="t", scope="helper")
    assert len(model.requests) == 2


# --- what the model gets -------------------------------------------------------------------------------------


async def test_the_model_is_shown_the_conversation_with_every_call_answered(keeper: Keeper) -> None:
    ledger = Ledger()
    model = rounds(2, 1)
    conversation = [
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go"},
    ]
    agent = Agent(model, [act_with(ledger, Policy.FAIL_CLOSED)], instructions="be brief")
    await keeper.run(agent, conversation, turn_id="t")
    roles = "".join(message.role.value[0] for message in model.requests[2].messages)
    assert roles == "suau" + "att" + "at"
    assert model.requests[0].messages[0].text == "be brief"
    assert last_results(model.requests[1]) == ["0", "1"]
    assert last_results(model.requests[2]) == ["0"]
    final = await messages_of(keeper)
    assert [message.text for message in final][-1] == "done"
    assert list(final[:-1]) == list(model.requests[2].messages)


@pytest.mark.parametrize(
    "conversation",
    [
        [],
        [{"role": "nobody", "content": "?"}],
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "act", "arguments": "{}"}]},
            {"role": "user", "content": "never mind"},
        ],
        [{"role": "tool", "tool_call_id": "a", "content": "out of nowhere"}],
    ],
    ids=["empty", "unknown role", "call without result", "result without call"],
)
async def test_a_conversation_that_no_model_would_take_is_refused(
    keeper: Keeper, counted: CountingStore, conversation: list[Any]
) -> None:
    with pytest.raises(InvalidInput):
        await keeper.run(Agent(ScriptedModel(["done"])), conversation, turn_id="t")
    assert counted.writes == 0
    assert await keeper.history("t") is None


async def test_a_model_without_a_last_word_ends_the_turn_without_a_reply(keeper: Keeper) -> None:
    channel = Channel()
    agent = Agent(ScriptedModel([ModelInvocationResponse()]))
    result = await keeper.run(agent, "go", turn_id="t", reply=ReplyPort(channel.send))
    assert (result.status, result.output, result.sent_message_id) == ("success", None, None)
    assert channel.tries == []


# --- where it stops ------------------------------------------------------------------------------------------


async def test_max_rounds_stops_a_model_that_comes_to_no_end(keeper: Keeper) -> None:
    ledger = Ledger()
    model = rounds(1, 1, 1)
    act = act_with(ledger, Policy.FAIL_CLOSED)
    result = await keeper.run(Agent(model, [act], max_rounds=2), "go", turn_id="t")
    assert (result.status, result.error_kind, result.rounds) == ("failed", "max_iterations", 2)
    assert len(model.requests) == 2
    again = await keeper.run(Agent(model, [act], max_rounds=2), "go", turn_id="t")
    assert again == result
    assert len(model.requests) == 2
    # With leave to go on, it goes on from there.
    assert (await keeper.run(Agent(model, [act], max_rounds=4), "go", turn_id="t")).status == "success"
    assert requests_of(model) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert ledger.once(3)


class FailingModel:
    """Raises what its plan says, then answers."""

    def __init__(self, *plan: Exception) -> None:
        self.plan = list(plan)
        self.requests: list[ModelRequest] = []

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        self.requests.append(request)
        if self.plan:
            raise self.plan.pop(0)
        return text("done")


async def test_a_model_call_that_fails_is_made_again(keeper: Keeper) -> None:
    model = FailingModel(ConnectionError("overloaded"), ConnectionError("overloaded"))
    result = await keeper.run(Agent(model), "go", turn_id="t")
    assert (result.status, result.model_calls, result.rounds) == ("success", 3, 1)
    assert [request.attempt for request in model.requests] == [0, 1, 2]
    assert len({request.invocation_id for request in model.requests}) == 3
    assert [failed.message for failed in await records_of(keeper, r.ModelFailed)] == ["ConnectionError: overloaded"] * 2


async def test_a_model_that_keeps_failing_fails_the_run_and_not_the_turn(keeper: Keeper) -> None:
    model = FailingModel(*[ConnectionError("down")] * 5)
    agent = Agent(model, max_model_attempts=2)
    result = await keeper.run(agent, "go", turn_id="t")
    assert (result.status, result.error_kind, result.output) == ("failed", "model_error", None)
    assert "down" in (result.message or "")
    assert len(model.requests) == 2
    assert (await keeper.run(agent, "go", turn_id="t")).status == "failed"
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    assert [request.attempt for request in model.requests] == [0, 1, 2, 3, 4, 5]
    assert len({request.invocation_id for request in model.requests}) == 6


async def test_a_model_call_of_unknown_outcome_is_not_made_again_by_itself(keeper: Keeper) -> None:
    model = FailingModel(OutcomeUnknown("cut"))
    result = await keeper.run(Agent(model), "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "model_outcome_unknown")
    assert len(model.requests) == 1
    assert (await keeper.run(Agent(model), "go", turn_id="t")).status == "success"


async def test_an_answer_that_cannot_be_kept_is_no_answer(keeper: Keeper) -> None:
    """It is not run half, and the model is asked again: nothing of it was used."""
    ledger = Ledger()
    bad = calls(("act", "{}"), ("act", object()))

    def script(request: ModelRequest) -> ModelInvocationResponse:
        return bad if request.attempt == 0 else text("done")

    agent = Agent(ScriptedModel(script), [act_with(ledger, Policy.FAIL_CLOSED)])
    assert (await keeper.run(agent, "go", turn_id="t")).output == "done"
    assert ledger.effects == []
    assert (await state_of(keeper)).current_round == 0


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_store_that_fails_says_so_and_the_next_run_goes_on(store: ClockedStore, *, parallel: bool) -> None:
    """An error of the store is the caller's, as it is; a result that it kept from being written is written after all."""
    ledger, failing = Ledger(), FailingStore(store)
    keeper = Keeper(failing)
    agent = Agent(rounds(3, 2), [act_with(ledger, Policy.FAIL_CLOSED)], parallel_tools=parallel)
    for write in range(1, 9):
        failing.fail_at(write)
        with pytest.raises(failing.error):
            await keeper.run(agent, "go", turn_id=f"t{write}")
        failing.fail_at(0)
        await store.advance_clock(60_000)
        result = await keeper.run(agent, "go", turn_id=f"t{write}", wait=False)
        assert result.status == "success", (write, result)
        assert ledger.once(5 * write)


async def test_what_was_started_is_never_started_again_by_a_finished_turn(keeper: Keeper) -> None:
    """Phases only go forward, and the log of a finished turn stays as it is."""
    agent = Agent(rounds(1), [act_with(Ledger(), Policy.FAIL_CLOSED)])
    await keeper.run(agent, "go", turn_id="t")
    history = await keeper.history("t")
    assert history is not None
    assert history.state.phase is TurnPhase.COMPLETED
    assert type(history.entries[-1].record) is r.Completed
    order = [type(entry.record) for entry in history.entries]
    assert order == [
        r.Started,
        r.ModelStarted,
        r.AssistantReserved,
        r.ToolBegun,
        r.ToolCompleted,
        r.RoundCommitted,
        r.ModelStarted,
        r.AssistantReserved,
        r.RoundCommitted,
        r.FinalModelSaved,
        r.Completed,
    ]


async def test_labels_and_runtime_are_kept_with_the_turn(keeper: Keeper) -> None:
    @tool
    async def nothing() -> None:
        """Do nothing."""

    agent = Agent(asks_once(("nothing", "")), [nothing])
    await keeper.run(agent, "go", turn_id="t", labels={"customer": "c1"}, runtime={"step": 7})
    heads = [head async for head in keeper.turns()]
    assert [head.labels for head in heads] == [{"turn": "t", "scope": "primary", "customer": "c1"}]
    snapshot = await keeper.session("t").load()
    assert snapshot is not None
    assert snapshot.runtime == {"step": 7}
    assert snapshot.tool_names == ["nothing"]
    assert [message.text for message in await messages_of(keeper) if message.role is Role.TOOL] == [""]
