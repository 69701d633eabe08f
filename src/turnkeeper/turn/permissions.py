"""The rules of permission for a tool call, pure: asked for once, decided once, for this very call, and perhaps not for ever."""

from __future__ import annotations

from turnkeeper.errors import TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log.decision import Decision
from turnkeeper.turn import commands as c
from turnkeeper.turn import records as r
from turnkeeper.turn.names import TurnPhase
from turnkeeper.turn.state import Permission, TurnState, permission_of


def is_allowed(permission: Permission | None, now: int) -> bool:
    """Whether a call may begin now: approved, and the approval is not over."""
    if permission is None or not permission.approved:
        return False
    return permission.valid_until == 0 or now < permission.valid_until


def decide_permission(
    state: TurnState, command: c.RequestPermission | c.ResolvePermission, now: int
) -> Decision[r.AnyRecord, None]:
    """Decide a command on the permission of a call. A decision belongs to one slot of one canonical decision, so it is bound
    to the exact arguments that were shown, and no other call can use it.

    Raises:
        TurnCheckpointError: there is no such call to be permitted any more.
        TurnCheckpointConflict: somebody else has decided already, or nobody asked.
    """
    round_ = state.round
    where = f"turn {state.trace_id!r} round {command.round_index} slot {command.slot_index}"
    active = state.phase is TurnPhase.ASSISTANT_RESERVED and round_ is not None
    if not active or round_ is None or round_.index != command.round_index:
        raise TurnCheckpointError(f"{where}: that round is not under way")
    if not 0 <= command.slot_index < len(round_.calls):
        raise TurnCheckpointError(f"{where}: there is no such call")
    known = permission_of(round_, command.slot_index)
    over = known is not None and known.approved is True and not is_allowed(known, now)
    if isinstance(command, c.RequestPermission):
        if known is not None and not over:
            return Decision(None, final=True)
        return Decision(None, (r.PermissionRequested(command.round_index, command.slot_index),))
    if known is None or over:
        raise TurnCheckpointConflict(f"{where}: nobody asks for permission" + " any more, the last one is over" * over)
    if known.approved is not None:
        same = (known.approved, known.who) == (command.approved, command.who)
        if same:
            return Decision(None, final=True)
        settled = "approved" if known.approved else "denied"
        raise TurnCheckpointConflict(f"{where}: {known.who} has {settled} it already")
    record = r.PermissionResolved(
        command.round_index,
        command.slot_index,
        command.approved,
        command.who,
        command.reason,
        command.metadata,
        command.valid_ms,
    )
    return Decision(None, (record,))
