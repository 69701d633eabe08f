"""A conversation's log in one process: commands in, answers and state out."""

from __future__ import annotations

import os
from typing import Any

import anyio

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.decide import LOST, Receipt, decide_all
from turnkeeper.conversation.effects import changes
from turnkeeper.conversation.evolve import ConversationRules, Retention
from turnkeeper.conversation.identity import conversation_key, event_digest
from turnkeeper.conversation.records import AnyRecord
from turnkeeper.conversation.state import ConversationState, TraceContext
from turnkeeper.errors import OwnershipLost
from turnkeeper.log import values
from turnkeeper.log.keeping import KEEPING, Keeping
from turnkeeper.log.shell import FencedLog
from turnkeeper.log.store import Store
from turnkeeper.observe.telemetry import Telemetry


class ConversationHandle:
    """One conversation, by its id."""

    def __init__(
        self,
        store: Store,
        conversation_id: str,
        retention: Retention = Retention(),  # noqa: B008  # immutable
        keeping: Keeping = KEEPING,
        *,
        telemetry: Telemetry | None = None,
    ) -> None:
        """
        Raises:
            InvalidInput: the id cannot serve as an identifier.
        """
        self.conversation_id = values.identifier(conversation_id, "conversation_id")
        self.key = conversation_key(conversation_id)
        self.keeping = keeping
        self.telemetry = telemetry
        watch = None if telemetry is None else telemetry.watch(store, changes)
        self.log: FencedLog[ConversationState, AnyRecord] = FencedLog(
            store, self.key, ConversationRules(retention), watch, most=keeping.limits.record
        )
        self._lock = anyio.Lock(fast_acquire=True)

    @property
    def state(self) -> ConversationState:
        """The state as last seen."""
        return self.log.cached

    async def read(self) -> ConversationState:
        """The state, read now."""
        return await self.log.read()

    async def ask(self, *commands: c.Command) -> list[Any]:
        """Put commands, decided one behind the other and durable in one append; their answers.

        Raises:
            OwnershipLost: a command was an owner's, and this one does not own the conversation any more (R3).
            ConversationError: a command does not fit what is there; nothing was written.
            StoreError: the store failed.
        """
        async with self._lock:  # in the order in which they were asked, so that a fold is never in vain
            answers = await self.log.ask(lambda state, now: decide_all(state, commands, now))
        if answers and answers[0] is LOST:
            raise OwnershipLost(f"conversation {self.conversation_id!r}")
        return answers

    async def receive(self, event_id: str, kind: str, message: bytes, trace: TraceContext | None = None) -> Receipt:
        """Take a message into the journal; durable when this returns (J1)."""
        digest = event_digest(values.identifier(event_id, "event_id"))
        taken = c.Receive(self.conversation_id, os.urandom(16), digest, kind, message, trace)
        (receipt,) = await self.ask(taken)
        return receipt

    async def fire_due(self) -> int:
        """Take the messages of all timers that are due into the journal; how many."""
        now = self.log.now()
        due = [timer for timer in self.state.timers if timer.due <= now]
        fired = 0
        for timer in due:
            (receipt,) = await self.ask(c.FireTimer(timer.id, event_digest(f"timer:{timer.id}:{timer.due}")))
            fired += receipt is not None
        return fired
