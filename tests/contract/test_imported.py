"""Turns that are begun with a checkpoint: of the engine in Java, or of another store of ours (engine-contract.md 2.7, 7)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.contract.host import (
    BOTH,
    DONE,
    ONE,
    Durability,
    PoppingModel,
    PostCommit,
    Tools,
    agent_of,
    answer,
    asked,
    with_the_calls,
)
from tests.contract.material import traces, without_empty_lists
from turnkeeper import (
    Agent,
    DidNotHappen,
    Keeper,
    Message,
    ModelInvocationResponse,
    ModelRequest,
    OutcomeUnknown,
    TextPart,
)
from turnkeeper.engine.documents import from_tree, to_tree
from turnkeeper.engine.stored import UNKNOWN_TEXT
from turnkeeper.engine.wire import (
    DelegatedStateReference,
    EngineCheckpoint,
    InvocationContextState,
    ResumeContext,
    Role,
)
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict

pytestmark = pytest.mark.anyio


def traced(scenario: str, *, last_sequence: int) -> EngineCheckpoint:
    """A checkpoint that the engine in Java wrote, with a transcript that providers accept, as its live models give it."""
    log = next(trace["log"] for trace in traces() if trace["scenario"] == scenario)
    with_the_calls(log)
    trees = (write["checkpoint"] for write in log if "checkpoint" in write)
    return from_tree(EngineCheckpoint, next(t for t in trees if t["lastSequence"] == last_sequence), strict=True).value


async def test_a_resume_has_a_budget_too(keeper: Keeper) -> None:
    """Row 24: the checkpoint is that of a finished round, and the budget leaves no further one."""
    exchange = traced("ordered", last_sequence=18)
    agent = agent_of(DONE, max_rounds=exchange.iteration + 1)
    await keeper.adopt(exchange, agent=agent)
    assert (await keeper.resume(agent, turn_id="t-ordered")).error_kind == "max_iterations"
    assert asked(agent) == []


async def test_a_turn_cannot_begin_with_contradictory_state(keeper: Keeper) -> None:
    """Row 30: a portable turn that starts with references is refused."""
    reference = DelegatedStateReference(provider="p", kind="response", id="r")
    changed = replace(
        traced("ordered", last_sequence=18), context_state=InvocationContextState(delegated_state=[reference])
    )
    with pytest.raises(InvalidInput) as refused:
        await keeper.adopt(changed)
    assert refused.value.field == "contextState.delegatedState"


async def test_a_final_checkpoint_is_delivered_under_the_same_key(keeper: Keeper) -> None:
    """Row 26: no model call, and the same effect id wherever it is resumed."""
    first, second = PostCommit(), PostCommit()
    await keeper.run(agent_of(DONE), "hi", turn_id="t", reply=first.port)
    exported = await keeper.checkpoint("t")
    assert exported is not None
    async with await Keeper.open("sqlite:///:memory:") as other:
        await other.adopt(exported)
        agent = agent_of()
        assert (await other.resume(agent, turn_id="t", reply=second.port)).output == "done"
        assert second.sent == first.sent
        assert asked(agent) == []


@pytest.mark.parametrize(("output", "expected"), [({"x": None}, '{"x":null}'), (None, "spoken"), ("done", "done")])
async def test_a_final_answer_of_any_kind_is_not_asked_for_again(keeper: Keeper, output: Any, expected: str) -> None:
    """2.7 `finalOutputReady`: also where the output is no text, and imported more than once."""
    await keeper.run(agent_of(answer(spoken="spoken", output=output)), "hi", turn_id="t")
    exported = await keeper.checkpoint("t")
    assert exported is not None
    for _ in range(2):
        async with await Keeper.open("sqlite:///:memory:") as other:
            await other.adopt(exported)
            result = await other.resume(agent_of(), turn_id="t")
            assert (result.status, result.output, result.model_calls) == ("success", expected, 0)
            exported = await other.checkpoint("t")
            assert exported is not None
            assert exported.final_output_ready


async def check_refused(checkpoint: EngineCheckpoint) -> None:
    """The arguments of its first call are nowhere, and nothing is made up in their place (issue C, 8)."""
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        with pytest.raises(InvalidInput) as refused:
            await keeper.adopt(checkpoint)
        assert refused.value.field == "messages[2].metadata.argumentsText"
        assert "the call 'call-a' of echo" in refused.value.reason
        assert await keeper.history(checkpoint.turn_id) is None


@pytest.mark.parametrize("accepted", [True, False])
async def test_every_traced_checkpoint_can_be_gone_on_from_and_says_the_same_here(*, accepted: bool) -> None:
    """2.6, 2.7: what the engine in Java wrote stands in our log just as there, but for the name of an unknown call."""
    logs = [trace.get("log", [trace]) for trace in traces()]
    for log in logs:
        if accepted:
            with_the_calls(log)
    trees = [write["checkpoint"] for log in logs for write in log if "checkpoint" in write]
    assert len(trees) == 20
    if not accepted:
        refused = [tree for tree in trees if any(message["role"] == "tool" for message in tree["messages"])]
        assert len(refused) == 6
        trees = [tree for tree in trees if tree not in refused]
        for tree in refused:
            await check_refused(from_tree(EngineCheckpoint, tree, strict=True).value)
    for tree in trees:
        checkpoint = from_tree(EngineCheckpoint, tree, strict=True).value
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            await keeper.adopt(checkpoint)
            adopted = await keeper.checkpoint(checkpoint.turn_id)
            assert adopted is not None
            expected = to_tree(checkpoint)
            for result in expected.get("completedToolResults", []):
                if result["outcome"] == "indeterminate":
                    result["output"] = UNKNOWN_TEXT
            named = replace(adopted, id=checkpoint.id, last_sequence=checkpoint.last_sequence)
            assert without_empty_lists(to_tree(named)) == without_empty_lists(expected)


def bare(scenario: str, last_sequence: int, *, spoken: bool = True, **kept: Any) -> EngineCheckpoint:
    """As the engine in Java wrote it, with no calls; `kept` stands beside each result, as an adapter may keep it."""
    log = next(trace["log"] for trace in traces() if trace["scenario"] == scenario)
    trees = (write["checkpoint"] for write in log if "checkpoint" in write)
    found = from_tree(EngineCheckpoint, next(t for t in trees if t["lastSequence"] == last_sequence), strict=True).value
    results = [replace(result, metadata=kept or None) for result in found.completed_tool_results]
    messages = [one for one in found.messages if spoken or one.role.value != "assistant"]
    return replace(found, completed_tool_results=results, messages=messages)


@pytest.mark.parametrize("spoken", [True, False])
@pytest.mark.parametrize("kept", [{"argumentsText": '{"v": "as given"}'}, {"arguments": {"v": 1}}])
async def test_calls_that_a_transcript_lacks_are_put_back_where_they_are_known(
    keeper: Keeper, kept: dict[str, Any], *, spoken: bool
) -> None:
    """Issue C, 8: ids from the messages, names from the results, and the arguments that somebody kept beside them."""
    agent = agent_of(DONE)
    await keeper.adopt(bare("ordered", 18, spoken=spoken, **kept), agent=agent)
    assert (await keeper.resume(agent, turn_id="t-ordered")).status == "success"
    assert isinstance(agent.model, PoppingModel)
    shown = agent.model.requests[0].messages
    assert [message.role.value for message in shown] == ["user", "assistant", "tool", "tool"]
    calls = shown[1].metadata["tool_calls"]
    assert [(call["id"], call["function"]["name"]) for call in calls] == [("call-a", "echo"), ("call-b", "echo")]
    assert {call["function"]["arguments"] for call in calls} == {kept.get("argumentsText", '{"v":1}')}
    history = await keeper.history("t-ordered")
    assert history is not None
    assert history.state.first_round == 1


async def test_what_is_missing_of_a_call_is_told_with_its_path(keeper: Keeper) -> None:
    """Nothing is appended, and nothing made up."""
    checkpoint = bare("ordered", 18, arguments={})
    nameless = replace(checkpoint, completed_tool_results=[])
    without_id = [replace(one, metadata={}) if one.role.value == "tool" else one for one in checkpoint.messages]
    for broken, field in (
        (nameless, "messages[2].metadata.name"),
        (replace(checkpoint, messages=without_id), "messages[2].metadata.tool_call_id"),
    ):
        with pytest.raises(InvalidInput) as refused:
            await keeper.adopt(broken)
        assert refused.value.field == field
    assert await keeper.history("t-ordered") is None


async def test_a_result_of_the_open_round_is_not_taken_for_that_of_an_earlier_call(keeper: Keeper) -> None:
    """5.1, 2: ids repeat. The arguments kept with the second round's result are not those of the first round's call."""
    told = bare("ordered", 18, arguments={"v": "first"})
    held = bare("ordered", 9)
    second = replace(held.completed_tool_results[0], metadata={"arguments": {"v": "second"}})
    checkpoint = replace(
        told,
        iteration=1,
        completed_tool_results=[*told.completed_tool_results, second],
        pending_model_response=held.pending_model_response,
        pending_tool_requests=held.pending_tool_requests,
    )
    agent = agent_of(DONE)
    await keeper.adopt(checkpoint, agent=agent)
    assert (await keeper.resume(agent, turn_id="t-ordered")).status == "success"
    assert isinstance(agent.model, PoppingModel)
    spoken = [message for message in agent.model.requests[0].messages if message.role.value == "assistant"]
    assert [[call["function"]["arguments"] for call in message.metadata["tool_calls"]] for message in spoken] == [
        ['{"v":"first"}'] * 2,
        ['{"v":"call-a"}', '{"v":"call-b"}'],
    ]


async def test_the_rest_of_a_round_of_another_engine(keeper: Keeper) -> None:
    """Row 25: only the second tool runs, the model sees both results; the stable prefix and the inputs are kept (row 27)."""
    tools = Tools("echo", outputs={"call-b": "out-call-b"})
    agent = agent_of(DONE, tools=tools)
    await keeper.adopt(traced("ordered", last_sequence=9), agent=agent)
    durability = Durability()
    assert (await keeper.resume(agent, turn_id="t-ordered", durability=durability)).status == "success"
    assert (tools.effects, asked(agent)) == ({"call-b": 1}, [1])
    assert isinstance(agent.model, PoppingModel)
    assert [message.text for message in agent.model.requests[0].messages] == [
        "hi",
        "calling",
        "out-call-a",
        "out-call-b",
    ]
    last = durability.checkpoints[-1]
    assert (last["completedModelIterations"], last["stablePrefixMessages"], last["inputs"]) == (2, 1, {"k": "v"})
    assert {event["runId"] for event in durability.events} == {"run-1"}


async def test_a_checkpoint_that_does_not_say_its_stable_prefix(keeper: Keeper) -> None:
    """Row 27: it has none."""
    tree = to_tree(traced("ordered", last_sequence=18))
    del tree["stablePrefixMessages"]
    await keeper.adopt(from_tree(EngineCheckpoint, tree).value)
    adopted = await keeper.checkpoint("t-ordered")
    assert adopted is not None
    assert adopted.stable_prefix_messages == 0


async def test_an_answer_to_an_imported_doubt_is_counted_once(keeper: Keeper) -> None:
    """Row 9, elsewhere: the answer that somebody knows is the first one of the turn."""
    await keeper.adopt(traced("indet_model", last_sequence=5))
    await keeper.resolve_model("t-indet_model", "happened", who="ann", why="seen", response=DONE)
    agent = agent_of()
    assert (await keeper.resume(agent, turn_id="t-indet_model")).output == "done"
    final = await keeper.checkpoint("t-indet_model")
    assert final is not None
    assert (final.completed_model_iterations, final.iteration, asked(agent)) == (1, 0, [])


async def test_a_look_up_is_asked_for_the_call_that_was_made_there(keeper: Keeper) -> None:
    """1.8: under its own invocation id, with what it was shown, which need not be the conversation."""
    checkpoint = traced("indet_model", last_sequence=5)
    unknown = checkpoint.model_reconciliation
    assert unknown is not None
    memory = Message(role=Role.SYSTEM, parts=[TextPart(value="what its host remembers")])
    snapshot = replace(unknown.request.context, messages=[memory, *unknown.request.context.messages])
    unknown = replace(
        unknown, request=replace(unknown.request, context=snapshot), metadata={"phase": "request_dispatch"}
    )
    await keeper.adopt(replace(checkpoint, model_reconciliation=unknown))
    adopted = await keeper.checkpoint("t-indet_model")
    assert adopted is not None
    assert (adopted.model_reconciliation, adopted.active_invocation_id) == (unknown, unknown.invocation_id)
    told = [event.payload for event in await keeper.events("t-indet_model") if event.kind.value == "context_prepared"]
    assert told == [to_tree(snapshot)]
    requests: list[ModelRequest] = []

    async def look_up(request: ModelRequest) -> DidNotHappen:
        requests.append(request)
        return DidNotHappen("never arrived")

    agent = agent_of(DONE, unknown_model="reconcile", reconcile_model=look_up)
    assert (await keeper.resume(agent, turn_id="t-indet_model")).status == "success"
    (asked_for,) = requests
    assert (asked_for.invocation_id, asked_for.attempt) == (unknown.invocation_id, unknown.failed_attempt)
    assert (asked_for.messages, asked_for.context) == (snapshot.messages, snapshot)
    assert isinstance(agent.model, PoppingModel)
    (made_again,) = agent.model.requests
    assert made_again.invocation_id != unknown.invocation_id
    assert [message.text for message in made_again.messages] == ["hi"]


async def test_no_call_in_doubt_is_run_where_several_are(keeper: Keeper) -> None:
    """Row 3, imported: neither a second call in doubt nor one that is done behind the first is taken for a pending one."""
    outputs: dict[str, Any] = {"call-a": OutcomeUnknown("cut"), "call-c": OutcomeUnknown("cut")}
    tools = Tools("echo", outputs=outputs)
    three = answer(("call-a", "echo"), ("call-b", "echo"), ("call-c", "echo"), spoken="calling")
    await keeper.run(Agent(PoppingModel(three), tools.all), "hi", turn_id="t")
    exported = await keeper.checkpoint("t")
    assert exported is not None
    assert (len(exported.completed_tool_results), exported.pending_tool_requests) == (3, [])
    async with await Keeper.open("sqlite:///:memory:") as other:
        await other.adopt(exported)
        left = Tools("echo")
        result = await other.resume(agent_of(DONE, tools=left), turn_id="t")
        assert (result.status, result.open_slots) == ("reconciliation_required", ((0, 0), (0, 2)))
        for slot in (0, 2):
            await other.resolve_tool("t", 0, slot, "happened", who="ann", why="seen", result="confirmed")
        assert (await other.resume(agent_of(DONE, tools=left), turn_id="t")).status == "success"
        assert left.effects == {}


async def test_the_identity_of_a_delegated_run_is_on_everything(keeper: Keeper) -> None:
    """Rows 28 and 29: session, run, parent and depth are kept independently of each other, in a log of the run's own."""
    child = replace(traced("ordered", last_sequence=9), run_id="child", parent_run_id="run-1", delegation_depth=2)
    scope = await keeper.adopt(child)
    await keeper.resume(agent_of(DONE), turn_id="t-ordered", scope=scope)
    assert await keeper.history("t-ordered") is None
    checkpoint = await keeper.checkpoint("t-ordered", scope)
    assert checkpoint is not None
    for one in (*await keeper.events("t-ordered", scope), checkpoint):
        assert (one.session_id, one.run_id, one.parent_run_id, one.delegation_depth) == (
            "s-ordered",
            "child",
            "run-1",
            2,
        )


async def test_the_same_id_in_two_rounds(keeper: Keeper) -> None:
    """Row 32 and 5.1, 2: the second round sees the second result, here and where it was imported in the middle."""
    outputs = iter(["first", "second"])

    class Changing(Tools):
        """Answers differently each time."""

    tools = Changing("echo")
    tools.outputs = {"call-a": next(outputs)}
    agent = agent_of(ONE, ONE, DONE, tools=tools)
    model = agent.model
    assert isinstance(model, PoppingModel)
    invoke = model.invoke

    async def noticed(request: Any) -> ModelInvocationResponse:
        if request.round_index == 1:
            tools.outputs = {"call-a": next(outputs)}
        return await invoke(request)

    model.invoke = noticed  # pyright: ignore[reportAttributeAccessIssue]  # between two rounds
    assert (await keeper.run(agent, "hi", turn_id="t")).status == "success"
    assert [message.text for message in model.requests[2].messages if message.role.value == "tool"] == [
        "first",
        "second",
    ]
    history = await keeper.history("t")
    assert history is not None
    for at in range(1, history.tail + 1):
        exported = await keeper.checkpoint("t", at=at)
        assert exported is not None
        if exported.iteration != 1 or exported.pending_model_response is None:
            continue
        async with await Keeper.open("sqlite:///:memory:") as other:
            await other.adopt(exported)
            left = agent_of(DONE, tools=Tools("echo", outputs={"call-a": "second"}))
            await other.resume(left, turn_id="t")
            assert isinstance(left.model, PoppingModel)
            shown = [message.text for message in left.model.requests[0].messages if message.role.value == "tool"]
            assert shown == ["first", "second"]


async def test_a_whole_batch_that_is_listed_as_pending(keeper: Keeper) -> None:
    """5.1, 3: another engine keeps all requests pending; the one that has its result is not run again."""
    checkpoint = traced("ordered", last_sequence=9)
    assert checkpoint.pending_model_response is not None
    whole = replace(checkpoint, pending_tool_requests=checkpoint.pending_model_response.tool_requests)
    tools = Tools("echo")
    await keeper.adopt(whole)
    adopted = await keeper.checkpoint("t-ordered")
    assert adopted is not None
    assert [request.id for request in adopted.pending_tool_requests] == ["call-b"]
    assert (await keeper.resume(agent_of(DONE, tools=tools), turn_id="t-ordered")).status == "success"
    assert tools.effects == {"call-b": 1}


# --- with a resume context ----------------------------------------------------------------------------------------


def resumed(checkpoint: EngineCheckpoint, tail: int = 0, *, rounds: int = 7, attempts: int = 5) -> ResumeContext:
    """How a host wants it to be resumed (1.9)."""
    return ResumeContext(
        checkpoint=checkpoint, max_iterations=rounds, max_model_attempts=attempts, last_journal_sequence=tail
    )


@pytest.mark.parametrize(
    ("tail", "first"),
    [(0, 20), (18, 20), (19, 20), (40, 41)],
    ids=["none", "what it includes", "its own event", "a longer one"],
)
async def test_events_go_on_behind_the_tail_of_the_journal(keeper: Keeper, tail: int, first: int) -> None:
    """Rows 27 and 28: never with the number of the checkpoint's own `checkpoint_created`, which is in the journal (2.5)."""
    checkpoint = traced("ordered", last_sequence=18)
    await keeper.adopt(resume=resumed(checkpoint, tail))
    agent = agent_of(DONE)
    assert (await keeper.resume(agent, turn_id="t-ordered")).status == "success"
    events = await keeper.events("t-ordered")
    assert [event.sequence for event in events] == list(range(first, first + len(events)))
    assert events[0].payload == {"maxIterations": 7, "startIteration": 1, "inputs": {"k": "v"}}


async def test_no_number_and_no_id_of_the_journal_is_used_again(keeper: Keeper) -> None:
    """5.1, 4: begun with any of a turn's checkpoints and the whole journal's tail, the ids of both are unique together."""
    await keeper.run(agent_of(BOTH, DONE), "hi", turn_id="t")
    history = await keeper.history("t")
    assert history is not None
    for at in range(1, history.tail + 1):
        exported, journal = await keeper.checkpoint("t", at=at), await keeper.events("t", at=at)
        assert exported is not None
        async with await Keeper.open("sqlite:///:memory:") as other:
            await other.adopt(resume=resumed(exported, len(journal)))
            left = [BOTH, DONE][exported.completed_model_iterations :]
            assert (await other.resume(agent_of(*left), turn_id="t")).status == "success"
            events = [*journal, *await other.events("t")]
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        ids = [event.id for event in events]
        ids += [e.payload["checkpointId"] for e in events if e.kind.value == "checkpoint_created"]
        assert len(set(ids)) == len(ids)


async def test_its_bounds_count_where_the_agent_has_none(keeper: Keeper) -> None:
    """1.9, 2.12: iterations of the turn, attempts at one of its decisions."""
    checkpoint = traced("ordered", last_sequence=18)
    await keeper.adopt(resume=resumed(checkpoint, rounds=2, attempts=1))
    stopped = await keeper.resume(agent_of(ConnectionError("503"), DONE), turn_id="t-ordered")
    assert (stopped.error_kind, stopped.message) == ("model_error", "ConnectionError: 503")
    failed = [e.payload for e in await keeper.events("t-ordered") if e.kind.value == "model_invocation_failed"]
    assert [(one["attempt"], one["exhausted"]) for one in failed] == [(0, True)]
    ended = await keeper.resume(agent_of(ONE), turn_id="t-ordered")
    assert (ended.error_kind, ended.rounds) == ("max_iterations", 2)
    again = agent_of(DONE)
    assert (await keeper.resume(again, turn_id="t-ordered")).error_kind == "max_iterations"
    assert asked(again) == []
    assert (await keeper.resume(agent_of(DONE, max_rounds=3), turn_id="t-ordered")).status == "success"


async def test_bounds_that_are_none_are_read_as_the_contract_reads_them(keeper: Keeper) -> None:
    """1.9: no iterations below none, and three attempts where none is allowed."""
    checkpoint = replace(traced("ordered", last_sequence=4), iteration=0)
    await keeper.adopt(resume=resumed(checkpoint, rounds=-4, attempts=0))
    agent = agent_of(DONE)
    assert (await keeper.resume(agent, turn_id="t-ordered")).error_kind == "max_iterations"
    assert asked(agent) == []


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"last_journal_sequence": -1}, "resume.lastJournalSequence"),
        ({"last_journal_sequence": 17}, "resume.lastJournalSequence"),
        ({"max_iterations": 0}, "resume.maxIterations"),
        ({"checkpoint": None}, "resume.checkpoint"),
    ],
    ids=["a tail before the first", "a tail before the checkpoint", "no iteration left", "another checkpoint"],
)
async def test_a_resume_context_that_contradicts_itself_is_refused(
    keeper: Keeper, changed: dict[str, Any], field: str
) -> None:
    """2.2: with the path, and nothing is appended."""
    checkpoint = traced("ordered", last_sequence=18)
    if "checkpoint" in changed:
        changed = {"checkpoint": traced("ordered", last_sequence=9)}
    with pytest.raises(InvalidInput) as refused:
        await keeper.adopt(checkpoint, resume=replace(resumed(checkpoint), **changed))
    assert refused.value.field == field
    assert await keeper.history("t-ordered") is None
    with pytest.raises(InvalidInput):
        await keeper.adopt()


async def test_who_adopts_again_with_other_bounds_is_told(keeper: Keeper) -> None:
    """The first one counts, and a second one that would be ignored is refused."""
    checkpoint = traced("ordered", last_sequence=18)
    for _ in range(2):
        await keeper.adopt(resume=resumed(checkpoint, 19))
    for other in (None, resumed(checkpoint, 20), resumed(checkpoint, 19, rounds=8)):
        with pytest.raises(TurnCheckpointConflict):
            await keeper.adopt(checkpoint, resume=other)
    history = await keeper.history("t-ordered")
    assert history is not None
    assert history.tail == 1
