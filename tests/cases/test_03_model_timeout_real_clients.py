"""Field case 03 through the providers' real clients: an answer that was lost is not bought again by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cases.charge_server import unused_port
from tests.conformance.support import ClockedStore
from tests.conftest import opened, shared_json
from tests.models.clients import calling, port_at, settling, short
from turnkeeper import Host, Keeper, ModelInvocationResponse, ModelRequest, Tool, TurnResult
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
)
from turnkeeper.log.store import Store
from turnkeeper.models.fake import FakeModel, Fault, Script, ScriptedCall
from turnkeeper.models.scripted import calls

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/03-model-timeout-needs-reconciliation.json")
EXPECTED: dict[str, dict[str, Any]] = {point["id"]: point["expect"] for point in CASE["crash_points"]}
SEEN: dict[str, int] = {point["id"]: point["provider_calls_seen"] for point in CASE["crash_points"]}
DECISIONS: dict[str, dict[str, Any]] = {one["decision"]: one for one in CASE["decisions_for_b_and_c"]}
LEASE = 30.0
LATE = Fault(slow=0.4)
"""The provider answers after the client's patience, which is a quarter of that, as in the case."""

every_api = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


class NoPolicy:
    """A host policy that has nothing to say before a commit."""

    async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
        """See `HostPolicyPort`."""
        return FinalOutputPolicyResult(output=request.output)


class Mortal:
    """A port whose process dies at a point of its first call."""

    def __init__(self, port: Any, dies: str | None) -> None:
        self._port = port
        self.dies = dies
        self.dead = anyio.CancelScope()
        self.acted = 0

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        answer: ModelInvocationResponse = await self._port.invoke(request)
        if self.dies == "behind the answer":
            await self._die()
        return answer

    async def act(self) -> str:
        """A tool; its process may die at its barrier, right behind the decision."""
        if self.dies == "behind the decision":
            await self._die()
        self.acted += 1
        return "acted"

    async def _die(self) -> None:
        self.dead.cancel()
        await anyio.sleep_forever()


@pytest.fixture
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """One kind of store: what is different here are the clients."""
    async with opened("sqlite file", request, tmp_path) as store:
        yield store


async def life(
    store: ClockedStore, port: Any, dies: str | None = None, look_up: Any = None
) -> tuple[TurnResult | None, Mortal]:
    """A process that runs the turn to its end or its death; then every lease is over."""
    mortal = Mortal(port, dies)
    agent = settling(mortal, [Tool(mortal.act, replay_safe=True)], lease_seconds=LEASE, reconcile_model=look_up)
    result: TurnResult | None = None
    with anyio.CancelScope() as mortal.dead:
        result = await Keeper(store).run(agent, "go", turn_id="t", wait=False)
    await store.advance_clock(round(LEASE * 1000))
    return result, mortal


async def checkpoint(store: Store) -> EngineCheckpoint:
    """The turn's last checkpoint."""
    found = await Keeper(store).checkpoint("t")
    assert found is not None
    return found


def script(*faults: Fault) -> Script:
    """One tool call, then a last word."""
    return calling(ScriptedCall(name="act"), faults=list(faults))


@every_api
async def test_point_a_before_the_first_byte(store: ClockedStore, api: str) -> None:
    """The checkpoint before the call says: same iteration; resumed by itself, it is one call in all."""

    class Dies(NoPolicy):
        async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
            dead.cancel()
            await anyio.sleep_forever()
            raise AssertionError

    expected = EXPECTED["a"]
    with FakeModel(script()) as fake:
        async with port_at(fake.url, api) as port:
            with anyio.CancelScope() as dead:
                agent = settling(port, host=Host(policy=Dies()), reconcile_model=None, lease_seconds=LEASE)
                await Keeper(store).run(agent, "go", turn_id="t")
            assert len(fake.requests) == SEEN["a"]
            found = await checkpoint(store)
            assert found.resume_same_iteration is expected["resumeSameIteration"]
            assert found.reconciliation_required is expected["reconciliationRequired"]
            result, _ = await life(store, port)
    assert result is not None
    assert (result.status, result.message) == ("success", None)
    assert fake.bought()[0] == expected["provider_calls_after_resume"]


@every_api
@pytest.mark.parametrize("point", ["b", "c"])
@pytest.mark.parametrize("restarts", [1, 2])
async def test_points_b_and_c_nobody_knows(store: ClockedStore, api: str, point: str, restarts: int) -> None:
    """The client gave up before the provider answered; the process died behind the answer. A plain resume asks nobody."""
    expected = EXPECTED[point]
    with FakeModel(script(*[LATE] * (point == "b"))) as fake:
        async with port_at(fake.url, api, timeout=short(0.1)) as port:
            await life(store, port, "behind the answer")
            for _ in range(restarts):
                result, _ = await life(store, port)
                assert result is not None
                assert (result.status, result.error_kind) == ("reconciliation_required", "model_outcome_unknown")
                assert result.message
        assert len(fake.requests) == SEEN[point] == expected["provider_calls_after_plain_resume"]
    found = await checkpoint(store)
    assert found.reconciliation_required is expected["reconciliationRequired"]
    assert found.completed_model_iterations == 0
    unknown = found.model_reconciliation
    assert unknown is not None
    assert unknown.invocation_id == found.active_invocation_id == fake.requests[0].invocation
    assert unknown.message
    assert [message.text for message in unknown.request.context.messages] == ["go"]


@every_api
async def test_point_d_certainly_not_accepted(store: ClockedStore, api: str) -> None:
    """429: free to retry, and nobody has to say anything."""
    with FakeModel(script(Fault(status=429, retry_after=0.001))) as fake:
        async with port_at(fake.url, api) as port:
            result, _ = await life(store, port)
    assert result is not None
    assert result.status == "success"
    assert fake.bought() == {0: 1, 1: 1}
    assert (await checkpoint(store)).reconciliation_required is EXPECTED["d"]["reconciliationRequired"]


@every_api
async def test_point_d_connection_refused(store: ClockedStore, api: str) -> None:
    """The provider is away, and then it is there: the same turn, with no question asked."""
    async with port_at(f"http://127.0.0.1:{unused_port()}", api) as port:
        result, _ = await life(store, port)
    assert result is not None
    assert (result.status, result.error_kind) == ("failed", "model_error")
    assert (await checkpoint(store)).reconciliation_required is EXPECTED["d"]["reconciliationRequired"]
    with FakeModel(script()) as fake:
        async with port_at(fake.url, api) as port:
            result, _ = await life(store, port)
    assert result is not None
    assert result.status == "success"


@every_api
async def test_point_e_behind_the_reserved_decision(store: ClockedStore, api: str) -> None:
    """The model is never asked again for that round; the tools are those of the decision."""
    with FakeModel(script()) as fake:
        async with port_at(fake.url, api) as port:
            await life(store, port, "behind the decision")
            assert len(fake.requests) == SEEN["e"]
            result, mortal = await life(store, port)
    assert result is not None
    assert result.status == "success"
    assert fake.bought()[0] == EXPECTED["e"]["provider_calls_after_plain_resume"]
    assert mortal.acted == 1


@every_api
@pytest.mark.parametrize("point", ["b", "c"])
@pytest.mark.parametrize("decision", list(DECISIONS))
async def test_decisions(store: ClockedStore, api: str, point: str, decision: str) -> None:
    """Retry: another invocation, two calls. The answer supplied: no call. Abandoned: the turn is not completed."""
    expected = DECISIONS[decision]
    keeper = Keeper(store)
    with FakeModel(script(*[LATE] * (point == "b"))) as fake:
        async with port_at(fake.url, api, timeout=short(0.1)) as port:
            await life(store, port, "behind the answer")
            await life(store, port)
            if decision == "retry":
                await keeper.resolve_model("t", "did_not_happen", who="ann", why="the provider has no such request")
            elif decision != "abandon the turn":
                answer = calls(("act", {}))
                await keeper.resolve_model("t", "happened", who="ann", why="from the provider's log", response=answer)
            if decision != "abandon the turn":
                result, _ = await life(store, port)
                assert result is not None
                assert (result.status, result.message) == ("success", None)
    first = [one for one in fake.requests if one.round == 0]
    assert len(first) == expected["provider_calls_total"]
    assert len({one.invocation for one in first}) == len(first)
    history = await keeper.history("t")
    assert history is not None
    assert history.state.completed is expected.get("turn_completed", True)


@pytest.mark.parametrize("api", ["background", "stored chat"])
@pytest.mark.parametrize("streaming", [True, False])
async def test_where_the_provider_can_be_asked_nobody_else_has_to_be(
    store: ClockedStore, api: str, streaming: bool
) -> None:
    """Point c again: the look-up supplies the answer, no call is made, and the turn goes on by itself."""
    with FakeModel(script()) as fake:
        async with port_at(fake.url, api, streaming=streaming) as port:
            await life(store, port, "behind the answer")
            result, mortal = await life(store, port, look_up=port.reconcile)
    assert result is not None
    assert (result.status, result.message) == ("success", None)
    assert mortal.acted == 1
    assert fake.bought() == {0: DECISIONS["supply the recovered response"]["provider_calls_total"], 1: 1}
