"""The shared runTurn vectors, run by our engine through `Keeper.run` (engine-contract.md 3.3)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import msgspec
import pytest

from tests.contract.host import Denies, Durability, PoppingModel, PostCommit, Tools
from tests.contract.material import vectors
from turnkeeper import Agent, Keeper, Message, ModelInvocationResponse, ModelToolRequest, TextPart
from turnkeeper.engine.wire import DelegatedStateReference, InvocationContextState, Portability, Role

pytestmark = pytest.mark.anyio

NAMES = (
    "cancel_before_context",
    "delegated_provider_state",
    "final_output",
    "ordered_tool_round",
    "permission_denial_is_model_visible",
    "memory_context_is_model_visible",
)


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    """A Keeper of its own for each vector."""
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        yield keeper


def run_turn_vectors() -> dict[str, dict[str, Any]]:
    """The vectors by name."""
    cases = [*vectors("vectors.json"), *vectors("runTurn-added.json")]
    return {case["vector"]["name"]: case["vector"] for case in cases if case["operation"] == "runTurn"}


def test_all_of_them_are_run() -> None:
    """A vector that is added to the shared material is not left out silently."""
    assert set(run_turn_vectors()) == set(NAMES)


def scripted(said: dict[str, Any]) -> ModelInvocationResponse:
    """A response of the script (3.3)."""
    following = None
    if "nextPortability" in said or "delegatedState" in said:
        following = InvocationContextState(
            portability=Portability(said.get("nextPortability", "portable")),
            delegated_state=msgspec.convert(said.get("delegatedState", []), list[DelegatedStateReference]),
        )
    spoken = [Message(role=Role.ASSISTANT, parts=[TextPart(value=said["assistant"])])] if "assistant" in said else []
    return ModelInvocationResponse(
        output=said.get("output"),
        assistant_messages=spoken,
        tool_requests=msgspec.convert(said.get("tools", []), list[ModelToolRequest]),
        next_context_state=following,
    )


def conversation(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that the host begins the turn with: its core memory stands before the conversation (3.3)."""
    entries = given.get("memory", {}).get("store", {}).get("entries", [])
    core = "".join(f"- {entry['content']}\n" for entry in entries if entry["category"] == "core")
    memory = [{"role": "system", "content": f"## Memory\n{core}"}] if core else []
    return [*memory, *given["messages"]]


def said_to(provider: PoppingModel) -> list[dict[str, str]]:
    """What the provider was sent first."""
    return [{"role": message.role.value, "content": message.text} for message in provider.requests[0].messages]


def column(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """A field of each row."""
    return [row[name] for row in rows]


@pytest.mark.parametrize("name", NAMES)
async def test_it_comes_out_as_the_vector_says(keeper: Keeper, name: str) -> None:
    """3.3: the keys that a vector expects, and what holds of all of them."""
    vector = run_turn_vectors()[name]
    given, expected = vector["input"], vector["expected"]
    model = PoppingModel(*(scripted(said) for said in given["model"]))
    requests = [request for said in given["model"] for request in said.get("tools", [])]
    tools = Tools(*dict.fromkeys(column(requests, "name")), outputs=given.get("toolOutputs"))
    denies = Denies(given.get("denyTools", []), "denied by vector")
    agent = Agent(model, tools.all, permission=denies, parallel_tools=False)
    durability, post_commit = Durability(), PostCommit()

    result = None
    with anyio.CancelScope() as run:
        if given.get("cancelBeforeRun"):
            run.cancel()
        result = await keeper.run(
            agent,
            conversation(given),
            turn_id=f"turn-{name}",
            session_id=f"session-{name}",
            reply=post_commit.port,
            durability=durability,
        )

    status = "cancelled" if result is None else result.status
    assert status == expected["status"]
    if "eventKinds" in expected:
        assert durability.kinds == expected["eventKinds"]
    assert column(durability.events, "sequence") == list(range(1, len(durability.events) + 1))
    assert len(post_commit.sent) == (status == "success")
    assert (None if result is None else result.output) == expected.get("output")
    last = durability.checkpoints[-1]
    assert last["completedModelIterations"] == expected["iterations"]
    snapshots = [event["payload"] for event in durability.events if event["kind"] == "context_prepared"]
    assert len(snapshots) == len(model.requests) == expected["snapshots"]
    if "snapshotStablePrefixes" in expected:
        assert column(snapshots, "stablePrefixMessages") == expected["snapshotStablePrefixes"]
    if "snapshotPortability" in expected:
        states = column(snapshots, "contextState")
        assert column(states, "portability") == expected["snapshotPortability"]
    results = last.get("completedToolResults", [])
    assert len(results) == expected["toolResults"]
    assert column(results, "requestId") == expected.get("toolResultOrder", [])
    committed = [e["payload"]["toolResult"] for e in durability.events if e["kind"] == "tool_result_committed"]
    assert committed == results
    assert all(tools.effects[one["requestId"]] == (one["outcome"] == "success") for one in results)
    if "commitPortability" in expected:
        assert last["contextState"]["portability"] == expected["commitPortability"]
    if "delegatedState" in expected:
        assert len(last["contextState"]["delegatedState"]) == expected["delegatedState"]
    if "providerMessages" in expected:
        assert said_to(model) == expected["providerMessages"]
