"""`TurnCheckpointSession`: a turn driven by hand, call by call, under the first seed's names (journal.md)."""

from __future__ import annotations

import secrets
from copy import deepcopy
from itertools import compress, count
from operator import ne
from typing import Any, cast

from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnSchemaConflict
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.log.shell import FencedLog
from turnkeeper.log.store import Client, Store, as_store
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.turn import commands as c
from turnkeeper.turn import decide
from turnkeeper.turn.handle import DEFAULT_TTL_SECONDS, TurnHandle, milliseconds
from turnkeeper.turn.identity import (
    ToolCall,
    arguments_fingerprint,
    input_fingerprint,
    kept_call_id,
    kept_labels,
    raw_calls,
    tool_calls,
)
from turnkeeper.turn.lifecycle import Lifecycle, project
from turnkeeper.turn.names import Resolution, ToolCallAction
from turnkeeper.turn.records import AnyRecord, RoundCommitted
from turnkeeper.turn.slots import SlotAnswer
from turnkeeper.turn.snapshot import ToolCallDecision, TurnSnapshot
from turnkeeper.turn.state import Transcript, TurnState, find_round, find_slot, thaw_messages


class TurnCheckpointSession:
    """Durable journal for one trace/scope pair.

    Every mutation is one append: durable when the call returns, never half. Sessions of several processes may share a
    trace; whoever comes second gets the first writer's canonical values back and has to use them.

    Args:
        redis: the store; or, as in the seed, an asyncio client of redis-py, whose servers are then the store.
        trace_id: the logical turn, the same on every redelivery.
        scope: `primary`, or the run id of a delegated run.
        ttl_seconds: how long the turn is kept after its last change (T1.6).
        claim_lease_seconds: how long a claimed slot may wait to be begun.
        execution_lease_seconds: how long an effect may take between renewals.
        proof_deadline_ms: until when, on the store's clock, the transport may redeliver; 0 for no bound (T1.7).
        lifecycle: where the phase of the `primary` scope is projected to (T4).
        labels: readable labels, for listing.
        report_ambiguous: let `commit_round` pass with slots whose outcome nobody has settled; the default is to
            refuse until somebody has (T3, ambiguity 7).
        telemetry: counts what the session writes; None: nobody does.

    Raises:
        InvalidInput: an identifier or a length of time cannot be used.
    """

    def __init__(
        self,
        redis: Store | Client,
        trace_id: str,
        scope: str = "primary",
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        claim_lease_seconds: float = 30,
        execution_lease_seconds: float = 900,
        proof_deadline_ms: int = 0,
        lifecycle: Lifecycle | None = None,
        *,
        labels: dict[str, str] | None = None,
        report_ambiguous: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        lengths = {
            "ttl_seconds": ttl_seconds,
            "claim_lease_seconds": claim_lease_seconds,
            "execution_lease_seconds": execution_lease_seconds,
        }
        for name, seconds in lengths.items():
            if not seconds > 0:
                raise InvalidInput(name, f"must be more than 0, not {seconds}")
        self._store = as_store(redis)
        self._turn = TurnHandle(self._store, trace_id, scope, ttl_seconds=ttl_seconds, telemetry=telemetry)
        self._ttl_seconds = ttl_seconds
        self._claim_lease_ms = milliseconds(claim_lease_seconds)
        self._execution_lease_seconds = execution_lease_seconds
        self._execution_lease_ms = milliseconds(execution_lease_seconds)
        self._proof_deadline = proof_deadline_ms
        self._lifecycle = lifecycle
        self._labels = kept_labels(labels)
        self._report_ambiguous = report_ambiguous
        self._known_transcript: tuple[Transcript | None, list[Any]] = (None, [])
        self._known_calls: tuple[bytes, list[tuple[str | None, str, Any]]] = (b"", [])

    @property
    def scope(self) -> str:
        """`primary`, or the run id of a delegated run."""
        return self._turn.scope

    @property
    def key(self) -> str:
        """The key of the turn's log."""
        return self._turn.key

    @property
    def redis(self) -> Store:
        """The store that the session writes to, for side-car stores; named as in the seed."""
        return self._store

    @property
    def trace_hash(self) -> str:
        """The trace id in the fixed-length form that keys are made of."""
        return self._turn.trace_hash

    @property
    def execution_lease_seconds(self) -> float:
        """How long an effect may take between renewals."""
        return self._execution_lease_seconds

    @property
    def ttl_seconds(self) -> float:
        """How long the turn is kept after its last change."""
        return self._ttl_seconds

    @property
    def log(self) -> FencedLog[TurnState, AnyRecord]:
        """The turn's log, for counting writes and for readers of its records."""
        return self._turn.log

    # --- the turn --------------------------------------------------------------------------------------------

    async def load(self) -> TurnSnapshot | None:
        """Load the canonical turn snapshot, or None before start.

        Raises:
            TurnSchemaConflict: the log has records of a newer version.
        """
        state = await self._turn.read()
        return None if state.phase is None else TurnSnapshot.of(state)

    async def reconcile_lifecycle(self, snapshot: TurnSnapshot | None = None) -> TurnSnapshot | None:
        """Project the durable phase into the transport's lifecycle; safe to repeat (T4).

        Only the `primary` scope is projected, and only what is durable: the projection may lag, it never leads.
        """
        if snapshot is None:
            snapshot = await self.load()
        if snapshot is not None and self._lifecycle is not None and self.scope == "primary":
            await project(self._lifecycle, self._turn.trace_id, snapshot.phase)
        return snapshot

    async def _asked(self, *commands: c.Command) -> TurnSnapshot:
        await self._turn.ask(*commands)
        return await self._snapshot()

    async def _snapshot(self) -> TurnSnapshot:
        snapshot = TurnSnapshot.of(self._turn.state)
        if self._lifecycle is not None:
            await self.reconcile_lifecycle(snapshot)
        return snapshot

    async def start(
        self, messages: list[Any], tool_names: list[str] | None = None, runtime: dict[str, Any] | None = None
    ) -> TurnSnapshot:
        """Create the canonical base transcript, or recover the first writer (T2).

        Raises:
            TurnCheckpointConflict: the turn was started with another inbound message.
            TurnCheckpointError: the proof deadline has passed and no log is there.
            InvalidInput: a value cannot be kept; names the path.
        """
        runtime = {} if runtime is None else runtime
        copied = values.storable(messages, "messages")
        if not isinstance(copied, list):
            raise InvalidInput("messages", "must be a list")
        command = c.Start(
            self._turn.trace_id,
            self._turn.scope,
            values.seal(copied, "messages"),
            values.freeze(tool_names, "tool_names"),
            values.freeze(runtime, "runtime"),
            input_fingerprint(messages, runtime),
            self._proof_deadline,
            self._labels,
        )
        snapshot = await self._asked(command)
        transcript = self._turn.state.transcript
        if transcript is not None and transcript.previous is None and transcript.tail == command.messages:
            self._known_transcript = (transcript, values.exactly(copied))
        return snapshot

    async def reserve_assistant(self, round_index: int, response: dict[str, Any]) -> dict[str, Any]:
        """Persist a provider decision before any effect and return canonical data: the first writer's (T2).

        Raises:
            TurnCheckpointError: the round is not the one that comes next.
            InvalidInput: a tool call has no name, or the decision cannot be kept.
        """
        command = c.ReserveAssistant(round_index, values.freeze(response, "response"), tool_calls(response))
        await self._asked(command)
        round_ = find_round(self._turn.state, round_index)
        assert round_ is not None
        return values.thaw(round_.response)

    async def get_assistant(self, round_index: int) -> dict[str, Any] | None:
        """Return a previously reserved provider decision without mutation."""
        round_ = find_round(await self._turn.read(), round_index)
        return None if round_ is None else values.thaw(round_.response)

    async def commit_round(self, round_index: int, messages: list[Any], runtime: dict[str, Any]) -> TurnSnapshot:
        """Commit the post-tool transcript/runtime and return canonical state.

        `messages` is the whole transcript; only what differs from the one before is stored.

        Raises:
            TurnCheckpointError: a slot has no result yet (an ambiguous one has to be resolved first), or the round is
                out of order.
        """
        if not isinstance(messages, list | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]  # the edge
            raise InvalidInput("messages", "must be a list")
        state = self._turn.state
        if find_round(state, round_index) is None:
            state = await self._turn.read()
        known = self._transcript(state)
        keep = _common_prefix(known, messages)
        added: list[Any] = values.storable(messages[keep:], "messages", first=keep)
        command = c.CommitRound(round_index, keep, added, values.freeze(runtime, "runtime"), self._report_ambiguous)
        decided: list[bytes] = []

        def decide_commit(state: TurnState, now: int) -> Decision[AnyRecord, Any]:
            decision = decide.decide_all(state, (command,), now)
            decided[:] = [record.messages for record in decision.records if isinstance(record, RoundCommitted)]
            return decision

        await self._turn.put(decide_commit)
        after = self._turn.state.transcript
        # Only if what is stored is ours: another worker may have committed the same round, with other messages.
        if after is not None and [after.tail] == decided and after.previous is state.transcript:
            self._known_transcript = (after, known[:keep] + values.exactly(added))
        return await self._snapshot()

    def _transcript(self, state: TurnState) -> list[Any]:
        """The messages of the last commit, in `values.exactly`'s form."""
        transcript, messages = self._known_transcript
        if transcript is not state.transcript or transcript is None:
            messages = cast("list[Any]", values.exactly(thaw_messages(state.transcript)))
            self._known_transcript = (state.transcript, messages)
        return messages

    async def save_final_model(self, content: str) -> str:
        """First-writer reserve the terminal provider content, and return the canonical one.

        Raises:
            TurnCheckpointError: tool calls of the last decision are not committed yet.
        """
        final = (await self._asked(c.SaveFinalModel(values.text(content, "content")))).final_model
        assert final is not None
        return final

    async def reserve_final_delivery(
        self, reply_message_key: str, text: str, delivery: dict[str, Any] | None = None
    ) -> TurnSnapshot:
        """Reserve delivery identity, exact text, and canonical presentation; the first writer's are returned.

        Raises:
            TurnCheckpointConflict: a reply is reserved under another key.
        """
        key = values.identifier(reply_message_key, "reply_message_key")
        frozen = None if delivery is None else values.freeze(delivery, "delivery")
        return await self._asked(c.ReserveDelivery(key, values.text(text, "text"), frozen))

    async def mark_delivered(self, reply_message_key: str, message_id: str) -> TurnSnapshot:
        """Record successful deterministic delivery using the reserved key.

        Raises:
            TurnCheckpointConflict: another message id is recorded. Both are kept: evidence of a double send.
        """
        command = c.MarkDelivered(
            values.identifier(reply_message_key, "reply_message_key"),
            values.identifier(message_id, "message_id"),
        )
        snapshot = await self._asked(command)
        if snapshot.sent_message_id != message_id:
            await self._turn.log.ask(lambda state, _: decide.disputes(state, command))
            raise TurnCheckpointConflict(
                f"turn {self._turn.trace_id!r}: the reply {reply_message_key!r} is recorded as message "
                f"{snapshot.sent_message_id!r}, now also as {message_id!r}: it may have been sent twice"
            )
        return snapshot

    async def mark_completed(self, *, allow_no_output: bool = False) -> TurnSnapshot:
        """Close a turn after delivery and all tool/effect slots are terminal.

        Raises:
            TurnCheckpointError: the reply is not delivered; without a reply, `allow_no_output` was not given, a slot is
                not terminal, or a send may be out.
        """
        return await self._asked(c.MarkCompleted(allow_no_output))

    # --- tool slots ------------------------------------------------------------------------------------------

    def logical_operation_id(self, round_index: int, slot_index: int) -> str:
        """Derive a stable effect ID using no provider-generated identity."""
        return self._turn.operation_id(round_index, slot_index)

    async def claim_tool(
        self,
        round_index: int,
        slot_index: int,
        provider_call_id: str | None,
        tool_name: str,
        raw_arguments: Any,
        operation_id: str,
        replay_safe: bool = False,
        owner_token: str | None = None,
        *,
        begin: bool = False,
        repeat_ambiguous: bool = False,
    ) -> ToolCallDecision:
        """Claim a logical tool slot, reclaiming only under safe lease rules (T3).

        Args:
            owner_token: who claims; made up for this call where it is None.
            begin: cross the effect barrier in the same append; a new owner is then answered BEGUN.
            repeat_ambiguous: run a call although an equal one of an earlier round is ambiguous.
        """
        owner = secrets.token_hex(16) if owner_token is None else values.identifier(owner_token, "owner_token")
        call = ToolCall(
            kept_call_id(provider_call_id),
            values.identifier(tool_name, "tool_name"),
            arguments_fingerprint(raw_arguments, "raw_arguments"),
        )
        return await self._slot(
            c.ClaimTool(
                round_index,
                slot_index,
                operation_id,
                call,
                owner,
                replay_safe,
                self._claim_lease_ms,
                self._execution_lease_ms if begin else None,
                repeat_ambiguous,
            ),
            unclaimed=(call, raw_arguments),
        )

    async def begin_tool(self, round_index: int, slot_index: int, owner_token: str, fence: int) -> ToolCallDecision:
        """Cross the effect barrier for the current fenced owner. Only `should_begin` authorises the effect."""
        return await self._slot(c.BeginTool(round_index, slot_index, owner_token, fence, self._execution_lease_ms))

    async def renew_tool(self, round_index: int, slot_index: int, owner_token: str, fence: int) -> ToolCallDecision:
        """Renew an executing slot while preserving its owner/fence."""
        return await self._slot(c.RenewTool(round_index, slot_index, owner_token, fence, self._execution_lease_ms))

    async def abandon_tool(self, round_index: int, slot_index: int, owner_token: str, fence: int) -> ToolCallDecision:
        """Release an executing slot whose call provably caused no effects.

        Only the live fenced owner may; the next claim is an ordinary RECLAIMED. A failure that merely might have
        reached the provider has to keep the way to AMBIGUOUS.
        """
        return await self._slot(c.AbandonTool(round_index, slot_index, owner_token, fence))

    async def complete_tool(
        self, round_index: int, slot_index: int, owner_token: str, fence: int, result_record: dict[str, Any]
    ) -> ToolCallDecision:
        """Save the exact model-facing/audit result before inference resumes.

        Raises:
            InvalidInput: the result cannot be kept. The slot stays EXECUTING, and its owner may complete it with a
                stand-in.
        """
        result = values.freeze(result_record, f"result of round {round_index} slot {slot_index}")
        return await self._slot(c.CompleteTool(round_index, slot_index, owner_token, fence, result))

    async def resolve_tool(
        self,
        round_index: int,
        slot_index: int,
        resolution: Resolution | str,
        *,
        who: str,
        why: str,
        result_record: dict[str, Any] | None = None,
        fence: int | None = None,
    ) -> ToolCallDecision:
        """Settle an ambiguous slot, with evidence: the audited way out of AMBIGUOUS (T3, ambiguity 8).

        Args:
            resolution: `happened` (with its result), `did_not_happen` (the slot may be claimed again), or `unknown` (the
                model is told `result_record`; the same call is still not repeated).
            who: who decided.
            why: the evidence.
            fence: of the slot as it was looked at. Without it, evidence that somebody else has acted on meanwhile (and the
                call ran again) would be taken for evidence about the later run.

        Raises:
            TurnCheckpointConflict: the slot is not ambiguous, or has run again since it had this `fence`.
            InvalidInput: a part of the evidence is missing.
        """
        settled = Resolution(resolution)
        if settled is not Resolution.DID_NOT_HAPPEN and result_record is None:
            raise InvalidInput("result_record", f"is needed for {settled.value!r}: it is what the model is told")
        why = values.text(why, "why")
        if not why.strip():
            raise InvalidInput("why", "must tell the evidence")
        result = None if result_record is None else values.freeze(result_record, "result_record")
        return await self._slot(
            c.ResolveTool(round_index, slot_index, settled, values.identifier(who, "who"), why, result, fence)
        )

    async def get_tool(self, round_index: int, slot_index: int) -> ToolCallDecision | None:
        """Read a logical tool slot without changing leases or ownership; None if it was never claimed."""
        slot = find_slot(await self._turn.read(), round_index, slot_index)
        if slot is None:
            return None
        action = ToolCallAction(
            {
                "CLAIMED": "ACQUIRED",
                "EXECUTING": "ALREADY_EXECUTING",
                "COMPLETED": "CACHED",
                "AMBIGUOUS": "AMBIGUOUS",
            }[slot.state.value]
        )
        answer = SlotAnswer(action, slot, slot.owner, slot.fence, slot.lease_end)
        return self._decision(round_index, slot_index, answer, None)

    async def _slot(self, command: c.SlotCommand, unclaimed: tuple[ToolCall, Any] | None = None) -> ToolCallDecision:
        try:
            (answer,) = await self._turn.ask(command)
        except TurnSchemaConflict:
            answer = SlotAnswer(ToolCallAction.SCHEMA_CONFLICT)
        assert answer is not None
        return self._decision(command.round_index, command.slot_index, answer, unclaimed)

    def _decision(
        self, round_index: int, slot_index: int, answer: SlotAnswer, unclaimed: tuple[ToolCall, Any] | None
    ) -> ToolCallDecision:
        call, arguments = self._call(round_index, slot_index) or unclaimed or (ToolCall("", "", ""), None)
        slot = answer.slot
        return ToolCallDecision(
            answer.action,
            None if slot is None else slot.state,
            round_index,
            slot_index,
            self._turn.operation_id(round_index, slot_index),
            call.provider_call_id,
            call.tool_name,
            arguments,
            answer.owner,
            answer.fence,
            False if slot is None else slot.replay_safe,
            None if slot is None or slot.result is None else values.thaw(slot.result),
            call.arguments_fingerprint,
            answer.lease_end,
            None if slot is None or slot.evidence is None else values.thaw(slot.evidence),
            answer.blocked_by,
        )

    def _call(self, round_index: int, slot_index: int) -> tuple[ToolCall, Any] | None:
        """The call of a slot and its raw arguments, from the reserved decision."""
        round_ = find_round(self._turn.state, round_index)
        if round_ is None or not 0 <= slot_index < len(round_.calls):
            return None
        if self._known_calls[0] is not round_.response:
            self._known_calls = (round_.response, raw_calls(values.thaw(round_.response)))
        return round_.calls[slot_index], deepcopy(self._known_calls[1][slot_index][2])


def _common_prefix(known: list[Any], messages: list[Any]) -> int:
    """How many leading messages are those of `known`, which is in `values.exactly`'s form.

    The whole transcript comes with every round, so messages are compared before they are copied, at the speed of C (measured at
    round 200: 0.1 ms, where copying and encoding them all took 3).
    """
    try:
        differing = list(compress(count(), map(ne, known, messages)))
    except Exception:  # whatever a value that is not kept does when it is compared: it is refused below
        differing = range(min(len(known), len(messages)))
    for index in differing:
        # May be stored as the same all the same: a tuple that comes back as a list, say.
        if known[index] != values.storable(messages[index], f"messages[{index}]"):
            return index
    return min(len(known), len(messages))
