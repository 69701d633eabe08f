"""The console itself: pipes, files and terminals as its input, and what is typed into it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.typist import PATIENCE, rows
from turnkeeper.conversation.message import MAX_MESSAGE

PROGRAM = """
import asyncio
import contextlib
import sys
from turnkeeper import Button, Content, Flow, FlowContext, run_console

flow = Flow("f")

@flow.step
async def only(c: FlowContext) -> None:
    answer = await c.ask(Content(text="Tea?", buttons=(Button("Yes, please", "yes"), Button("No"))))
    await c.send(f"{c.message.kind} {answer!r} \\x1b[31m")

with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(run_console(flow, "sqlite:///store.db", sys.argv[1], "t.jsonl", lease_seconds=1))
"""


def run(folder: Path, stdin: Any, conversation: str = "c", **more: Any) -> subprocess.CompletedProcess[str]:
    """Run it to the end of its input."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, conversation]
    return subprocess.run(
        command, cwd=folder, stdin=stdin, capture_output=True, text=True, check=False, timeout=PATIENCE, **more
    )


def test_a_file_as_its_input(tmp_path: Path) -> None:
    """The loop does not wait for files. The last line has no end, blank ones say nothing."""
    (tmp_path / "in").write_bytes("hi\n\n   \nNö\r\nhi\nyes, INDEED".encode())
    with (tmp_path / "in").open() as file:
        done = run(tmp_path, file)
    assert done.stderr == ""
    assert (
        done.stdout
        == "Tea?\n[Yes, please]  [No]\ntext 'Nö' \x1b[31m\nTea?\n[Yes, please]  [No]\ntext 'yes, INDEED' \x1b[31m\n"
    )
    said = [row["text"] for row in rows(tmp_path / "t.jsonl") if row["line"] == "said"]
    assert said == ["hi", "Nö", "hi", "yes, INDEED"]


@pytest.mark.parametrize(
    ("typed", "taken"), [("yes, PLEASE ", "button 'yes'"), ("no", "button 'No'"), ("maybe", "text 'maybe'")]
)
def test_buttons(tmp_path: Path, typed: str, taken: str) -> None:
    """A label under the last message presses its button, in a later process too."""
    assert "Tea?" in _says(tmp_path, "hi")
    assert taken in _says(tmp_path, typed)


def _says(folder: Path, text: str) -> str:
    (folder / "in").write_text(text + "\n")
    with (folder / "in").open() as file:
        done = run(folder, file)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_nothing_as_its_input(tmp_path: Path) -> None:
    done = run(tmp_path, subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_line_that_is_too_large(tmp_path: Path) -> None:
    """It is refused without an entry anywhere, and the next one is taken."""
    done = _says(tmp_path, "x" * (5 * MAX_MESSAGE) + "\nhi")
    assert done.startswith("(not taken: message: ")
    assert "Tea?" in done
    assert [row["text"] for row in rows(tmp_path / "t.jsonl") if row["line"] == "said"] == ["hi"]


def test_another_conversations_transcript(tmp_path: Path) -> None:
    _says(tmp_path, "hi")
    done = run(tmp_path, subprocess.DEVNULL, "other")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "turnkeeper.errors.TranscriptError: t.jsonl: is of the conversation 'c'"
    )


def test_another_transcript_for_the_same_conversation(tmp_path: Path) -> None:
    """Its line numbers begin again: they are not taken for repetitions."""
    _says(tmp_path, "hi")
    (tmp_path / "t.jsonl").unlink()
    assert "text 'x'" in _says(tmp_path, "x")


def test_old_transcript_and_a_journal_that_forgot(tmp_path: Path) -> None:
    """What the journal has taken is never given to it again, so that it may forget what it has seen."""
    _says(tmp_path, "hi\nx")
    for file in tmp_path.glob("store.db*"):
        file.unlink()
    assert _says(tmp_path, "").endswith("text 'x' \x1b[31m\n")  # shown again, and nothing is begun
    assert len([row for row in rows(tmp_path / "t.jsonl") if row["line"] == "wrote"]) == 2


def test_terminal(tmp_path: Path) -> None:
    """A prompt, no control of the terminal by what is said, and Ctrl-C hands over."""
    master, slave = pty.openpty()
    command = [sys.executable, "-W", "error", "-c", PROGRAM, "c"]
    with (tmp_path / "errors.txt").open("w") as errors:
        process = subprocess.Popen(command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=errors)
    os.close(slave)
    try:
        shown = _until(master, b"> ")
        os.write(master, b"hi\n")
        shown += _until(master, b"[No]\r\n> ")
        os.write(master, b"no\n")
        shown += _until(master, b"button 'No' [31m\r\n> ")
        process.send_signal(2)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(master)
    assert (tmp_path / "errors.txt").read_text() == ""
    assert b"\x1b[31m" not in shown


def _until(terminal: int, wanted: bytes) -> bytes:
    shown = b""
    deadline = time.monotonic() + PATIENCE
    while not shown.endswith(wanted):
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 1000)
    return shown
