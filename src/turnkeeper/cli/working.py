"""`worker` and `serve`: a service's processes, with their signals, health endpoints and the view on a terminal."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import TaskStatus
from rich.console import Console

from turnkeeper.errors import InvalidInput
from turnkeeper.service import Service
from turnkeeper.worker import Progress, Worker

log = logging.getLogger(__name__)

_HUNG: Final = 60.0
"""Seconds without a beat of the loop after which it is told to be unhealthy."""
_TELL: Final = 10.0
"""Most often, in seconds, that progress is told where there is no terminal."""


def load_service(target: str) -> Service:
    """The service that `module:attribute` names: it itself, or a function that makes it.

    Raises:
        InvalidInput: there is no such module, attribute or service.
    """
    module_name, colon, attribute = target.partition(":")
    if not module_name or not colon or not attribute:
        raise InvalidInput("service", f"{target!r} is not of the form module:attribute, as app:service")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not module_name.startswith(e.name):
            raise
        raise InvalidInput("service", f"there is no module {module_name!r} here") from e
    found: Any = getattr(module, attribute, None)
    if callable(found) and not isinstance(found, Service):
        found = found()
    if not isinstance(found, Service):
        raise InvalidInput("service", f"{target!r} is no turnkeeper.Service, nor a function that makes one")
    return found


async def run_worker(
    target: str,
    *,
    concurrency: int,
    drain_seconds: float,
    lease_seconds: float,
    sweep_seconds: float,
    wait_seconds: float,
    health_port: int | None,
) -> int:
    """Work until SIGTERM or SIGINT; then finish what is under way, or put it back."""
    if concurrency < 1:
        raise InvalidInput("--concurrency", f"must be at least 1, not {concurrency}")
    service = load_service(target)
    console = Console(stderr=True)
    _log_to_stderr()
    async with service.open(replicas=True, wait_seconds=wait_seconds) as running:
        worker = Worker(
            running.bot,
            running.transport,
            at_once=concurrency,
            drain_seconds=drain_seconds,
            lease_seconds=lease_seconds,
            sweep_seconds=sweep_seconds,
            changed=_teller(console),
        )
        async with anyio.create_task_group() as tasks:
            if health_port is not None:
                await tasks.start(_serve_health, health_port, worker.progress)
            await tasks.start(_drain_on_signals, worker)
            log.info("worker %s takes from %s", running.bot.name, service.queue)
            await worker.run()
            tasks.cancel_scope.cancel()
    log.info("stopped: %d messages handled, %d failures", worker.progress.handled, worker.progress.failures)
    return 0


async def run_front(target: str, *, wait_seconds: float) -> int:
    """Run a service's front end until SIGTERM or SIGINT: messages in, into the journal, and told to the workers."""
    service = load_service(target)
    if service.front is None:
        raise InvalidInput("service", f"{target!r} has no front end: give it `Service(front=…)`")
    _log_to_stderr()
    opened = service.open(replicas=True, wait_seconds=wait_seconds)
    async with opened as running, anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_on_signals, tasks.cancel_scope)
        await service.front(running)
        tasks.cancel_scope.cancel()
    return 0


def _log_to_stderr() -> None:
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for noisy in ("httpx2", "httpcore2", "httpx", "httpcore"):
            logging.getLogger(noisy).setLevel(logging.WARNING)  # at INFO they tell addresses, which may hold secrets


async def _cancel_on_signals(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            log.info("told to stop")
            scope.cancel()


async def _drain_on_signals(worker: Worker, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            log.info("told to stop: takes nothing more, and finishes %d conversations", worker.progress.in_hand)
            worker.drain()


def _teller(console: Console) -> Callable[[Progress], None]:
    """Tells of progress: a line that is written over on a terminal, a log record now and then elsewhere."""
    told: dict[str, Any] = {"at": time.monotonic(), "line": ""}

    def tell(progress: Progress) -> None:
        line = f"{progress.state}: {progress.handled} handled, {progress.in_hand} in hand, {progress.failures} failures"
        if console.is_terminal:
            console.print(line.ljust(console.width - 1)[: console.width - 1], end="\r", highlight=False)
        elif line != told["line"] and time.monotonic() - told["at"] >= _TELL:
            told.update(at=time.monotonic(), line=line)
            log.info("%s", line)

    return tell


# --- health ------------------------------------------------------------------------------------------------------

Send = Callable[[dict[str, Any]], Awaitable[None]]


def health_app(progress: Progress) -> Callable[[dict[str, Any], Any, Send], Awaitable[None]]:
    """`/healthz`: the loop goes round. `/readyz`: it takes messages. Both tell the progress as JSON."""

    async def app(scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        status = 404
        match scope["path"]:
            case "/healthz":
                status = 200 if time.monotonic() - progress.beat < _HUNG else 503
            case "/readyz":
                status = 200 if progress.state == "ready" else 503
            case _:
                pass
        told = {name: value for name, value in asdict(progress).items() if name != "beat"}
        body = msgspec.json.encode(told if status != 404 else {"paths": ["/healthz", "/readyz"]})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def _serve_health(port: int, progress: Progress, *, task_status: TaskStatus[None]) -> None:
    try:
        import uvicorn
    except ImportError as e:
        raise InvalidInput("--health-port", "needs uvicorn; pip install 'turnkeeper[webhook]'") from e

    class Server(uvicorn.Server):
        """One that leaves signals to the worker, and tells when it listens."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            """Not this server's."""
            yield

        async def startup(self, sockets: Any = None) -> None:
            """Begin to listen."""
            await super().startup(sockets)
            if not self.should_exit:
                address = self.servers[0].sockets[0].getsockname()
                log.info("health at http://%s:%d/healthz and /readyz", *address[:2])
                task_status.started()

    config = uvicorn.Config(
        health_app(progress), host="127.0.0.1", port=port, log_level="warning", access_log=False, lifespan="off"
    )
    await Server(config).serve()
