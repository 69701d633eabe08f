"""A charge server on the loopback address, with the behaviours of field case 05."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast


class ChargeServer(ThreadingHTTPServer):
    """Charges once for each idempotency key, and then does to the answer what it was told to.

    Attributes:
        behaviours: what happens to the answers, in order; the last one goes on.
        ledger: charges that were made, by idempotency key.
        keys: the key of every request, in order.
    """

    daemon_threads = True

    def __init__(self, *behaviours: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviours = list(behaviours)
        self.ledger: Counter[str] = Counter()
        self.keys: list[str] = []

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast("ChargeServer", self.server)
        key = self.headers["Idempotency-Key"]
        json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.keys.append(key)
        behaviour = server.behaviours.pop(0) if len(server.behaviours) > 1 else server.behaviours[0]
        if behaviour == "declined":
            self._answer(402, "declined")
            return
        server.ledger[key] = 1  # the real thing: a key is charged once
        if behaviour == "applied_then_504":
            self._answer(504, "gateway timeout")
        elif behaviour == "applied_then_socket_reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self._answer(200, "charged")

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's word
        """Say nothing."""


@contextmanager
def charge_server(*behaviours: str) -> Generator[ChargeServer]:
    """A server that runs while the block does."""
    server = ChargeServer(*behaviours)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def unused_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
