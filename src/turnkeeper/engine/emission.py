"""Events and checkpoints handed to the host's durability port, behind the log's own writes (engine-contract.md 2.4, 2.16)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import anyio

from turnkeeper.engine.contract_ports import EngineDurabilityPort
from turnkeeper.engine.events import Projection, Write
from turnkeeper.engine.wire import EngineCheckpoint
from turnkeeper.errors import TurnkeeperError
from turnkeeper.log.record import NOWHERE
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.history import decode_entries


@runtime_checkable
class ReadableDurability(Protocol):
    """A durability port that knows how far it is, so that a resumed run hands over what a dead one could not."""

    async def last_sequence(self, session_id: str, turn_id: str, run_id: str) -> int:
        """The sequence of the last event that it keeps of the run; 0 for none."""
        ...


class DurabilityFailed(TurnkeeperError):
    """The host's durability port did not take what is durable in the log. Run the turn again: it goes on from the log.

    Attributes:
        stage: what the events are about.
        checkpoint: the checkpoint that it did not take, if one went with them.
    """

    def __init__(self, stage: str, checkpoint: EngineCheckpoint | None, cause: Exception) -> None:
        super().__init__(f"the durability port failed at the {stage}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.checkpoint = checkpoint


class Emitter:
    """Follows one turn's log, and hands what it means to the port, in order and each event once in a run of this process."""

    def __init__(self, turn: TurnHandle, port: EngineDurabilityPort) -> None:
        self._turn = turn
        self._port = port
        self._projection = Projection(apart=True)
        self._position = NOWHERE
        self._told = 0
        self._begun = False
        self._waiting: list[Write] = []
        """Followed and not handed over yet; where the port fails, what comes later must not overtake it."""

    async def begin(self) -> None:
        """Take note of what the log holds already: a port that keeps count gets what it lacks, another one what comes next.

        A run that is cancelled in the middle of it may begin again.
        """
        self._waiting += await self._read()
        if isinstance(self._port, ReadableDurability):
            identity = self._projection.identity
            self._told = await self._port.last_sequence(
                identity.session_id or "", self._turn.trace_id, identity.run_id or ""
            )
            await self._hand_over([])
        elif self._waiting:
            self._told = self._waiting.pop().last_sequence
            self._waiting.clear()
        self._begun = True

    async def catch_up(self) -> None:
        """Hand over what became durable since.

        Raises:
            DurabilityFailed: the port did not take it.
        """
        if self._begun:
            await self._hand_over(await self._read())

    async def _read(self) -> list[Write]:
        tail = await self._turn.log.store.read(self._turn.key, after=self._position)
        if tail.restart and self._position != NOWHERE:
            self._projection = Projection(apart=True)
        self._position = tail.position
        return list(self._projection.follow(decode_entries(self._turn.key, tail.records)))

    async def _hand_over(self, writes: list[Write]) -> None:
        self._waiting += writes
        while self._waiting:
            write = self._waiting[0]
            # Looked at first: events that are told already, with the whole conversation in some, need not be made.
            told = write.last_sequence <= self._told
            events = [] if told else [event for event in write.events if event.sequence > self._told]
            try:
                with anyio.CancelScope(
                    shield=True
                ):  # durability is not cancellable (1.16): half a write is told by nobody
                    if events and write.checkpoint is not None:
                        await self._port.append_with_checkpoint(events, write.checkpoint)
                    elif events:
                        await self._port.append(events[0])  # what has no checkpoint is one event
            except Exception as e:
                raise DurabilityFailed(write.kinds[0].value, write.checkpoint, e) from e
            self._told = max(self._told, write.last_sequence)
            del self._waiting[0]
