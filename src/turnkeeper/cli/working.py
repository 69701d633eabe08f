"""`worker` and `serve`: a service's processes, with their signals, health endpoints and the view on a terminal."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Final

import anyio
import msgspec
from anyio.abc import TaskStatus
from cyclopts import Parameter
from rich.console import Console

from turnkeeper.cli.durations import seconds_of
from turnkeeper.cli.loading import load
from turnkeeper.cli.options import ServiceTarget
from turnkeeper.errors import InvalidInput
from turnkeeper.service import Service
from turnkeeper.worker import Progress, Worker

log = logging.getLogger(__name__)

_HUNG: Final = 60.0
"""Seconds without a beat of the loop after which it is told to be unhealthy."""
_GRACE: Final = 10.0
"""Seconds that a front end may take to stop by itself, where it does that."""
_TELL: Final = 10.0
"""Most often, in seconds, that progress is told where there is no terminal."""


_Wait = Annotated[str, Parameter(help="How long to wait at the start for a store that cannot be reached yet.")]


async def worker(
    service: ServiceTarget,
    *,
    concurrency: Annotated[int, Parameter(help="Conversations that are handled at the same time.")] = 16,
    drain: Annotated[str, Parameter(help="How long what is under way may take after SIGTERM: 20s, 5m.")] = "20s",
    lease: Annotated[str, Parameter(help="How long a dead worker's hints stay its: 30s.")] = "30s",
    sweep: Annotated[str, Parameter(help="Between two looks through the store for what no hint told of.")] = "15s",
    wait: _Wait = "1m",
    health_port: Annotated[int | None, Parameter(help="Serve /healthz and /readyz on this port of 127.0.0.1.")] = None,
) -> int:
    """Work until SIGTERM or SIGINT; then finish what is under way, or put it back."""
    if concurrency < 1:
        raise InvalidInput("--concurrency", f"must be at least 1, not {concurrency}")
    loaded = load(service, Service, "service")
    console = Console(stderr=True)
    _log_to_stderr()
    async with loaded.open(replicas=True, wait_seconds=seconds_of(wait, "--wait")) as running:
        drainer = Worker(
            running.bot,
            running.transport,
            at_once=concurrency,
            drain_seconds=seconds_of(drain, "--drain"),
            lease_seconds=seconds_of(lease, "--lease"),
            sweep_seconds=seconds_of(sweep, "--sweep"),
            changed=_teller(console),
        )
        async with anyio.create_task_group() as tasks:
            if health_port is not None:
                await tasks.start(_serve_health, health_port, drainer.progress)
            await tasks.start(_drain_on_signals, drainer)
            log.info("worker %s takes from %s", running.bot.name, loaded.queue)
            await drainer.run()
            tasks.cancel_scope.cancel()
    log.info("stopped: %d messages handled, %d failures", drainer.progress.handled, drainer.progress.failures)
    return 0


async def serve(service: ServiceTarget, *, wait: _Wait = "1m") -> int:
    """Run a service's front end until SIGTERM or SIGINT: messages in, into the journal, and told to the workers."""
    loaded = load(service, Service, "service")
    if loaded.front is None:
        raise InvalidInput("service", f"{service!r} has no front end: give it `Service(front=…)`")
    _log_to_stderr()
    opened = loaded.open(replicas=True, wait_seconds=seconds_of(wait, "--wait"))
    async with opened as running, anyio.create_task_group() as tasks:
        await tasks.start(_cancel_on_signals, tasks.cancel_scope)
        await loaded.front(running)
        tasks.cancel_scope.cancel()
    return 0


def _log_to_stderr() -> None:
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for noisy in ("httpx2", "httpcore2", "httpx", "httpcore"):
            logging.getLogger(noisy).setLevel(logging.WARNING)  # at INFO they tell addresses, which may hold secrets


async def _cancel_on_signals(scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        ours = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
        task_status.started()
        async for one in signals:
            log.info("told to stop")
            if signal.getsignal(one) is not ours[one]:
                # The front end listens for signals itself: a web server, which finishes the requests that it has.
                with anyio.move_on_after(_GRACE):
                    async for _ in signals:  # told once more, it does not
                        break
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
