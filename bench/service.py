"""From a webhook to its reply, through real processes: a front end, workers, a peer; and what a worker costs that idles."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec
import uvicorn

from bench.findings import Finding
from bench.measured import Measured
from turnkeeper.channels.signatures import Signatures

WORKERS: Final = (1, 4)
_TURNS: Final = 240
_AT_ONCE: Final = (1, 16)
_CONVERSATIONS: Final = 64
_IDLE: Final = 10.0
_ROOT: Final = Path(__file__).resolve().parents[1]
_SECRET: Final = "whsec_" + base64.b64encode(bytes(range(32))).decode()
_MAIN: Final = "from turnkeeper.cli.app import main; main()"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class _Peer:
    """Posts messages, and is posted their answers."""

    def __init__(self) -> None:
        self.port = _free_port()
        self._waiting: dict[str, asyncio.Future[float]] = {}
        self._signatures = Signatures(_SECRET)

    async def app(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Take an answer."""
        if scope["type"] != "http":
            return
        body = b""
        more = True
        while more:
            part = await receive()
            body += part.get("body", b"")
            more = part.get("more_body", False)
        waiting = self._waiting.pop(msgspec.json.decode(body)["data"]["text"], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(time.perf_counter())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def turn(self, client: httpx2.AsyncClient, url: str, number: int) -> float:
        """Say something and wait for the answer: the seconds between."""
        text = f"message {number}"
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[text] = answered
        data = {"conversation": str(number % _CONVERSATIONS), "text": text}
        body = msgspec.json.encode({"type": "message", "data": data})
        headers = {"content-type": "application/json", **self._signatures.sign(f"event-{number}", body).headers}
        start = time.perf_counter()
        response = await client.post(url, content=body, headers=headers)
        assert response.status_code == 202, response.text
        return await asyncio.wait_for(answered, 60) - start


@contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _cpu(process: subprocess.Popen[bytes]) -> float:
    """Seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """Turns a second and their latency with one worker and with four; and a worker that has nothing to do."""
    found: list[Finding] = []
    peer = _Peer()
    config = uvicorn.Config(peer.app, interface="asgi3", port=peer.port, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        for workers in WORKERS:
            found += await _with_workers(measured, peer, workers, progress)
    finally:
        server.should_exit = True
        await serving
    return found


async def _with_workers(
    measured: Measured, peer: _Peer, workers: int, progress: Callable[[str], None]
) -> list[Finding]:
    port = _free_port()
    environment = {
        **os.environ,
        "TURNKEEPER_STORE": await measured.empty(),
        "WEBHOOK_SECRET": _SECRET,
        "WEBHOOK_REPLIES": f"http://127.0.0.1:{peer.port}/",
        "PORT": str(port),
    }
    found: list[Finding] = []
    url = f"http://127.0.0.1:{port}/webhook"
    command = [sys.executable, "-c", _MAIN]
    progress(f"a service with {workers} workers")
    with _process([*command, "serve", "bench.service_app:service"], environment):
        works = [_process([*command, "worker", "bench.service_app:service"], environment) for _ in range(workers)]
        running = [one.__enter__() for one in works]
        try:
            async with httpx2.AsyncClient(timeout=60) as client:
                await _until_up(client, f"http://127.0.0.1:{port}/webhook")
                number = 0
                for at_once in _AT_ONCE:
                    turns = _TURNS if at_once > 1 else _TURNS // 4
                    await _turns(peer, client, url, range(number, number + 2 * at_once), at_once)
                    number += 2 * at_once
                    start = time.perf_counter()
                    times = await _turns(peer, client, url, range(number, number + turns), at_once)
                    wall = time.perf_counter() - start
                    number += turns
                    cuts = statistics.quantiles(times, n=100)
                    more = {"p50 ms": 1000 * cuts[49], "p99 ms": 1000 * cuts[98], "turns": float(turns)}
                    what = f"webhook to reply, {workers} workers, {at_once} at once"
                    found.append(Finding(what, turns / wall, "turns/s", more))
                if workers == 1:
                    before = _cpu(running[0])
                    await asyncio.sleep(_IDLE)
                    idle = (_cpu(running[0]) - before) / _IDLE
                    found.append(Finding("an idle worker", 100 * idle, "% of a core", {"seconds": _IDLE}))
        finally:
            for one in works:
                one.__exit__(None, None, None)
    return found


async def _until_up(client: httpx2.AsyncClient, url: str) -> None:
    for _ in range(600):
        try:
            await client.get(url)
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
        else:
            return
    raise TimeoutError(url)


async def _turns(peer: _Peer, client: httpx2.AsyncClient, url: str, numbers: range, at_once: int) -> list[float]:
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> float:
        async with room:
            return await peer.turn(client, url, number)

    return await asyncio.gather(*(one(number) for number in numbers))
