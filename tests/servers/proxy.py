"""A TCP proxy on the loopback interface that cuts connections where a test wants it: whatever protocol goes through."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

When = Literal["before", "after"]


class Proxy:
    """Stands between a client and a server. Belongs to the event loop that entered it."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._faults: deque[When | None] = deque()
        self._held: asyncio.Event | None = None
        self._cut = asyncio.Event()
        self.made = 0
        """Connections that were made through it so far."""
        self.sent = 0
        """Pieces of data that came from clients so far."""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*(pair.over for pair in self._pairs), return_exceptions=True)

    @property
    def port(self) -> int:
        """The port to connect to."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Cut every connection."""
        for pair in self._pairs:
            pair.cut()

    def cut_next(self, when: When | None, *later: When | None) -> asyncio.Event:
        """Cut the connection that sends something next: before the server got it, or after it answered.

        `later` is for what is sent behind that, on whatever connection; None lets it through. The event tells when the last
        cut was made.
        """
        self._faults.extend((when, *later))
        self._cut = asyncio.Event()
        return self._cut

    def hold_next(self) -> asyncio.Event:
        """Keep back what is sent next until the event is set, whatever the client does meanwhile: a slow network."""
        self._held = asyncio.Event()
        return self._held

    def held(self) -> asyncio.Event | None:
        """What the data that came just now has to wait for."""
        held, self._held = self._held, None
        return held

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self.made += 1
        pair = _Pair(self, (reader, writer), there)
        self._pairs.add(pair)
        await pair.over
        self._pairs.discard(pair)

    def fault(self) -> When | None:
        """What is planned for the data that came just now."""
        self.sent += 1
        return self._faults.popleft() if self._faults else None

    def has_cut(self) -> None:
        """Tell that a planned cut was made."""
        if not self._faults:
            self._cut.set()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: Streams, server: Streams) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._swallows = False
        self.over = asyncio.gather(self._there(), self._back())

    def cut(self) -> None:
        """End it on both sides, at once."""
        for _, writer in (self._client, self._server):
            writer.transport.abort()

    async def _there(self) -> None:
        reader, writer = self._client[0], self._server[1]
        try:
            while data := await reader.read(1 << 16):
                held = self._proxy.held()
                if held is not None:
                    await held.wait()
                fault = self._proxy.fault()
                if fault == "before":
                    self._proxy.has_cut()
                    break
                self._swallows |= fault == "after"
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        self.cut()

    async def _back(self) -> None:
        reader, writer = self._server[0], self._client[1]
        try:
            while data := await reader.read(1 << 16):
                if self._swallows:
                    self._proxy.has_cut()
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        self.cut()
