"""A front end as a process of its own, told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.cases.charge_server import unused_port

WEB = """
import os
from pathlib import Path

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.conversation.platform import Platform
from turnkeeper import Flow, FlowContext
from turnkeeper.service import Service

flow = Flow("f")


@flow.step
async def only(c: FlowContext) -> None: ...


async def front(running):
    async def slow(request):
        Path("entered").touch()
        while not Path("go").exists():
            await anyio.sleep(0.01)
        return Response("done")

    app = Starlette(routes=[Route("/", slow)])
    await uvicorn.Server(uvicorn.Config(app, port=int(os.environ["PORT"]))).serve()


async def poller(running):
    Path("entered").touch()
    await anyio.sleep_forever()


web = Service(flow, {"chat": Platform()}, store="sqlite:///t.db", front=front)
polls = Service(flow, {"chat": Platform()}, store="sqlite:///t.db", front=poller)
"""
PATIENCE = 30.0


def started(folder: Path, name: str, port: int) -> subprocess.Popen[bytes]:
    """The front end, as a process."""
    (folder / "app.py").write_text(WEB)
    command = Path(sys.executable).with_name("turnkeeper")
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, "PORT": str(port), "PYTHONPATH": here}
    return subprocess.Popen([command, "serve", f"app:{name}"], cwd=folder, env=environment)


def until_there(path: Path) -> None:
    """Wait for a file."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def answer(port: int) -> httpx2.Response:
    """What a request brings, once the server listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/", timeout=PATIENCE)
        except httpx2.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def until_refused(port: int) -> None:
    """Wait until nobody listens there any more."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            httpx2.get(f"http://127.0.0.1:{port}/", timeout=0.5)
        except httpx2.ConnectError:
            return
        except httpx2.HTTPError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_requests_that_are_under_way_are_answered(tmp_path: Path, how: signal.Signals) -> None:
    """What is in the journal is acknowledged, and needs not come again."""
    port = unused_port()
    process = started(tmp_path, "web", port)
    try:
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(answer, port)
            until_there(tmp_path / "entered")
            process.send_signal(how)
            until_refused(port)
            (tmp_path / "go").touch()
            assert asked.result(PATIENCE).text == "done"
        assert process.wait(PATIENCE) == 0
    finally:
        (tmp_path / "go").touch()
        process.kill()
        process.wait()


def test_what_does_not_listen_for_signals_is_stopped(tmp_path: Path) -> None:
    process = started(tmp_path, "polls", 0)
    try:
        until_there(tmp_path / "entered")
        process.send_signal(signal.SIGTERM)
        assert process.wait(8) == 0
    finally:
        process.kill()
        process.wait()
