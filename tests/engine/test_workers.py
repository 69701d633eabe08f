"""Several workers at one turn: effects once, the others wait, and who lost the turn neither goes on nor is listened to."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
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
    slot_of,
    state_of,
)
from tests.engine.wrapped import WrappedStore
from turnkeeper import (
    Agent,
    Happened,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    OwnershipLost,
    Reply,
    ReplyPort,
    ScriptedModel,
    Tool,
    ToolContext,
    TurnResult,
    tool,
)
from turnkeeper.engine.tools import Policy
from turnkeeper.errors import TurnCheckpointBusy
from turnkeeper.log.record import NOWHERE, Position, Tail
from turnkeeper.models.scripted import calls, text
from turnkeeper.turn import records as r
from turnkeeper.turn.names import ToolCallState

pytestmark = pytest.mark.anyio


@pytest.fixture
async def keepers(tmp_path: Path) -> AsyncIterator[list[Keeper]]:
    """Keepers of their own on one file, as several processes have them."""
    url = f"sqlite:///{tmp_path}/turns.db"
    opened = [await Keeper.open(url) for _ in range(3)]
    yield opened
    for keeper in opened:
        await keeper.close()


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("parallel", [True, False])
async def test_several_workers_at_one_turn_make_its_effects_once(
    keepers: list[Keeper], policy: Policy, *, parallel: bool
) -> None:
    ledger, channel = Ledger(), Channel()

    async def look_up(context: ToolContext) -> Happened:
        raise AssertionError("nobody died")

    def act(n: int, context: ToolContext) -> int:
        ledger.write(context)
        return n

    options: dict[Policy, dict[str, Any]] = {
        Policy.FAIL_CLOSED: {},
        Policy.REPLAY_SAFE: {"replay_safe": True},
        Policy.RECONCILE: {"reconcile": look_up},
        Policy.TRANSACTIONAL: {"transactional": True},
    }
    model = asks(*[[("act", {"n": n}) for n in range(size)] for size in (1, 3, 2)])
    agent = Agent(model, [Tool(act, **options[policy])], parallel_tools=parallel)
    results: list[TurnResult] = []

    async def work(keeper: Keeper) -> None:
        results.append(await keeper.run(agent, "go", turn_id="t", reply=ReplyPort(channel.send)))

    async with anyio.create_task_group() as tasks:
        for keeper in keepers * 2:
            tasks.start_soon(work, keeper)
    assert ledger.once(6)
    assert len(channel.tries) == 1
    assert sorted(request.round_index for request in model.requests) == [0, 1, 2, 3]
    assert len(results) == 6
    assert len({(result.status, result.output, result.sent_message_id) for result in results}) == 1
    assert results[0].status == "success"


# --- busy ----------------------------------------------------------------------------------------------------


class At:
    """A place of a turn that a worker stays at until it is told to go on."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.there, self.go_on = anyio.Event(), anyio.Event()
        self.channel = Channel()

    async def _pass(self, place: str) -> None:
        if place == self._place:
            self.there.set()
            await self.go_on.wait()

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        await self._pass("model")
        return text("done") if request.round_index else calls(("act", ""))

    async def act(self) -> str:
        """Act."""
        await self._pass("tool")
        return "acted"

    async def send(self, reply: Reply) -> str:
        """See `ReplyPort`."""
        await self._pass("send")
        return await self.channel.send(reply)

    def agent(self, **options: Any) -> Agent:
        """The agent."""
        return Agent(self, [Tool(self.act)], **options)


@pytest.mark.parametrize("place", ["model", "tool", "send"])
async def test_who_does_not_want_to_wait_is_told_who_is_at_it(keeper: Keeper, place: str) -> None:
    at = At(place)
    told: list[TurnCheckpointBusy] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(at.agent(), "go", turn_id="t", reply=ReplyPort(at.send)))
        await at.there.wait()
        with pytest.raises(TurnCheckpointBusy) as busy:
            await keeper.run(At("nowhere").agent(), "go", turn_id="t", reply=ReplyPort(at.send), wait=False)
        told.append(busy.value)
        at.go_on.set()
    state = await state_of(keeper)
    assert state.completed
    assert told[0].owner == (await records_of(keeper, r.ModelStarted))[0].owner
    assert told[0].until is not None
    assert len(at.channel.sent) == 1


@pytest.mark.parametrize(("replay_safe", "outcome"), [(True, "success"), (False, "reconciliation_required")])
async def test_who_waits_takes_over_when_the_other_is_dead(
    keeper: Keeper, store: ClockedStore, outcome: str, *, replay_safe: bool
) -> None:
    ledger = Ledger()

    class Died(BaseException):
        """The process is gone: unlike a cancelled run it gives nothing back."""

    @tool(replay_safe=replay_safe)
    async def act(context: ToolContext) -> str:
        ledger.write(context)
        if context.fence == 1:
            raise Died
        return "acted"

    agent = Agent(asks_once(("act", "")), [act])
    with pytest.raises(BaseExceptionGroup):
        await keeper.run(agent, "go", turn_id="t")
    results: list[TurnResult] = []

    async def wait() -> None:
        results.append(await keeper.run(agent, "go", turn_id="t"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        with pytest.raises(TurnCheckpointBusy):  # the dead worker's lease is not over
            await keeper.run(agent, "go", turn_id="t", wait=False)
        assert ledger.once(1)
        await store.advance_clock(30_000)
    assert results[0].status == outcome
    assert len(ledger.effects) == (2 if replay_safe else 1)
    assert len(set(ledger.effects)) == 1


async def test_a_cancelled_call_that_may_run_again_is_given_back(keeper: Keeper) -> None:
    """Whoever goes on with the turn need not wait for the end of a lease."""
    begun = anyio.Event()
    fences: list[int] = []

    @tool(replay_safe=True)
    async def act(context: ToolContext) -> str:
        fences.append(context.fence)
        if context.fence == 1:
            begun.set()
            await anyio.sleep_forever()
        return "acted"

    agent = Agent(asks_once(("act", "")), [act])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(agent, "go", turn_id="t"))
        await begun.wait()
        tasks.cancel_scope.cancel()
    result = await keeper.run(agent, "go", turn_id="t", wait=False)
    assert result.status == "success"
    assert fences == [1, 2]


async def test_a_call_that_is_not_run_here_waits_for_the_worker_that_runs_it(keeper: Keeper) -> None:
    """An older process does not know the tool yet. It waits all the same, and does not refuse what is under way."""
    at = At("tool")
    results: list[TurnResult] = []

    async def work(agent: Agent) -> None:
        results.append(await keeper.run(agent, "go", turn_id="t"))

    replay_safe = Agent(at, [Tool(at.act, replay_safe=True)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work, replay_safe)
        await at.there.wait()
        with pytest.raises(TurnCheckpointBusy):
            await keeper.run(Agent(at), "go", turn_id="t", wait=False)
        tasks.start_soon(work, Agent(at))
        await anyio.lowlevel.checkpoint()
        at.go_on.set()
    assert [result.output for result in results] == ["done", "done"]
    assert [message.text for message in await messages_of(keeper)][2] == "acted"


class Meddling(WrappedStore):
    """Lets something happen before a read."""

    def __init__(self, inner: ClockedStore) -> None:
        super().__init__(inner)
        self.before_read: list[Any] = []

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        if self.before_read:
            await self.before_read.pop(0)()
        return await super().read(key, after=after)


@pytest.mark.parametrize("reads", range(4))
async def test_a_slot_given_back_while_it_is_looked_at_is_run(store: ClockedStore, reads: int) -> None:
    """Whoever looks may become its owner by looking. It is not left begun with nobody to run it."""
    ledger = Ledger()

    @tool
    async def act(context: ToolContext) -> str:
        ledger.write(context)
        return "acted"

    async def nothing() -> None:
        pass

    async def give_back() -> None:
        await session.abandon_tool(0, 0, "hand", 1)

    meddling = Meddling(store)
    session = Keeper(store).session("t")
    await session.start([{"role": "user", "content": "go"}])
    await session.reserve_assistant(0, {"role": "assistant", "tool_calls": [{"id": "a", "name": "act"}]})
    await session.claim_tool(0, 0, "a", "act", None, session.logical_operation_id(0, 0), owner_token="hand", begin=True)
    meddling.before_read = [nothing] * reads + [give_back]
    result = await Keeper(meddling).run(Agent(ScriptedModel(["?", "done"]), [act]), "go", turn_id="t")
    assert result.status == "success"
    assert ledger.once(1)


# --- lost ----------------------------------------------------------------------------------------------------


async def test_a_tool_cannot_swallow_that_its_call_is_lost(keeper: Keeper, store: ClockedStore) -> None:
    """`context.check()` raises what `except Exception` does not catch."""
    ledger = Ledger()
    begun = threading.Event()
    stopped: list[BaseException] = []

    @tool(replay_safe=True)
    def work(context: ToolContext) -> str:
        begun.set()
        while context.fence == 1:
            try:
                time.sleep(0.001)
                context.check()
            except Exception:
                continue
            except BaseException as e:
                stopped.append(e)
                raise
        ledger.write(context)
        return "worked"

    results: list[TurnResult] = []
    agent = Agent(asks_once(("work", "")), [work], lease_seconds=2)

    async def run() -> None:
        results.append(await keeper.run(agent, "go", turn_id="t"))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.to_thread.run_sync(begun.wait)
            await store.advance_clock(2000)
            tasks.start_soon(run)
    assert [type(error) for error in stopped] == [OwnershipLost]
    assert not isinstance(stopped[0], Exception)
    assert [result.status for result in results] == ["success"] * 2
    assert ledger.once(1)


async def test_an_async_tool_is_cancelled_where_its_call_is_lost(keeper: Keeper, store: ClockedStore) -> None:
    ledger = Ledger()
    begun, lost = anyio.Event(), anyio.Event()

    @tool(replay_safe=True)
    async def work(context: ToolContext) -> str:
        if context.fence == 1:
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                lost.set()
        ledger.write(context)
        return "worked"

    agent = Agent(asks_once(("work", "")), [work], lease_seconds=2)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: keeper.run(agent, "go", turn_id="t"))
            await begun.wait()
            await store.advance_clock(2000)
            await lost.wait()
    assert ledger.once(1)
    assert (await state_of(keeper)).completed


async def test_a_result_that_comes_too_late_is_kept_as_evidence(keeper: Keeper, store: ClockedStore) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ledger = Ledger()

    @tool
    def pay(context: ToolContext) -> str:
        begun.set()
        go_on.wait(10)
        ledger.write(context)
        return "paid"

    results: list[TurnResult] = []
    agent = Agent(asks_once(("pay", "")), [pay])

    async def run() -> None:
        results.append(await keeper.run(agent, "go", turn_id="t"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.to_thread.run_sync(begun.wait)
        await store.advance_clock(30_000)
        assert (await keeper.run(agent, "go", turn_id="t")).status == "reconciliation_required"
        go_on.set()
    assert results[0].status == "reconciliation_required"
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert (slot.state, slot.result) == (ToolCallState.AMBIGUOUS, None)
    assert slot.evidence is not None
    assert b"paid" in slot.evidence
    assert ledger.once(1)


async def test_a_result_that_comes_late_is_taken_where_nobody_has_looked(keeper: Keeper, store: ClockedStore) -> None:
    """It is the only proof of the outcome, and taking it cannot repeat anything."""
    begun, go_on = threading.Event(), threading.Event()

    @tool
    def pay() -> str:
        begun.set()
        go_on.wait(10)
        return "paid"

    agent = Agent(asks_once(("pay", "")), [pay])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(agent, "go", turn_id="t"))
        await anyio.to_thread.run_sync(begun.wait)
        await store.advance_clock(30_000)
        go_on.set()
    assert (await state_of(keeper)).completed
    slot = await slot_of(keeper, 0, 0)
    assert slot is not None
    assert (slot.state, slot.late) == (ToolCallState.COMPLETED, True)


# --- decisions -----------------------------------------------------------------------------------------------


class Slow:
    """A model that answers when it is told to."""

    def __init__(self, *answers: ModelInvocationResponse) -> None:
        self._answers = list(answers)
        self.asked, self.go_on = anyio.Event(), anyio.Event()

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        self.asked.set()
        await self.go_on.wait()
        return self._answers[request.round_index]


async def test_a_decision_that_comes_second_is_discarded_whole(keeper: Keeper, store: ClockedStore) -> None:
    """Also where it asks for the same calls: what was said with them is the first one's too."""
    begun = anyio.Event()

    @tool(replay_safe=True)
    async def act(context: ToolContext) -> str:
        if context.fence == 1:
            begun.set()
            await anyio.sleep_forever()
        return "acted"

    slow = Slow(calls(("act", "{}"), spoken="the second one"), text("done"))
    first = ScriptedModel([calls(("act", "{}"), spoken="the first one"), "done"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(Agent(slow, [act]), "go", turn_id="t"))
        await slow.asked.wait()
        await store.advance_clock(30_000)
        async with anyio.create_task_group() as inner:
            inner.start_soon(lambda: keeper.run(Agent(first, [act]), "go", turn_id="t"))
            await begun.wait()
            inner.cancel_scope.cancel()
        await store.advance_clock(30_000)
        slow.go_on.set()
    assert [message.text for message in await messages_of(keeper)] == ["go", "the first one", "acted", "done"]
    assert len(await records_of(keeper, r.AssistantReserved)) == 2


async def test_a_last_word_that_comes_second_is_discarded(keeper: Keeper) -> None:
    channel = Channel()
    slow = Slow(text("the second one"))
    results: list[TurnResult] = []

    async def run() -> None:
        results.append(await keeper.run(Agent(slow), "go", turn_id="t", reply=ReplyPort(channel.send)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await slow.asked.wait()
        await keeper.session("t").reserve_assistant(0, {"role": "assistant", "content": "the first one"})
        slow.go_on.set()
    assert results[0].output == "the first one"
    assert [reply.text for reply in channel.sent] == ["the first one"]
    assert [message.text for message in await messages_of(keeper)] == ["go", "the first one"]


async def test_a_worker_that_is_told_of_results_by_another_shows_them_to_its_model(
    keeper: Keeper, store: ClockedStore
) -> None:
    """The round was half done by one worker, is finished by another, and read as one."""
    half = anyio.Event()

    @tool(replay_safe=True)
    async def act(n: int, context: ToolContext) -> str:
        if n == 1 and context.fence == 1:
            half.set()
            await anyio.sleep_forever()
        return f"acted {n}"

    model = asks_once(("act", {"n": 0}), ("act", {"n": 1}), ("act", {"n": 2}))
    agent = Agent(model, [act], parallel_tools=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(agent, "go", turn_id="t"))
        await half.wait()
        tasks.cancel_scope.cancel()
    await store.advance_clock(30_000)
    assert (await keeper.run(agent, "go", turn_id="t", wait=False)).status == "success"
    assert last_results(model.requests[-1]) == ["acted 0", "acted 1", "acted 2"]
    assert len(model.requests) == 2
