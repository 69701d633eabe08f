"""Permission to run a tool call: asked of the host's port, kept in the log, or waited for until a person decides (2.13)."""

from __future__ import annotations

from collections.abc import Callable

from turnkeeper.engine.contract_ports import EnginePermissionPort
from turnkeeper.engine.journal import Journal
from turnkeeper.engine.outcomes import awaited
from turnkeeper.engine.wire import EnginePermissionDecision, ModelToolRequest
from turnkeeper.errors import TurnkeeperError
from turnkeeper.log import values
from turnkeeper.turn import commands as c
from turnkeeper.turn.permissions import is_allowed
from turnkeeper.turn.state import Permission, TurnState, permission_of

PORT = "permission port"
"""Who decided, where the host's port did."""


class ApprovalPending(TurnkeeperError):
    """Raised by a permission port: a person has to decide first. The turn is parked until `Keeper.decide_permission`."""


class PermissionFailed(Exception):
    """The host's port could not say whether a call may run; the run fails, and the next one asks again."""


class Parked(Exception):
    """Everything is done but calls that wait for somebody's permission."""

    def __init__(self, slots: list[int]) -> None:
        super().__init__(f"slots {slots} wait for permission")
        self.slots = slots


class HumanApproval:
    """A permission port that lets a person decide: the turn is parked meanwhile, in no process and for as long as it takes.

    Attributes:
        needed: which calls need a person; None: all. Others are allowed.
    """

    def __init__(self, needed: Callable[[ModelToolRequest], bool] | None = None) -> None:
        self._needed = needed

    async def authorize(self, request: ModelToolRequest) -> EnginePermissionDecision:
        """See `EnginePermissionPort`."""
        if self._needed is not None and not self._needed(request):
            return EnginePermissionDecision(approved=True, reason="no approval is needed")
        raise ApprovalPending(f"{request.name} needs a person's approval")


class PermissionDesk:
    """Asks for the permission of one round's calls."""

    def __init__(self, journal: Journal, port: EnginePermissionPort, round_index: int) -> None:
        self._journal = journal
        self._port = port
        self._round = round_index

    def _known(self, state: TurnState, slot_index: int) -> Permission | None:
        round_ = state.round
        return permission_of(round_, slot_index) if round_ is not None and round_.index == self._round else None

    async def ask(self, slot_index: int, request: ModelToolRequest) -> EnginePermissionDecision | None:
        """Whether the call may run; None where a person has yet to decide. What was decided is written with what follows.

        Raises:
            PermissionFailed: the port failed, or answered what is no decision.
            TurnCheckpointConflict: somebody else decided meanwhile.
        """
        known = self._known(self._journal.state, slot_index)
        if known is None or known.approved is None or (known.approved and not self._holds(known)):
            await self._journal.ask(c.RequestPermission(self._round, slot_index))
            known = self._known(self._journal.state, slot_index)
        if known is not None and known.approved is not None:
            metadata = None if known.metadata is None else values.thaw(known.metadata)
            return EnginePermissionDecision(approved=known.approved, reason=known.reason, metadata=metadata)
        try:
            decision = await awaited(self._port.authorize(request))
        except ApprovalPending:
            return None
        except Exception as e:
            raise PermissionFailed(f"{type(e).__name__}: {e}") from e
        if not isinstance(decision, EnginePermissionDecision):  # pyright: ignore[reportUnnecessaryIsInstance]  # the edge
            raise PermissionFailed(f"the port answered {type(decision).__name__}, which is no decision")
        metadata = None if decision.metadata is None else values.freeze(decision.metadata, "decision.metadata")
        self._journal.defer(
            c.ResolvePermission(self._round, slot_index, decision.approved, PORT, decision.reason, metadata)
        )
        return decision

    def _holds(self, known: Permission) -> bool:
        return is_allowed(known, self._journal.turn.log.now())
