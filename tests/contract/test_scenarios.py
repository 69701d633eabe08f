"""The scenario catalogue (engine-contract.md 7), as far as no trace shows it and the engine has the ports.

Elsewhere: rows 1 to 3, 5, 7, 10, 16 (in a tool) and 19 in `test_traces.py`; row 2 also in `tests/engine/test_permissions.py`;
rows 8 and 9 in `tests/engine/test_unknown_model_calls.py`; row 18 in `tests/engine/test_rounds.py` and `test_policies.py`, where
an exception that nobody vouches for leaves its call in doubt; row 25 at every checkpoint in `test_export_import.py`; row 28's
JSON in `test_round_trips.py`; row 34 in `tests/crash/`; rows 24 to 28 with imported turns in `test_imported.py`. Row 17's unknown
tool is told to the model (`tests/engine/test_rounds.py`).

Rows 12 to 14, 20, 21 and 31, which are about the host's ports, are in `tests/engine/test_host.py`; row 29 also in
`tests/engine/test_delegation.py`.

Not here: a cancellation inside a policy (16).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from tests.contract.host import (
    BOTH,
    DONE,
    ONE,
    CountingDurability,
    Durability,
    PoppingModel,
    PostCommit,
    Tools,
    agent_of,
    asked,
)
from tests.engine.support import records_of, until
from turnkeeper import Agent, EffectRefused, Keeper, Message, OutcomeUnknown, Reply, ReplyPort, TextPart
from turnkeeper.engine.documents import to_tree
from turnkeeper.engine.emission import DurabilityFailed
from turnkeeper.engine.host import Host
from turnkeeper.engine.usage import Budget
from turnkeeper.engine.wire import (
    DelegatedStateReference,
    EngineCheckpoint,
    EngineEvent,
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    InvocationContextState,
    Portability,
    Role,
)
from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r

pytestmark = pytest.mark.anyio

LEASE_MS = 30_000


async def tail_of(keeper: Keeper, turn_id: str = "t") -> int:
    """How long the turn's log is."""
    history = await keeper.history(turn_id)
    return 0 if history is None else history.tail


def told(events: list[EngineEvent]) -> list[str]:
    """The kinds of events."""
    return [event.kind.value for event in events]


# --- what is in doubt -----------------------------------------------------------------------------------------


async def test_a_resume_that_finds_the_same_doubt_does_nothing(keeper: Keeper) -> None:
    """Rows 4 and 8: no effect, and the same status. Their engine writes two events each time; ours writes what is new."""
    tools = Tools("echo", outputs={"call-a": OutcomeUnknown("dropped")})
    agent = agent_of(BOTH, tools=tools)
    first = await keeper.run(agent, "hi", turn_id="t")
    before = await tail_of(keeper)
    assert await keeper.run(agent, "hi", turn_id="t") == first
    assert (await tail_of(keeper), tools.effects, asked(agent)) == (before, {"call-a": 1}, [0])


async def test_a_tool_in_doubt_is_settled_as_a_tool_and_once(keeper: Keeper) -> None:
    """Row 6: what settles something else, or nothing, is refused, and nothing is written."""
    tools = Tools("echo", outputs={"call-a": OutcomeUnknown("dropped")})
    await keeper.run(agent_of(BOTH, tools=tools), "hi", turn_id="t")
    before = await tail_of(keeper)
    with pytest.raises(TurnCheckpointConflict):
        await keeper.resolve_model("t", "happened", response=DONE, who="ann", why="seen")
    for round_index, slot_index in ((0, 1), (0, 2), (1, 0)):
        with pytest.raises(TurnCheckpointError):
            await keeper.resolve_tool(
                "t", round_index, slot_index, "happened", result="confirmed", who="ann", why="seen"
            )
    assert await tail_of(keeper) == before
    await keeper.resolve_tool("t", 0, 0, "happened", result="confirmed", who="ann", why="seen")
    with pytest.raises(TurnCheckpointConflict):
        await keeper.resolve_tool("t", 0, 0, "happened", result="otherwise", who="ann", why="seen")


async def test_a_model_call_in_doubt_is_settled_as_a_model_call(keeper: Keeper) -> None:
    """Row 6, the other way round; that it stays unknown is no way to settle it."""
    agent = agent_of(OutcomeUnknown("cut"), unknown_model="reconcile")
    await keeper.run(agent, "hi", turn_id="t")
    before = await tail_of(keeper)
    with pytest.raises(TurnCheckpointError):
        await keeper.resolve_tool("t", 0, 0, "happened", who="ann", why="seen", result="confirmed")
    with pytest.raises(TurnCheckpointError):
        await keeper.resolve_model("t", "unknown", who="ann", why="seen")
    assert await tail_of(keeper) == before


# --- a run that fails -----------------------------------------------------------------------------------------


async def test_a_model_that_always_fails(keeper: Keeper) -> None:
    """Row 11."""
    durability = Durability()
    agent = agent_of(*[ConnectionError("503")] * 3)
    result = await keeper.run(agent, "hi", turn_id="t", durability=durability)
    assert (result.status, result.error_kind, result.rounds) == ("failed", "model_error", 0)
    failed = [event["payload"] for event in durability.events if event["kind"] == "model_invocation_failed"]
    assert [(one["attempt"], one["exhausted"], one["outcomeUnknown"]) for one in failed] == [
        (0, False, False),
        (1, False, False),
        (2, True, False),
    ]
    last = durability.events[-1]
    assert (last["sequence"], last["kind"], last["iteration"]) == (9, "turn_failed", 0)
    assert last["payload"] == {
        "status": "failed",
        "output": {"errorKind": "model_error", "message": "ConnectionError: 503"},
    }


async def test_a_permission_port_that_fails(keeper: Keeper) -> None:
    """Row 17: the turn fails, with no result of the call."""

    class Down:
        async def authorize(self, request: Any) -> Any:
            raise OSError("down")

    durability = Durability()
    await keeper.run(agent_of(ONE, permission=Down()), "hi", turn_id="t", durability=durability)
    assert durability.kinds[-2:] == ["permission_requested", "turn_failed"]
    assert durability.events[-1]["payload"]["output"]["errorKind"] == "permission_error"
    assert durability.checkpoints[-1]["completedToolResults"] == []


async def test_the_rounds_are_used_up(keeper: Keeper) -> None:
    """Row 23: behind the exchange's checkpoint, in the round that was not begun."""
    durability = Durability()
    agent = agent_of(ONE, max_rounds=1)
    assert (await keeper.run(agent, "hi", turn_id="t", durability=durability)).error_kind == "max_iterations"
    assert durability.kinds[-4:] == [
        "tool_result_committed",
        "conversation_updated",
        "checkpoint_created",
        "turn_failed",
    ]
    assert durability.events[-1]["iteration"] == 1
    assert durability.events[-1]["payload"]["output"]["errorKind"] == "max_iterations"


@pytest.mark.parametrize(
    "state",
    [
        InvocationContextState(delegated_state=[DelegatedStateReference(provider="p", kind="response", id="r")]),
        InvocationContextState(portability=Portability.DELEGATED),
    ],
    ids=["portable with references", "delegated without"],
)
async def test_a_response_with_contradictory_state(keeper: Keeper, state: InvocationContextState) -> None:
    """Row 30."""
    result = await keeper.run(agent_of(replace(DONE, next_context_state=state)), "hi", turn_id="t")
    assert (result.status, result.error_kind) == ("failed", "provider_state_error")


# --- a durability port that fails -----------------------------------------------------------------------------


async def failed_at(
    keeper: Keeper, store: SqliteStore, kind: str, tools: Tools
) -> tuple[CountingDurability, Agent, PostCommit]:
    """A run whose port fails at that kind of event; then its leases are over, and the port works again."""
    durability, agent, post_commit = CountingDurability(), agent_of(ONE, DONE, tools=tools), PostCommit()
    durability.fail_at = kind
    with pytest.raises(DurabilityFailed) as failed:
        await keeper.run(agent, "hi", turn_id="t", durability=durability, reply=post_commit.port)
    assert kind in str(failed.value)
    durability.fail_at = None
    await store.advance_clock(LEASE_MS)
    return durability, agent, post_commit


FAILS_AT = (
    "turn_started",
    "context_prepared",
    "model_invocation_started",
    "model_invocation_completed",
    "permission_requested",
    "permission_resolved",
    "tool_execution_started",
    "tool_execution_completed",
    "tool_result_committed",
    "turn_committed",
    "post_commit_started",
    "post_commit_completed",
)


@pytest.mark.parametrize("kind", FAILS_AT)
async def test_wherever_the_port_fails_the_turn_goes_on_and_nothing_is_done_twice(
    keeper: Keeper, store: SqliteStore, kind: str
) -> None:
    """Rows 19, 22 and 34: the log is the truth, and a port that can tell how far it is gets all of it in the end."""
    tools = Tools("echo")
    durability, agent, post_commit = await failed_at(keeper, store, kind, tools)
    result = await keeper.run(agent, "hi", turn_id="t", durability=durability, reply=post_commit.port)
    assert result.status == "success"
    assert tools.effects == {"call-a": 1}
    assert asked(agent) == [0, 1]
    keys = {reply.key for reply in post_commit.sent}
    assert len(keys) == 1
    assert durability.events == [to_tree(event) for event in await keeper.events("t")]


async def test_what_comes_later_does_not_overtake_what_the_port_did_not_take(keeper: Keeper) -> None:
    """2.5: of two tools at the same time, the second one's events wait for those of the first; the journal has no gap."""

    class FailsOnce(CountingDurability):
        async def append_with_checkpoint(self, events: Any, checkpoint: EngineCheckpoint) -> None:
            await super().append_with_checkpoint(events, checkpoint)
            if events[0].kind.value == self.once:
                del self.log[-1]
                self.once = ""
                raise OSError("disk full")

        once = "tool_execution_completed"

    durability = FailsOnce()
    agent = Agent(PoppingModel(BOTH, DONE), Tools("echo").all)
    with pytest.raises(DurabilityFailed):
        await keeper.run(agent, "hi", turn_id="t", durability=durability)
    assert [event["sequence"] for event in durability.events] == list(range(1, len(durability.events) + 1))


# --- behind the commit ----------------------------------------------------------------------------------------


async def test_a_reply_that_fails_does_not_undo_the_commit(keeper: Keeper) -> None:
    """Row 22: the events tell of one commit, and of a failed effect behind it; the next run makes it again."""
    plan: list[Exception] = [EffectRefused("closed")]
    sent: list[Reply] = []

    async def send(reply: Reply) -> str:
        if plan:
            raise plan.pop()
        sent.append(reply)
        return "m1"

    agent = agent_of(DONE)
    first = await keeper.run(agent, "hi", turn_id="t", reply=ReplyPort(send))
    assert (first.status, first.error_kind, first.output) == ("failed", "reply_refused", "done")
    assert told(await keeper.events("t"))[-3:] == ["turn_committed", "post_commit_started", "post_commit_failed"]
    assert (await keeper.run(agent, "hi", turn_id="t", reply=ReplyPort(send))).status == "success"
    events = await keeper.events("t")
    assert told(events)[-3:] == ["turn_started", "post_commit_started", "post_commit_completed"]
    assert told(events).count("turn_committed") == 1
    assert {event.payload["effectId"] for event in events if event.kind.value.startswith("post_commit")} == {
        sent[0].key
    }
    assert asked(agent) == [0]


async def test_a_long_send_is_told_once(keeper: Keeper) -> None:
    """2.15: that the lease of a send is renewed is no second effect."""

    async def renewed() -> bool:
        return len(await records_of(keeper, r.DeliveryClaimed)) >= 2

    async def send(_: Reply) -> str:
        await until(renewed)
        return "m1"

    agent = agent_of(DONE, lease_seconds=0.6)
    assert (await keeper.run(agent, "hi", turn_id="t", reply=ReplyPort(send))).status == "success"
    assert told(await keeper.events("t"))[-3:] == ["turn_committed", "post_commit_started", "post_commit_completed"]


# --- lives of a run ---------------------------------------------------------------------------------------------


async def test_each_life_that_ends_otherwise_has_begun(keeper: Keeper) -> None:
    """2.5: `turn_started` comes before the terminal event also where nothing else was written in between."""
    durability = CountingDurability()
    for agent in (agent_of(*[ConnectionError("503")] * 3), agent_of(budget=Budget(max_tokens=0))):
        await keeper.run(agent, "hi", turn_id="t", durability=durability)
    assert durability.kinds[-3:] == ["turn_failed", "turn_started", "turn_failed"]
    assert durability.events[-1]["payload"]["output"]["errorKind"] == "budget_exhausted"


async def test_a_life_that_finds_a_model_call_in_doubt_has_begun(keeper: Keeper) -> None:
    """2.7: whoever takes the turn over says so before he says what became of the call."""

    class Dies:
        async def invoke(self, request: Any) -> Any:
            asked.set()
            await anyio.sleep_forever()

    asked, before = anyio.Event(), 0
    dead = Agent(Dies(), unknown_model="reconcile")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(keeper.run, dead, "hi", turn_id="t"))
        await asked.wait()
        assert isinstance(keeper.store, SqliteStore)
        await keeper.store.advance_clock(LEASE_MS)
        result = await keeper.run(agent_of(DONE, unknown_model="reconcile"), "hi", turn_id="t")
        assert result.error_kind == "model_outcome_unknown"
        before = await tail_of(keeper)
        tasks.cancel_scope.cancel()
    history = await keeper.events("t", at=before)
    assert told(history) == [
        "turn_started",
        "context_prepared",
        "model_invocation_started",
        "turn_started",
        "model_invocation_failed",
        "model_reconciliation_required",
        "checkpoint_created",
        "turn_reconciliation_required",
    ]


async def test_a_policy_names_the_call_that_it_is_for(keeper: Keeper) -> None:
    """2.3 (3): in every round the id of the call that follows; in the checkpoint, no call is the active one."""

    class Adds:
        async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
            note = Message(role=Role.USER, parts=[TextPart(value=f"note {request.iteration}")])
            return HostPolicyResult(messages=[*request.messages, note], stable_prefix_messages=0)

        async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
            return FinalOutputPolicyResult(output=request.output)

    durability = Durability()
    agent = agent_of(BOTH, ONE, DONE, host=Host(policy=Adds()))
    assert (await keeper.run(agent, "hi", turn_id="t", durability=durability)).status == "success"
    named = [(e["kind"], e["invocationId"]) for e in durability.events if "invocationId" in e]
    started = [invocation for kind, invocation in named if kind == "model_invocation_started"]
    assert [invocation for kind, invocation in named if kind == "policy_applied"] == started
    assert len(set(started)) == 3
    applied = [one for one in durability.checkpoints if one["policyAppliedForIteration"]]
    assert [one.get("activeInvocationId") for one in applied] == [None] * 3
