"""The owner's pen: commands that may wait are written together with the next one that may not (one write between effects)."""

from __future__ import annotations

from typing import Any

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.state import Row, SendKey
from turnkeeper.errors import OwnershipLost, TurnkeeperError
from turnkeeper.observe.logs import logger

log = logger(__name__)


class Pen:
    """What one owner writes to one conversation, in order.

    Attributes:
        handle: the conversation.
        owner, fence: in whose name.
        revision: of the row that this owner has read or written last; what is written goes over that one alone (R2).
    """

    def __init__(
        self, handle: ConversationHandle, owner: str, fence: int, tasks: TaskGroup, *, revision: int = 0
    ) -> None:
        self.handle = handle
        self.owner = owner
        self.fence = fence
        self.revision = revision
        self._tasks = tasks
        self._deferred: list[c.Command] = []
        self._writing: list[c.Command] = []
        self._row: Row | None = None
        self._lock = anyio.Lock(fast_acquire=True)

    def defer(self, command: c.Command) -> None:
        """Write this with whatever is written next."""
        self._deferred.append(command)

    def has_settled(self, key: SendKey) -> bool:
        """Whether the outcome of a send was deferred, or is being written."""
        return any(isinstance(one, c.SettleSend) and one.key == key for one in self._writing + self._deferred)

    def set_row(self, row: Row) -> None:
        """Make this the flow's row with whatever is written next; it holds what was deferred of the row before."""
        self._deferred = [one for one in self._deferred if not isinstance(one, c.KeepAnswer | c.KeepValue)]
        self._row = row

    async def write(self, *commands: c.Command) -> list[Any]:
        """Write what was deferred and `commands` in one append; the answers to `commands`.

        A caller that is cancelled is told so only behind the write.

        Raises:
            OwnershipLost: this owner does not own the conversation any more.
        """
        answers: list[Any] = []
        with anyio.CancelScope(shield=True):
            async with self._lock:
                deferred, row = self._deferred, self._row
                self._writing, self._deferred, self._row = deferred, [], None
                ahead = list(deferred)
                if row is not None:
                    ahead.append(c.SetRow(self.owner, self.fence, replace(row, revision=self.revision)))
                try:
                    answers += await self.handle.ask(*ahead, *commands)
                except BaseException:
                    self._deferred = deferred + self._deferred
                    self._row = self._row or row
                    raise
                finally:
                    self._writing = []
                if row is not None:
                    self.revision = answers[len(ahead) - 1]
                del answers[: len(ahead)]
        return answers

    async def flush(self) -> None:
        """Write what was deferred."""
        if self._deferred or self._row is not None:
            await self.write()

    def flush_soon(self) -> None:
        """Write what was deferred as soon as the step waits for anything, if nothing else has written it by then."""
        self._tasks.start_soon(self._flush_quietly)

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except (TurnkeeperError, OwnershipLost) as e:
            # It is still deferred: whoever writes next meets the same, and is told.
            log.debug("conversation %s: %s", self.handle.conversation_id, e)

    async def salvage(self) -> None:
        """Write what was deferred about sends: they have happened, whatever else went wrong."""
        sends: list[c.Command] = [one for one in self._deferred if isinstance(one, c.SettleSend)]
        self._deferred, self._row = sends, None
        try:
            await self.flush()
        except (TurnkeeperError, OwnershipLost) as e:
            log.warning(
                "conversation %s: that messages were sent could not be written: %s", self.handle.conversation_id, e
            )
