"""A run that is cancelled anywhere: what is finished is kept, what was not begun is given back, and nothing happens twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.contract.host import Durability
from tests.engine.inline import InlineStore
from tests.engine.support import Ledger, asks, asks_once, messages_of, records_of, slot_of, state_of, until
from turnkeeper import (
    Agent,
    DidNotHappen,
    Happened,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    Reply,
    ReplyPort,
    Tool,
    TurnResult,
    tool,
)
from turnkeeper import ToolContext as Context
from turnkeeper.turn import records as r
from turnkeeper.turn.names import ToolCallState
from turnkeeper.turn.state import TurnState, find_round

pytestmark = pytest.mark.anyio

LEASE = 60.0
How = Callable[[Callable[[], Any], int], Any]


async def by_the_task(run: Callable[[], Any], turns: int) -> TurnResult | None:
    """Cancel the caller's task, as asyncio does."""
    task = asyncio.ensure_future(run())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def by_the_task_twice(run: Callable[[], Any], turns: int) -> TurnResult | None:
    """Cancel it again, while it is at its last words."""
    task = asyncio.ensure_future(run())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def by_a_scope(run: Callable[[], Any], turns: int) -> TurnResult | None:
    """Cancel a scope around it, as a timeout does."""
    results: list[TurnResult] = []

    async def into_results() -> None:
        results.append(await run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(into_results)
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks.cancel_scope.cancel()
    return results[0] if results else None


class World:
    """A turn of two rounds and a reply, with awaits before and behind every effect."""

    def __init__(self, *, parallel: bool) -> None:
        self.store = InlineStore()
        self.keeper = Keeper(self.store)
        self.ledger = Ledger()
        self.begun: set[str] = set()
        self.finished: set[str] = set()
        self.sent: list[str] = []
        self.asked: list[int] = []
        self.script = asks([("act", '{"n": 0}')], [("act", '{"n": 1}'), ("act_and_go_on", '{"n": 2}')])

        @tool
        async def act(n: int, context: Context) -> str:
            self.begun.add(context.operation_id)
            await asyncio.sleep(0)
            self.ledger.write(context)
            self.finished.add(context.operation_id)
            return f"acted {n}"

        @tool
        async def act_and_go_on(n: int, context: Context) -> str:
            self.begun.add(context.operation_id)
            self.ledger.write(context)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.finished.add(context.operation_id)
            return f"acted {n}"

        self.agent = Agent(self, [act, act_and_go_on], parallel_tools=parallel, lease_seconds=LEASE)
        self.port = ReplyPort(self.send, find=self.find)

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        self.asked.append(request.round_index)
        await asyncio.sleep(0)
        return await self.script.invoke(request)

    async def send(self, reply: Reply) -> str:
        """See `ReplyPort`."""
        await asyncio.sleep(0)
        self.sent.append(reply.text)
        await asyncio.sleep(0)
        return "m1"

    async def find(self, reply: Reply) -> Happened | DidNotHappen:
        """See `ReplyPort`."""
        return Happened("m1") if self.sent else DidNotHappen()

    async def run(self, *, wait: bool = True) -> TurnResult:
        """Run the turn."""
        return await self.keeper.run(self.agent, "go", turn_id="t", reply=self.port, wait=wait)

    async def check_at_rest(self) -> TurnState | None:
        """What the cancelled run has to have left behind."""
        history = await self.keeper.history("t")
        if history is None:
            assert not self.begun
            return None
        state = await state_of(self.keeper)
        session = self.keeper.session("t")
        completed: set[str] = set()
        for index in range(state.current_round + 1):
            round_ = find_round(state, index)
            assert round_ is not None
            for slot_index, slot in enumerate(round_.slots):
                operation = session.logical_operation_id(index, slot_index)
                if slot is not None and slot.state is ToolCallState.COMPLETED:
                    completed.add(operation)
                if slot is not None and slot.state is ToolCallState.EXECUTING:
                    assert operation in self.begun, "a slot that nothing ran in was not given back"
        assert self.finished <= completed, "a finished effect's result was lost"
        return state

    async def settle(self, result: TurnResult) -> None:
        """Say what the ledger says."""
        session = self.keeper.session("t")
        for round_index, slot_index in result.open_slots:
            happened = session.logical_operation_id(round_index, slot_index) in self.ledger.effects
            await self.keeper.resolve_tool(
                "t",
                round_index,
                slot_index,
                "happened" if happened else "did_not_happen",
                who="ann",
                why="as the ledger says",
                result=f"acted {round_index + slot_index}" if happened else None,
            )


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("cancelled", [by_the_task, by_the_task_twice, by_a_scope])
async def test_cancelled_at_every_turn_of_the_loop(cancelled: How, *, parallel: bool) -> None:
    undisturbed = World(parallel=parallel)
    await undisturbed.run()
    expected = await messages_of(undisturbed.keeper)
    assert undisturbed.ledger.once(3)
    for turns in range(1000):
        world = World(parallel=parallel)
        result = await cancelled(world.run, turns)
        found = await world.check_at_rest()
        asked = len(world.asked)
        await world.store.advance_clock(round(LEASE * 1000))
        again = await world.run(wait=False)
        if again.status != "success":
            await world.settle(again)
            again = await world.run(wait=False)
        assert again.status == "success", (turns, again)
        assert await messages_of(world.keeper) == expected
        assert world.ledger.once(3)
        assert world.sent == ["done"]
        decided = 0 if found is None else found.current_round + 1
        assert all(round_index >= decided for round_index in world.asked[asked:])
        if result is not None:
            assert again == result
            break
    else:
        raise AssertionError("the run does not get to its end")
    print(f"cancelled at {turns} turns of the loop")
    assert turns > 20


@pytest.mark.parametrize("looks", [True, False])
async def test_a_call_that_is_cut_off_is_in_doubt_at_once(keeper: Keeper, *, looks: bool) -> None:
    """T3: its owner says so itself, so that a look-up, or a person, need not wait for the end of its lease."""
    begun = anyio.Event()

    async def look_up(context: Context) -> Happened:
        return Happened("acted")

    @tool(reconcile=look_up if looks else None)
    async def act() -> str:
        begun.set()
        await anyio.sleep_forever()
        raise AssertionError

    agent = Agent(asks_once(("act", "")), [act])
    run = asyncio.ensure_future(keeper.run(agent, "go", turn_id="t"))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    (doubt,) = await records_of(keeper, r.ToolAmbiguous)
    assert doubt.reason == "it was cancelled while it ran"
    result = await keeper.run(agent, "go", turn_id="t", wait=False)
    assert result.status == ("success" if looks else "reconciliation_required")


# --- threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_plain_function_is_waited_for_and_its_result_kept(keeper: Keeper, *, parallel: bool) -> None:
    """A thread cannot be stopped. The run ends when it does, and not before what it did is in the log."""
    running, go_on = threading.Semaphore(0), threading.Event()
    ledger = Ledger()

    @tool
    def act(context: Context) -> str:
        running.release()
        go_on.wait(10)
        ledger.write(context)
        return "acted"

    agent = Agent(asks_once(("act", ""), ("act", "")), [act], parallel_tools=parallel)
    run = asyncio.ensure_future(keeper.run(agent, "go", turn_id="t"))
    for _ in range(2 if parallel else 1):
        await anyio.to_thread.run_sync(running.acquire)
    run.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ledger.once(2 if parallel else 1)
    for slot_index in range(len(ledger.effects)):
        slot = await slot_of(keeper, 0, slot_index)
        assert slot is not None
        assert slot.state is ToolCallState.COMPLETED
    if not parallel:
        second = await slot_of(keeper, 0, 1)
        assert second is None or second.state is ToolCallState.CLAIMED


async def test_a_plain_function_that_still_waits_for_a_thread_is_given_back(keeper: Keeper) -> None:
    running, go_on = threading.Event(), threading.Event()
    ledger = Ledger()

    @tool
    def act(context: Context) -> str:
        running.set()
        go_on.wait(10)
        ledger.write(context)
        return "acted"

    limiter = anyio.to_thread.current_default_thread_limiter()
    tokens, limiter.total_tokens = limiter.total_tokens, 1
    try:
        agent = Agent(asks_once(("act", ""), ("act", "")), [act])
        run = asyncio.ensure_future(keeper.run(agent, "go", turn_id="t"))
        while not running.is_set():  # noqa: ASYNC110  # a thread's event, and the only thread of anyio's is taken
            await asyncio.sleep(0.001)
        run.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await run
    finally:
        limiter.total_tokens = tokens
    assert ledger.once(1)
    states = [slot and slot.state for slot in [await slot_of(keeper, 0, 0), await slot_of(keeper, 0, 1)]]
    assert sorted(state.value for state in states if state) == ["CLAIMED", "COMPLETED"]
    result = await keeper.run(agent, "go", turn_id="t", wait=False)
    assert result.status == "success"
    assert ledger.once(2)


async def test_a_plain_function_stays_ours_while_a_cancelled_run_waits_for_it(keeper: Keeper) -> None:
    """Its lease is renewed on, so nobody takes it for dead and nothing is in doubt in the end."""
    running, go_on = threading.Event(), threading.Event()

    @tool
    def act() -> str:
        running.set()
        go_on.wait(60)
        return "acted"

    async def renewed() -> bool:
        return len(await records_of(keeper, r.ToolRenewed)) >= 4

    run = asyncio.ensure_future(keeper.run(Agent(asks_once(("act", "")), [act], lease_seconds=1), "go", turn_id="t"))
    await anyio.to_thread.run_sync(running.wait)
    run.cancel()
    try:
        await until(renewed, 30)
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert (slot.state, slot.late) == (ToolCallState.COMPLETED, False)


async def test_a_tool_that_cancels_itself_is_no_cancellation_of_the_run(keeper: Keeper) -> None:
    """Its outcome is as unknown as behind any other exception, and its siblings go on."""
    ledger = Ledger()

    @tool
    async def give_up(context: Context) -> None:
        ledger.write(context)
        raise asyncio.CancelledError

    @tool
    async def act(context: Context) -> str:
        await asyncio.sleep(0)
        ledger.write(context)
        return "acted"

    for parallel in (True, False):
        agent = Agent(asks_once(("give_up", ""), ("act", "")), [give_up, act], parallel_tools=parallel)
        result = await keeper.run(agent, "go", turn_id=f"t{parallel}")
        assert result.status == "reconciliation_required"
        assert result.open_slots == ((0, 0),)
    assert ledger.once(3)


class GivesUp:
    """A model, a channel and look-ups that are cancelled from inside the first time."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def _give_up(self, place: str) -> None:
        self.calls.append(place)
        if self.calls.count(place) == 1:
            raise asyncio.CancelledError

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        await self._give_up("model")
        return await asks_once(("act", "")).invoke(request)

    async def act(self) -> None:
        """Act."""
        await self._give_up("act")

    async def look_up(self, context: Context) -> Happened:
        """Look up."""
        await self._give_up("look_up")
        return Happened("acted")

    async def send(self, reply: Reply) -> str:
        """See `ReplyPort`."""
        await self._give_up("send")
        return "m1"

    async def find(self, reply: Reply) -> Happened:
        """See `ReplyPort`."""
        await self._give_up("find")
        return Happened("m1")


async def test_whatever_is_cancelled_from_inside_has_failed_and_the_run_says_so(keeper: Keeper) -> None:
    host = GivesUp()
    agent = Agent(host, [Tool(host.act, reconcile=host.look_up)])
    port = ReplyPort(host.send, find=host.find)
    results = [await keeper.run(agent, "go", turn_id="t", reply=port) for _ in range(4)]
    assert [(result.status, result.error_kind) for result in results] == [
        ("failed", "model_outcome_unknown"),
        ("reconciliation_required", "effect_outcome_unknown"),
        ("reconciliation_required", "reply_outcome_unknown"),
        ("success", None),
    ]
    assert host.calls == ["model", "model", "act", "look_up", "look_up", "model", "send", "find", "find"]


# --- before anything is begun --------------------------------------------------------------------------------


async def cancelled_before(run: Callable[[], Any]) -> None:
    """Run it under a scope that is cancelled already."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run()
    assert scope.cancelled_caught


@pytest.mark.parametrize("inline", [True, False])
async def test_a_run_that_is_cancelled_before_it_begins_says_so_once(keeper: Keeper, *, inline: bool) -> None:
    """2.11: the turn begins and is cancelled, in one write; whoever finds it there and changes nothing writes nothing."""
    keeper = Keeper(InlineStore()) if inline else keeper
    agent = Agent(asks())
    durability = Durability()

    async def run() -> TurnResult:
        return await keeper.run(agent, "go", turn_id="t", durability=durability)

    await cancelled_before(run)
    await cancelled_before(run)
    await cancelled_before(lambda: keeper.resume(agent, turn_id="t"))
    assert durability.kinds == ["turn_started", "turn_cancelled"]
    history = await keeper.history("t")
    assert history is not None
    assert [type(entry.record) for entry in history.entries] == [r.Started, r.RunStopped]
    assert (await run()).model_calls == 1
    assert durability.kinds[2:5] == ["turn_started", "context_prepared", "model_invocation_started"]
    assert [event["sequence"] for event in durability.events] == list(range(1, len(durability.events) + 1))
    await cancelled_before(run)
    assert durability.kinds.count("turn_cancelled") == 1


async def test_a_turn_that_is_not_there_is_not_begun_by_a_cancelled_resume(keeper: Keeper) -> None:
    await cancelled_before(lambda: keeper.resume(Agent(asks()), turn_id="t"))
    assert await keeper.history("t") is None


async def test_who_waits_for_another_worker_and_is_cancelled_does_not_end_his_run(keeper: Keeper) -> None:
    """Its life had not begun, and the other one's goes on."""
    asked, go_on = anyio.Event(), anyio.Event()

    class Slow:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            asked.set()
            await go_on.wait()
            return await asks().invoke(request)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(keeper.run, Agent(Slow()), "go", turn_id="t"))
        await asked.wait()
        with anyio.move_on_after(0.05):
            await keeper.run(Agent(asks()), "go", turn_id="t")
        go_on.set()
    assert await records_of(keeper, r.RunStopped) == []


async def test_what_is_being_handed_to_the_durability_port_is_handed_over_whole(keeper: Keeper) -> None:
    """1.16: its operations are not cancellable. A port that was cut off would hold half of it, and nobody would know."""
    inside, begun = anyio.Event(), [0, 0]

    class Slow(Durability):
        async def append_with_checkpoint(self, events: Any, checkpoint: Any) -> None:
            begun[0] += 1
            inside.set()
            await anyio.sleep(0.02)
            begun[1] += 1
            await super().append_with_checkpoint(events, checkpoint)

    durability = Slow()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(keeper.run, Agent(asks()), "go", turn_id="t", durability=durability))
        await inside.wait()
        tasks.cancel_scope.cancel()
    assert begun == [1, 1]
    assert durability.kinds[-1] == "turn_cancelled"
