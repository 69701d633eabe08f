"""Handling what has come in, in the process that took it: at once, and by and by what had to wait."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Final

import anyio
from anyio.abc import TaskGroup

from turnkeeper.conversation.conversations import Conversations
from turnkeeper.observe.logs import logger

log = logger(__name__)

_POLL: Final = 0.5

Taken = Callable[[str], object]
"""Told of a conversation with a new message, when its sender has its answer; what it returns may be awaited."""


def nobody(_: str) -> None:
    """To be told where a bot announces by itself what it takes."""


def who_is_told(bot: Conversations, taken: Taken | None) -> Taken | None:
    """Who is told of what comes in: `taken`, or nobody where the bot announces it by itself. None: it is to be handled here."""
    return nobody if taken is None and bot.announces else taken


async def tell(taken: Taken, conversation_id: str) -> None:
    """Tell of a conversation. What is raised is no failure of the message: it is in the journal, where a worker finds it."""
    try:
        told = taken(conversation_id)
        if inspect.isawaitable(told):
            await told
    except Exception:
        log.exception("conversation %s: telling of its message failed", conversation_id)


class InProcess:
    """Handles conversations here, as soon as something is in their journals. Use it as an async context manager.

    What waits, and what an earlier process has left, is found in the store.
    """

    def __init__(self, bot: Conversations, *, at_once: int = 16, poll_seconds: float = _POLL) -> None:
        """
        Args:
            at_once: conversations that are handled at the same time.
            poll_seconds: how often the store is asked for what waits.
        """
        self._bot = bot
        self._poll = poll_seconds
        self._at_once = at_once
        self._limit = anyio.Semaphore(at_once)
        self._again: dict[str, bool] = {}
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> InProcess:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._work)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is under way stops at its next barrier and is put back."""
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)

    @property
    def running(self) -> bool:
        """Whether it handles anything."""
        return self._tasks is not None

    def soon(self, conversation_id: str) -> None:
        """Handle what is pending in a conversation, without making the caller wait."""
        if self._tasks is None:
            log.error("conversation %s has a message, and this process handles none now", conversation_id)
        elif conversation_id in self._again:
            self._again[conversation_id] = True
        else:
            self._again[conversation_id] = False
            self._tasks.start_soon(self._process, conversation_id)

    async def _work(self) -> None:
        while True:
            try:
                await self._bot.work(poll_seconds=self._poll, at_once=self._at_once)
            except Exception:
                # Without it, what waits would wait for the next start, and nobody would see why.
                log.exception("what waits in the store cannot be looked for now")
            await anyio.sleep(self._poll)

    async def _process(self, conversation_id: str) -> None:
        try:
            async with self._limit:
                while True:
                    self._again[conversation_id] = False
                    await self._bot.process(conversation_id)
                    if not self._again[conversation_id]:
                        break
        except Exception:
            # Its messages are in the journal: whoever looks for pending ones tries again.
            log.exception("conversation %s cannot be gone on with now", conversation_id)
        finally:
            del self._again[conversation_id]
