"""The event stream as a projection of a turn's log: what each record means to a durability port (engine-contract.md 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from turnkeeper.engine.checkpoints import (
    Standing,
    accepted_answers,
    canonical_messages,
    checkpoint_of,
    context_state,
    imported_call,
    model_reconciliation,
    slot_result,
    snapshot_of,
)
from turnkeeper.engine.identity import RunIdentity, identity_of
from turnkeeper.engine.stored import Reader
from turnkeeper.engine.usage import was_held
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    EngineEvent,
    EngineEventKind,
    EnginePermissionDecision,
    EngineTurnStatus,
    ModelToolRequest,
    TurnCommit,
    to_builtins,
)
from turnkeeper.log import values
from turnkeeper.turn import records as r
from turnkeeper.turn.decide import model_invocation_id
from turnkeeper.turn.evolve import evolve
from turnkeeper.turn.history import Entry
from turnkeeper.turn.identity import derived_id
from turnkeeper.turn.names import Resolution, TurnPhase
from turnkeeper.turn.state import Permission, Round, TurnState, final_model, find_round, permission_of

_Kind = EngineEventKind
_STOPS: Final = {
    EngineTurnStatus.FAILED.value: _Kind.TURN_FAILED,
    EngineTurnStatus.CANCELLED.value: _Kind.TURN_CANCELLED,
    EngineTurnStatus.RECONCILIATION_REQUIRED.value: _Kind.TURN_RECONCILIATION_REQUIRED,
}
_OWNED: Final = (
    r.ModelStarted,
    r.ModelFailed,
    r.ToolClaimed,
    r.ToolBegun,
    r.ToolAmbiguous,
    r.DeliveryClaimed,
    r.RunStopped,
)
"""Records that say in whose name they were written."""
_ALLOWED: Final = to_builtins(EnginePermissionDecision(approved=True, reason="allow_all"))
"""The decision where the host has no say: it is asked for nothing and told all the same (1.16)."""


class _Planned(msgspec.Struct, frozen=True, gc=False):
    """An event before its payload is made: a payload may hold the whole conversation, and nobody may want it."""

    sequence: int
    kind: EngineEventKind
    invocation_id: str | None
    iteration: int | None
    payload: Callable[[], Any]


_UNTOLD: Final = _Planned(0, _Kind.TURN_STARTED, None, None, lambda: None)
"""Stands for the events that nobody wants."""


def _told_result(round_: Round, slot_index: int, read: Reader) -> Callable[[], Any]:
    """The payload that tells what is recorded of a call."""

    def payload() -> Any:
        result = slot_result(round_.slots[slot_index], read.named_response(round_).tool_requests[slot_index], read)
        return {"toolResult": None if result is None else to_builtins(result)}

    return payload


@dataclass(frozen=True)
class Write:
    """One call of a durability port: events, with the checkpoint that they lead to, or one event alone (1.16).

    Attributes:
        seq: the log's record that it is projected from.
        at: that record's time, in milliseconds.
    """

    seq: int
    at: int
    _planned: tuple[_Planned, ...]
    _standing: Standing
    _with_checkpoint: bool

    @property
    def kinds(self) -> tuple[EngineEventKind, ...]:
        """The kinds of its events."""
        return tuple(planned.kind for planned in self._planned)

    @property
    def last_sequence(self) -> int:
        """The sequence of its last event."""
        return self._planned[-1].sequence

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint goes with it."""
        return self._with_checkpoint

    @cached_property
    def events(self) -> tuple[EngineEvent, ...]:
        """Its events."""
        state, identity = self._standing.state, self._standing.identity
        moment = datetime.fromtimestamp(self.at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return tuple(
            EngineEvent(
                sequence=planned.sequence,
                id=derived_id("event", state.trace_id, state.scope, planned.sequence),
                timestamp=moment,
                session_id=identity.session_id or "",
                turn_id=state.trace_id,
                run_id=identity.run_id or "",
                parent_run_id=identity.parent_run_id,
                delegation_depth=identity.delegation_depth,
                invocation_id=planned.invocation_id,
                iteration=planned.iteration,
                kind=planned.kind,
                payload=planned.payload(),
            )
            for planned in self._planned
        )

    @cached_property
    def checkpoint(self) -> EngineCheckpoint | None:
        """Its checkpoint, if it has one."""
        return checkpoint_of(self._standing) if self._with_checkpoint else None


class Projection:
    """Follows a turn's log record by record, and tells what each of them means to a durability port.

    Events are numbered without gaps over all lives of the run; what a record becomes depends on the records before it alone, so
    it is the same whoever projects, and whenever.
    """

    def __init__(self, *, apart: bool = False, quiet: bool = False) -> None:
        """
        Args:
            apart: the writes share nothing that could be changed: for who hands them out while the projection goes on.
            quiet: events are counted and not made: for who wants checkpoints alone.
        """
        self._apart = apart
        self._quiet = quiet
        self._began = False
        self._read = Reader()
        self.state = TurnState()
        self.identity = RunIdentity()
        self._sequence = 0
        self._owner: str | None = None
        self._running = False
        self._invocation: str | None = None
        self._attempt = 0
        self._committed = False
        self._unknown: Standing | None = None
        self._refused: set[tuple[int, int]] = set()
        """Calls of which nothing ran: denied, unknown, or with arguments that do not fit."""
        self._prepared: r.ContextPrepared | None = None
        self._entry: Entry | None = None
        self._writes: list[Write] = []

    def follow(self, entries: Iterable[Entry]) -> Iterator[Write]:
        """The writes of the records that come next."""
        for entry in entries:
            yield from self.step(entry)

    def step(self, entry: Entry) -> list[Write]:
        """The writes of the next record."""
        before, self._entry, self._writes = self.state, entry, []
        self._began = False
        if self._apart:
            self._read = Reader()
        self.state = evolve(before, entry.record, entry.at)
        record = entry.record
        if isinstance(record, r.Started):
            self._begin()
            return self._writes
        if isinstance(record, r.LeasesReleased):
            return self._writes  # of leases the contract knows nothing; whoever goes on is told as another owner
        if not (self._committed and isinstance(record, r.RunStopped)):  # 2.1, 10: nothing is told of it behind a commit
            self._resume(record, before)
        match record:
            case r.ModelStarted():
                self._model_started(record)
            case r.PolicyApplied():
                self._policy_applied(record)
            case r.ContextPrepared():
                self._prepared = record
            case r.ModelFailed():
                self._model_failed(record)
            case r.ModelResolved():
                self._model_resolved(record)
            case r.AssistantReserved():
                self._decided(record)
            case r.PermissionRequested():
                self._append(_Kind.PERMISSION_REQUESTED, self._told_request(record))
            case r.PermissionResolved():
                self._permission_resolved(record)
            case r.ToolBegun():
                self._begun(record)
            case r.ToolCompleted() if (record.round_index, record.slot_index) in self._refused:
                self._checkpointed()  # 5.1, 1: nothing was executed, so nothing is said to be
            case r.ToolCompleted() | r.ToolAmbiguous():
                self._ended(record, _Kind.TOOL_EXECUTION_COMPLETED)
            case r.ToolResolved(resolution=Resolution.DID_NOT_HAPPEN):
                self._checkpointed()  # the request is pending again; no kind of event says so
            case r.ToolResolved():
                self._ended(record, _Kind.TOOL_RESULT_RECONCILED)
            case r.RoundCommitted():
                self._folded(record)
            case r.RunStopped():
                self._stopped(record)
            case r.DeliveryReserved():
                self._commit()
                self._append(_Kind.POST_COMMIT_STARTED, lambda: {"effectId": record.key}, invoked=False)
            case r.DeliveryClaimed() if self._is_sent_again(before):
                self._post_commit(_Kind.POST_COMMIT_STARTED)
            case r.DeliveryUnknown():
                self._post_commit(_Kind.POST_COMMIT_FAILED, message=record.reason)
            case r.DeliveryResolved() if not self._is_doubted(before):
                self._post_commit(_Kind.POST_COMMIT_FAILED, message=record.why)
            case r.Delivered():
                self._post_commit(_Kind.POST_COMMIT_COMPLETED)
            case r.Completed():
                self._commit()
            case _:
                pass
        return self._writes

    # --- the run ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.identity = identity_of(self.state)
        begun_with = self.identity.begun_with
        self._sequence = self.identity.last_sequence
        if begun_with is not None:
            self._invocation = begun_with.active_invocation_id
        self._running = True
        # 5.2, 1: with a checkpoint, so that a turn that dies in its first model call is found, and no event that tells of it.
        final = begun_with is not None and begun_with.final_output_ready
        iteration = begun_with.iteration if begun_with is not None and final else self.state.first_round
        planned = self._plan(_Kind.TURN_STARTED, self._started_payload(iteration), placed=False)
        self._write([planned], checkpoint=True)

    def _started_payload(self, iteration: int) -> Callable[[], Any]:
        identity = self.identity
        return lambda: {
            "maxIterations": identity.max_iterations,
            "startIteration": iteration,
            "inputs": identity.inputs,
        }

    def _resume(self, record: r.AnyRecord, before: TurnState) -> None:
        """A life of the run begins: the one before said that it stopped, or is silent and another owner goes on."""
        owner = record.owner or None if isinstance(record, _OWNED) and before.model_calls else None
        taken_over = self._owner is not None and owner not in (None, self._owner)
        if not self._running or taken_over:
            between = before.phase is TurnPhase.ROUND_COMMITTED
            iteration = before.current_round + between if before.round is not None else before.first_round
            self._append(_Kind.TURN_STARTED, self._started_payload(iteration), placed=False)
            self._running = self._began = True
        if owner is not None:
            self._owner = owner
        elif isinstance(record, r.ModelStarted):
            self._owner = record.owner

    def _stopped(self, record: r.RunStopped) -> None:
        self._running, self._owner = False, None
        if self._committed:
            return  # 2.1, 10: what comes behind a commit does not undo it; that the reply failed is told already
        cancelled = record.status == EngineTurnStatus.CANCELLED.value
        output = None if cancelled else {"errorKind": record.error_kind, "message": record.message}
        told = self._plan(_STOPS[record.status], lambda: {"status": record.status, "output": output}, invoked=False)
        state = self.state
        if state.phase is TurnPhase.ROUND_COMMITTED and state.model is None and told.iteration == state.current_round:
            told = replace(told, iteration=state.current_round + 1)  # the round is over, and no other one was begun
        self._write([told])

    # --- the model -------------------------------------------------------------------------------------------

    def _model_started(self, record: r.ModelStarted) -> None:
        state = self.state
        first = state.attempts == 1 or self._began  # of the round, or of a new life, which asks anew (2.7)
        imported = imported_call(state, self.identity)
        if imported is not None:
            self._invocation, self._attempt = imported.invocation_id, imported.failed_attempt
        elif first:
            self._invocation, self._attempt = record.invocation_id, 0
        if first:
            if self._prepared is not None and self._prepared.round_index != record.round_index:
                self._prepared = None
            standing = self._standing()
            self._append(_Kind.CONTEXT_PREPARED, lambda: to_builtins(snapshot_of(standing, record.round_index)))
        else:
            self._attempt += 1
        attempt, standing = self._attempt, self._standing()

        def payload() -> Any:
            shown = snapshot_of(standing, record.round_index)
            return {"snapshotId": shown.id, "attempt": attempt, "messageCount": len(shown.messages)}

        self._append(_Kind.MODEL_INVOCATION_STARTED, payload)

    def _policy_applied(self, record: r.PolicyApplied) -> None:
        state = self.state
        metadata = None if record.metadata is None else values.thaw(record.metadata)

        def payload() -> Any:
            messages = [to_builtins(message) for message in canonical_messages(state, self._read)]
            return {"messages": messages, "stablePrefixMessages": record.stable_prefix, "metadata": metadata}

        # 2.3 (3): the call that comes next has its id already, and is not the active one before its context is prepared.
        self._invocation = model_invocation_id(state, record.round_index)
        self._checkpointed(self._plan(_Kind.POLICY_APPLIED, payload), active=False)

    def _model_failed(self, record: r.ModelFailed) -> None:
        attempt, most = self._attempt, self.identity.max_model_attempts
        self._append(
            _Kind.MODEL_INVOCATION_FAILED,
            lambda: {
                "attempt": attempt,
                "exhausted": record.unknown or attempt + 1 >= most,
                "outcomeUnknown": record.unknown,
                "message": record.message,
            },
        )
        if record.unknown:
            self._unknown = self._standing()
            self._checkpointed(self._plan(_Kind.MODEL_RECONCILIATION_REQUIRED, self._told_unknown(self._unknown)))

    def _told_unknown(self, standing: Standing) -> Callable[[], Any]:
        def payload() -> Any:
            unknown = model_reconciliation(standing)
            return None if unknown is None else to_builtins(unknown)

        return payload

    def _model_resolved(self, record: r.ModelResolved) -> None:
        if record.resolution is Resolution.DID_NOT_HAPPEN:
            self._unknown = None
            self._checkpointed()  # 5.1, 13: the call is to be made again; no kind of event says so

    def _decided(self, record: r.AssistantReserved) -> None:
        round_ = self.state.round
        assert round_ is not None
        unknown, self._unknown = self._unknown, None
        if unknown is not None:
            self._reconciled(round_, unknown)
            return
        begun_with = self.identity.begun_with
        held = begun_with is not None and round_.previous is None and was_held(self.state, begun_with)
        if self._invocation is None or (self.state.model_calls == 0 and not held):
            self._invocation = derived_id("inv", self.state.trace_id, self.state.scope, record.round_index)

        def payload() -> Any:
            response = self._read.named_response(round_)
            following = None if response.next_context_state is None else to_builtins(response.next_context_state)
            return {
                "hasOutput": response.output is not None,
                "toolRequests": len(response.tool_requests),
                "nextPortability": following and following["portability"],
                "delegatedState": following and following["delegatedState"],
                "metadata": response.metadata,
            }

        self._checkpointed(self._plan(_Kind.MODEL_INVOCATION_COMPLETED, payload))

    def _reconciled(self, round_: Round, unknown: Standing) -> None:
        told = self._told_unknown(unknown)

        def payload() -> Any:
            response = self._read.named_response(round_)
            return {
                "reconciliation": told(),
                "hasOutput": response.output is not None,
                "toolRequests": len(response.tool_requests),
                "metadata": response.metadata,
            }

        self._checkpointed(self._plan(_Kind.MODEL_INVOCATION_RECONCILED, payload))

    # --- tools -----------------------------------------------------------------------------------------------

    def _request(
        self, record: r.ToolBegun | r.PermissionRequested | r.PermissionResolved
    ) -> Callable[[], ModelToolRequest]:
        """The call that a record is about, to be read when somebody wants it."""
        round_, read, index = find_round(self.state, record.round_index), self._read, record.slot_index
        assert round_ is not None
        return lambda: read.named_response(round_).tool_requests[index]

    def _told_request(self, record: r.ToolBegun | r.PermissionRequested) -> Callable[[], Any]:
        request = self._request(record)
        return lambda: {"toolRequest": to_builtins(request())}

    def _permission(self, record: r.ToolBegun) -> Permission | None:
        round_ = find_round(self.state, record.round_index)
        return None if round_ is None else permission_of(round_, record.slot_index)

    def _permission_resolved(self, record: r.PermissionResolved) -> None:
        request = self._request(record)
        metadata = None if record.metadata is None else values.thaw(record.metadata)
        decision = EnginePermissionDecision(approved=record.approved, reason=record.reason, metadata=metadata)
        self._append(
            _Kind.PERMISSION_RESOLVED, lambda: {"toolRequestId": request().id, "decision": to_builtins(decision)}
        )

    def _begun(self, record: r.ToolBegun) -> None:
        if record.refused:
            self._refused.add((record.round_index, record.slot_index))
            return
        request, told = self._request(record), self._told_request(record)
        if self._permission(record) is None:
            self._append(_Kind.PERMISSION_REQUESTED, told)
            self._append(_Kind.PERMISSION_RESOLVED, lambda: {"toolRequestId": request().id, "decision": dict(_ALLOWED)})
        self._append(_Kind.TOOL_EXECUTION_STARTED, told)

    def _ended(self, record: r.ToolCompleted | r.ToolAmbiguous | r.ToolResolved, kind: EngineEventKind) -> None:
        round_ = find_round(self.state, record.round_index)
        assert round_ is not None
        self._checkpointed(self._plan(kind, _told_result(round_, record.slot_index, self._read)))

    def _folded(self, record: r.RoundCommitted) -> None:
        round_ = find_round(self.state, record.round_index)
        assert round_ is not None
        if not round_.calls:
            return  # a final answer is in the conversation from its acceptance on
        state = self.state
        planned = [
            self._plan(_Kind.TOOL_RESULT_COMMITTED, _told_result(round_, index, self._read))
            for index in range(len(round_.calls))
        ]
        counted = self._plan(
            _Kind.CONVERSATION_UPDATED, lambda: {"messageCount": len(canonical_messages(state, self._read))}
        )
        self._checkpointed(*planned, counted)

    # --- the end ---------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        if self._committed:
            return
        self._committed = True
        state = self.state
        self._append(
            _Kind.TURN_COMMITTED,
            lambda: {"status": EngineTurnStatus.SUCCESS.value, "output": final_model(state)},
            invoked=False,
        )

    def _post_commit(self, kind: EngineEventKind, **told: str) -> None:
        delivery = self.state.delivery
        assert delivery is not None
        self._append(kind, lambda: {"effectId": delivery.key, **told}, invoked=False)

    def _is_sent_again(self, before: TurnState) -> bool:
        """Whether a claim is more than a renewal: somebody else sends, or what surely was not sent is sent again."""
        old, new = before.delivery, self.state.delivery
        assert old is not None
        assert new is not None
        return old.owner != new.owner or old.not_sent

    @staticmethod
    def _is_doubted(before: TurnState) -> bool:
        return before.delivery is not None and before.delivery.unknown

    def commit(self) -> TurnCommit:
        """How the turn stands, as its end would be told (1.12)."""
        state, stop = self.state, self.state.stop
        status = EngineTurnStatus.SUCCESS if self._committed else EngineTurnStatus(stop.status if stop else "failed")
        output: Any = final_model(state)
        if not self._committed and stop is not None and status is not EngineTurnStatus.CANCELLED:
            output = {"errorKind": stop.error_kind, "message": stop.message}
        return TurnCommit(
            session_id=self.identity.session_id or "",
            turn_id=state.trace_id,
            status=status,
            output=output,
            messages=canonical_messages(state, self._read),
            iterations=accepted_answers(state, self.identity),
            last_sequence=self._sequence,
            context_state=context_state(state, self.identity, self._read),
            model_reconciliation=model_reconciliation(self._standing()),
        )

    # --- writing ---------------------------------------------------------------------------------------------

    def _plan(
        self, kind: EngineEventKind, payload: Callable[[], Any], *, invoked: bool = True, placed: bool = True
    ) -> _Planned:
        """An event at the next sequence; `invoked` and `placed`: whether it names the model call and the iteration."""
        self._sequence += 1
        if self._quiet:
            return _UNTOLD
        model = self.state.model
        iteration = self.state.current_round if model is None else model.round_index
        return _Planned(
            self._sequence,
            kind,
            self._invocation if invoked and placed else None,
            max(iteration, self.state.first_round) if placed else None,
            payload,
        )

    def _append(
        self, kind: EngineEventKind, payload: Callable[[], Any], *, invoked: bool = True, placed: bool = True
    ) -> None:
        self._write([self._plan(kind, payload, invoked=invoked, placed=placed)])

    def _checkpointed(self, *planned: _Planned, active: bool = True) -> None:
        """Events with the checkpoint that they lead to, which the last of them tells of (2.5).

        `active`: whether the model call that they name is the checkpoint's active one.
        """
        included, trace_id, scope = self._sequence, self.state.trace_id, self.state.scope
        told = self._plan(
            _Kind.CHECKPOINT_CREATED,
            lambda: {
                "checkpointId": derived_id("checkpoint", trace_id, scope, included),
                "includedThroughSequence": included,
            },
        )
        if not active:
            self._invocation = None
        self._write([*planned, told], checkpoint=True, included=included)

    def _standing(self, sequence: int | None = None) -> Standing:
        last = self._sequence if sequence is None else sequence
        return Standing(self.state, self.identity, last, self._invocation, self._attempt, self._prepared, self._read)

    def _write(self, planned: list[_Planned], *, checkpoint: bool = False, included: int | None = None) -> None:
        assert self._entry is not None
        if self._quiet and not checkpoint:
            return
        self._writes.append(
            Write(self._entry.seq, self._entry.at, tuple(planned), self._standing(included), checkpoint)
        )


def writes_of(entries: Iterable[Entry]) -> list[Write]:
    """Everything that a turn's log, from its first record on, means to a durability port."""
    return list(Projection().follow(entries))


def last_checkpoint(entries: Iterable[Entry]) -> EngineCheckpoint | None:
    """The checkpoint of the last write that has one."""
    last: Write | None = None
    for write in Projection(quiet=True).follow(entries):
        last = write if write.has_checkpoint else last
    return None if last is None else last.checkpoint
