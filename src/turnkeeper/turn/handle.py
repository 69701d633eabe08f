"""A turn's log in one process: commands in, answers and state out. Sessions and the engine both stand on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from turnkeeper.errors import InvalidInput, SchemaConflict, TurnSchemaConflict
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.log.keeping import KEEPING, Keeping
from turnkeeper.log.shell import FencedLog
from turnkeeper.log.store import Store
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.turn import commands as c
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.effects import changes
from turnkeeper.turn.evolve import TurnRules
from turnkeeper.turn.identity import operation_id, trace_hash, turn_key
from turnkeeper.turn.leases import Lease, leases
from turnkeeper.turn.records import AnyRecord
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.state import TurnState

A = TypeVar("A")

DEFAULT_TTL_SECONDS = 604_800
"""How long a turn is kept after its last change: proof against late redeliveries (T1.6)."""


class TurnHandle:
    """One turn, by trace and scope."""

    def __init__(
        self,
        store: Store,
        trace_id: str,
        scope: str = "primary",
        *,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        telemetry: Telemetry | None = None,
        keeping: Keeping = KEEPING,
    ) -> None:
        """
        Raises:
            InvalidInput: `trace_id` or `scope` cannot serve as an identifier.
        """
        self.trace_id = values.identifier(trace_id, "trace_id")
        self.scope = values.identifier(scope, "scope", longest=128)
        self.trace_hash = trace_hash(trace_id)
        self._ttl_seconds = ttl_seconds
        self.telemetry = telemetry
        self.keeping = keeping
        self.key = turn_key(self.trace_hash, scope)
        watch = None if telemetry is None else telemetry.watch(store, changes)
        rules = TurnRules(round(ttl_seconds * 1000))
        self.log: FencedLog[TurnState, AnyRecord] = FencedLog(store, self.key, rules, watch, keeping.limits.record)

    def sibling(self, scope: str) -> TurnHandle:
        """The log of another scope of the same trace, kept as long."""
        return TurnHandle(
            self.log.store,
            self.trace_id,
            scope,
            ttl_seconds=self._ttl_seconds,
            telemetry=self.telemetry,
            keeping=self.keeping,
        )

    @property
    def state(self) -> TurnState:
        """The state as last seen."""
        return self.log.cached

    async def read(self) -> TurnState:
        """The state, read now.

        Raises:
            TurnSchemaConflict: the log has records of a newer version.
        """
        try:
            return await self.log.read()
        except SchemaConflict as e:
            raise _ours(e) from e

    async def ask(self, *commands: c.Command) -> tuple[SlotAnswer | None, ...]:
        """Put commands, decided one behind the other and durable in one append. See `decide.decide_all`."""
        return await self.put(lambda state, now: decide_all(state, commands, now))

    async def put(self, decide: Callable[[TurnState, int], Decision[AnyRecord, A]]) -> A:
        """Put a question of the caller's own. See `FencedLog.ask`."""
        try:
            return await self.log.ask(decide)
        except SchemaConflict as e:
            raise _ours(e) from e

    async def release(self, owner: str | None, *, who: str, why: str, force: bool = False) -> list[Lease]:
        """Take the turn's leases from an owner that is known to be dead, so that nobody waits for their end.

        They end as if they had run out (T3, T5): nothing is decided about any effect, and what the owner still writes counts only
        where it proves what has happened, and nobody has gone on since.

        Args:
            owner: whose leases, as it was looked at; may be None where one owner holds them all.
            who: who decided.
            why: how it is known that the owner is dead.
            force: take them also where the owner was heard of less than half a lease ago.

        Returns:
            What was taken.

        Raises:
            TurnCheckpointError: nobody holds anything of the turn, or there is no such turn.
            OwnerAlive: its owner was heard of just now.
            InvalidInput: there are several owners, and none is named; or the reason is missing.
        """
        if not why.strip():
            raise InvalidInput("why", "must say how it is known that the owner is dead")
        who, why = values.identifier(who, "who"), values.text(why, "why")

        def decide(state: TurnState, now: int) -> Decision[AnyRecord, list[Lease]]:
            held = list(leases(state, now))
            owners = sorted({lease.owner for lease in held})
            if owner is None and len(owners) > 1:
                raise InvalidInput("owner", f"is needed, there are several: {', '.join(owners)}")
            whose = owner or (owners[0] if owners else "nobody")
            decision = decide_all(state, [c.ReleaseLeases(whose, who, why, force)], now)
            return Decision([lease for lease in held if lease.owner == whose], decision.records, decision.guard)

        await self.read()
        return await self.put(decide)

    def operation_id(self, round_index: int, slot_index: int) -> str:
        """The slot's idempotency key (T3)."""
        return operation_id(self.trace_hash, self.scope, round_index, slot_index)


def _ours(error: SchemaConflict) -> TurnSchemaConflict:
    return error if isinstance(error, TurnSchemaConflict) else TurnSchemaConflict(error.where, error.reason)


def milliseconds(seconds: float) -> int:
    """A length of time for a record."""
    return max(1, round(seconds * 1000))
