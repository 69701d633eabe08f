"""The executed traces of the Java engine, reproduced write for write by ours (engine-contract.md 2.4, 2.6, 3.7)."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.from_thread
import pytest

from tests.contract.host import (
    BOTH,
    DONE,
    ONE,
    CountingDurability,
    Denies,
    PoppingModel,
    PostCommit,
    Tools,
    objects,
    with_the_calls,
)
from tests.contract.material import traces, without_empty_lists
from turnkeeper import Agent, Keeper, OutcomeUnknown, Tool, ToolContext, TurnResult
from turnkeeper.engine.documents import to_tree
from turnkeeper.engine.emission import DurabilityFailed
from turnkeeper.engine.events import Projection
from turnkeeper.engine.stored import UNKNOWN_TEXT
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

Log = list[dict[str, Any]]
DOCUMENTATION = Path(__file__).parents[2] / "docs/engine.md"


def trace(scenario: str) -> dict[str, Any]:
    """A trace by its name."""
    return next(one for one in traces() if one["scenario"] == scenario)


# --- departures: what our engine writes differently, and why --------------------------------------------------


def events_of(log: Log) -> Iterator[dict[str, Any]]:
    """The events of a log, in order."""
    for write in log:
        yield from write.get("events", [write["event"]] if "event" in write else [])


def initial_checkpoint(log: Log) -> None:
    """`turn_started` of a new turn comes with a checkpoint, without an event that tells of it."""
    first = log[0]
    if first["op"] != "append" or first["event"]["sequence"] != 1:
        return
    event = first.pop("event")
    base = next(write["checkpoint"] for write in log if "checkpoint" in write)
    known = {key: base[key] for key in ("sessionId", "turnId", "runId", "delegationDepth", "messages", "inputs")
             if key in base}  # fmt: skip
    context = next(one["payload"] for one in events_of(log) if one["kind"] == "context_prepared")
    first |= {
        "op": "appendWithCheckpoint",
        "events": [event],
        "checkpoint": {
            **known,
            "id": "checkpoint-initial",
            "iteration": 0,
            "lastSequence": 1,
            "messages": context["messages"],
            "stablePrefixMessages": context["stablePrefixMessages"],
            "completedModelIterations": 0,
            "reconciliationRequired": False,
            "finalOutputReady": False,
            "resumeSameIteration": True,
            "policyAppliedForIteration": False,
            "contextState": {"portability": "portable"},
        },
    }


def nothing_executed(log: Log) -> None:
    """A denied call has no `tool_execution_completed`, and what follows is numbered on without it."""
    denied = [one["payload"]["toolRequestId"] for one in events_of(log)
              if one["kind"] == "permission_resolved" and not one["payload"]["decision"]["approved"]]  # fmt: skip
    for write in log:
        for event in list(write.get("events", [])):
            told = event["payload"].get("toolResult", {})
            if event["kind"] == "tool_execution_completed" and told["requestId"] in denied:
                write["events"].remove(event)
                _number_on(log, event["sequence"])


def _number_on(log: Log, removed: int) -> None:
    for found in objects(log):
        for name in ("sequence", "lastSequence", "includedThroughSequence"):
            found[name] = found[name] - 1 if found.get(name, 0) >= removed else found.get(name)
            if found[name] is None:
                del found[name]


def our_words_for_the_unknown(log: Log) -> None:
    """What is said of an effect of unknown outcome: to the model, and as the turn's output."""
    for found in objects(log):
        if found.get("outcome") == "indeterminate":
            found["output"] = UNKNOWN_TEXT
        if found.get("errorKind") == "effect_outcome_unknown" and "message" in found:
            found["message"] = "a tool call may have happened; settle it, then run the turn again"


def named_errors(log: Log) -> None:
    """A failed model call is told with the name of the exception."""
    for found in objects(log):
        if found.get("outcomeUnknown") is True or "failedAttempt" in found:
            found["message"] = f"OutcomeUnknown: {found['message']}"
        elif found.get("outcomeUnknown") is False:
            found["message"] = f"ConnectionError: {found['message']}"


def no_word_of_the_provider(log: Log) -> None:
    """What a provider said of a call of unknown outcome is not kept: the exception that tells of it has no place for it."""
    for found in objects(log):
        if "failedAttempt" in found:
            found.pop("metadata", None)


def budget_of_the_beginning(log: Log) -> None:
    """The `turn_started` of a resumed run tells the budget of the run that began the turn."""
    for event in events_of(log):
        if event["kind"] == "turn_started" and event["sequence"] > 1:
            event["payload"]["maxIterations"] = 10


def effect_id_of_the_reply(log: Log) -> None:
    """The effect id is the key of the reply, which is derived from turn and scope."""
    for event in events_of(log):
        if event["kind"].startswith("post_commit"):
            event["payload"]["effectId"] = "effect-reply"


@dataclass(frozen=True)
class Departure:
    """What our engine writes differently.

    Attributes:
        name: as in the table of docs/engine.md.
        reason: why; the documentation says more.
        apply: makes of their log the one that ours has to be.
    """

    name: str
    reason: str
    apply: Callable[[Log], None]


DEPARTURES = (
    Departure("initial checkpoint", "5.2, 1: a turn that dies in its first model call is found", initial_checkpoint),
    Departure("nothing executed", "5.1, 1: the specification says so, their engine does not", nothing_executed),
    Departure("accepted transcript", "providers refuse a result without its call", with_the_calls),
    Departure("words for the unknown", "the model is told what not to assume, the host what to do", our_words_for_the_unknown),
    Departure("named errors", "a message without the kind of its error says little", named_errors),
    Departure("no word of the provider", "`OutcomeUnknown` carries a text only", no_word_of_the_provider),
    Departure("budget of the beginning", "the log keeps the budgets once", budget_of_the_beginning),
    Departure("effect id", "the reply's key, which also knows the scope of a delegated run", effect_id_of_the_reply),
)  # fmt: skip
"""Everything that is allowed to differ. Ids and times differ too, but always in the same way; see `Same`."""


def as_ours(log: Log) -> Log:
    """Their log as ours has to be."""
    expected = copy.deepcopy(log)
    for departure in DEPARTURES:
        departure.apply(expected)
    return expected


def test_each_departure_departs_and_is_documented() -> None:
    """None of the table is left over from a time when it was true, and docs/engine.md lists all of them."""
    documented = DOCUMENTATION.read_text()
    logs = [one["log"] for one in traces() if "log" in one]
    for departure in DEPARTURES:
        changed = [log for log in logs if (after := copy.deepcopy(log)) and not departure.apply(after) and after != log]
        assert changed, departure.name
        assert f"| {departure.name} |" in documented


# --- comparing ------------------------------------------------------------------------------------------------


class Same:
    """Compares documents: an id of theirs always stands for the same id of ours, and no two of theirs for one."""

    IDS = re.compile(r"(?:context:)?((?:run|event|invocation|checkpoint|effect)-\w+)")
    TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")

    def __init__(self) -> None:
        self._ours: dict[str, str] = {}
        self._theirs: dict[str, str] = {}

    def check(self, theirs: Any, ours: Any, path: str = "") -> None:
        """Check that ours says the same as theirs, to the key."""
        same_kind = type(theirs) is type(ours)  # True is not 1 here
        if isinstance(theirs, dict) and isinstance(ours, dict):
            one, other = cast("dict[str, Any]", theirs), cast("dict[str, Any]", ours)
            assert one.keys() == other.keys(), path
            for key, item in one.items():
                self.check(item, other[key], f"{path}.{key}")
        elif isinstance(theirs, list) and isinstance(ours, list):
            items, others = cast("list[Any]", theirs), cast("list[Any]", ours)
            assert len(items) == len(others), path
            for index, (item, other) in enumerate(zip(items, others, strict=True)):
                self.check(item, other, f"{path}[{index}]")
        elif isinstance(theirs, str) and isinstance(ours, str) and self.IDS.fullmatch(theirs):
            prefix = "context:" if theirs.startswith("context:") else ""
            assert ours.startswith(prefix), path
            self._stands_for(theirs.removeprefix(prefix), ours.removeprefix(prefix), path)
        elif isinstance(theirs, str) and isinstance(ours, str) and self.TIME.fullmatch(theirs):
            assert self.TIME.fullmatch(ours), path
        else:
            assert same_kind, path
            assert theirs == ours, path

    def _stands_for(self, theirs: str, ours: str, path: str) -> None:
        assert self._ours.setdefault(theirs, ours) == ours, path
        assert self._theirs.setdefault(ours, theirs) == theirs, path

    def check_logs(self, theirs: Log, ours: Log) -> None:
        """Check a log, write for write."""
        for index, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            self.check(without_empty_lists(one), without_empty_lists(other), f"[{index}]")
        assert len(theirs) == len(ours)


# --- the host that produced them ------------------------------------------------------------------------------


class Host:
    """The host of a scenario, as far as its trace tells of it."""

    def __init__(self, keeper: Keeper, name: str, model: PoppingModel, tools: Tools, **options: Any) -> None:
        self._keeper = keeper
        self._turn_id, self._session_id = f"t-{name}", f"s-{name}"
        self.inputs: Any = None
        self.model = model
        self.tools = tools
        options.setdefault("max_rounds", 10)
        self.agent = Agent(model, tools.all, parallel_tools=False, **options)
        self.durability = CountingDurability()
        self.post_commit = PostCommit()
        self.ran: list[str] = []
        """Requests that tools of the scenario's own were run for."""

    async def run(self) -> TurnResult:
        """Run the turn, or go on with it."""
        return await self._keeper.run(
            self.agent,
            "hi",
            turn_id=self._turn_id,
            session_id=self._session_id,
            inputs=self.inputs,
            reply=self.post_commit.port,
            durability=self.durability,
        )

    async def commit(self) -> dict[str, Any]:
        """How the turn stands, as its end would be told."""
        history = await self._keeper.history(self._turn_id)
        assert history is not None
        projection = Projection()
        assert list(projection.follow(history.entries))
        return to_tree(projection.commit())


OUTPUTS = {"call-a": "out-call-a", "call-b": "out-call-b"}


def compare(host: Host, commit: dict[str, Any], scenario: str, *, behind: int = 0) -> None:
    """Check everything that a trace says, and that our log holds `behind` a number of writes."""
    told = trace(scenario)
    expected, ours = [*told["log"]], host.durability.log[behind:]
    expected[-1] = {**expected[-1], "commit": told["result"]["commit"]}
    expected = as_ours(expected)
    wanted = expected[-1].pop("commit")
    same = Same()
    same.check_logs(expected, ours)
    same.check(without_empty_lists(wanted), without_empty_lists(commit), "commit")
    snapshots = [event["payload"] for event in events_of(ours) if event["kind"] == "context_prepared"]
    assert len(snapshots) == len(told["result"]["snapshots"])
    wanted = next(write["checkpoint"] for write in reversed(expected) if "checkpoint" in write)
    assert host.durability.checkpoints[-1].get("completedToolResults", []) == wanted["completedToolResults"]


# --- the scenarios --------------------------------------------------------------------------------------------


def ordered(keeper: Keeper) -> Host:
    """Two tools, then an answer."""
    host = Host(keeper, "ordered", PoppingModel(BOTH, DONE), Tools("echo", outputs=OUTPUTS))
    host.inputs = {"k": "v"}
    return host


def denied(keeper: Keeper) -> Host:
    """The tool is denied, and the model told."""
    permission = Denies(["echo"], "denied by host")
    return Host(keeper, "denied", PoppingModel(ONE, DONE), Tools("echo"), permission=permission)


def indet_tool(keeper: Keeper) -> Host:
    """Of the first tool, nobody knows what it did."""
    outputs = {**OUTPUTS, "call-a": OutcomeUnknown("dropped")}
    return Host(keeper, "indet_tool", PoppingModel(BOTH, DONE), Tools("echo", outputs=outputs))


def indet_model(keeper: Keeper) -> Host:
    """Of the model call, nobody knows whether it was answered."""
    model = PoppingModel(OutcomeUnknown("timeout after dispatch"), DONE)
    return Host(keeper, "indet_model", model, Tools("echo"), unknown_model="reconcile")


def retry_then_ok(keeper: Keeper) -> Host:
    """The model is reached with the third attempt."""
    model = PoppingModel(ConnectionError("503"), ConnectionError("503"), DONE)
    return Host(keeper, "retry", model, Tools("echo"))


@pytest.mark.parametrize("scenario", [ordered, denied, indet_tool, indet_model, retry_then_ok])
async def test_a_run_is_reproduced(keeper: Keeper, scenario: Callable[[Keeper], Host]) -> None:
    """Section 7, rows 1, 2, 3, 7 and 10."""
    host, name = scenario(keeper), scenario.__name__
    expected = trace(name)["result"]["commit"]
    result = await host.run()
    assert result.status == expected["status"]
    compare(host, await host.commit(), name)
    assert len(host.post_commit.sent) == (result.status == "success")


async def test_a_resolved_run_is_reproduced(keeper: Keeper) -> None:
    """Section 7, row 5: what was in doubt is told by somebody, and not run again."""
    host = indet_tool(keeper)
    await host.run()
    behind = len(host.durability.log)
    await keeper.resolve_tool("t-indet_tool", 0, 0, "happened", who="ann", why="seen", result="confirmed")
    assert (await host.run()).status == "success"
    compare(host, await host.commit(), "indet_tool_resolved", behind=behind)
    assert host.tools.effects == {"call-a": 1, "call-b": 1}


# --- cancelled in a tool --------------------------------------------------------------------------------------


async def cancelled_in_its_tool(keeper: Keeper) -> Host:
    """The host cancels the run while the first tool works; the tool comes to its end all the same."""
    host = Host(keeper, "canc", PoppingModel(BOTH, DONE), Tools("echo"))
    cancelled = anyio.CancelScope()

    def echo(context: ToolContext, **_: Any) -> str:
        host.ran.append(context.call_id or "")
        anyio.from_thread.run_sync(cancelled.cancel)
        return "o"

    # A plain function: its thread cannot be stopped, so its result is waited for, as the contract demands of each tool.
    tool = Tool(echo, name="echo")
    host.agent = Agent(host.model, [tool], parallel_tools=False, max_rounds=10)
    with cancelled:
        await host.run()
    return host


async def test_a_cancelled_run_is_reproduced_but_for_its_last_word(keeper: Keeper) -> None:
    """Section 7, row 16: the result of the tool that runs is kept with its checkpoint, and the next one does not run."""
    host = await cancelled_in_its_tool(keeper)
    expected = as_ours(trace("cancel_in_tool")["log"])[:-1]
    Same().check_logs(expected, host.durability.log[: len(expected)])
    assert expected[-1]["events"][-1]["kind"] == "checkpoint_created"
    assert host.ran == ["call-a"]
    assert host.post_commit.sent == []
    assert (await host.run()).status == "success"
    assert host.ran == ["call-a", "call-b"]


async def test_a_cancelled_run_is_reproduced(keeper: Keeper) -> None:
    """Section 7, row 16."""
    host = await cancelled_in_its_tool(keeper)
    compare(host, await host.commit(), "cancel_in_tool")


# --- a durability port that fails -----------------------------------------------------------------------------


async def test_a_port_that_fails_behind_an_effect(store: SqliteStore, keeper: Keeper) -> None:
    """Section 7, row 19: the error carries the checkpoint; the turn goes on from the log, with the effect made once."""
    host = Host(keeper, "recov", PoppingModel(ONE, DONE), Tools("echo", outputs=OUTPUTS))
    host.durability.fail_at = "tool_execution_completed"
    with pytest.raises(DurabilityFailed) as failed:
        await host.run()
    told = trace("recovery_required")
    assert failed.value.checkpoint is not None
    Same().check(
        without_empty_lists(as_ours([{"op": "none", "checkpoint": told["checkpoint"]}])[0]["checkpoint"]),
        without_empty_lists(to_tree(failed.value.checkpoint)),
    )
    assert failed.value.stage == "tool_execution_completed"  # "tool result" in the words of their error
    assert "disk full" in str(failed.value)
    assert host.durability.kinds[-1] == "tool_execution_started"
    assert host.tools.effects == {"call-a": 1}

    host.durability.fail_at = None
    await store.advance_clock(30_000)  # the failed run had announced its next model call, and keeps its lease
    assert (await host.run()).status == "success"
    assert host.tools.effects == {"call-a": 1}
    assert [request.round_index for request in host.model.requests] == [0, 1]
    assert [event["sequence"] for event in host.durability.events] == list(range(1, len(host.durability.events) + 1))
    events = await keeper.events("t-recov")
    assert host.durability.events == [to_tree(event) for event in events]
