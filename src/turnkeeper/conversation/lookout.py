"""Looking through the store for conversations with something to do, and having them handled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import anyio

from turnkeeper.errors import StoreError
from turnkeeper.observe.logs import logger

log = logger(__name__)

_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 60.0
"""Seconds until a conversation that cannot be gone on with here is tried again."""


class _Failing(NamedTuple):
    """A conversation that cannot be gone on with here, and until when it is left alone."""

    pause: float
    until: float


class Lookout:
    """Looks again and again, and has so many conversations handled at the same time."""

    def __init__(
        self,
        pending: Callable[[], Awaitable[list[str]]],
        process: Callable[[str], Awaitable[object]],
        *,
        poll_seconds: float,
        at_once: int,
    ) -> None:
        """
        Args:
            pending: lists conversations with something to do.
            process: handles one of them.
            poll_seconds: between two looks.
            at_once: conversations that are handled at the same time.
        """
        self._pending = pending
        self._process = process
        self._poll = poll_seconds
        self._limit = anyio.CapacityLimiter(at_once)
        self._busy: set[str] = set()
        self._failing: dict[str, _Failing] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    pending = await self._pending()
                except StoreError:
                    log.exception("what is pending cannot be listed now")
                    await anyio.sleep(self._poll)
                    continue
                for gone in self._failing.keys() - set(pending):
                    del self._failing[gone]
                for conversation_id in pending:
                    failing = self._failing.get(conversation_id)
                    if conversation_id in self._busy or (failing and anyio.current_time() < failing.until):
                        continue
                    self._busy.add(conversation_id)
                    await self._limit.acquire_on_behalf_of(conversation_id)
                    tasks.start_soon(self._handle, conversation_id)
                await anyio.sleep(self._poll)

    async def _handle(self, conversation_id: str) -> None:
        try:
            await self._process(conversation_id)
            self._failing.pop(conversation_id, None)
        except Exception:
            before = self._failing.get(conversation_id)
            pause = _PAUSE if before is None else min(2 * before.pause, _LONGEST_PAUSE)
            self._failing[conversation_id] = _Failing(pause, anyio.current_time() + pause)
            log.exception(
                "conversation %s cannot be gone on with here", conversation_id, extra={"conversation": conversation_id}
            )
        finally:
            self._busy.discard(conversation_id)
            self._limit.release_on_behalf_of(conversation_id)
