"""A host for the contract tests: a scripted model, tools that answer by request id, and ports that take note of everything."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from turnkeeper import (
    Agent,
    Message,
    ModelInvocationResponse,
    ModelRequest,
    ModelToolRequest,
    Reply,
    ReplyPort,
    TextPart,
    Tool,
    ToolContext,
)
from turnkeeper.engine.documents import to_tree
from turnkeeper.engine.wire import EngineCheckpoint, EngineEvent, EnginePermissionDecision, Role


def answer(
    *requests: tuple[str, str], spoken: str | None = None, output: Any = None, **more: Any
) -> ModelInvocationResponse:
    """A response: its tool requests are (id, name), each with the arguments `{"v": id}`."""
    said = [] if spoken is None else [Message(role=Role.ASSISTANT, parts=[TextPart(value=spoken)])]
    asked = [ModelToolRequest(id=request_id, name=name, arguments={"v": request_id}) for request_id, name in requests]
    return ModelInvocationResponse(output=output, assistant_messages=said, tool_requests=asked, **more)


DONE = answer(spoken="done", output="done")
BOTH = answer(("call-a", "echo"), ("call-b", "echo"), spoken="calling")
ONE = answer(("call-a", "echo"), spoken="calling")


class PoppingModel:
    """Gives its answers in order, whatever it is asked, and raises those that are exceptions (3.3)."""

    def __init__(self, *answers: ModelInvocationResponse | Exception) -> None:
        self.left = list(answers)
        self.requests: list[ModelRequest] = []

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        self.requests.append(request)
        if not self.left:
            raise RuntimeError("scripted model response exhausted")
        said = self.left.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


class Tools:
    """Tools of those names: each answers with what is given for its request's id, else with its arguments (3.3)."""

    def __init__(self, *names: str, outputs: Mapping[str, Any] | None = None) -> None:
        self.outputs = dict(outputs or {})
        """By request id; an exception is raised, and only once."""
        self.effects: Counter[str] = Counter()
        """How often each request was executed."""
        self.all = [self._named(name) for name in names]

    def _named(self, name: str) -> Tool:
        async def run(context: ToolContext, **arguments: Any) -> Any:
            request_id = context.call_id or ""
            self.effects[request_id] += 1
            given = self.outputs.get(request_id, json.dumps(arguments, separators=(",", ":")))
            if isinstance(given, Exception):
                del self.outputs[request_id]
                raise given
            return given

        return Tool(run, name=name)


def agent_of(*answers: ModelInvocationResponse | Exception, tools: Tools | None = None, **options: Any) -> Agent:
    """An agent that runs one tool behind the other."""
    return Agent(PoppingModel(*answers), (tools or Tools("echo")).all, parallel_tools=False, **options)


def asked(agent: Agent) -> list[int]:
    """The rounds that its model was asked for."""
    assert isinstance(agent.model, PoppingModel)
    return [request.round_index for request in agent.model.requests]


class Denies:
    """A permission port that denies tools by their names."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        self._names = names
        self._reason = reason

    async def authorize(self, request: ModelToolRequest) -> EnginePermissionDecision:
        """See `EnginePermissionPort`."""
        if request.name in self._names:
            return EnginePermissionDecision(approved=False, reason=self._reason)
        return EnginePermissionDecision(approved=True, reason="allow_all")


class Durability:
    """A durability port that keeps what it gets in memory, as documents, and that can be made to fail.

    Attributes:
        log: the writes, in the form of the shared traces.
        fail_at: the kind of event at which it fails, each time, with nothing kept; None for never.
    """

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        self.fail_at: str | None = None

    def _may_fail(self, *events: EngineEvent) -> None:
        if self.fail_at in [event.kind.value for event in events]:
            raise OSError("disk full")

    async def append(self, event: EngineEvent) -> None:
        """See `EngineDurabilityPort`."""
        self._may_fail(event)
        self.log.append({"op": "append", "event": to_tree(event)})

    async def append_with_checkpoint(self, events: Sequence[EngineEvent], checkpoint: EngineCheckpoint) -> None:
        """See `EngineDurabilityPort`."""
        self._may_fail(*events)
        written = {"events": [to_tree(event) for event in events], "checkpoint": to_tree(checkpoint)}
        self.log.append({"op": "appendWithCheckpoint", **written})

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, in order."""
        return [event for write in self.log for event in write.get("events", [write.get("event")])]

    @property
    def kinds(self) -> list[str]:
        """Their kinds."""
        return [event["kind"] for event in self.events]

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """All checkpoints, in order."""
        return [write["checkpoint"] for write in self.log if "checkpoint" in write]


class CountingDurability(Durability):
    """The same, and it can tell how far it is."""

    async def last_sequence(self, session_id: str, turn_id: str, run_id: str) -> int:
        """See `ReadableDurability`."""
        ours = (session_id, turn_id, run_id)
        told = [e["sequence"] for e in self.events if (e["sessionId"], e["turnId"], e["runId"]) == ours]
        return max(told, default=0)


class PostCommit:
    """Stands for the post-commit port: a channel that knows the key of each effect, so it may be called again (2.15)."""

    def __init__(self) -> None:
        self.sent: list[Reply] = []

    @property
    def port(self) -> ReplyPort:
        """The port."""

        async def send(reply: Reply) -> str:
            self.sent.append(reply)
            return f"m{len(self.sent)}"

        return ReplyPort(send, keyed=True)


def objects(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects in a document, from the outside in."""
    if isinstance(tree, dict):
        found = cast("dict[str, Any]", tree)
        yield found
        for item in found.values():
            yield from objects(item)
    elif isinstance(tree, list):
        for item in cast("list[Any]", tree):
            yield from objects(item)


def with_the_calls(log: Any) -> None:
    """Messages of a tool round get the calls (`tool_calls`) and the tools' names, which providers demand and no trace has."""
    responses = [found for found in objects(log) if isinstance(found.get("toolRequests"), list)]
    asked = {request["id"]: request for response in responses for request in response["toolRequests"]}
    for found in objects(log):
        messages = found.get("messages", [])
        for index, message in enumerate(messages):
            answered: list[str] = []
            for behind in messages[index + 1 :]:
                if behind["role"] != "tool":
                    break
                answered.append(behind["metadata"]["tool_call_id"])
            if message["role"] == "assistant" and answered:
                message["metadata"]["tool_calls"] = [_call(asked[one]) for one in answered]
        for message in messages:
            if message["role"] == "tool":
                message["metadata"]["name"] = asked[message["metadata"]["tool_call_id"]]["name"]


def _call(request: dict[str, Any]) -> dict[str, Any]:
    arguments = ",".join(f'"{key}":"{value}"' for key, value in request["arguments"].items())
    return {
        "id": request["id"],
        "type": "function",
        "function": {"name": request["name"], "arguments": f"{{{arguments}}}"},
    }
