"""The same random commands on every store at once: the same answers step by step, and at the end the same records, state, heads.

What is compared has no absolute times in it: an instant counts as the number of `GRAIN`s since the example began. Ticks and
leases are multiples of it, no sum of ticks is the end of a lease, and no example takes as long: so the clocks may run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.conformance.support import ClockedStore, listed
from tests.servers.postgres import Server
from tests.servers.redis import RedisCluster, RedisServer
from turnkeeper.errors import TurnCheckpointError, TurnkeeperError
from turnkeeper.log import values
from turnkeeper.log.record import HeadQuery
from turnkeeper.stores.opening import open_store
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import decide
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.history import read_history
from turnkeeper.turn.identity import ProviderReference, ToolCall, arguments_fingerprint, operation_id, trace_hash
from turnkeeper.turn.names import Resolution, ToolCallState, TurnPhase
from turnkeeper.turn.state import TurnState, find_round, find_slot

T = TypeVar("T")

GRAIN: Final = 100_000
TICK: Final = 3 * GRAIN
CLAIM_LEASE: Final = 5 * GRAIN
LEASE: Final = 13 * GRAIN
PROOF: Final = 4 * TICK + GRAIN
WORKERS: Final = 3
LONG: Final = "long enough to be stored once in a round and only referred to afterwards: "
CALLS: Final = tuple(
    ToolCall(call_id, name, arguments_fingerprint(arguments, "arguments"))
    for call_id, name, arguments in (("call_0", "charge", {"cents": 500}), (None, "mail", '{"text": "漢字 \\ud83d"}'))
)
DECISIONS: Final = ((), CALLS[:1], CALLS, CALLS[1:])


class Pick(NamedTuple):
    """What is left to chance about one command."""

    name: str
    """The command's, or "" for one that gets the turn on."""
    right: bool
    """Whether it comes from the owner, with the right ids."""
    offset: int
    slot: int
    variant: int
    dice: int


class Step(NamedTuple):
    """One step, the same on every store."""

    what: str
    worker: int
    picks: list[Pick]
    amount: int


# --- commands ------------------------------------------------------------------------------------------------------


class Author:
    """Writes the commands of one worker for a turn as it stands."""

    def __init__(self, trace: str, state: TurnState, pick: Pick, me: str) -> None:
        self.trace, self.me = trace, me
        self.variant, self.dice = pick.variant, pick.dice
        self._state, self._name = state, pick.name
        straight = not pick.name
        self.right = straight or pick.right
        self.round = state.current_round + (0 if straight else pick.offset)
        round_ = find_round(state, self.round)
        self._calls = () if round_ is None else round_.calls
        self.slot = pick.slot % len(self._calls) if straight and self._calls else pick.slot
        self.here = (self.round, self.slot)
        held = find_slot(state, *self.here)
        self.own = (held.owner, held.fence) if held and self.right else (me, 1)
        self.operation = operation_id(trace_hash(trace), "primary", *self.here)
        self.call = self._calls[self.slot] if self.right and self.slot < len(self._calls) else CALLS[0]
        self.resolution = list(Resolution)[pick.dice % 3]
        model, delivery = state.model, state.delivery
        self.invocation = (model.invocation_id, model.owner) if model and self.right else ("none", me)
        self.sender = delivery.owner if delivery and self.right else me
        self.key = "key" if self.right else "other key"
        self.text = f"{LONG}{pick.variant}"
        self.frame = values.freeze({"told": self.text})

    def write(self) -> c.Command:
        """The command."""
        return BY_NAME[self._name or self._next()](self)

    def _next(self) -> str:
        """The name of a command that gets the turn on, or one that has to wait for another worker to do so."""
        state, dice = self._state, self.dice
        match state.phase:
            case None:
                return "Start"
            case TurnPhase.STARTED | TurnPhase.ROUND_COMMITTED:
                if state.current_round >= 1 and dice < 3:
                    return "SaveFinalModel"
                if state.model is not None and state.model.unknown:
                    return "ResolveModel"
                called = state.model is not None and not state.model.failed
                return (
                    "ReserveAssistant" if called and dice < 7 else "FailModel" if called and dice == 9 else "StartModel"
                )
            case TurnPhase.ASSISTANT_RESERVED:
                return self._next_of_the_slot() if self._calls else "CommitRound" if dice < 7 else "SaveFinalModel"
            case TurnPhase.FINAL_MODEL_SAVED:
                return "ReserveDelivery"
            case TurnPhase.DELIVERY_RESERVED:
                unknown = state.delivery is not None and state.delivery.unknown
                return "ResolveDelivery" if unknown else ("DoubtDelivery", "ClaimDelivery", "MarkDelivered")[dice % 3]
            case TurnPhase.DELIVERED:
                return "MarkCompleted"
            case TurnPhase.COMPLETED:
                return "Start"

    def _next_of_the_slot(self) -> str:
        slots = [find_slot(self._state, self.round, index) for index in range(len(self._calls))]
        if all(slot and (slot.state is ToolCallState.COMPLETED or slot.resolution) for slot in slots):
            return "CommitRound"
        slot, dice = slots[self.slot], self.dice
        match slot.state if slot else None:
            case ToolCallState.CLAIMED if dice < 7:
                return "BeginTool"
            case ToolCallState.EXECUTING if dice < 8:
                return ("CompleteTool", "CompleteTool", "CompleteTool", "RenewTool", "AbandonTool", "DoubtTool")[
                    dice % 6
                ]
            case ToolCallState.AMBIGUOUS:
                return "ResolveTool"
            case _:
                return "ClaimTool"


BY_NAME: Final[dict[str, Callable[[Author], c.Command]]] = {
    "Start": lambda a: c.Start(
        a.trace,
        "primary",
        values.freeze([a.text, LONG]),
        values.freeze(["charge"]),
        values.freeze({"of": a.variant}),
        "input" if a.right else "other input",
        PROOF if a.dice < 3 else 0,
        {"label": "漢字" * a.variant},
    ),
    "ApplyPolicy": lambda a: c.ApplyPolicy(a.round + 1, a.dice % 2, values.freeze([a.text, LONG]), 0, a.frame),
    "PrepareContext": lambda a: c.PrepareContext(a.round + 1, a.dice % 2, values.freeze([a.text]), a.frame),
    "StartModel": lambda a: c.StartModel(a.round + 1, a.me, LEASE),
    "RenewModel": lambda a: c.RenewModel(
        *a.invocation, LEASE, ProviderReference("provider", "response", a.text) if a.dice < 3 else None
    ),
    "FailModel": lambda a: c.FailModel(*a.invocation, a.text, a.dice < 3),
    "ResolveModel": lambda a: c.ResolveModel(
        a.invocation[0], Resolution.HAPPENED if a.right else Resolution.DID_NOT_HAPPEN, a.me, a.text
    ),
    "ReserveAssistant": lambda a: c.ReserveAssistant(a.round + 1, a.frame, DECISIONS[a.dice % 4]),
    "RequestPermission": lambda a: c.RequestPermission(*a.here),
    "ResolvePermission": lambda a: c.ResolvePermission(*a.here, a.dice < 7, a.me, a.text, a.frame, LEASE * a.variant),
    "ClaimTool": lambda a: c.ClaimTool(
        *a.here,
        a.operation,
        a.call,
        a.me,
        a.variant == 1,
        CLAIM_LEASE,
        LEASE if a.dice % 2 else None,
        repeat_ambiguous=a.dice > 7,
        needs_permission=a.dice == 6,
    ),
    "BeginTool": lambda a: c.BeginTool(*a.here, *a.own, LEASE),
    "RenewTool": lambda a: c.RenewTool(*a.here, *a.own, LEASE),
    "AbandonTool": lambda a: c.AbandonTool(*a.here, *a.own),
    "CompleteTool": lambda a: c.CompleteTool(*a.here, *a.own, a.frame),
    "DoubtTool": lambda a: c.DoubtTool(*a.here, *a.own, "cut off"),
    "ResolveTool": lambda a: c.ResolveTool(
        *a.here,
        a.resolution,
        "operator",
        "looked",
        None if a.resolution is Resolution.DID_NOT_HAPPEN else a.frame,
        a.own[1] if a.dice < 8 else None,
    ),
    "CommitRound": lambda a: c.CommitRound(
        a.round, a.slot, [{"content": a.text}, {"results": [a.text, a.slot]}], a.frame, a.dice < 5
    ),
    "SaveFinalModel": lambda a: c.SaveFinalModel(a.text),
    "ReserveDelivery": lambda a: c.ReserveDelivery(a.key, a.text, a.frame if a.variant else None, a.me, LEASE),
    "ClaimDelivery": lambda a: c.ClaimDelivery(a.me, LEASE),
    "DoubtDelivery": lambda a: c.DoubtDelivery(a.sender, "cut off"),
    "ResolveDelivery": lambda a: c.ResolveDelivery(
        "message" if a.dice % 2 else None, a.sender, "looked", a.sender if a.dice < 8 else "another"
    ),
    "MarkDelivered": lambda a: c.MarkDelivered(a.key, f"message {a.variant}"),
    "ReleaseLeases": lambda a: c.ReleaseLeases(a.own[0], "operator", "it is dead", a.dice < 5),
    "StopRun": lambda a: c.StopRun(a.me, "error", f"kind {a.variant}", a.text),
    "MarkCompleted": lambda a: c.MarkCompleted(a.dice == 0),
}
"""How each command is written."""


def test_no_command_is_left_out() -> None:
    """The sequences are made of everything that can be asked of a turn."""
    kinds = {*c.Command.__subclasses__(), *c.SlotCommand.__subclasses__()} - {c.SlotCommand}
    assert BY_NAME.keys() == {kind.__name__ for kind in kinds if kind.__module__ == c.__name__}


picks = st.builds(
    Pick,
    name=st.sampled_from(["", *BY_NAME]) | st.just("") | st.just(""),
    right=st.sampled_from([True, True, True, False]),
    offset=st.sampled_from([0, 0, 0, -1, 1]),
    slot=st.integers(0, 1),
    variant=st.integers(0, 1),
    dice=st.integers(0, 9),
)
steps = st.builds(
    Step,
    what=st.sampled_from(["ask"] * 20 + ["tick"] * 4 + ["forget", "look", "look", "erase"]),
    worker=st.integers(0, WORKERS - 1),
    picks=st.lists(picks, min_size=1, max_size=3),
    amount=st.integers(1, 5),
)


def commands(trace: str, state: TurnState, now: int, chosen: Sequence[Pick], me: str) -> list[c.Command]:
    """Commands for one ask: each for the turn as the ones before leave it, where they are not refused."""
    written: list[c.Command] = []
    for pick in chosen:
        command = Author(trace, state, pick, me).write()
        written.append(command)
        try:
            for record in decide(state, command, now).records:
                state = evolve(state, record, now)
        except TurnkeeperError:
            pass
    return written


# --- stores --------------------------------------------------------------------------------------------------------


class There:
    """A turn in one store, and the workers at it."""

    def __init__(self, name: str, store: ClockedStore, trace: str) -> None:
        self.name = name
        self.store = store
        self.trace = trace
        self.workers = [TurnHandle(store, trace) for _ in range(WORKERS)]
        self.watcher = TurnHandle(store, trace)
        self.beginning = 0

    async def begin(self) -> None:
        """Note when it was."""
        self.beginning = (await self.store.read(self.watcher.key)).now

    async def ask(self, worker: int, asked: Sequence[c.Command]) -> Any:
        """What a worker is told."""
        if isinstance(asked[0], c.Start) and asked[0].proof_deadline:
            deadline = asked[0].proof_deadline + self.beginning
            asked = [msgspec.structs.replace(asked[0], proof_deadline=deadline), *asked[1:]]
        handle = self.workers[worker]
        try:
            told: Any = await handle.ask(*asked)
        except TurnCheckpointError as e:
            told = type(e).__name__, str(e), self.relative("until", getattr(e, "until", None))
        return self.plain(told), handle.log.position.seq, handle.state.revision

    async def look(self, worker: int) -> Any:
        """What a worker sees that looks."""
        state = await self.workers[worker].read()
        return self.plain(state), self.workers[worker].log.position.seq

    async def erase(self, tail: int | None) -> bool:
        """Whether there was such a log to erase."""
        return await self.store.erase(self.watcher.key, unchanged_since=tail)

    async def end(self) -> dict[str, Any]:
        """All there is to see of the turn."""
        key = self.watcher.key
        history = await read_history(self.store, key)
        for handle in self.workers:
            assert await handle.read() == (TurnState() if history is None else history.state), (
                "every worker sees the log"
            )
        entries = [] if history is None else history.entries
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        return {
            "records": [(entry.size, self.plain(entry.record)) for entry in entries],
            "times": [self.relative("at", entry.at) for entry in entries],
            "state": self.plain(None if history is None else history.state),
            "heads": [self.plain(head) for head in await listed(self.store, HeadQuery(prefix=key))],
            "in need": [head.key for head in await listed(self.store, HeadQuery(prefix=key, attention=True))],
        }

    def plain(self, value: Any) -> Any:
        """A value that can be compared with the one of another store: fields by name, instants made relative."""
        if isinstance(value, msgspec.Struct):
            fields = {name: self.relative(name, getattr(value, name)) for name in value.__struct_fields__}
            return {"": type(value).__name__, **fields}
        if isinstance(value, tuple | list):
            return [self.plain(part) for part in cast("Sequence[Any]", value)]
        return value

    def relative(self, name: str, value: Any) -> Any:
        """A field of that name."""
        if name in ("at", "created", "lease_end", "until", "updated", "valid_until") and value:
            return (value - self.beginning) // GRAIN
        if name in ("keep_until", "proof_deadline") and value:
            return value - self.beginning  # exactly as it was given
        return self.plain(value)


async def everywhere(turns: Sequence[There], do: Callable[[There], Awaitable[T]]) -> T:
    """Do the same on all stores, and give what came of it on all of them."""
    first, *others = await asyncio.gather(*(do(there) for there in turns))
    for there, other in zip(turns[1:], others, strict=True):
        assert other == first, f"on {there.name} it is not as on {turns[0].name}:\n{other}\n{first}"
    return first


@asynccontextmanager
async def opened(urls: dict[str, str]) -> AsyncGenerator[dict[str, ClockedStore]]:
    """All stores."""
    async with AsyncExitStack() as stack:
        stores: dict[str, ClockedStore] = {}
        for name, url in urls.items():
            stores[name] = cast("ClockedStore", await open_store(url))
            stack.push_async_callback(stores[name].close)
        yield stores


async def run(stores: dict[str, ClockedStore], trace: str, chosen: Sequence[Step]) -> set[str]:
    """One example; the kinds of records that it left."""
    turns = [There(name, store, trace) for name, store in stores.items()]
    for there in turns:
        await there.begin()
    names = [f"worker {number}" for number in range(WORKERS)]
    for number, step in enumerate(chosen):
        # Read where the least depends on it: what is asked is the same for all.
        state = await turns[0].watcher.read()
        match step.what:
            case "ask":
                now = turns[0].watcher.log.now()
                asked = commands(trace, state, now, step.picks, names[step.worker])
                note(f"{names[step.worker]}: {asked}")
                note(f"  {await everywhere(turns, lambda there: there.ask(step.worker, asked))}")  # noqa: B023  # awaited here
            case "tick":
                note(f"{step.amount} ticks")
                await everywhere(turns, lambda there: there.store.advance_clock(step.amount * TICK))  # noqa: B023
            case "forget":
                names[step.worker] = f"worker {step.worker} since {number}"
                for there in turns:
                    there.workers[step.worker] = TurnHandle(there.store, trace)
            case "look":
                await everywhere(turns, lambda there: there.look(step.worker))  # noqa: B023
            case _:
                tail = turns[0].watcher.log.position.seq
                unchanged = (None, tail, tail, tail + 1, tail - 1)[step.amount - 1]
                erased = await everywhere(turns, lambda there: there.erase(unchanged))  # noqa: B023
                note(f"erased if {unchanged}: {erased}")
    end = await everywhere(turns, lambda there: there.end())
    return {record[""] for _, record in end["records"]}


# With six stores on a machine that does much else, several times what it takes alone.
@pytest.mark.timeout(600)
def test_every_store_decides_the_same(
    tmp_path: Path,
    postgres: Server,
    postgres_database: str,
    redis_server: RedisServer,
    redis_cluster: RedisCluster,
) -> None:
    """LOG-1 to LOG-9, T2, T3: what a turn's commands are answered, and what is left of them, does not depend on the store."""
    redis_server.flush()
    redis_cluster.flush()
    urls = {
        "sqlite memory": "sqlite:///:memory:",
        "sqlite file": f"sqlite:///{tmp_path}/turns.db",
        "postgres": postgres.url(postgres_database),
        "redis": redis_server.url("protocol=2"),
        "redis resp3": redis_server.url("protocol=3", database=1),
        "redis cluster": redis_cluster.url(),
    }
    traces = (f"trace {number}" for number in count())
    seen: set[str] = set()
    with asyncio.Runner() as runner:
        opening = opened(urls)
        stores = runner.run(opening.__aenter__())

        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,  # the same sequences in every run: a failure here is one everywhere
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )
        @given(st.lists(steps, min_size=30, max_size=30))
        def compare(chosen: list[Step]) -> None:
            seen.update(runner.run(run(stores, next(traces), chosen)))

        try:
            compare()
        finally:
            runner.run(opening.__aexit__(None, None, None))
    print(sorted(seen))
    kinds = {kind.__name__ for kind in get_args(r.AnyRecord)}
    assert len(seen) > len(kinds) * 2 / 3, f"the sequences get nowhere: they never left {kinds - seen}"


@pytest.mark.anyio
async def test_a_refused_erase_leaves_the_clock_alone(store: ClockedStore) -> None:
    """LOG-3: whoever wants to erase a log that has gone on meanwhile does not move its clock."""
    handle = TurnHandle(store, "trace")
    await store.advance_clock(TICK)
    start = Author("trace", TurnState(), Pick("", True, 0, 0, 0, 9), "me").write()
    await handle.ask(start)
    before = (await store.read(handle.key)).now
    assert not await store.erase(handle.key, unchanged_since=handle.log.position.seq + 1)
    assert (await store.read(handle.key)).now < before + GRAIN
