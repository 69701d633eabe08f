"""The README's examples run as they stand."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnkeeper import Keeper, ScriptedModel
from turnkeeper.models.scripted import calls
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn_checkpoint import TurnCheckpointSession, TurnPhase

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_first_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[0]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "success - You are booked on TK133.\n"


@pytest.mark.anyio
async def test_second_example_parks_until_somebody_approves() -> None:
    first = BLOCKS[0].partition("async def main")[0]
    names: dict[str, Any] = {}
    exec(first + BLOCKS[1], names)
    names["agent"] = dataclasses.replace(
        names["agent"], model=ScriptedModel([calls(("clerk", {"task": "book TK133"})), "It is booked."])
    )
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        assert (await keeper.run(names["agent"], "Book TK133", turn_id="t")).status == "parked"
        await keeper.decide_permission("t", 0, 0, True, who="ann")
        result = await keeper.run(names["agent"], "Book TK133", turn_id="t")
    assert (result.status, result.output) == ("success", "It is booked.")


def test_third_example_is_a_conversation(tmp_path: Path) -> None:
    """Each line is typed into another process."""
    shown = ""
    for typed in ("hi\n", "M\n", "yes\n"):
        command = [sys.executable, "-c", BLOCKS[2]]
        done = subprocess.run(
            command, cwd=tmp_path, input=typed, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        shown += done.stdout
    question = "A shirt in M, 21 euros. Say anything to order it."
    assert shown.splitlines()[-3:] == [question, question, "Thank you! receipt for 2100 cents"]


@pytest.mark.anyio
async def test_fourth_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[3], names)
    async with await SqliteStore.open(":memory:") as store:
        await names["by_hand"](store)
        snapshot = await TurnCheckpointSession(store, "message-4712").load()
    assert snapshot is not None
    assert snapshot.phase is TurnPhase.ASSISTANT_RESERVED


def test_import_is_light() -> None:
    """`import turnkeeper` brings no library beside the standard one."""
    code = "import sys, turnkeeper; print(sorted({m.split('.')[0] for m in sys.modules} & {*sys.argv[1:]}))"
    heavy = [
        "msgspec",
        "anyio",
        "backports",
        "rich",
        "cyclopts",
        "redis",
        "psycopg",
        "asyncio",
        "sqlite3",
        "openai",
        "anthropic",
        "httpx2",
        "starlette",
        "uvicorn",
    ]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
