"""An application on a port of the loopback address, in the test's own event loop: it can be stopped, and started there again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Self

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        """Leave them alone: they are the test runner's."""
        return contextlib.nullcontext()


class Site:
    """Serves an application. Use it as an async context manager.

    Attributes:
        port: where; the same after a restart.
    """

    def __init__(self, app: ASGIApp, *, lifespan: bool = False) -> None:
        self._app = app
        self._lifespan = lifespan
        self.port = 0
        self._lines: dict[tuple[str, int], asyncio.Transport] = {}
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Listen; a connection is taken from here on."""
        lines = self._lines

        class Protocol(H11Protocol):
            """Knows its connection by its peer, so that a fault can lose it."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                lines[transport.get_extra_info("peername")[:2]] = transport

            def connection_lost(self, exc: Exception | None) -> None:
                lines.pop(self.transport.get_extra_info("peername")[:2], None)
                super().connection_lost(exc)

        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", self.port))
        self._socket.listen(128)
        self.port = self._socket.getsockname()[1]
        lifespan = "on" if self._lifespan else "off"
        config = uvicorn.Config(
            self._app,
            http=Protocol,
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]))

    async def stop(self) -> None:
        """Cut everybody off and listen no more: who comes now is refused."""
        if self._server is None or self._task is None or self._socket is None:
            return
        server, task, self._server = self._server, self._task, None
        for line in list(self._lines.values()):
            line.abort()
        server.should_exit = True
        server.force_exit = not self._lifespan  # forced, it would leave the lifespan where it is
        await task
        left = list(server.server_state.tasks)
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._socket.close()

    def sever(self, request: Request) -> None:
        """Lose the connection of a request: its client gets no answer."""
        assert request.client is not None
        self._lines[(request.client.host, request.client.port)].abort()
