"""The leases of a turn, and the rule by which somebody takes them from an owner that is known to be dead; pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from turnkeeper.errors import OwnerAlive, TurnCheckpointConflict
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import Guard
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.names import ToolCallState, TurnPhase
from turnkeeper.turn.state import TurnState


class Lease(NamedTuple):
    """What somebody holds of a turn.

    Attributes:
        what: the model call, a tool call that is claimed, a tool call that may be happening, or the sending of the reply.
        owner: who holds it.
        end: when it ends on the store's clock, in milliseconds, unless it is renewed.
        length: how long it is; its owner renews it at a third of that.
        slot: the tool call's (round, slot).
    """

    what: str
    owner: str
    end: int
    length: int
    slot: tuple[int, int] | None = None

    @property
    def silent_from(self) -> int:
        """When its owner has missed a renewal: half of its length behind the last one."""
        return self.end - self.length // 2


def leases(state: TurnState, now: int) -> Iterator[Lease]:
    """The leases that are held at an instant of the store's clock."""
    return (lease for lease in _leases(state) if now < lease.end)


def _leases(state: TurnState) -> Iterator[Lease]:
    model, delivery, round_ = state.model, state.delivery, state.round
    asking = state.phase in (TurnPhase.STARTED, TurnPhase.ROUND_COMMITTED)
    if asking and model is not None and not model.failed and not model.unknown:
        yield Lease("model call", model.owner, model.lease_end, model.lease_ms)
    if state.phase is TurnPhase.ASSISTANT_RESERVED and round_ is not None:
        for index, slot in enumerate(round_.slots):
            if slot is not None and slot.state in (ToolCallState.CLAIMED, ToolCallState.EXECUTING):
                what = "tool call" if slot.state is ToolCallState.EXECUTING else "claim of a tool call"
                yield Lease(what, slot.owner, slot.lease_end, slot.lease_ms, (round_.index, index))
    sending = state.phase is TurnPhase.DELIVERY_RESERVED and delivery is not None and bool(delivery.owner)
    if sending and delivery is not None and not delivery.unknown and not delivery.not_sent:
        yield Lease("reply", delivery.owner, delivery.lease_end, delivery.lease_ms)


def decide_release(state: TurnState, command: c.ReleaseLeases, now: int) -> Decision[r.AnyRecord, None]:
    """End every lease of an owner now instead of later; nothing else. Whoever comes next finds what a crash leaves (T5), so
    no effect can happen twice by it that could not by a lease that runs out.

    Raises:
        TurnCheckpointConflict: that owner holds nothing here.
        OwnerAlive: it was heard of less than half a lease ago, and the command does not insist.
    """
    held = [lease for lease in leases(state, now) if lease.owner == command.owner]
    where = f"turn {state.trace_id!r} ({state.scope})"
    if not held:
        raise TurnCheckpointConflict(
            f"{where}: {command.owner} holds no lease, so nobody waits for it: run the turn again"
        )
    silent_from = max(lease.silent_from for lease in held)
    if now < silent_from and not command.force:
        raise OwnerAlive(where, command.owner, silent_from - now)
    guard = None if command.force else Guard(not_before=silent_from)
    return Decision(None, (r.LeasesReleased(command.owner, command.who, command.why),), guard)
