"""The fake provider on an address of the loopback interface, in a thread of its own or in the foreground."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Any, Self

from turnkeeper.errors import TurnkeeperError
from turnkeeper.models.failures import MissingSdk
from turnkeeper.models.fake.app import Provider
from turnkeeper.models.fake.desk import Asked, Billed, Desk
from turnkeeper.models.fake.script import Script

try:
    import uvicorn
    from starlette.requests import Request
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as e:
    raise MissingSdk("fake-model", e) from e


class AddressTaken(TurnkeeperError):
    """The server cannot listen where it was told to.

    Attributes:
        host, port: the address.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen at {host}:{port}: {reason}")
        self.host = host
        self.port = port


class FakeModel:
    """A provider's server that answers from a script. As a context manager it runs in a thread.

    Attributes:
        script: what it answers.
    """

    def __init__(self, script: Script, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """
        Args:
            port: where it listens; 0 for one that is free.
        """
        self.script = script
        self._desk = Desk(script)
        self._lines: dict[tuple[str, int], asyncio.Transport] = {}
        lines = self._lines

        class Protocol(H11Protocol):
            """Knows its connection by its peer, so that a fault can lose it."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                lines[transport.get_extra_info("peername")[:2]] = transport

            def connection_lost(self, exc: Exception | None) -> None:
                lines.pop(self.transport.get_extra_info("peername")[:2], None)
                super().connection_lost(exc)

        app = Provider(self._desk, self._sever).app()
        # Errors of the application go to the client as an answer; uvicorn's own words about lost connections are no news here.
        config = uvicorn.Config(
            app, http=Protocol, lifespan="off", log_level="critical", access_log=False, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(128)  # from here on nobody is turned away, also before the server runs
        except OSError as e:
            self._socket.close()
            raise AddressTaken(host, port, str(e)) from e
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Its address: what Anthropic's client takes for its `base_url`."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    @property
    def openai_url(self) -> str:
        """What OpenAI's client takes for its `base_url`."""
        return f"{self.url}/v1"

    @property
    def bill(self) -> list[Billed]:
        """Every answer that was made, in order."""
        return list(self._desk.bill)

    @property
    def requests(self) -> list[Asked]:
        """Every request for an answer, in order."""
        return list(self._desk.asked)

    def bought(self) -> Counter[int]:
        """How often each round's answer was bought."""
        return self._desk.bought()

    def serve(self) -> None:
        """Serve in the foreground, until somebody interrupts it."""
        # uvicorn ends in an orderly way, and then hands the interrupt on.
        with suppress(KeyboardInterrupt):
            self._server.run([self._socket])

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    def _sever(self, request: Request) -> None:
        """Lose the connection of a request: its client gets neither a rest nor an end."""
        assert request.client is not None
        self._lines[(request.client.host, request.client.port)].close()
