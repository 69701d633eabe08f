"""FlowCheckpoint, the portable form of a flow's row, and the store of it for hosts with a flow runtime of their own (F1, F8)."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import send_key
from turnkeeper.conversation.message import kept_message
from turnkeeper.conversation.state import Answer, ConversationState, Handover, Row, SendKey, TraceContext
from turnkeeper.errors import FlowCheckpointConflict, InvalidInput
from turnkeeper.log import values
from turnkeeper.log.store import Client, Store, as_store
from turnkeeper.observe.contexts import valid


class Cause(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Where the sends of a step start to count: an inbound record and a number behind it."""

    record: str | int
    seq: int


class Trace(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The W3C context of the turn that wrote a checkpoint (F7)."""

    traceparent: str
    tracestate: str | None = None


class HandoverMark(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a replica left behind for another (F6). Times are milliseconds of the store's clock.

    `from` is the replica.
    """

    kind: Literal["ephemeral", "stub"]
    source: str = msgspec.field(name="from", default="")
    at: int = 0
    expires: int | None = None


class FlowCheckpoint(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Where a flow stands (F1). Stores never interpret anything of it but `revision` and the times of `handover`.

    Attributes:
        flow, step, version: which step of which code.
        state: the flow's data, JSON-like.
        parked: the waking message is the first wait's answer.
        inbound: the journal's id of the message whose effects it captures.
        cause: where the sends of the step start to count.
        answer: what the first wait was answered while the step is unfinished.
        answers: what all its waits were answered, where the runtime keeps that.
        handover, trace: see their types.
        revision: the one last read or written, and one more; None where it was set without a condition (it counts as 0).
        data: whatever else a host keeps with it.
    """

    flow: str
    step: str | int
    version: int = 1
    state: Any = None
    parked: bool = False
    inbound: str | int | None = None
    cause: Cause | None = None
    answer: Any = None
    answers: list[Any] | None = None
    handover: HandoverMark | None = None
    trace: Trace | None = None
    revision: int | None = None
    data: dict[str, Any] = {}


class Adopted(NamedTuple):
    """What a replica has taken over.

    Attributes:
        checkpoint: the whole row, to be gone on with; None where there is none.
        interrupted: a flow was here and its state did not travel: it is over, and its user has to be told, once.
        notice_key: the key under which he is told, the same for whoever tells it.
    """

    checkpoint: FlowCheckpoint | None
    interrupted: bool = False
    notice_key: str = ""


def load_checkpoint(document: str | bytes) -> FlowCheckpoint:
    """A checkpoint from its JSON.

    Raises:
        InvalidInput: it is none; names the path.
    """
    try:
        return msgspec.json.decode(document, type=FlowCheckpoint)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as e:
        raise InvalidInput("checkpoint", str(e)) from e


def save_checkpoint(checkpoint: FlowCheckpoint) -> str:
    """Its JSON."""
    return msgspec.json.encode(checkpoint).decode()


def checkpoint_of(state: ConversationState, now: int) -> FlowCheckpoint | None:
    """The checkpoint of a conversation's flow as it stands; None where no flow is under way, or it has expired (F6)."""
    row = state.flow
    if row is None or (row.handover is not None and 0 < row.handover.expires <= now):
        return None
    if row.document is not None:
        host = msgspec.convert(values.thaw(row.document), FlowCheckpoint)
        return replace(host, revision=row.revision or None, handover=_mark(row.handover))
    answers = [_answer(one) for one in row.answers]
    return FlowCheckpoint(
        flow=row.flow,
        step=row.step,
        version=row.version,
        state=values.thaw(row.state) if row.state else None,
        parked=row.parked,
        inbound=row.inbound,
        cause=Cause(*row.cause),
        answer=answers[0] if len(answers) == 1 else None,
        answers=None if row.first_wait else answers,
        handover=_mark(row.handover),
        trace=None if row.trace is None else Trace(row.trace.traceparent, row.trace.tracestate or None),
        revision=row.revision or None,
    )


def _answer(answer: Answer) -> dict[str, Any]:
    return {"record": answer.number, "message": msgspec.to_builtins(kept_message(answer.message))}


def _mark(handover: Handover | None) -> HandoverMark | None:
    if handover is None:
        return None
    return HandoverMark(handover.kind, handover.source, handover.at, handover.expires or None)


class FlowCheckpoints:
    """The checkpoints of conversations, for a host with a flow runtime of its own: get, set, compare and set, delete.

    A conversation is driven by one runtime: ours (`Conversations`) leaves rows that were set here alone.
    """

    def __init__(self, store: Store | Client) -> None:
        """
        Raises:
            InvalidInput: it is no store, and no client that one can be made of.
        """
        self._store = as_store(store)

    def _handle(self, conversation_id: str) -> ConversationHandle:
        return ConversationHandle(self._store, conversation_id)

    async def get(self, conversation_id: str) -> FlowCheckpoint | None:
        """The checkpoint as it is now; an ephemeral one that has expired is none.

        Raises:
            StoreError: the store could not be read.
        """
        handle = self._handle(conversation_id)
        return checkpoint_of(await handle.read(), handle.log.now())

    async def set(self, conversation_id: str, checkpoint: FlowCheckpoint) -> None:
        """Set it, whatever is there. It counts as revision 0 from then on.

        Raises:
            InvalidInput: something in it cannot be kept; names the path.
        """
        await self._put(conversation_id, checkpoint, None)

    async def set_if(self, conversation_id: str, checkpoint: FlowCheckpoint, expected: int) -> int:
        """Set it over revision `expected` (0: none, or one that was set without a condition). Its new revision.

        Revisions of a conversation never come again, also where its row was deleted meanwhile (R2).

        Raises:
            FlowCheckpointConflict: another revision is there: ownership is lost, do not retry (R3).
            InvalidInput: something in it cannot be kept.
        """
        return await self._put(conversation_id, checkpoint, expected)

    async def delete(self, conversation_id: str) -> None:
        """Delete it, whatever is there."""
        await self._handle(conversation_id).ask(c.DeleteRow())

    async def delete_if(self, conversation_id: str, expected: int) -> None:
        """Delete revision `expected`.

        Raises:
            FlowCheckpointConflict: another revision is there.
        """
        await self._handle(conversation_id).ask(c.DeleteRow(expected))

    async def hand_over(
        self, conversation_id: str, checkpoint: FlowCheckpoint, *, replica: str, keep_seconds: float, stub: bool = False
    ) -> int:
        """Leave it for another replica: whole, for `keep_seconds`; or as a stub that tells that its state did not travel (F6).

        Raises:
            FlowCheckpointConflict: `checkpoint.revision` is not the one that is there.
        """
        handle = self._handle(conversation_id)
        await handle.read()
        now = handle.log.now()
        mark = (
            HandoverMark("stub", replica, now)
            if stub
            else HandoverMark("ephemeral", replica, now, now + round(keep_seconds * 1000))
        )
        left = replace(checkpoint, handover=mark)
        if stub:
            left = replace(left, state=None, answer=None, answers=None, data={})
        return await self._put(conversation_id, left, checkpoint.revision or 0)

    async def adopt(self, conversation_id: str) -> Adopted:
        """Take over what another replica has left: an ephemeral checkpoint once, a stub by ending its flow (F6).

        A checkpoint without a mark of hand-over is given as it is: its owner crashed, and left none.

        Raises:
            FlowCheckpointConflict: another replica was faster.
        """
        handle = self._handle(conversation_id)
        state = await handle.read()
        found = checkpoint_of(state, handle.log.now())
        if found is None or found.handover is None:
            return Adopted(found)
        revision = found.revision or 0
        if found.handover.kind == "stub":
            await handle.ask(c.DeleteRow(revision))
            # Of the stub's own revision, behind all keys that a record's sends can have (F6).
            key = send_key(state.conversation_id, state.seed, SendKey(0, revision))
            return Adopted(None, interrupted=True, notice_key=key)
        adopted = replace(found, handover=None)
        return Adopted(replace(adopted, revision=await self._put(conversation_id, adopted, revision)))

    async def _put(self, conversation_id: str, checkpoint: FlowCheckpoint, expected: int | None) -> int:
        handle = self._handle(conversation_id)
        put = c.PutRow(_host_row(checkpoint), expected, os.urandom(16), handle.conversation_id)
        (revision,) = await handle.ask(put)
        return revision


def _host_row(checkpoint: FlowCheckpoint) -> Row:
    mark, trace = checkpoint.handover, checkpoint.trace
    plain = cast("dict[str, Any]", msgspec.to_builtins(replace(checkpoint, revision=None, handover=None)))
    known = TraceContext(trace.traceparent, trace.tracestate or "") if trace is not None else None
    return Row(
        values.identifier(checkpoint.flow, "checkpoint.flow", longest=512),
        checkpoint.version,
        str(checkpoint.step),
        document=values.freeze(plain, "checkpoint"),
        trace=known if known is not None and valid(known) else None,
        handover=None if mark is None else Handover(mark.kind, mark.source, mark.at, mark.expires or 0),
    )


__all__ = [
    "Adopted",
    "Cause",
    "FlowCheckpoint",
    "FlowCheckpointConflict",
    "FlowCheckpoints",
    "HandoverMark",
    "Trace",
    "checkpoint_of",
    "load_checkpoint",
    "save_checkpoint",
]
