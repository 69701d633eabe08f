"""Connections to one server, and the exchange of commands for replies on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnkeeper.stores.redis import client as c


class NotSent(Exception):
    """There was no connection: the server surely got nothing of it. The cause says why."""


class AnswerLost(Exception):
    """Commands went out, and what became of them is not known. The cause says why."""


class Lines:
    """Connections to one server, used again from one exchange to the next. For one event loop."""

    def __init__(self, make: Callable[[], c.Wire], timeout: float) -> None:
        """
        Args:
            make: makes a connection that is not connected yet.
            timeout: seconds for the server to take what is sent.
        """
        self._make = make
        self._timeout = timeout
        self._free: list[c.Wire] = []

    async def exchange(self, commands: Sequence[c.Command]) -> list[Any]:
        """Send commands in one go, on one connection, and give their replies; a server's error is a reply.

        Raises:
            NotSent: nothing of it went out.
            AnswerLost: some of it may have been executed.
        """
        wire = await self._take()
        transport = c.transport_of(wire)
        try:
            await c.send(wire, commands, self._timeout)
            replies: list[Any] = []
            while len(replies) < len(commands):
                replies.append(await c.reply_of(wire))
                if not wire.is_connected:  # behind LOADING or NOAUTH the parser reads no further
                    replies += replies[-1:] * (len(commands) - len(replies))
        except BaseException as error:
            # Also a cancellation: a connection with an unread reply on it is never used again (LOG-6).
            await c.drop(wire, transport)
            if isinstance(error, c.FAILURES):
                raise AnswerLost from error
            raise
        self._free.append(wire)
        return replies

    async def _take(self) -> c.Wire:
        """A connection that is connected and has nothing to read."""
        try:
            while self._free:
                wire = self._free.pop()
                if wire.is_connected and not await wire.can_read():
                    return wire
                await wire.disconnect(nowait=True)
            wire = self._make()
            await wire.connect()
        except c.FAILURES as error:
            raise NotSent from error
        return wire

    async def close(self) -> None:
        """Close the connections that are not in use; the next exchange makes new ones."""
        while self._free:
            await self._free.pop().disconnect(nowait=True)
