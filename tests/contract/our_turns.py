"""Turns of our own engine that went through everything, for the tests that look at all of their events and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import pytest

from tests.contract.host import Denies, PoppingModel, answer
from tests.engine.wrapped import WrappedStore
from turnkeeper import (
    Agent,
    EffectRefused,
    Keeper,
    Message,
    ModelInvocationResponse,
    NotSent,
    OutcomeUnknown,
    Reply,
    ReplyPort,
    TextPart,
    Tool,
    ToolContext,
    TurnResult,
)
from turnkeeper.engine.host import Host
from turnkeeper.engine.permissions import HumanApproval
from turnkeeper.engine.wire import (
    ContextCandidate,
    ContextRequest,
    DelegatedStateReference,
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    InvocationContextState,
    InvocationUsage,
    Portability,
    Role,
)
from turnkeeper.errors import StoreBusy
from turnkeeper.stores.sqlite import SqliteStore

DONE = answer(spoken="done", output="done")
BOTH = answer(("a", "act"), ("b", "act"), spoken="calling")
LEASE = 30.0
T = TypeVar("T")


class DyingStore(WrappedStore):
    """Takes nothing more from a process that is dead."""

    dead = False

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        if self.dead:
            raise StoreBusy("the test", "its process is dead")
        return await write()


class World:
    """A store, a Keeper on it, and what the turns are made of. Every turn is called "t"."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.keeper = Keeper(store)
        self.ran: list[str | None] = []
        self.fails: dict[str | None, Exception] = {}
        """What a request raises the first time."""

    async def _act(self, context: ToolContext, **_: Any) -> dict[str, Any]:
        self.ran.append(context.call_id)
        error = self.fails.pop(context.call_id, None)
        if error is not None:
            raise error
        return {"of": context.call_id, "nothing": None}

    def agent(self, *answers: ModelInvocationResponse | Exception, **options: Any) -> Agent:
        """An agent whose model gives these answers in order."""
        tools = [Tool(self._act, name="act"), Tool(self._act, name="other", refusals=(ValueError,))]
        return Agent(PoppingModel(*answers), tools, lease_seconds=LEASE, **options)

    async def run(self, agent: Agent, reply: ReplyPort | None = None) -> TurnResult:
        """Run the turn, or go on with it."""
        return await self.keeper.run(agent, "go", turn_id="t", session_id="s", inputs={"k": [1, None]}, reply=reply)

    async def killed(self, agent: Agent, wait: Callable[[anyio.Event], Any]) -> None:
        """Run the turn until what `wait` gets is set, and leave it there as a dead process would; then its leases are over."""
        reached, dying = anyio.Event(), DyingStore(self.store)
        wait(reached)
        alive, self.keeper = self.keeper, Keeper(dying)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run, agent)
            await reached.wait()
            dying.dead = True
            tasks.cancel_scope.cancel()
        self.keeper = alive
        await self.store.advance_clock(int(LEASE * 1000))


Turn = Callable[[World], Awaitable[None]]


async def rounds_in_parallel(world: World) -> None:
    """Several rounds of parallel tools, with ids that repeat, and a delivered reply."""
    sent: list[Reply] = []

    async def send(reply: Reply) -> str:
        sent.append(reply)
        return "m1"

    await world.run(world.agent(BOTH, BOTH, answer(("", "act"), ("a", "act")), DONE), ReplyPort(send))


async def rounds_one_by_one(world: World) -> None:
    """The same, one tool behind the other, and no reply."""
    await world.run(world.agent(BOTH, BOTH, DONE, parallel_tools=False))


async def rich_answers(world: World) -> None:
    """Answers with everything that an answer may have, and one without words of its own."""
    delegated = InvocationContextState(
        portability=Portability.DELEGATED,
        delegated_state=[DelegatedStateReference(provider="openai", kind="response", id="resp_1")],
    )
    usage = InvocationUsage(input_tokens=3, output_tokens=5, total_tokens=8)
    first = answer(("a", "act"), metadata={"x": [None, {"y": None}]}, usage=usage, next_context_state=delegated)
    await world.run(world.agent(first, answer(output={"x": None}, usage=usage)))


async def denied(world: World) -> None:
    """One tool of two is denied."""
    permission = Denies(["other"], "no")
    await world.run(world.agent(answer(("a", "act"), ("b", "other")), DONE, permission=permission))


async def approved_by_a_person(world: World) -> None:
    """Parked, decided, and gone on with by another process."""
    agent = world.agent(BOTH, DONE, permission=HumanApproval())
    assert (await world.run(agent)).status == "parked"
    await world.keeper.decide_permission("t", 0, 0, True, who="ann")
    assert (await world.run(agent)).status == "parked"
    await world.keeper.decide_permission("t", 0, 1, False, who="ann", why="no")
    assert (await world.run(agent)).status == "success"


async def a_permission_port_that_failed(world: World) -> None:
    """The run fails and is made again."""

    class Down:
        async def authorize(self, request: Any) -> Any:
            raise OSError("down")

    assert (await world.run(world.agent(BOTH, permission=Down()))).error_kind == "permission_error"
    assert (await world.run(world.agent(DONE))).status == "success"


async def refused(world: World) -> None:
    """Calls that are never run, or that the tool refuses."""
    world.fails = {"b": EffectRefused("declined", kind="declined"), "c": ValueError("no")}
    await world.run(world.agent(answer(("a", "unknown"), ("b", "act"), ("c", "other")), DONE))


async def not_sent_twice(world: World) -> None:
    """A tool that did not happen the first time."""
    world.fails = {"a": NotSent("no line")}
    await world.run(world.agent(BOTH, DONE, parallel_tools=False))


async def ambiguous(world: World) -> None:
    """Stopped, and run again without being settled."""
    world.fails = {"a": OutcomeUnknown("cut")}
    for _ in range(2):
        assert (await world.run(world.agent(BOTH, DONE, parallel_tools=False))).status == "reconciliation_required"


async def both_ambiguous(world: World) -> None:
    """Two calls of one round, at the same time."""
    world.fails = {"a": OutcomeUnknown("cut"), "b": OutcomeUnknown("cut")}
    await world.run(world.agent(BOTH))
    await world.keeper.resolve_tool("t", 0, 1, "happened", who="ann", why="seen", result="confirmed")
    await world.run(world.agent(DONE))
    await world.keeper.resolve_tool("t", 0, 0, "happened", who="ann", why="seen", result="confirmed")
    assert (await world.run(world.agent(DONE))).status == "success"


def settled(resolution: str) -> Turn:
    """Stopped, settled and gone on with."""

    async def turn(world: World) -> None:
        world.fails = {"a": OutcomeUnknown("cut")}
        await world.run(world.agent(BOTH))
        result = "confirmed" if resolution == "happened" else None
        await world.keeper.resolve_tool("t", 0, 0, resolution, who="ann", why="seen", result=result)
        assert (await world.run(world.agent(DONE))).status == "success"

    turn.__name__ = f"settled_{resolution}"
    return turn


async def reported_as_unknown(world: World) -> None:
    """The model is told that nobody knows."""
    world.fails = {"a": OutcomeUnknown("cut")}
    await world.run(world.agent(BOTH, BOTH, DONE, on_ambiguous="report"))


async def unknown_model(world: World) -> None:
    """A model call in doubt, in the second round."""
    agent = world.agent(BOTH, OutcomeUnknown("cut"), unknown_model="reconcile")
    for _ in range(2):
        assert (await world.run(agent)).error_kind == "model_outcome_unknown"


def settled_model(response: ModelInvocationResponse | None) -> Turn:
    """The same, settled: with its answer, or made again."""

    async def turn(world: World) -> None:
        await unknown_model(world)
        settled = "did_not_happen" if response is None else "happened"
        await world.keeper.resolve_model("t", settled, who="ann", why="seen", response=response)
        assert (await world.run(world.agent(DONE, unknown_model="reconcile"))).status == "success"

    kind = "again" if response is None else "final" if response.output else "with_tools"
    turn.__name__ = f"settled_model_{kind}"
    return turn


async def model_that_fails(world: World) -> None:
    """A run whose attempts are used up, and one that gets its answer with the second."""
    down = [ConnectionError("down")] * 3
    assert (await world.run(world.agent(*down))).error_kind == "model_error"
    assert (await world.run(world.agent(ConnectionError("down"), BOTH, DONE))).status == "success"


async def too_many_rounds(world: World) -> None:
    """The budget is used up; another agent goes on."""
    assert (await world.run(world.agent(BOTH, BOTH, max_rounds=1))).error_kind == "max_iterations"
    assert (await world.run(world.agent(DONE))).status == "success"


async def killed_in_the_model(world: World) -> None:
    """A process that dies in its second model call."""

    class Dies(PoppingModel):
        async def invoke(self, request: Any) -> ModelInvocationResponse:
            if request.round_index == 1:
                reached[0].set()
                await anyio.sleep_forever()
            return await super().invoke(request)

    reached: list[anyio.Event] = []
    agent = Agent(Dies(BOTH), world.agent().tools, lease_seconds=LEASE)
    await world.killed(agent, reached.append)
    assert (await world.run(world.agent(DONE))).status == "success"


async def killed_in_a_tool(world: World) -> None:
    """A process that dies in its second tool: in doubt, settled, gone on with."""
    reached: list[anyio.Event] = []

    async def act(context: ToolContext, **_: Any) -> str:
        if context.slot_index == 1:
            reached[0].set()
            await anyio.sleep_forever()
        return "done"

    agent = Agent(PoppingModel(BOTH), [Tool(act)], parallel_tools=False, lease_seconds=LEASE)
    await world.killed(agent, reached.append)
    assert (await world.run(world.agent(DONE))).status == "reconciliation_required"
    await world.keeper.resolve_tool("t", 0, 1, "did_not_happen", who="ann", why="seen")
    assert (await world.run(world.agent(DONE))).status == "success"


async def cancelled_in_a_tool(world: World) -> None:
    """A run that its host cancels in the middle of its second tool, and that is run again."""
    with anyio.CancelScope() as run:

        async def act(context: ToolContext, **_: Any) -> str:
            if context.slot_index == 1:
                run.cancel()
                await anyio.sleep_forever()
            return "done"

        await world.run(Agent(PoppingModel(BOTH), [Tool(act)], parallel_tools=False, lease_seconds=LEASE))
    await world.store.advance_clock(int(LEASE * 1000))
    await world.run(world.agent(DONE))


def delivered(*plan: Exception, keyed: bool = False, settle: bool = False) -> Turn:
    """A reply whose sends go by a plan."""

    async def turn(world: World) -> None:
        left = list(plan)

        async def send(reply: Reply) -> str:
            if left:
                raise left.pop(0)
            return "m1"

        first = await world.run(world.agent(BOTH, DONE), ReplyPort(send, keyed=keyed))
        if settle:
            await world.keeper.resolve_delivery("t", None, who="ann", why="not there")
        if first.status != "success":
            assert (await world.run(world.agent(), ReplyPort(send, keyed=keyed))).status == "success"

    turn.__name__ = f"delivered_behind_{'_'.join(type(error).__name__ for error in plan)}"
    return turn


def imported(at: int) -> Turn:
    """Begun elsewhere, and gone on with here."""

    async def turn(world: World) -> None:
        other = World(await SqliteStore.open(":memory:"))
        try:
            await other.run(other.agent(BOTH, BOTH, DONE, parallel_tools=False))
            checkpoint = await other.keeper.checkpoint("t", at=at)
        finally:
            await other.store.close()
        assert checkpoint is not None
        await world.keeper.adopt(checkpoint)
        left = [BOTH, BOTH, DONE][checkpoint.completed_model_iterations :]
        assert (await world.keeper.resume(world.agent(*left), turn_id="t")).status == "success"

    turn.__name__ = f"imported_at_{at}"
    return turn


class Rewrites:
    """A policy and a source of the host: a rule in front of the conversation, and a memory behind it."""

    async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
        """See `HostPolicyPort`."""
        rule = Message(role=Role.SYSTEM, parts=[TextPart(value=f"rule {request.iteration}")])
        return HostPolicyResult(messages=[rule, *request.messages], stable_prefix_messages=1, metadata={"x": None})

    async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
        """See `HostPolicyPort`."""
        return FinalOutputPolicyResult(output=f"{request.output}!")

    async def load(self, request: ContextRequest) -> list[ContextCandidate]:
        """See `ContextSource`."""
        memory = Message(role=Role.SYSTEM, parts=[TextPart(value=f"memory {request.iteration}")])
        return [ContextCandidate(id="m", source="memory", messages=[memory])]


async def rewritten_by_the_host(world: World) -> None:
    """Policy and context change what the model is shown, over a failed attempt and a failed run."""
    host = Host(policy=Rewrites(), sources=[Rewrites()])
    down = [ConnectionError("down")] * 3
    assert (await world.run(world.agent(down[0], BOTH, *down, host=host))).error_kind == "model_error"
    assert (await world.run(world.agent(DONE, host=host))).output == "done!"


async def rewritten_and_unknown(world: World) -> None:
    """The same, with a model call in doubt."""
    host = Host(policy=Rewrites(), sources=[Rewrites()])
    agent = world.agent(BOTH, OutcomeUnknown("cut"), host=host, unknown_model="reconcile")
    assert (await world.run(agent)).error_kind == "model_outcome_unknown"


async def by_hand(world: World) -> None:
    """Driven through the journal's session, without the engine."""
    session = world.keeper.session("t")
    await session.start([{"role": "user", "content": "go"}], tool_names=["act"])
    call = {"id": "a", "type": "function", "function": {"name": "act", "arguments": json.dumps({"v": 1})}}
    await session.reserve_assistant(0, {"role": "assistant", "content": "", "tool_calls": [call]})


TURNS: tuple[Turn, ...] = (
    rounds_in_parallel,
    rounds_one_by_one,
    rich_answers,
    denied,
    approved_by_a_person,
    a_permission_port_that_failed,
    refused,
    not_sent_twice,
    ambiguous,
    both_ambiguous,
    settled("happened"),
    settled("did_not_happen"),
    settled("unknown"),
    reported_as_unknown,
    unknown_model,
    settled_model(None),
    settled_model(DONE),
    settled_model(BOTH),
    model_that_fails,
    too_many_rounds,
    killed_in_the_model,
    killed_in_a_tool,
    cancelled_in_a_tool,
    delivered(NotSent("no line")),
    delivered(OutcomeUnknown("cut"), keyed=True),
    delivered(OutcomeUnknown("cut"), settle=True),
    delivered(EffectRefused("no")),
    imported(1),
    imported(4),
    imported(6),
    imported(9),
    rewritten_by_the_host,
    rewritten_and_unknown,
    by_hand,
)


def by_name(turn: Turn) -> str:
    """The name of a turn, for the test's id."""
    return getattr(turn, "__name__", "turn")


every_turn = pytest.mark.parametrize("turn", TURNS, ids=by_name)
