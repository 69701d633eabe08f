"""`turnkeeper init`: what it writes runs at once, is killed, and goes on."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.command import turnkeeper
from turnkeeper.keeper import Keeper


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the service in it."""
    done = turnkeeper("init", tmp_path / "bot")
    assert done.status == 0, done.err
    assert "python app.py" in done.out
    return tmp_path / "bot"


def talk(home: Path, *lines: str) -> str:
    """What the console says to these lines."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OPENAI_API_KEY", "TURNKEEPER_STORE")
    }
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=home,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_at_once(home: Path) -> None:
    assert "Your order is on its way." in talk(home, "Where is order 4711?")
    # Started again, it goes on in the same conversation.
    out = talk(home, "Please refund order 4712.", "And now?")
    assert "order 4712 is refunded" in out
    assert "number of your order" in out

    async def turns() -> int:
        async with await Keeper.open(f"sqlite:///{home}/turnkeeper.db") as keeper:
            return len([head async for head in keeper.turns()])

    assert anyio.run(turns) == 3


def test_nothing_is_written_over(home: Path) -> None:
    (home / "app.py").write_text("mine")
    again = turnkeeper("init", home)
    assert again.status == 2
    assert "app.py and README.md already" in again.err
    assert (home / "app.py").read_text() == "mine"
    assert turnkeeper("init", home / "app.py" / "below").status == 2


def test_its_worker_starts(home: Path) -> None:
    """The service is one that `turnkeeper worker` takes; without a secret for its webhook it says so."""
    secret = "whsec_" + base64.b64encode(bytes(32)).decode()
    script = (
        "import json, anyio\n"
        "from app import service\n"
        "async def main():\n"
        "    async with service.open(replicas=True) as running:\n"
        "        print(json.dumps([type(running.transport).__name__, running.bot.name]))\n"
        "anyio.run(main)\n"
    )
    environment = {**os.environ, "WEBHOOK_SECRET": secret, "WEBHOOK_REPLIES": "http://127.0.0.1:9/answers"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == "SqliteTransport"
    refused = turnkeeper("worker", "app:service", cwd=home)
    assert refused.status == 2
    assert "secret" in refused.err.lower()
