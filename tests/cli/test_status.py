"""Exit statuses that scripts can use: the table of docs/operating.md, each of them by the real command."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.command import turnkeeper
from tests.cli.operator_session import PROMPT, Terminal
from tests.docs.pages import ROOT
from turnkeeper import Agent, Keeper, ScriptedModel

MAIN = "from turnkeeper.cli.app import main; main()"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with one completed turn, and one that is not finished."""
    where = f"sqlite:///{tmp_path}/t.db"

    async def fill() -> None:
        async with await Keeper.open(where) as keeper:
            await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="done")
            await keeper.session("open").start([{"role": "user", "content": "hi"}])

    anyio.run(fill)
    return where


def test_0_done_and_1_no(url: str) -> None:
    assert turnkeeper("diff", "open", "1", "--store", url).status == 0
    differs = turnkeeper("diff", "done", "0", "--store", url)
    assert (differs.status, differs.err) == (1, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("show",),
        ("show", "done", "--nonsense"),
        ("diff", "done", "first"),
        ("show", "missing"),
        ("resolve", "done", "0", "0", "unknown", "--who", "ann", "--why", "looked"),
        ("resolve", "done", "0", "0", "unknown", "--who", "ann"),
        ("list", "--older-than", "soon"),
        ("release", "done", "--who", "ann", "--why", "it is dead"),
    ],
    ids=" ".join,
)
def test_2_refused(url: str, arguments: tuple[str, ...]) -> None:
    done = turnkeeper(*arguments, environment={"TURNKEEPER_STORE": url})
    assert (done.status, done.out, done.err != "", "Traceback" in done.err) == (2, "", True, False)


def test_3_not_now(url: str, tmp_path: Path) -> None:
    """A store that somebody else holds; a server that is not there."""
    holder = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    try:
        holder.execute("BEGIN EXCLUSIVE")
        busy = turnkeeper("erase", "done", "--store", f"{url}?busy_timeout=0.1")
    finally:
        holder.close()
    assert (busy.status, busy.out) == (3, ""), busy.err
    away = turnkeeper("list", "--store", "redis://127.0.0.1:1?patience=0")
    assert (away.status, "cannot be reached" in away.err) == (3, True), away.err


def test_130_interrupted(url: str) -> None:
    """Ctrl-C, while it waits for what comes next."""
    command = [sys.executable, "-c", MAIN, "tail", "open", "--store", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "started" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")


def test_130_at_a_question(tmp_path: Path) -> None:
    """Ctrl-C instead of an answer: nothing was settled."""
    with Terminal(tmp_path) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("turnkeeper resolve-message chat 1", "the evidence: ")
        terminal.interrupt(PROMPT)
        terminal.type("echo status $?", f"status 130\n{PROMPT}")
        assert "Traceback" not in terminal.screen


def test_the_page_has_them_all() -> None:
    page = (ROOT / "docs" / "operating.md").read_text().partition("## ")[0]
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "3", "130"]
