"""Field case 03: a model call that timed out, or whose answer was lost, is not made again by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conformance.support import ClockedStore
from tests.conftest import opened, shared_json
from turnkeeper import Agent, Host, Keeper, ModelInvocationResponse, ModelRequest, NotSent, Tool, TurnResult
from turnkeeper.engine.wire import EngineCheckpoint
from turnkeeper.log.store import Store
from turnkeeper.models.scripted import calls, text

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/03-model-timeout-needs-reconciliation.json")
EXPECTED: dict[str, dict[str, Any]] = {point["id"]: point["expect"] for point in CASE["crash_points"]}
SEEN: dict[str, int] = {point["id"]: point["provider_calls_seen"] for point in CASE["crash_points"]}
DECISIONS: dict[str, dict[str, Any]] = {one["decision"]: one for one in CASE["decisions_for_b_and_c"]}
LEASE = 30.0


@pytest.fixture(params=["sqlite file", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Two kinds of stores."""
    async with opened(request.param, request, tmp_path) as store:
        yield store


class Provider:
    """Logs each request that it sees. At its point, the first one goes wrong; from then on it answers."""

    def __init__(self, point: str) -> None:
        self.point: str | None = point
        self.seen: list[ModelRequest] = []
        self.dead = anyio.CancelScope()
        self.acted = 0

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        point = self.point
        if point != "e":  # which comes later
            self.point = None
        if point == "d":
            raise NotSent("HTTP 429")
        self.seen.append(request)
        if point == "b":
            raise TimeoutError("no answer within 1 s")
        if point == "c":
            await self._die()
        return calls(("act", {})) if request.round_index == 0 else text("done")

    async def _die(self) -> None:
        self.dead.cancel()
        await anyio.sleep_forever()

    async def act(self) -> str:
        """A tool; at point e its process is killed at the tool's barrier, right behind the decision."""
        if self.point == "e":
            self.point = None
            await self._die()
        self.acted += 1
        return "acted"

    def agent(self) -> Agent:
        """An agent that wants model calls of unknown outcome settled."""
        tool = Tool(self.act, replay_safe=True)
        return Agent(self, [tool], unknown_model="reconcile", lease_seconds=LEASE, host=_NO_PAUSE)


class NoPause:
    """A retry policy that does not wait."""

    async def backoff(self, request: Any) -> None:
        """See `RetryPolicyPort`."""


_NO_PAUSE = Host(retry=NoPause())


async def life(store: ClockedStore, provider: Provider) -> TurnResult | None:
    """A process that runs the turn, to its end or to the provider's point; then every lease is over."""
    result: TurnResult | None = None
    with anyio.CancelScope() as provider.dead:
        result = await Keeper(store).run(provider.agent(), "go", turn_id="t", wait=False)
    await store.advance_clock(round(LEASE * 1000))
    return result


async def checkpoint(store: Store) -> EngineCheckpoint:
    """The turn's last checkpoint."""
    found = await Keeper(store).checkpoint("t")
    assert found is not None
    return found


async def test_point_a_before_the_first_byte(store: ClockedStore) -> None:
    """The checkpoint before the call says: same iteration; resumed, one call in all."""
    provider = Provider("none")
    began = Agent(provider, unknown_model="reconcile", host=_NO_PAUSE, max_rounds=1)
    assert began.announces_ahead is False

    class DiesBeforeTheCall:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            raise AssertionError("it is not asked")

    class Dies(NoPause):
        async def before_model(self, request: Any) -> Any:
            dead.cancel()
            await anyio.sleep_forever()

        async def before_commit(self, request: Any) -> Any:
            raise AssertionError("it does not come to that")

    dying = Agent(DiesBeforeTheCall(), unknown_model="reconcile", host=Host(policy=Dies()), lease_seconds=LEASE)
    with anyio.CancelScope() as dead:
        await Keeper(store).run(dying, "go", turn_id="t")
    found, expected = await checkpoint(store), EXPECTED["a"]
    assert found.resume_same_iteration is expected["resumeSameIteration"]
    assert found.reconciliation_required is expected["reconciliationRequired"]
    result = await life(store, provider)
    assert result is not None
    assert result.status == "success"
    assert len([one for one in provider.seen if one.round_index == 0]) == expected["provider_calls_after_resume"]


@pytest.mark.parametrize("point", ["b", "c"])
@pytest.mark.parametrize("restarts", [1, 2])
async def test_points_b_and_c_nobody_knows(store: ClockedStore, point: str, restarts: int) -> None:
    """No provider call on a plain resume, also not on the second one; the checkpoint says what was asked."""
    provider, expected = Provider(point), EXPECTED[point]
    await life(store, provider)
    for _ in range(restarts):
        result = await life(store, provider)
        assert result is not None
        assert (result.status, result.error_kind) == ("reconciliation_required", "model_outcome_unknown")
        assert result.message
    assert len(provider.seen) == SEEN[point] == expected["provider_calls_after_plain_resume"]
    found = await checkpoint(store)
    assert found.reconciliation_required is expected["reconciliationRequired"]
    assert found.completed_model_iterations == 0
    unknown = found.model_reconciliation
    assert unknown is not None
    assert unknown.invocation_id == found.active_invocation_id
    assert unknown.invocation_id
    assert unknown.message
    assert unknown.failed_attempt == 0  # counted from zero, as the contract says and its traces show
    assert list(unknown.request.context.messages) == list(provider.seen[0].messages)


async def test_point_d_certainly_not_accepted(store: ClockedStore) -> None:
    """Free to retry: nobody has to say anything."""
    provider = Provider("d")
    result = await life(store, provider)
    assert result is not None
    assert result.status == "success"
    assert (await checkpoint(store)).reconciliation_required is EXPECTED["d"]["reconciliationRequired"]


async def test_point_e_behind_the_reserved_decision(store: ClockedStore) -> None:
    """The model is never asked again for that round; the tools are those of the decision."""
    provider = Provider("e")
    await life(store, provider)
    assert len(provider.seen) == SEEN["e"]
    result = await life(store, provider)
    assert result is not None
    assert result.status == "success"
    asked = [one.round_index for one in provider.seen]
    assert asked.count(0) == EXPECTED["e"]["provider_calls_after_plain_resume"]
    assert provider.acted == 1


@pytest.mark.parametrize("point", ["b", "c"])
@pytest.mark.parametrize("decision", list(DECISIONS))
async def test_decisions(store: ClockedStore, point: str, decision: str) -> None:
    """Retry: a new invocation id, two calls. The answer supplied: no call. Abandoned: the turn is not completed."""
    provider, expected = Provider(point), DECISIONS[decision]
    await life(store, provider)
    await life(store, provider)
    keeper = Keeper(store)
    if decision == "retry":
        await keeper.resolve_model("t", "did_not_happen", who="ann", why="the provider has no such request")
    elif decision != "abandon the turn":
        answer = calls(("act", {}))
        await keeper.resolve_model("t", "happened", who="ann", why="from the provider's log", response=answer)
    if decision != "abandon the turn":
        result = await life(store, provider)
        assert result is not None
        assert result.status == "success"
    first_round = [one for one in provider.seen if one.round_index == 0]
    assert len(first_round) == expected["provider_calls_total"]
    assert len({one.invocation_id for one in first_round}) == len(first_round)
    history = await keeper.history("t")
    assert history is not None
    assert history.state.completed is expected.get("turn_completed", True)
