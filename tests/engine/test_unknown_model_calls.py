"""A model call of which nobody knows whether it was answered (engine-contract.md 2.10): looked up, or settled by somebody."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from tests.conformance.support import ClockedStore
from tests.engine.support import state_of
from turnkeeper import (
    Agent,
    DidNotHappen,
    Happened,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    OutcomeUnknown,
    StillUnknown,
    Tool,
    TurnResult,
)
from turnkeeper.engine.contract_ports import PortError
from turnkeeper.engine.wire import DelegatedStateReference, EngineEventKind, to_builtins
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.models.scripted import calls, text

pytestmark = pytest.mark.anyio


class Model:
    """Leaves its first answer unknown, and says "done" from then on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or OutcomeUnknown("cut behind the request")
        self.asked: list[ModelRequest] = []

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        self.asked.append(request)
        if len(self.asked) == 1:
            raise self.error
        return text(f"done in round {request.round_index}")


async def run(keeper: Keeper, model: Any, **options: Any) -> TurnResult:
    """Run the turn with an agent that wants such calls settled."""

    def act() -> str:
        return "acted"

    agent = Agent(model, [Tool(act)], unknown_model="reconcile", **options)
    return await keeper.run(agent, "go", turn_id="t", wait=False)


UNKNOWN = ("reconciliation_required", "model_outcome_unknown")


async def test_it_is_not_made_again_before_it_is_settled(keeper: Keeper) -> None:
    """Section 7, rows 7 and 8; the checkpoint says what was asked."""
    model = Model()
    for _ in range(3):
        result = await run(keeper, model)
        assert (result.status, result.error_kind) == UNKNOWN
    assert len(model.asked) == 1
    assert [head.attention async for head in keeper.turns(attention=True)] == ["unknown_model"]
    checkpoint = await keeper.checkpoint("t")
    assert checkpoint is not None
    assert checkpoint.reconciliation_required
    unknown = checkpoint.model_reconciliation
    assert unknown is not None
    assert (unknown.invocation_id, unknown.failed_attempt) == (checkpoint.active_invocation_id, 0)
    assert [message.text for message in unknown.request.context.messages] == ["go"]
    assert (checkpoint.completed_model_iterations, checkpoint.resume_same_iteration) == (0, False)
    kinds = [event.kind.value for event in await keeper.events("t")]
    assert kinds == [
        "turn_started",
        "context_prepared",
        "model_invocation_started",
        "model_invocation_failed",
        "model_reconciliation_required",
        "checkpoint_created",
        "turn_reconciliation_required",
    ]


@pytest.mark.parametrize("answer", [text("it was this"), calls(("act", "{}"))])
async def test_the_answer_that_the_provider_is_known_to_have_given(
    keeper: Keeper, answer: ModelInvocationResponse
) -> None:
    """Section 7, row 9: no model call for it, and everything goes on behind it."""
    model = Model()
    await run(keeper, model)
    await keeper.resolve_model("t", "happened", who="ann", why="in the provider's log", response=answer)
    result = await run(keeper, model)
    final = not answer.tool_requests
    assert (result.status, result.output) == ("success", "it was this" if final else "done in round 1")
    assert len(model.asked) == 1 + (not final)
    kinds = [event.kind for event in await keeper.events("t")]
    assert kinds.count(EngineEventKind.MODEL_INVOCATION_RECONCILED) == 1
    assert kinds.count(EngineEventKind.MODEL_INVOCATION_COMPLETED) == (not final)
    checkpoint = await keeper.checkpoint("t")
    assert checkpoint is not None
    assert (checkpoint.model_reconciliation, checkpoint.reconciliation_required) == (None, False)


async def test_what_did_not_happen_is_asked_again_in_its_own_round(keeper: Keeper) -> None:
    """5.1, 13."""
    model = Model()
    await run(keeper, model)
    await keeper.resolve_model("t", "did_not_happen", who="ann", why="not in the provider's log")
    checkpoint = await keeper.checkpoint("t")
    assert checkpoint is not None
    flags = (checkpoint.reconciliation_required, checkpoint.resume_same_iteration)
    assert (*flags, checkpoint.policy_applied_for_iteration, checkpoint.iteration) == (False, True, True, 0)
    assert (await run(keeper, model)).output == "done in round 0"
    assert [request.round_index for request in model.asked] == [0, 0]


@pytest.mark.parametrize(
    ("found", "expected", "asked"),
    [
        (Happened(text("found")), ("success", "found"), 1),
        (DidNotHappen(), ("success", "done in round 0"), 2),
        (StillUnknown(), ("reconciliation_required", None), 1),
        (ConnectionError("down"), ("reconciliation_required", None), 1),
    ],
)
async def test_the_host_is_asked_first(keeper: Keeper, found: Any, expected: tuple[str, Any], asked: int) -> None:
    """Issue C, 4: a reconciler hook is asked first; what is left waits for an operator."""
    looked: list[str] = []

    async def look_up(request: ModelRequest) -> Any:
        looked.append(request.invocation_id)
        if isinstance(found, Exception):
            raise found
        return found

    model = Model()
    await run(keeper, model)
    result = await run(keeper, model, reconcile_model=look_up)
    assert (result.status, result.output) == expected
    assert looked == [model.asked[0].invocation_id]
    assert len(model.asked) == asked


async def test_a_call_that_died_with_its_process_is_in_doubt(keeper: Keeper, store: ClockedStore) -> None:
    """5.2, 2: started and not completed is never silently repeated, where the agent says so."""

    class Dies(Model):
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            self.asked.append(request)
            dead.cancel()
            await anyio.sleep_forever()
            raise AssertionError

    with anyio.CancelScope() as dead:
        await run(keeper, Dies())
    await store.advance_clock(30_000)
    model = Model()
    result = await run(keeper, model)
    assert (result.status, result.error_kind) == UNKNOWN
    assert model.asked == []
    await keeper.resolve_model("t", "happened", who="ann", why="billed", response=text("it was this"))
    assert (await run(keeper, model)).output == "it was this"


async def test_only_what_is_in_doubt_can_be_settled(keeper: Keeper) -> None:
    """2.9, 2.10: a tool's reconciliation does not settle a model call, nor the other way round."""
    model = Model()
    await run(keeper, model)
    with pytest.raises(TurnCheckpointError):
        await keeper.resolve_model("other", "did_not_happen", who="ann", why="looked")
    for wrong in ({"resolution": "happened"}, {"resolution": "did_not_happen", "response": text("x")}):
        with pytest.raises(InvalidInput):
            await keeper.resolve_model("t", who="ann", why="looked", **wrong)  # pyright: ignore[reportArgumentType]
    await keeper.resolve_model("t", "did_not_happen", who="ann", why="looked")
    with pytest.raises(TurnCheckpointConflict):
        await keeper.resolve_model("t", "did_not_happen", who="ann", why="looked")
    assert (await state_of(keeper)).attention is None


class Named(Model):
    """Says what its provider calls the call, and then leaves it unknown: in words, or by the death of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: anyio.CancelScope | None = None
        self.looked_up: list[ModelRequest] = []

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`."""
        await request.known_as(KNOWN)
        if self.dead is not None:
            self.dead.cancel()
            await anyio.sleep_forever()
        return await super().invoke(request)

    async def look_up(self, request: ModelRequest) -> Happened | StillUnknown:
        """Fetches the answer, once it is asked for by its name."""
        self.looked_up.append(request)
        return StillUnknown() if request.reference is None else Happened(text("fetched"))


KNOWN = DelegatedStateReference(provider="p", kind="response", id="resp_1")


@pytest.mark.parametrize("dies", [False, True])
async def test_what_its_provider_calls_it_is_there_after_a_crash(store: ClockedStore, dies: bool) -> None:
    """The look-up is given it, and so is whoever takes the checkpoint elsewhere; the answer is not bought again."""
    model = Named()
    with anyio.CancelScope() as scope:
        model.dead = scope if dies else None
        await run(Keeper(store), model)
    await store.advance_clock(60_000)
    checkpoint = await Keeper(store).checkpoint("t")
    assert checkpoint is not None
    if not dies:
        assert checkpoint.model_reconciliation is not None
        assert (checkpoint.model_reconciliation.metadata or {})["reference"] == to_builtins(KNOWN)
    result = await run(Keeper(store), model, reconcile_model=model.look_up)
    assert (result.status, result.output, result.model_calls) == ("success", "fetched", 1)
    assert [request.reference for request in model.looked_up] == [KNOWN]


async def test_an_imported_call_is_looked_up_by_its_name(keeper: Keeper) -> None:
    """The checkpoint carries it from store to store."""
    model = Named()
    await run(keeper, model)
    checkpoint = await keeper.checkpoint("t")
    assert checkpoint is not None
    async with await Keeper.open("sqlite:///:memory:") as other:
        agent = Agent(model, unknown_model="reconcile", reconcile_model=model.look_up)
        scope = await other.adopt(checkpoint, agent=agent)
        assert (await other.resume(agent, turn_id="t", scope=scope)).output == "fetched"
    assert model.looked_up[0].reference == KNOWN


async def test_why_the_look_up_could_not_tell_is_said(keeper: Keeper) -> None:
    model = Model()
    await run(keeper, model)

    async def look_up(_: ModelRequest) -> StillUnknown:
        return StillUnknown("the provider does not keep it any more")

    result = await run(keeper, model, reconcile_model=look_up)
    assert "does not keep it any more" in (result.message or "")


async def test_the_provider_says_when_to_come_again(keeper: Keeper) -> None:
    """2.12: the next attempt is made no earlier than it asked."""
    model = Model(PortError("HTTP 429", retry_after=0.05))
    began = time.monotonic()
    assert (await run(keeper, model)).status == "success"
    assert time.monotonic() - began >= 0.05
    assert len(model.asked) == 2
