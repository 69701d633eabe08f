"""Field case 08: a policy that shortens the conversation must not cut a call from its result."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.conftest import shared_json
from turnkeeper import Agent, Host, Keeper, Message, ModelInvocationResponse, ModelRequest, TextPart
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    InvocationContextState,
    message_from,
)
from turnkeeper.models.scripted import text

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/08-trim-splits-tool-pair.json")
ALLOWED: list[int] = CASE["cut_k_allowed"]
REFUSED: list[int] = CASE["cut_k_must_be_refused_or_moved"]
NINE = [message_from(message, f"messages[{index}]") for index, message in enumerate(CASE["messages"])]


class Provider:
    """Refuses a broken pair, as real ones do, and counts."""

    def __init__(self) -> None:
        self.shown: list[list[Message]] = []
        self.answered_400 = 0

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        try:
            check_pairs(request.messages)
        except ValueError:
            self.answered_400 += 1
        self.shown.append(list(request.messages))
        return text("done")


class Policy:
    """Makes of the conversation what it is told to, at each round boundary."""

    def __init__(self, rewrite: Any) -> None:
        self.rewrite = rewrite
        self.asked = 0

    async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
        """See `HostPolicyPort`."""
        self.asked += 1
        messages = self.rewrite(list(request.messages))
        return HostPolicyResult(
            messages=messages, stable_prefix_messages=min(request.stable_prefix_messages, len(messages))
        )

    async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
        """See `HostPolicyPort`."""
        return FinalOutputPolicyResult(output=request.output)


def cut_at(k: int) -> Policy:
    """The case's policy."""

    def cut(messages: list[Message]) -> list[Message]:
        return [messages[0], *messages[k:]]

    return Policy(cut)


def nothing(messages: list[Message]) -> list[Message]:
    """Of nine messages, none."""
    return []


def reworded(messages: list[Message]) -> list[Message]:
    """The text of message 1 in other words."""
    return [messages[0], Message(role=messages[1].role, parts=[TextPart(value="u1, in short")]), *messages[2:]]


async def asked_once(keeper: Keeper, policy: Policy, provider: Provider) -> Any:
    """A turn whose model was asked before, and whose conversation is then the case's nine messages."""
    begun = EngineCheckpoint(
        id="c",
        session_id="s",
        turn_id="t",
        run_id="r",
        iteration=1,
        last_sequence=40,
        messages=NINE,
        stable_prefix_messages=CASE["stablePrefixMessages_before"],
        completed_model_iterations=2,
        context_state=InvocationContextState(),
    )
    await keeper.adopt(begun)
    return await keeper.resume(Agent(provider, host=Host(policy=policy)), turn_id="t")


@pytest.fixture
async def keeper() -> Any:
    """A Keeper."""
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        yield keeper


@pytest.mark.parametrize("k", [*ALLOWED, *REFUSED])
async def test_a_cut_is_accepted_or_refused_whole(keeper: Keeper, k: int) -> None:
    """Refused: the index and the call are named, nothing is stored, and the provider is not asked."""
    provider = Provider()
    result = await asked_once(keeper, cut_at(k), provider)
    found = await keeper.checkpoint("t")
    assert found is not None
    assert provider.answered_400 == 0
    if k in ALLOWED:
        assert result.status == "success"
        assert provider.shown == [[NINE[0], *NINE[k:]]]
        if k == 5:
            assert found.stable_prefix_messages <= CASE["expect_after_cut_at_5"]["stablePrefixMessages_at_most"]
        return
    assert (result.status, result.error_kind) == ("failed", "policy_error")
    assert "messages[1]" in result.message
    assert "the call '" in result.message
    assert provider.shown == []
    assert found.policy_applied_for_iteration is False
    assert found.messages == NINE


async def test_a_reworded_message_ends_the_stable_prefix(keeper: Keeper) -> None:
    """Nine messages as before, but the provider's cache ends before the second."""
    assert (await asked_once(keeper, Policy(reworded), Provider())).status == "success"
    found = await keeper.checkpoint("t")
    assert found is not None
    assert found.stable_prefix_messages <= 1


async def test_an_empty_conversation_is_refused(keeper: Keeper) -> None:
    """Nothing is stored."""
    result = await asked_once(keeper, Policy(nothing), Provider())
    assert (result.status, result.error_kind) == ("failed", "policy_error")
    found = await keeper.checkpoint("t")
    assert found is not None
    assert found.messages == NINE


async def test_a_policy_is_not_applied_twice(keeper: Keeper) -> None:
    """A crash between the policy and the model call: the same shortened history is used."""

    class Dies(Provider):
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            dead.cancel()
            await anyio.sleep_forever()
            raise AssertionError

    first, second, provider = cut_at(5), cut_at(5), Provider()
    with anyio.CancelScope() as dead:
        await asked_once(keeper, first, Dies())
    found = await keeper.checkpoint("t")
    assert found is not None
    assert found.policy_applied_for_iteration is True
    await keeper.store.advance_clock(60_000)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # the test clock
    result = await keeper.resume(Agent(provider, host=Host(policy=second)), turn_id="t")
    assert result.status == "success"
    assert (first.asked, second.asked) == (1, 0)
    assert provider.shown == [[NINE[0], *NINE[5:]]]
