"""The turn of the crash tests: three rounds of 1, 3 and 2 tools and a reply, with a boundary to die at between any two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from tests.conformance.support import ClockedStore
from tests.crash.ledger import Ledger
from tests.crash.sealed import open_marked
from tests.engine.wrapped import WrappedStore
from turnkeeper import (
    Agent,
    DidNotHappen,
    Happened,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    Reply,
    ReplyPort,
    ToolContext,
    TurnResult,
    tool,
)
from turnkeeper.engine.stored import stored_messages
from turnkeeper.engine.tools import Policy, Tool
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.engine.wire import to_builtins
from turnkeeper.log.record import Appended, Behind, Guard, GuardFailed, Head, Position
from turnkeeper.log.store import Store
from turnkeeper.models.scripted import calls, text
from turnkeeper.turn import records as r
from turnkeeper.turn.evolve import TurnRules
from turnkeeper.turn.history import TurnHistory
from turnkeeper.turn.names import ToolCallState, TurnPhase
from turnkeeper.turn.state import final_text, find_round

T = TypeVar("T")

LEASE: Final = 60.0
"""Longer than any run takes, so that no renewal adds a boundary by chance. Over it goes the store's clock."""
ROUNDS: Final = (1, 3, 2)
"""Tools in each round."""


class Boundaries:
    """Counts what may be the last thing that the process does, and dies at the one that was chosen."""

    def __init__(self, die_at: int) -> None:
        self._die_at = die_at
        self._lock = threading.Lock()
        self.passed: list[str] = []

    def reach(self, name: str) -> None:
        """Note a boundary; tools come here from their threads as well."""
        with self._lock:
            self.passed.append(name)
            if len(self.passed) == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)


class MortalStore(WrappedStore):
    """A store that the process may die at: immediately before and immediately behind each append."""

    def __init__(self, inner: Store, boundaries: Boundaries) -> None:
        super().__init__(inner)
        self._reach = boundaries.reach

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the write, between two boundaries."""
        self._reach("before an append")
        outcome = await write()
        self._reach("behind an append")
        return outcome

    async def append_with(
        self,
        key: str,
        effect: Callable[[Any], T],
        records: Callable[[T], Sequence[bytes]],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
    ) -> tuple[T, Appended] | Behind | GuardFailed:
        """See `TransactionalStore`: one boundary more, between the effect and its completion in their transaction."""

        def complete(result: T) -> Sequence[bytes]:
            self._reach("within a transaction")
            return records(result)

        return await super().append_with(key, effect, complete, expected=expected, head=head, guard=guard)


class World:
    """The model, the tools and the channel of the turn. All of them write to the ledger, and none of them looks into it."""

    def __init__(self, ledger: Ledger, boundaries: Boundaries, policy: Policy, life: int, placeholder: str) -> None:
        self.ledger = ledger
        self._reach = boundaries.reach
        self._policy = policy
        self._life = life
        self._insert = f"INSERT INTO effects VALUES ({placeholder}, {placeholder})"

    def agent(self, *, parallel_tools: bool) -> Agent:
        """The model with its tools."""
        return Agent(model=self, tools=self._tools(), parallel_tools=parallel_tools, lease_seconds=LEASE)

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """See `ModelPort`: the tools of the round, then a last word."""
        self._reach("before a model call")
        self.ledger.write("model", round=request.round_index, life=self._life)
        self._reach("behind a model call")
        if request.round_index == len(ROUNDS):
            return text(f"done after {len(request.messages)} messages")
        names = ("pay", "book")
        requests = [
            (names[n % 2], f'{{"n": {request.round_index * 10 + n}}}') for n in range(ROUNDS[request.round_index])
        ]
        return calls(*requests, spoken=f"round {request.round_index}")

    def _effect(self, context: ToolContext, name: str, n: int) -> str:
        """An effect and what it gives. That of a transactional tool goes into a table of its own beside the store's."""
        result = f"{name} {n} is done"
        self._reach("before an effect")
        if context.transaction is None:
            self.ledger.write("effect", operation_id=context.operation_id, result=result)
        else:
            context.transaction.execute("CREATE TABLE IF NOT EXISTS effects (operation_id TEXT, result TEXT)")
            context.transaction.execute(self._insert, (context.operation_id, result))
        self._reach("behind an effect")
        return result

    def _tools(self) -> list[Tool]:
        options: dict[str, Any] = {
            Policy.FAIL_CLOSED: {},
            Policy.REPLAY_SAFE: {"replay_safe": True},
            Policy.RECONCILE: {"reconcile": self._look_up},
            Policy.TRANSACTIONAL: {"transactional": True},
        }[self._policy]

        @tool(**options)
        def pay(n: int, context: ToolContext) -> str:
            return self._effect(context, "pay", n)

        if self._policy is Policy.TRANSACTIONAL:  # these are plain functions, always

            @tool(**options)
            def book(n: int, context: ToolContext) -> str:
                return self._effect(context, "book", n)

        else:

            @tool(**options)
            async def book(n: int, context: ToolContext) -> str:
                return self._effect(context, "book", n)

        return [pay, book]

    async def _look_up(self, context: ToolContext) -> Happened | DidNotHappen:
        rows = self.ledger.rows("effect", operation_id=context.operation_id)
        return Happened(rows[0]["result"]) if rows else DidNotHappen()

    # --- the channel -----------------------------------------------------------------------------------------

    def port(self) -> ReplyPort:
        """The channel: one that drops a second message of a key, one that can be searched, one that can do neither."""
        if self._policy in (Policy.REPLAY_SAFE, Policy.TRANSACTIONAL):
            return ReplyPort(self._send, keyed=True)
        return ReplyPort(self._send, find=self._find if self._policy is Policy.RECONCILE else None)

    async def _send(self, reply: Reply) -> str:
        self._reach("before a send")
        self.ledger.write("send", key=reply.key, text=reply.text, message=f"message {reply.key}")
        self._reach("behind a send")
        return f"message {reply.key}"

    async def _find(self, reply: Reply) -> Happened | DidNotHappen:
        sent = self.sent(reply.key)
        return DidNotHappen() if sent is None else Happened(sent)

    def sent(self, key: str) -> str | None:
        """The message under that key, if it was sent."""
        rows = self.ledger.rows("send", key=key)
        return rows[0]["message"] if rows else None


async def _settle(keeper: Keeper, turn: str, world: World, result: TurnResult) -> None:
    """The operator: looks into the ledger, and says what is there."""
    session = keeper.session(turn)
    for round_index, slot_index in result.open_slots:
        rows = world.ledger.rows("effect", operation_id=session.logical_operation_id(round_index, slot_index))
        found, settled = (rows[0]["result"], "happened") if rows else (None, "did_not_happen")
        await keeper.resolve_tool(
            turn, round_index, slot_index, settled, who="operator", why="as the ledger says", result=found
        )
    if not result.open_slots:
        snapshot = await session.load()
        assert snapshot is not None
        assert snapshot.reply_message_key is not None
        sent = world.sent(snapshot.reply_message_key)
        await keeper.resolve_delivery(turn, sent, who="operator", why="as the ledger says")


async def _open(url: str, life: int) -> Store:
    """The store, behind every lease of the processes that were there before."""
    store = await open_marked(url)
    # The test clock of a file or a database stands where the process before has left it; that of Redis is this object's alone.
    leases = life if url.startswith("redis") else 1
    await cast("ClockedStore", store).advance_clock(round(leases * LEASE * 1000))
    return store


async def warm_up(path: str) -> None:
    """A job in a file of its own."""
    files = {"url": f"sqlite:///{path}.db", "ledger": f"{path}.ledger"}
    await perform(**files, turn="a turn", policy=Policy.FAIL_CLOSED, parallel=True, life=0, die_at=0)


async def perform(
    *, url: str, turn: str, ledger: str, policy: str, parallel: bool, life: int, die_at: int
) -> dict[str, Any]:
    """One process: opens the store behind every lease of the one before, goes on with the turn, and tells of it.

    Args:
        life: how many processes were at the turn before.
        die_at: the boundary to die at, counted from 1; 0 for none.
    """
    boundaries = Boundaries(die_at)
    inner = await _open(url, life)
    placeholder = "%s" if url.startswith("postgresql:") else "?"
    world = World(Ledger(Path(ledger)), boundaries, Policy(policy), life, placeholder)
    agent = world.agent(parallel_tools=parallel)
    async with Keeper(MortalStore(inner, boundaries)) as keeper:
        world.ledger.write("found", life=life, **_found(await keeper.history(turn)))
        for _ in range(20):
            # Nobody else is there: to wait would mean that a dead process's lease outlives its time.
            result = await keeper.run(agent, "go", turn_id=turn, reply=world.port(), wait=False)
            if result.status == "success":
                break
            assert result.status == "reconciliation_required", result
            await _settle(keeper, turn, world, result)
        else:
            raise AssertionError("the turn does not come to its end")
        history = await keeper.history(turn)
        assert history is not None
        return {"boundaries": boundaries.passed, "end": _told(history)}


def _found(history: TurnHistory | None) -> dict[str, Any]:
    """What a process finds in the log of the one that died before it."""
    if history is None:
        return {"decided": 0, "executing": [], "sending": False}
    executing: list[list[int]] = []
    for index in range(history.state.current_round + 1):
        round_ = find_round(history.state, index)
        assert round_ is not None
        executing += [
            [index, slot_index]
            for slot_index, slot in enumerate(round_.slots)
            if slot is not None and slot.state is ToolCallState.EXECUTING
        ]
    sending = history.state.phase is TurnPhase.DELIVERY_RESERVED
    return {"decided": history.state.current_round + 1, "executing": executing, "sending": sending}


def _told(history: TurnHistory) -> dict[str, Any]:
    """What the log of a finished turn holds; checks that its transcript was sound at every moment."""
    rules = TurnRules(0)
    state = rules.initial()
    for entry in history.entries:
        state = rules.evolve(state, entry.record, entry.at)
        check_pairs(stored_messages(state))
    return {
        "phase": history.state.phase,
        "revision": history.state.revision,
        "sequences": [entry.seq for entry in history.entries],
        "transcript": [to_builtins(message) for message in stored_messages(history.state)],
        "text": final_text(history.state),
        "sent": history.state.sent_message_id,
        "decisions": sum(isinstance(entry.record, r.AssistantReserved) for entry in history.entries),
        "completions": [
            [entry.record.round_index, entry.record.slot_index]
            for entry in history.entries
            if isinstance(entry.record, r.ToolCompleted)
        ],
    }
