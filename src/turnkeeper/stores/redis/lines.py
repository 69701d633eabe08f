"""Connections to one server, and the exchange of commands for replies on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from turnkeeper.stores.redis import client as c

_IDLE: Final = 0.01
"""Seconds without use behind which a connection is looked at twice."""


class NotSent(Exception):
    """There was no connection: the server surely got nothing of it. The cause says why."""


class AnswerLost(Exception):
    """Commands went out, and what became of them is not known. The cause says why."""


class Lines:
    """Connections to one server, used again from one exchange to the next. For one event loop."""

    def __init__(self, make: Callable[[], c.Wire], timeout: float, room: asyncio.Semaphore) -> None:
        """
        Args:
            make: makes a connection that is not connected yet.
            timeout: seconds for the server to take what is sent.
            room: how many more connections may be in use.
        """
        self._make = make
        self._timeout = timeout
        self._room = room
        self._free: list[tuple[float, c.Wire]] = []
        """Since when, on the event loop's clock; the one that was used last is taken first."""
        self.abandoned: set[asyncio.Task[None]] = set()
        """Exchanges that go on without their callers, who were cancelled."""

    async def exchange(self, commands: Sequence[c.Command], *, abandons: bool = True) -> list[Any]:
        """Send commands in one go, on one connection, and give their replies; a server's error is a reply.

        Where the caller is cancelled, what went out is executed all the same, and its replies are awaited by a task in
        `abandoned`; what did not go out whole is not executed (LOG-6). Without `abandons` the connection is dropped in any
        case: for commands that only read, and take their time.

        Raises:
            NotSent: nothing of it went out.
            AnswerLost: some of it may have been executed.
        """
        await self._room.acquire()
        abandoned = False
        try:
            wire = await self._take()
            transport = c.transport_of(wire)
            replies: list[Any] = []
            try:
                await c.send(wire, commands, self._timeout)
                await self._receive(wire, replies, len(commands))
            except asyncio.CancelledError:
                abandoned = abandons and not transport.get_write_buffer_size()
                if abandoned:
                    self._abandon(wire, replies, len(commands))
                else:
                    await c.drop(wire, transport)
                raise
            except c.FAILURES as error:
                await c.drop(wire, transport)
                raise AnswerLost from error
            except BaseException:
                await c.drop(wire, transport)
                raise
        finally:
            if not abandoned:
                self._room.release()
        self._let_go(wire)
        return replies

    def _let_go(self, wire: c.Wire) -> None:
        self._free.append((asyncio.get_running_loop().time(), wire))

    def _abandon(self, wire: c.Wire, replies: list[Any], count: int) -> None:
        rest = asyncio.ensure_future(self._finish(wire, replies, count))
        self.abandoned.add(rest)
        rest.add_done_callback(self.abandoned.discard)

    async def _receive(self, wire: c.Wire, replies: list[Any], count: int) -> None:
        while len(replies) < count:
            replies.append(await c.reply_of(wire))
            if not wire.is_connected:  # behind LOADING or NOAUTH the parser reads no further
                replies += replies[-1:] * (count - len(replies))

    async def _finish(self, wire: c.Wire, replies: list[Any], count: int) -> None:
        transport = c.transport_of(wire)
        try:
            await self._receive(wire, replies, count)
        except c.FAILURES:
            await c.drop(wire, transport)
        except BaseException:  # the event loop is ending
            await c.drop(wire, transport)
            raise
        else:
            self._let_go(wire)
        finally:
            self._room.release()

    async def _take(self) -> c.Wire:
        """A connection that is connected and has nothing to read."""
        try:
            while self._free:
                since, wire = self._free.pop()
                if await self._usable(wire, since):
                    return wire
                await wire.disconnect(nowait=True)
            wire = self._make()
            await wire.connect()
        except c.FAILURES as error:
            raise NotSent from error
        return wire

    async def _usable(self, wire: c.Wire, since: float) -> bool:
        if asyncio.get_running_loop().time() - since > _IDLE:
            # A busy event loop may not have seen yet that the server closed it: once round sees it.
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self._free.append((since, wire))
                raise
        return wire.is_connected and not await wire.can_read()

    async def close(self) -> None:
        """Close the connections that are not in use; the next exchange makes new ones."""
        while self._free:
            _, wire = self._free.pop()
            await wire.disconnect(nowait=True)
