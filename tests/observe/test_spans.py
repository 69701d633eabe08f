"""The spans of a turn: their tree, what they say, and what they never say."""

from __future__ import annotations

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from tests.engine.support import Channel, Ledger, asks, asks_once
from tests.observe.watching import Watched, emitted, ids, links, parent, told
from turnkeeper import (
    Agent,
    EffectRefused,
    HumanApproval,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    OutcomeUnknown,
    ReplyPort,
    ScriptedModel,
    Tool,
    ToolContext,
    subagent,
)
from turnkeeper.engine.wire import InvocationUsage
from turnkeeper.errors import TurnCheckpointBusy, TurnCheckpointConflict
from turnkeeper.log.store import Store
from turnkeeper.observe import names

pytestmark = pytest.mark.anyio


def add(a: int, b: int, context: ToolContext) -> int:
    """Add."""
    return a + b


class Named:
    """A model port that knows what it is, and counts tokens."""

    provider = "acme"
    model = "acme-1"

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """Call a tool, then say something."""
        answer = await asks([("add", {"a": 1, "b": 2})], then="secret answer").invoke(request)
        return ModelInvocationResponse(
            output=answer.output,
            assistant_messages=answer.assistant_messages,
            tool_requests=answer.tool_requests,
            usage=InvocationUsage(input_tokens=10, output_tokens=5, total_tokens=15),
        )


async def test_a_turn_is_a_tree(keeper: Keeper, watched: Watched) -> None:
    channel = Channel()
    with watched.provider.get_tracer("host").start_as_current_span("request"):
        await keeper.run(
            Agent(Named(), [Tool(add)]), "secret question", turn_id="t", reply=ReplyPort(channel.send), session_id="s"
        )
    request, run, send = watched.only("request"), watched.only(names.TURN), watched.only(names.SEND)
    first, second = watched.spans(names.CHAT)
    call = watched.only(names.EXECUTE_TOOL)
    assert parent(run) == ids(request)
    assert [parent(span) for span in (first, call, second, send)] == [ids(run)] * 4
    assert first.name == "chat acme-1"
    assert call.name == "execute_tool add"
    assert told(run) == {
        names.OPERATION: "invoke_agent",
        names.CONVERSATION_ID: "s",
        names.TURN_ID: "t",
        names.TURN_SCOPE: "primary",
        names.TURN_STATUS: "success",
        names.INPUT_TOKENS: 20,
        names.OUTPUT_TOKENS: 10,
    }
    assert told(second) == {
        names.OPERATION: "chat",
        names.PROVIDER: "acme",
        names.REQUEST_MODEL: "acme-1",
        names.TURN_ID: "t",
        names.TURN_SCOPE: "primary",
        names.ROUND: 1,
        names.ATTEMPT: 0,
        names.OPERATION_ID: told(second)[names.OPERATION_ID],
        names.OUTCOME: "success",
        names.INPUT_TOKENS: 10,
        names.OUTPUT_TOKENS: 5,
    }
    assert told(call) == {
        names.OPERATION: "execute_tool",
        names.TOOL_NAME: "add",
        names.TOOL_TYPE: "function",
        names.TOOL_CALL_ID: "call_0",
        names.TURN_ID: "t",
        names.TURN_SCOPE: "primary",
        names.ROUND: 0,
        names.SLOT: 0,
        names.FENCE: 1,
        names.OPERATION_ID: told(call)[names.OPERATION_ID],
        names.TOOL_POLICY: "fail_closed",
        names.OUTCOME: "success",
    }
    assert told(send)[names.SENT_MESSAGE_ID] == "m1"
    assert told(send)[names.SEND_KEY] == channel.sent[0].key
    assert all(span.status.status_code is StatusCode.UNSET for span in watched.spans())


async def test_every_attribute_is_in_its_table(keeper: Keeper, watched: Watched) -> None:
    await keeper.run(Agent(Named(), [Tool(add)]), "q", turn_id="t", reply=ReplyPort(Channel().send))
    for span in watched.spans():
        (kind,) = (one for one in names.SPANS if span.name.split(" ")[0] == one.name)
        assert set(told(span)) <= {*kind.attributes, names.ERROR_TYPE}
        assert span.kind.name.lower() == kind.kind


async def test_contents_only_where_they_are_wanted(store: Store) -> None:
    async def fails(a: int, b: int) -> None:
        raise EffectRefused("secret reason", kind="declined")

    for contents in (False, True):
        watched = Watched(contents=contents)
        keeper = Keeper(store, telemetry=watched.telemetry)
        agent = Agent(Named(), [Tool(fails, name="add")])
        await keeper.run(agent, "secret question", turn_id=f"{contents}", reply=ReplyPort(Channel().send))
        text = "".join(map(emitted, watched.spans()))
        for said in ("secret question", "secret answer", "secret reason"):
            assert (said in text) is contents
        call = told(watched.only(names.EXECUTE_TOOL))
        assert call.get(names.TOOL_ARGUMENTS) == ('{"a":1,"b":2}' if contents else None)


async def test_what_a_tool_does_is_below_its_call(keeper: Keeper, watched: Watched) -> None:
    """Calls that run at the same time, in tasks, in threads and in the store's transaction."""
    tracer = watched.provider.get_tracer("host")
    both = anyio.Event()

    async def in_a_task(name: str) -> str:
        if name == "one":
            both.set()
        await both.wait()
        with tracer.start_as_current_span("work", attributes={"call": name}):
            return name

    def in_a_thread(name: str) -> str:
        with tracer.start_as_current_span("work", attributes={"call": name}):
            return name

    def in_a_transaction(name: str) -> str:
        with tracer.start_as_current_span("work", attributes={"call": name}):
            return name

    tools = [Tool(in_a_task), Tool(in_a_thread), Tool(in_a_transaction, transactional=True)]
    wanted = {"two": "in_a_task", "one": "in_a_task", "three": "in_a_thread", "four": "in_a_transaction"}
    model = asks_once(*((tool, {"name": name}) for name, tool in wanted.items()))
    assert (await keeper.run(Agent(model, tools), "q", turn_id="t")).status == "success"
    calls = {told(span)[names.SLOT]: span for span in watched.spans(names.EXECUTE_TOOL)}
    work = {told(span)["call"]: span for span in watched.spans("work")}
    assert [parent(work[name]) for name in wanted] == [ids(calls[slot]) for slot in range(4)]
    assert {parent(span) for span in calls.values()} == {ids(watched.only(names.TURN))}


async def test_a_delegated_run_is_below_the_call(keeper: Keeper, watched: Watched) -> None:
    helper = subagent(Agent(ScriptedModel(["done"])), name="helper", description="helps")
    await keeper.run(Agent(asks([("helper", {"task": "x"})]), [helper]), "q", turn_id="t")
    child, run = watched.spans(names.TURN)
    call = watched.only(names.EXECUTE_TOOL)
    assert parent(child) == ids(call)
    assert parent(call) == ids(run)
    assert told(child)[names.TURN_SCOPE] == f"run_{told(call)[names.OPERATION_ID]}"


async def test_errors_have_our_kinds(keeper: Keeper, watched: Watched) -> None:
    async def declines() -> None:
        raise EffectRefused("no", kind="declined")

    def breaks(request: ModelRequest) -> str:
        raise ConnectionError("503")

    await keeper.run(Agent(asks([("declines", {})]), [Tool(declines)]), "q", turn_id="tool")
    call = watched.only(names.EXECUTE_TOOL)
    assert (told(call)[names.ERROR_TYPE], told(call)[names.OUTCOME]) == ("declined", "failed")
    assert (call.status.status_code, call.status.description) == (StatusCode.ERROR, "declined")
    assert watched.only(names.TURN).status.status_code is StatusCode.UNSET  # the model went on

    await keeper.run(Agent(ScriptedModel(breaks), max_model_attempts=2), "q", turn_id="model")
    run = watched.spans(names.TURN)[1]
    failed = [span for span in watched.spans(names.CHAT) if parent(span) == ids(run)]
    assert [told(span)[names.ERROR_TYPE] for span in failed] == ["ConnectionError"] * 2
    assert [told(span)[names.ATTEMPT] for span in failed] == [0, 1]
    assert (told(run)[names.TURN_STATUS], told(run)[names.ERROR_TYPE]) == ("failed", "model_error")
    assert run.status.status_code is StatusCode.ERROR
    assert watched.metric(names.TURNS) == {("success",): 1, ("model_error", "failed"): 1}


async def test_a_run_without_a_result(keeper: Keeper, watched: Watched) -> None:
    await keeper.run(Agent(ScriptedModel(["a"])), "q", turn_id="t")
    with pytest.raises(TurnCheckpointConflict):
        await keeper.run(Agent(ScriptedModel(["a"])), "another", turn_id="t")
    started = anyio.Event()

    async def hangs() -> None:
        started.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: keeper.run(Agent(asks([("hangs", {})]), [Tool(hangs)]), "q", turn_id="u"))
        await started.wait()
        with pytest.raises(TurnCheckpointBusy):
            await keeper.run(Agent(asks([("hangs", {})]), [Tool(hangs)]), "q", turn_id="u", wait=False)
        tasks.cancel_scope.cancel()
    runs = {(told(span)[names.TURN_STATUS], told(span).get(names.ERROR_TYPE)) for span in watched.spans(names.TURN)}
    assert runs == {
        ("success", None),
        ("raised", "TurnCheckpointConflict"),
        ("raised", "TurnCheckpointBusy"),
        ("cancelled", "cancelled"),
    }
    assert told(watched.only(names.EXECUTE_TOOL))[names.ERROR_TYPE] == "cancelled"


async def test_an_ambiguous_tool(keeper: Keeper, watched: Watched) -> None:
    async def charge(context: ToolContext) -> None:
        raise OutcomeUnknown("timeout")

    agent = Agent(asks([("charge", {})]), [Tool(charge)])
    assert (await keeper.run(agent, "q", turn_id="t")).status == "reconciliation_required"
    call, run = watched.only(names.EXECUTE_TOOL), watched.only(names.TURN)
    assert told(call)[names.OUTCOME] == "ambiguous"
    assert told(call)[names.ERROR_TYPE] == told(run)[names.ERROR_TYPE] == "effect_outcome_unknown"
    assert told(run)[names.TURN_STATUS] == "reconciliation_required"
    assert watched.effects()["tool", "begun"] == 1
    assert ("tool", "completed") not in watched.effects()
    assert watched.effects()["tool", "ambiguous"] == 1
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("tool",): 1}
    await keeper.resolve_tool("t", 0, 0, "happened", who="me", why="seen", result="paid")
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("tool",): 0}


async def test_a_parked_turn_is_no_error_and_links_when_it_goes_on(keeper: Keeper, watched: Watched) -> None:
    ledger = Ledger()

    async def act(context: ToolContext) -> None:
        ledger.write(context)

    agent = Agent(asks([("act", {})]), [Tool(act)], permission=HumanApproval(lambda _: True))
    assert (await keeper.run(agent, "q", turn_id="t")).status == "parked"
    (parked,) = watched.spans(names.TURN)
    assert told(parked)[names.TURN_STATUS] == "parked"
    assert parked.status.status_code is StatusCode.UNSET
    assert watched.spans(names.EXECUTE_TOOL) == []
    await keeper.decide_permission("t", 0, 0, True, who="me")
    assert (await keeper.run(agent, "q", turn_id="t")).status == "success"
    _, resumed = watched.spans(names.TURN)
    assert links(resumed) == [ids(parked)]
    assert told(resumed)[names.TURN_RESUMED] is True
    assert parent(resumed) is None
    assert ids(resumed)[0] != ids(parked)[0]  # a trace of its own
    assert names.TURN_RESUMED not in told(parked)


async def test_a_refused_reply(keeper: Keeper, watched: Watched) -> None:
    channel = Channel(ConnectionRefusedError("down"), EffectRefused("blocked", kind="blocked"))
    agent = Agent(ScriptedModel(["a"]))
    assert (await keeper.run(agent, "q", turn_id="t", reply=ReplyPort(channel.send))).error_kind == "reply_refused"
    first, second = watched.spans(names.SEND)
    assert (told(first)[names.OUTCOME], told(first)[names.ERROR_TYPE]) == ("not_sent", "ConnectionRefusedError")
    assert (told(second)[names.OUTCOME], told(second)[names.ERROR_TYPE]) == ("refused", "blocked")
    assert told(watched.only(names.TURN))[names.ERROR_TYPE] == "reply_refused"


async def test_the_current_span_is_given_back(keeper: Keeper) -> None:
    await keeper.run(Agent(ScriptedModel(["a"])), "q", turn_id="t")
    assert not trace.get_current_span().get_span_context().is_valid
