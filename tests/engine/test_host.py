"""The host's ports: policies, context, messages of a round, retries, the stream (engine-contract.md 1.13 to 1.16, 2.18)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from tests.conformance.support import ClockedStore
from tests.engine.support import asks_once
from turnkeeper import Agent, Keeper, ModelInvocationResponse, ModelRequest, ScriptedModel, Tool
from turnkeeper.engine.contract_ports import HostPolicyError
from turnkeeper.engine.host import Host
from turnkeeper.engine.transcript import tool_exchange
from turnkeeper.engine.wire import (
    ContextCandidate,
    ContextRequest,
    EngineEventKind,
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    Message,
    ModelInvocationContextSnapshot,
    ModelToolResult,
    RetryPolicyRequest,
    Role,
    TextChunk,
    TextPart,
)
from turnkeeper.models.scripted import calls, text

pytestmark = pytest.mark.anyio


def say(words: str, role: Role = Role.SYSTEM) -> Message:
    """A message."""
    return Message(role=role, parts=[TextPart(value=words)])


class Policy:
    """Puts a rule in front of the conversation, once, and shouts at the end."""

    def __init__(self, **broken: Exception) -> None:
        self.broken = broken
        self.asked: list[int] = []

    async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
        """See `HostPolicyPort`."""
        self.asked.append(request.iteration)
        if "before_model" in self.broken:
            raise self.broken["before_model"]
        messages = list(request.messages)
        if messages[0].text != "be kind":
            messages.insert(0, say("be kind"))
        prefix = len(messages) if request.iteration == 0 else request.stable_prefix_messages
        return HostPolicyResult(messages=messages, stable_prefix_messages=prefix, metadata={"by": [None]})

    async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
        """See `HostPolicyPort`."""
        if "before_commit" in self.broken:
            raise self.broken["before_commit"]
        return FinalOutputPolicyResult(output=f"{request.output}!")


def act() -> str:
    """A tool."""
    return "acted"


async def test_a_policy_that_rewrites(keeper: Keeper) -> None:
    """Section 7, rows 13 and 14: durable before the model call, told once; a policy that changes nothing is not told."""
    policy = Policy()
    model = asks_once(("act", {}))
    result = await keeper.run(Agent(model, [Tool(act)], host=Host(policy=policy)), "go", turn_id="t")
    assert (result.status, result.output) == ("success", "done!")
    assert [message.text for message in model.requests[0].messages] == ["be kind", "go"]
    assert policy.asked == [0, 1]
    events = await keeper.events("t")
    kinds = [event.kind.value for event in events]
    assert kinds[:4] == ["turn_started", "policy_applied", "checkpoint_created", "context_prepared"]
    assert kinds.count("policy_applied") == 1
    assert [m["parts"][0]["value"] for m in events[1].payload["messages"]] == ["be kind", "go"]
    assert (events[1].payload["stablePrefixMessages"], events[1].payload["metadata"]) == (2, {"by": [None]})
    assert [e.payload["stablePrefixMessages"] for e in events if e.kind is EngineEventKind.CONTEXT_PREPARED] == [2, 2]
    assert events[-1].payload == {"status": "success", "output": "done!"}
    rewritten = await keeper.checkpoint("t", at=2)
    assert rewritten is not None
    flags = (rewritten.resume_same_iteration, rewritten.policy_applied_for_iteration, rewritten.iteration)
    assert flags == (True, True, 0)
    assert [message.text for message in rewritten.messages] == ["be kind", "go"]


async def test_a_rewrite_is_not_made_again_after_a_crash(keeper: Keeper, store: ClockedStore) -> None:
    """2.8: a policy run behind its checkpoint is not re-run; the model call is."""

    class Dies:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            dead.cancel()
            await anyio.sleep_forever()
            raise AssertionError

    with anyio.CancelScope() as dead:
        await keeper.run(Agent(Dies(), host=Host(policy=Policy())), "go", turn_id="t")
    await store.advance_clock(30_000)
    policy = Policy()
    model = ScriptedModel(["hello"])
    assert (await keeper.run(Agent(model, host=Host(policy=policy)), "go", turn_id="t")).output == "hello!"
    assert policy.asked == []
    assert [message.text for message in model.requests[0].messages] == ["be kind", "go"]


@pytest.mark.parametrize("where", ["before_model", "before_commit"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(HostPolicyError("input_guardrail_denied", "no"), "input_guardrail_denied"), (RuntimeError("x"), "policy_error")],
)
async def test_a_policy_that_refuses_fails_the_run(keeper: Keeper, where: str, error: Exception, kind: str) -> None:
    """Section 7, row 12; 2.16. Before the model it is not asked; at the end it is not asked again."""
    model = ScriptedModel(["hello"])
    result = await keeper.run(Agent(model, host=Host(policy=Policy(**{where: error}))), "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", kind)
    assert len(model.requests) == (where == "before_commit")
    assert (await keeper.run(Agent(model, host=Host(policy=Policy())), "go", turn_id="t")).output == "hello!"
    assert len(model.requests) == 1


async def test_a_policy_must_not_lose_a_result(keeper: Keeper) -> None:
    """Issue C, 8: a transcript that providers accept, after any trim."""

    class Trims(Policy):
        async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
            return HostPolicyResult(messages=[*request.messages][-1:], stable_prefix_messages=0)

    agent = Agent(asks_once(("act", {})), [Tool(act)], host=Host(policy=Trims()))
    result = await keeper.run(agent, "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "policy_error")


class Memory:
    """A context source."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids

    async def load(self, request: ContextRequest) -> Sequence[ContextCandidate]:
        """See `ContextSource`."""
        return [ContextCandidate(id=one, source="memory", messages=[say(f"memory {one}")]) for one in self.ids]


class Drops:
    """A transform that drops one candidate."""

    name = "drops"

    async def apply(
        self, request: ContextRequest, candidates: Sequence[ContextCandidate]
    ) -> Sequence[ContextCandidate]:
        """See `ContextTransform`."""
        return [candidate for candidate in candidates if candidate.id != "b"]


async def test_context_is_shown_and_not_kept_in_the_conversation(keeper: Keeper) -> None:
    """Section 7, row 31; 2.18: decisions are recorded, also of what was dropped; attempts send the same."""
    failing = [ConnectionError("down")]

    class Model(ScriptedModel):
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            if failing:
                self.requests.append(request)
                raise failing.pop()
            return await super().invoke(request)

    model = Model([calls(("act", {})), "done"])
    host = Host(sources=[Memory("a", "b")], transforms=[Drops()])
    assert (await keeper.run(Agent(model, [Tool(act)], host=host), "go", turn_id="t")).status == "success"
    shown = [[message.text for message in request.messages] for request in model.requests]
    assert shown == [["go", "memory a"], ["go", "memory a"], ["go", "", "acted", "memory a"]]
    final = await keeper.checkpoint("t")
    assert final is not None
    assert [message.text for message in final.messages] == ["go", "", "acted", "done"]
    prepared = [event for event in await keeper.events("t") if event.kind is EngineEventKind.CONTEXT_PREPARED]
    assert len(prepared) == 2
    for event, request in zip(prepared, model.requests[1:], strict=True):
        assert [m["parts"][0]["value"] for m in event.payload["messages"] if m["parts"]] == [
            message.text for message in request.messages if message.parts
        ]
        decided = [(one["candidateId"], one["disposition"], one.get("rank")) for one in event.payload["decisions"]]
        assert decided == [("a", "included", 0), ("b", "excluded", None)]
        assert event.payload["invocationId"] == event.invocation_id


class Packs:
    """A packer that breaks one rule of the snapshot."""

    name = "packs"

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    async def pack(
        self, request: ContextRequest, candidates: Sequence[ContextCandidate]
    ) -> ModelInvocationContextSnapshot:
        """See `ContextPackingStrategy`."""
        made = ModelInvocationContextSnapshot(
            id="x",
            session_id=request.session_id,
            turn_id=request.turn_id,
            invocation_id=request.invocation_id,
            iteration=request.iteration,
            messages=request.messages,
            context_state=request.context_state,
        )
        return replace(made, **self.wrong)


@pytest.mark.parametrize(
    "host",
    [
        Host(sources=[Memory("a"), Memory("a")]),
        Host(packing=Packs(stable_prefix_messages=9)),
        Host(packing=Packs(turn_id="another")),
        Host(packing=Packs(messages=[])),
        Host(packing=Packs(nonsense=1)),
    ],
)
async def test_a_context_that_breaks_its_rules_fails_the_run(keeper: Keeper, host: Host) -> None:
    """2.16 `context_error`; the model is not asked. An empty context is the packer's own choice."""
    model = ScriptedModel(["hello"])
    result = await keeper.run(Agent(model, host=host), "go", turn_id="t")
    if isinstance(host.packing, Packs) and host.packing.wrong == {"messages": []}:
        assert result.status == "success"
        return
    assert (result.status, result.error_kind) == ("failed", "context_error")
    assert model.requests == []


class Formats:
    """A formatter of tool rounds."""

    def __init__(self, *, loses: bool = False) -> None:
        self.loses = loses
        self.asked = 0

    def format_tool_exchange(
        self, response: ModelInvocationResponse, results: Sequence[ModelToolResult]
    ) -> Sequence[Message]:
        """See `ConversationPort`."""
        self.asked += 1
        messages = tool_exchange(response, results, 0)
        return messages[:-1] if self.loses else [say("a round", Role.DEVELOPER), *messages]


async def test_the_host_formats_a_round(keeper: Keeper) -> None:
    """Section 7, rows 20 and 21: results are durable first; a bad format fails the run, and a good one goes on from there."""
    model, ran = asks_once(("act", {}), ("act", {})), [0]

    def counted() -> str:
        ran[0] += 1
        return "acted"

    tools = [Tool(counted, name="act")]
    bad = Formats(loses=True)
    result = await keeper.run(Agent(model, tools, host=Host(conversation=bad)), "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "conversation_format_error")
    good = Formats()
    assert (await keeper.run(Agent(model, tools, host=Host(conversation=good)), "go", turn_id="t")).status == "success"
    assert (bad.asked, good.asked, ran) == (1, 1, [2])
    assert model.requests[1].messages[1].text == "a round"


async def test_the_host_waits_between_attempts(keeper: Keeper) -> None:
    """Section 7, row 10: asked behind each failed attempt but the last."""
    asked: list[RetryPolicyRequest] = []

    class Retry:
        async def backoff(self, request: RetryPolicyRequest) -> None:
            asked.append(request)

    class Down:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            if len(asked) == 2:
                return text("hello")
            raise ConnectionError("down")

    agent = Agent(Down(), host=Host(retry=Retry()))
    assert (await keeper.run(agent, "go", turn_id="t")).status == "success"
    told = [(one.failed_attempts, one.next_attempt, one.max_attempts, one.reason) for one in asked]
    assert told == [(1, 2, 3, "down"), (2, 3, 3, "down")]


async def test_a_backoff_that_fails_fails_the_run(keeper: Keeper) -> None:
    """2.16 `retry_policy_error`."""

    class Retry:
        async def backoff(self, request: RetryPolicyRequest) -> None:
            raise RuntimeError("enough")

    class Down:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            raise ConnectionError("down")

    result = await keeper.run(Agent(Down(), host=Host(retry=Retry())), "go", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "retry_policy_error")


@pytest.mark.parametrize("fails", [True, False])
async def test_the_stream_changes_nothing(keeper: Keeper, *, fails: bool) -> None:
    """1.16: what a host does with the pieces of an answer is not the turn's business."""
    shown: list[str] = []

    class Stream:
        async def emit(self, chunk: Any) -> None:
            shown.append(chunk.value)
            if fails:
                raise RuntimeError("closed")

    class Speaks:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            for piece in ("hel", "lo"):
                await request.stream.emit(TextChunk(value=piece))
            return text("hello")

    result = await keeper.run(Agent(Speaks(), host=Host(stream=Stream())), "go", turn_id="t")
    assert (result.status, result.output, shown) == ("success", "hello", ["hel", "lo"])
