"""`turnkeeper worker` as a process: its health endpoints, how it stops, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import turnkeeper
from tests.servers.redis import free_port, server

APP = """
from turnkeeper.conversation.channel import Sent
from turnkeeper.conversation.flow import Flow
from turnkeeper.service import Service


class Nowhere:
    dedup_window = 0.0
    max_length = None

    async def send(self, conversation_id, key, content):
        return Sent(key)


flow = Flow("echo")


@flow.step
async def answer(c):
    await c.send(c.message.text)


def service():
    return Service(flow, {"chat": Nowhere()}, store="sqlite:///bot.db")


nothing = 5
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the app is."""
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@contextmanager
def working(home: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    """A worker that runs within the block."""
    main = "from turnkeeper.cli.app import main; main()"
    command = [sys.executable, "-c", main, "worker", "app:service", *options]
    with subprocess.Popen(command, cwd=home, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def asked(port: int, path: str) -> tuple[int, Any]:
    """Status and document of a health endpoint; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.load(e)
    except OSError:
        return 0, None


def test_health_and_stop(home: Path) -> None:
    port = free_port()
    with working(home, "--health-port", str(port), "--concurrency", "2") as process:
        deadline = time.monotonic() + 60
        while asked(port, "/readyz")[0] != 200:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        status, told = asked(port, "/healthz")
        assert (status, told["state"], told["in_hand"]) == (200, "ready", 0)
        assert asked(port, "/elsewhere")[0] == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert "stopped: 0 messages handled" in process.stderr.read()


def test_waits_for_a_store_that_is_not_there_yet(home: Path) -> None:
    """Whatever starts first, the worker or the store: what starts both need not know."""
    with server() as redis:
        redis.stop()
        app = APP.replace("sqlite:///bot.db", redis.url())
        (home / "app.py").write_text(app)
        with working(home) as process:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            assert any("not there yet" in line for line in lines)
            redis.start()
            assert any("takes from" in line for line in lines)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        redis.stop()
        done = turnkeeper("worker", "app:service", "--wait", "1s", cwd=home)
        assert done.status == 3
        assert "cannot be reached" in done.err


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("app", "module:attribute"),
        ("nowhere:service", "no module 'nowhere'"),
        ("app:missing", "no turnkeeper.Service"),
        ("app:nothing", "no turnkeeper.Service"),
    ],
)
def test_what_is_no_service(home: Path, target: str, told: str) -> None:
    done = turnkeeper("worker", target, cwd=home)
    assert done.status == 2
    assert told in done.err


@pytest.mark.parametrize(("option", "value"), [("--concurrency", "0"), ("--drain", "soon"), ("--lease", "x")])
def test_bad_options(home: Path, option: str, value: str) -> None:
    done = turnkeeper("worker", "app:service", option, value, cwd=home)
    assert done.status == 2
    assert option in done.err
