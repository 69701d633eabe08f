"""The Keeper: keeps turns in a store, and hands out everything that can be done with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from turnkeeper.conversation import oversight
from turnkeeper.conversation.channel import Channel
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.oversight import ConversationHistory
from turnkeeper.conversation.state import SendKey
from turnkeeper.engine.contract_ports import EngineDurabilityPort
from turnkeeper.engine.events import last_checkpoint, writes_of
from turnkeeper.engine.importing import begin_with, scope_of
from turnkeeper.engine.loop import TurnResult, resume_turn, run_turn
from turnkeeper.engine.model_calls import reservation
from turnkeeper.engine.ports import Agent, ReplyPort
from turnkeeper.engine.stored import UNKNOWN_TEXT, kept_result
from turnkeeper.engine.wire import (
    EngineCheckpoint,
    EngineEvent,
    ModelInvocationResponse,
    ModelToolResult,
    Outcome,
    ResumeContext,
)
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log import values
from turnkeeper.log.decision import Decision
from turnkeeper.log.keeping import Keeping, Limits, Redact
from turnkeeper.log.record import Head, HeadQuery
from turnkeeper.log.store import Promise, Store
from turnkeeper.moving import Receipt, erase_logs
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.stores.opening import open_store
from turnkeeper.turn import commands as c
from turnkeeper.turn.decide import decide_all
from turnkeeper.turn.handle import DEFAULT_TTL_SECONDS, TurnHandle, milliseconds
from turnkeeper.turn.history import TurnHistory, read_entries, read_history
from turnkeeper.turn.identity import trace_hash, turn_key
from turnkeeper.turn.leases import Lease
from turnkeeper.turn.names import Resolution, TurnPhase
from turnkeeper.turn.session import TurnCheckpointSession
from turnkeeper.turn.state import KIND, TurnState, find_round

if TYPE_CHECKING:
    from turnkeeper.log.keyring import Keyring

Input = str | Sequence[Any]


class Pruned(NamedTuple):
    """What a prune removed (or would remove), and what it left."""

    removed: int
    kept: int
    bytes_removed: int


class Keeper:
    """Keeps turns in a store. Open it once for a process; its methods may be used by many tasks at once."""

    def __init__(
        self,
        store: Store,
        *,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        limits: Limits = Limits(),  # noqa: B008  # immutable
        redact: Redact | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """
        Args:
            store: where the logs are kept.
            ttl_seconds: how long a turn is kept after its last change.
            limits: the largest sizes that are kept.
            redact: sees every text of an input and of a tool's result before it is kept, and gives what is kept and used in its
                place; it has to give the same for the same (docs/security.md).
            telemetry: traces and counts what is done here; None: nobody does.
        """
        self.store = store
        self._telemetry = telemetry
        self._ttl_seconds = ttl_seconds
        self._keeping = Keeping(limits, redact)

    @classmethod
    async def open(
        cls,
        url: str = "sqlite:///turnkeeper.db",
        *,
        create: bool = True,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        keyring: Keyring | None = None,
        limits: Limits = Limits(),  # noqa: B008  # immutable
        redact: Redact | None = None,
        telemetry: Telemetry | None = None,
    ) -> Keeper:
        """Open the store of a URL, encrypted where a keyring is given. See `open_store`, and `Keeper` for the rest."""
        store = await open_store(url, create=create, keyring=keyring)
        return cls(store, ttl_seconds=ttl_seconds, limits=limits, redact=redact, telemetry=telemetry)

    async def __aenter__(self) -> Keeper:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what was asked, and close the store."""
        await self.store.close()

    # --- running ---------------------------------------------------------------------------------------------

    async def run(
        self,
        agent: Agent,
        input: Input,  # noqa: A002  # the field's word
        *,
        turn_id: str,
        scope: str = "primary",
        reply: ReplyPort | None = None,
        runtime: dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
        proof_deadline_ms: int = 0,
        wait: bool = True,
        session_id: str | None = None,
        inputs: Any = None,
        durability: EngineDurabilityPort | None = None,
    ) -> TurnResult:
        """Run a turn to its end; the same turn id again goes on with it, or gives its recorded result.

        Args:
            input: a user's text, or the conversation up to and with the message to be answered.

        See `turnkeeper.engine.loop.run_turn` for the rest, and for what is raised.
        """
        messages = [{"role": "user", "content": input}] if isinstance(input, str) else input
        return await run_turn(
            self._handle(turn_id, scope),
            agent,
            messages,
            reply=reply,
            runtime=runtime,
            labels=labels,
            proof_deadline_ms=proof_deadline_ms,
            wait=wait,
            session_id=session_id,
            inputs=inputs,
            durability=durability,
        )

    async def resume(
        self,
        agent: Agent,
        *,
        turn_id: str,
        scope: str = "primary",
        reply: ReplyPort | None = None,
        wait: bool = True,
        durability: EngineDurabilityPort | None = None,
    ) -> TurnResult:
        """Go on with a turn from where its log stands, without its input: an imported one, say.

        Raises:
            TurnCheckpointError: there is no such turn. For the rest see `run`.
        """
        turn = self._handle(turn_id, scope)
        return await resume_turn(turn, agent, reply=reply, wait=wait, durability=durability)

    async def adopt(
        self,
        checkpoint: EngineCheckpoint | None = None,
        *,
        agent: Agent | None = None,
        resume: ResumeContext | None = None,
    ) -> str:
        """Begin a turn with a checkpoint of another engine or another store; then `resume` it. The turn's scope.

        Doing it again changes nothing. Nothing is appended where anything is wrong with the checkpoint.

        Args:
            checkpoint: may be left out where `resume` has it.
            agent: who is to go on with it; a pending call of a tool that it does not have is refused.
            resume: how it is to be resumed. Its bounds count for each run whose agent has none of its own; its events go on
                behind `last_journal_sequence`. Its metadata is the host's and not kept.

        Raises:
            InvalidInput: the checkpoint contradicts itself or `resume`, or cannot be gone on with here; names the path.
            TurnCheckpointConflict: there is a turn of that id, which was begun with something else.
        """
        if checkpoint is None:
            if resume is None:
                raise InvalidInput("checkpoint", "is needed, by itself or in `resume`")
            checkpoint = resume.checkpoint
        commands = begin_with(checkpoint, None if agent is None else agent.by_name.keys(), resume=resume)
        scope = scope_of(checkpoint)

        def decide(state: TurnState, now: int) -> Decision[Any, Any]:
            return decide_all(state, commands[:1] if state.phase is not None else commands, now)

        await self._handle(checkpoint.turn_id, scope).put(decide)
        return scope

    def session(self, turn_id: str, scope: str = "primary", **options: Any) -> TurnCheckpointSession:
        """A session that drives the turn by hand. `options` are those of `TurnCheckpointSession`."""
        options.setdefault("ttl_seconds", self._ttl_seconds)
        options.setdefault("telemetry", self._telemetry)
        return TurnCheckpointSession(self.store, turn_id, scope, **options)

    def _handle(self, turn_id: str, scope: str) -> TurnHandle:
        return TurnHandle(
            self.store,
            turn_id,
            scope,
            ttl_seconds=self._ttl_seconds,
            telemetry=self._telemetry,
            keeping=self._keeping,
        )

    def conversations(
        self, flows: Flow | Sequence[Flow], channel: Channel | Callable[[str], Channel], **options: Any
    ) -> Conversations:
        """The conversations of a bot, to be used as an async context manager. `options` are those of `Conversations`."""
        limits, redact = self._keeping
        options = {"limits": limits, "redact": redact, "telemetry": self._telemetry, **options}
        return Conversations(self.store, flows, channel, **options)

    # --- looking ---------------------------------------------------------------------------------------------

    def turns(
        self, *, attention: bool | None = None, phase: TurnPhase | None = None, unchanged_since: int | None = None
    ) -> AsyncIterator[Head]:
        """The turns of the store, by key; `labels["turn"]` and `labels["scope"]` name them.

        With `unchanged_since`, those that did not change from that instant of the store's clock on, in milliseconds.
        """
        wanted = phase and phase.value
        return self.store.heads(HeadQuery(kind=KIND, phase=wanted, attention=attention, updated_before=unchanged_since))

    async def now(self) -> int:
        """The store's time, in milliseconds."""
        return (await self.store.read("turn:none")).now

    async def history(self, turn_id: str, scope: str = "primary", *, at: int | None = None) -> TurnHistory | None:
        """The records of a turn, and its state as it is, or as it was at a sequence number. None if there is none."""
        return await read_history(self.store, self._handle(turn_id, scope).key, at=at)

    async def checkpoint(
        self, turn_id: str, scope: str = "primary", *, at: int | None = None
    ) -> EngineCheckpoint | None:
        """The turn's last portable checkpoint, or the last one up to a sequence number of its log. None if there is none."""
        return last_checkpoint(await read_entries(self.store, self._handle(turn_id, scope).key, at=at))

    async def events(self, turn_id: str, scope: str = "primary", *, at: int | None = None) -> list[EngineEvent]:
        """The turn's events, gapless from the first one on; up to a sequence number of its log, if one is given."""
        entries = await read_entries(self.store, self._handle(turn_id, scope).key, at=at)
        return [event for write in writes_of(entries) for event in write.events]

    def conversation_heads(self, *, attention: bool | None = None) -> AsyncIterator[Head]:
        """The conversations of the store, by key; `labels["conversation"]` names them."""
        return oversight.conversations(self.store, attention=attention)

    async def conversation(self, conversation_id: str) -> ConversationHistory | None:
        """The records of a conversation that compaction has left, and its state. None if there is none."""
        return await oversight.read_conversation(self.store, conversation_id)

    # --- settling --------------------------------------------------------------------------------------------

    async def resolve_tool(
        self,
        turn_id: str,
        round_index: int,
        slot_index: int,
        resolution: Resolution | str,
        *,
        who: str,
        why: str,
        result: Any = None,
        fence: int | None = None,
        scope: str = "primary",
    ) -> None:
        """Settle a tool call whose outcome is unknown, with evidence; then run the turn again.

        Args:
            resolution: `happened` (with the tool's `result`), `did_not_happen` (it will run again), or `unknown` (the model
                is told so).
            who: who decided.
            why: the evidence.
            fence: of the call as it was looked at (`show` prints it). Without it, evidence on which somebody else has acted
                meanwhile, so that the call ran again, would be taken for evidence about the later run.

        Raises:
            TurnCheckpointConflict: the call is not in doubt, or has run again since it had this `fence`.
            InvalidInput: `result` cannot be kept exactly; names the path.
        """
        session = self.session(turn_id, scope)
        await session.load()
        settled = Resolution(resolution)
        round_ = find_round(session.log.cached, round_index)
        if round_ is None or not 0 <= slot_index < len(round_.calls):
            raise TurnCheckpointError(f"turn {turn_id!r} has no slot {slot_index} in round {round_index}")
        call = round_.calls[slot_index]
        happened = settled is Resolution.HAPPENED
        record = ModelToolResult(
            request_id=call.provider_call_id or "",
            name=call.tool_name,
            outcome=Outcome.SUCCESS if happened else Outcome.INDETERMINATE,
            output=result if happened else UNKNOWN_TEXT,
            error_kind=None if happened else "effect_outcome_unknown",
        )
        kept = (
            None
            if settled is Resolution.DID_NOT_HAPPEN
            else values.thaw(kept_result(record, "result", self._keeping)[1])
        )
        await session.resolve_tool(round_index, slot_index, settled, who=who, why=why, result_record=kept, fence=fence)

    async def resolve_model(
        self,
        turn_id: str,
        resolution: Resolution | str,
        *,
        who: str,
        why: str,
        response: ModelInvocationResponse | None = None,
        scope: str = "primary",
    ) -> None:
        """Settle a model call of which nobody knows whether it was answered; then run the turn again.

        Args:
            resolution: `happened` (with the answer that the provider is known to have given), or `did_not_happen` (it is made
                again).
            who: who decided.
            why: the evidence.
            response: the answer, for `happened`.

        Raises:
            TurnCheckpointConflict: no model call is in doubt.
            InvalidInput: a part of the evidence is missing, or the answer cannot be kept.
        """
        settled = Resolution(resolution)
        if (settled is Resolution.HAPPENED) != (response is not None):
            raise InvalidInput("response", "is needed with `happened`, and only there")
        if not why.strip():
            raise InvalidInput("why", "must tell the evidence")
        turn = self._handle(turn_id, scope)
        state = await turn.read()
        invocation = "" if state.model is None else state.model.invocation_id
        commands: list[c.Command] = [
            c.ResolveModel(invocation, settled, values.identifier(who, "who"), values.text(why, "why"))
        ]
        if response is not None:
            commands.append(reservation(state.current_round + 1, response))
        await turn.ask(*commands)

    async def decide_permission(
        self,
        turn_id: str,
        round_index: int,
        slot_index: int,
        approved: bool,
        *,
        who: str,
        why: str | None = None,
        valid_seconds: float | None = None,
        scope: str = "primary",
    ) -> None:
        """Say whether a parked tool call may run; then run the turn again.

        The decision belongs to this one call with these exact arguments; no other call can use it. Of two decisions the first
        one counts.

        Args:
            who: who decides.
            why: the reason; where it is denied, the model is told.
            valid_seconds: how long an approval holds, until the call begins; for ever where it is None.

        Raises:
            TurnCheckpointConflict: somebody else has decided already, or nobody asks.
            TurnCheckpointError: there is no such call.
        """
        command = c.ResolvePermission(
            round_index,
            slot_index,
            approved,
            values.identifier(who, "who"),
            None if why is None else values.text(why, "why"),
            None,
            0 if valid_seconds is None else milliseconds(valid_seconds),
        )
        await self._handle(turn_id, scope).ask(command)

    async def resolve_delivery(
        self,
        turn_id: str,
        message_id: str | None,
        *,
        who: str,
        why: str,
        sender: str | None = None,
        scope: str = "primary",
    ) -> None:
        """Settle a reply that may have been sent: its message id, or None where it surely was not.

        Args:
            who: who decided.
            why: the evidence.
            sender: the owner of the send that was looked at (`show` prints it), as `fence` in `resolve_tool`.

        Raises:
            TurnCheckpointConflict: the reply was sent again since that send.
            TurnCheckpointError: the reply is not in doubt.
        """
        if not why.strip():
            raise InvalidInput("why", "must tell the evidence")
        if message_id is not None:
            values.identifier(message_id, "message_id")
        await self._handle(turn_id, scope).ask(
            c.ResolveDelivery(message_id, values.identifier(who, "who"), values.text(why, "why"), sender)
        )

    async def release(
        self,
        turn_id: str,
        *,
        who: str,
        why: str,
        owner: str | None = None,
        force: bool = False,
        scope: str | None = None,
    ) -> dict[str, list[Lease]]:
        """Take a turn's leases from an owner that is known to be dead; then run the turn again. See `TurnHandle.release`.

        Args:
            scope: of one run; None: the turn's, and those of all runs that it delegated.

        Returns:
            What was taken, by scope.
        """
        scopes = [scope]
        if scope is None:
            query = HeadQuery(kind=KIND, prefix=turn_key(trace_hash(values.identifier(turn_id, "turn_id")), ""))
            scopes = [head.labels["scope"] async for head in self.store.heads(query)]
        taken: dict[str, list[Lease]] = {}
        refused: TurnCheckpointError = TurnCheckpointError(f"there is no turn {turn_id!r}")
        for one in filter(None, scopes):
            try:
                taken[one] = await self._handle(turn_id, one).release(owner, who=who, why=why, force=force)
            except TurnCheckpointConflict as e:
                refused = e
        if not taken:
            raise refused
        return taken

    async def release_conversation(
        self, conversation_id: str, *, who: str, why: str, owner: str | None = None, force: bool = False
    ) -> str:
        """Take a conversation from an owner that is known to be dead. See `oversight.release`."""
        return await oversight.release(self.store, conversation_id, who=who, why=why, owner=owner, force=force)

    # --- keeping house ---------------------------------------------------------------------------------------

    async def resolve_send(
        self, conversation_id: str, key: tuple[int, int, int], *, message_id: str | None, who: str, why: str
    ) -> None:
        """Settle a conversation's message that may be out. See `oversight.resolve_send`."""
        await oversight.resolve_send(
            self.store,
            conversation_id,
            SendKey(*key),
            message_id=message_id,
            who=who,
            why=why,
            telemetry=self._telemetry,
        )

    async def resolve_message(self, conversation_id: str, number: int, *, drop: bool, who: str, why: str) -> None:
        """Let a message be tried again, or drop it. See `oversight.resolve_message`."""
        await oversight.resolve_message(self.store, conversation_id, number, drop=drop, who=who, why=why)

    async def prune(self, *, older_than_seconds: float, dry_run: bool = False) -> Pruned:
        """Remove completed turns whose last change is older, and that need nobody's attention (LOG-9).

        Unfinished turns, turns with an open question, and turns before their proof deadline stay.
        """
        removed = kept = size = 0
        now = await self.now()
        async for head in self.store.heads(HeadQuery(kind=KIND)):
            old = head.updated < now - older_than_seconds * 1000 and head.keep_until < now
            done = head.phase == TurnPhase.COMPLETED.value and head.attention is None
            if not (old and done):
                kept += 1
            elif dry_run or await self.store.erase(head.key, unchanged_since=head.tail):
                removed += 1
                size += head.size
            else:
                kept += 1
        if removed and not dry_run:
            await self.store.tidy()
        return Pruned(removed, kept, size)

    async def erase(self, turn_id: str) -> Receipt:
        """Erase a turn with all its scopes, and give a receipt. A person's right to be forgotten, or a test's clean-up."""
        trace = trace_hash(values.identifier(turn_id, "turn_id"))
        return await erase_logs(self.store, turn_key(trace, ""))

    async def erase_conversation(self, conversation_id: str) -> Receipt:
        """Erase a conversation with the turns that its steps ran, and give a receipt."""
        return await oversight.erase_conversation(self.store, values.identifier(conversation_id, "conversation_id"))

    async def promises(self) -> list[Promise]:
        """What the store, as it is set up, promises."""
        return await self.store.promises()
