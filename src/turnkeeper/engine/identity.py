"""What a run is known by over all of its lives: session, run, parent and inputs, kept with the turn's first record."""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from turnkeeper.engine.wire import EngineCheckpoint, InvocationUsage, Wire, to_builtins
from turnkeeper.errors import InvalidInput, SchemaConflict
from turnkeeper.log import values
from turnkeeper.turn.identity import derived_id
from turnkeeper.turn.state import TurnState

METADATA_KEY: Final = "turnkeeper"
"""Under which our own additions stand in a checkpoint's metadata."""
MAX_ITERATIONS: Final = 50
MAX_MODEL_ATTEMPTS: Final = 3


class RunIdentity(Wire, frozen=True, kw_only=True):
    """What the engine has to know again of a run (engine-contract.md 2.2); whatever has its default is not stored.

    Attributes:
        session_id: shared by a tree of delegated runs; the trace id where it is None.
        run_id: kept across resumes; derived from trace and scope where it is None.
        parent_run_id, delegation_depth: of a delegated run.
        inputs: the turn's.
        max_iterations, max_model_attempts: the budgets that the turn was begun with.
        begun_with: the foreign checkpoint that the turn was imported from.
        last_journal_sequence: the last event in the journal that the checkpoint came with; 0 where that is not known.
    """

    session_id: str | None = None
    run_id: str | None = None
    parent_run_id: str | None = None
    delegation_depth: int = 0
    inputs: Any = None
    max_iterations: int = MAX_ITERATIONS
    max_model_attempts: int = MAX_MODEL_ATTEMPTS
    begun_with: EngineCheckpoint | None = None
    last_journal_sequence: int = 0

    @property
    def inherited(self) -> tuple[int, int]:
        """Iterations and model attempts for an agent that has no bounds of its own."""
        if self.begun_with is None:
            return MAX_ITERATIONS, MAX_MODEL_ATTEMPTS
        return self.max_iterations, self.max_model_attempts

    @property
    def last_sequence(self) -> int:
        """Of the last event before the turn's own: behind that, its numbers go on (2.5)."""
        if self.begun_with is None:
            return 0
        # The checkpoint's own `checkpoint_created` has the number behind the last one that it includes. One that comes before
        # any policy and model call is ours and has none (5.2, 1), so a journal may end with what it includes.
        begins = self.begun_with.resume_same_iteration and not self.begun_with.policy_applied_for_iteration
        least = self.begun_with.last_sequence + (not (begins and self.last_journal_sequence))
        return max(least, self.last_journal_sequence)

    @property
    def usage_before(self) -> InvocationUsage | None:
        """Tokens that were used before the turn was imported, where the checkpoint says so (our own key in its metadata)."""
        kept = ((self.begun_with and self.begun_with.metadata) or {}).get(METADATA_KEY)
        usage: Any = cast("dict[str, Any]", kept).get("usage") if isinstance(kept, dict) else None
        try:
            return None if usage is None else msgspec.convert(usage, InvocationUsage)
        except msgspec.ValidationError as e:
            raise InvalidInput(f"metadata.{METADATA_KEY}.usage", str(e)) from e

    def frame(self) -> bytes:
        """As the turn's first record keeps it; empty where everything has its default.

        Raises:
            InvalidInput: the inputs cannot be kept; names the path.
        """
        fields = to_builtins(self)
        return values.freeze(fields, "run") if fields else b""


def identity_of(state: TurnState) -> RunIdentity:
    """The identity of a turn's run, with nothing left out.

    Raises:
        SchemaConflict: it has a form that this version does not know.
    """
    try:
        stored = msgspec.convert(values.thaw(state.engine), RunIdentity) if state.engine else RunIdentity()
    except msgspec.ValidationError as e:
        raise SchemaConflict("identity of the run", str(e)) from e
    return msgspec.structs.replace(
        stored,
        session_id=stored.session_id or state.trace_id,
        run_id=stored.run_id or derived_id("run", state.trace_id, state.scope),
    )
