"""The console's transcript: one process, whole lines, and never a second line for what stands there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.crew import SPAWN
from turnkeeper.channels.console import ConsoleChannel
from turnkeeper.channels.transcript import Said, Taken, Transcript, Wrote
from turnkeeper.conversation.channel import NotSent, Refused, Sent, Unknown
from turnkeeper.conversation.message import Content
from turnkeeper.engine.outcomes import DidNotHappen, Happened
from turnkeeper.errors import TranscriptError


def begun(path: Path) -> str:
    """A transcript with a question that was answered; its id."""
    with Transcript(path, "c") as paper:
        assert paper.append(Wrote(key="k1", text="Name?")) == 2
        assert paper.append(Said(text="Ann")) == 3
        return paper.id


def test_goes_on_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    name = begun(path)
    with Transcript(path, "c") as paper:
        assert paper.id == name
        assert paper.wrote == {"k1": 2}
        assert [said.text for said in paper.untaken.values()] == ["Ann"]
        assert paper.since == []
        assert paper.append(Taken(number=3)) == 4
        paper.append(Wrote(key="k2", text="Hello Ann"))
    with Transcript(path, "c") as paper:
        assert paper.untaken == {}
        assert [line.text for line in paper.since] == ["Hello Ann"]


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_torn_last_line(tmp_path: Path, cut: int) -> None:
    """It was neither journaled nor told to be sent; its number is given again, and the file is whole lines behind it."""
    path = tmp_path / "t.jsonl"
    begun(path)
    os.truncate(path, path.stat().st_size - cut)
    with Transcript(path, "c") as paper:
        assert paper.untaken == {}
        assert paper.append(Said(text="Bob")) == 3
    with Transcript(path, "c") as paper:
        assert [said.text for said in paper.untaken.values()] == ["Bob"]


def test_torn_first_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    begun(path)
    os.truncate(path, 30)
    with Transcript(path, "c") as paper:
        assert paper.append(Said(text="Bob")) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"notes, without an end of line", "is no transcript"),
        (b"notes\n", "line 1 is no line of a transcript"),
        (b'{"line":"said","text":"x"}\n', "says whose it is"),
        (b'{"line":"transcript","id":"1","conversation":"other"}\n', "is of the conversation 'other'"),
        (b'{"line":"transcript","id":"1","conversation":"c","version":2}\n', "has version 2"),
        (b'{"line":"transcript","id":"1","conversation":"c"}\n{"line":"sung"}\n', "line 2 is no line"),
        (b"[" * 100_000 + b"\n", "line 1 is no line"),
    ],
)
def test_what_is_no_transcript_is_left_alone(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TranscriptError, match=said):
        Transcript(path, "c")
    assert path.read_bytes() == content


def _try_to_open(path: Path, answer: Any) -> None:
    try:
        Transcript(path, "c").close()
    except TranscriptError as e:
        answer.put(str(e))
    else:
        answer.put("opened")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    answers: list[str] = []
    with Transcript(path, "c"):
        answers.append(_from_another_process(path))
    answers.append(_from_another_process(path))
    assert "another process has it" in answers[0]
    assert answers[1] == "opened"


def _from_another_process(path: Path) -> str:
    answer = SPAWN.Queue()
    process = SPAWN.Process(target=_try_to_open, args=(path, answer))
    process.start()
    found: str = answer.get(timeout=60)
    process.join(60)
    answer.close()
    answer.join_thread()
    return found


# --- the channel -------------------------------------------------------------------------------------------------

pytest_async = pytest.mark.anyio


@pytest_async
async def test_sends_once_and_can_tell(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    shown: list[Wrote] = []
    with Transcript(path, "c") as paper:
        channel = ConsoleChannel(paper, shown.append)
        assert await channel.find("c", "k1") == DidNotHappen()
        assert await channel.send("c", "k1", Content(text="Hi")) == Sent("2")
        assert await channel.send("c", "k1", Content(text="Hi")) == Sent("2")
        assert isinstance(await channel.send("other", "k2", Content(text="Hi")), NotSent)
        assert isinstance(await channel.send("c", "k3", Content(text="Hi", data={"x": {1: b"", "y": float}})), Refused)
    with Transcript(path, "c") as paper:
        found = await ConsoleChannel(paper, shown.append).find("c", "k1")
        assert isinstance(found, Happened)
        assert found.result == "2"
    assert [line.text for line in shown] == ["Hi"]


@pytest_async
@pytest.mark.parametrize("repaired", [True, False])
async def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: bool) -> None:
    """A line that could only be written in part is taken back, and provably not sent; where that fails, nobody can know."""
    path = tmp_path / "t.jsonl"
    write, truncate = os.write, os.ftruncate

    def half(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2])

    def fails(file: int, length: int) -> None:
        raise OSError(errno.EIO, "broken")

    with Transcript(path, "c") as paper:
        channel = ConsoleChannel(paper, lambda _: None)
        size = path.stat().st_size
        monkeypatch.setattr(os, "write", half)
        monkeypatch.setattr(os, "ftruncate", truncate if repaired else fails)
        outcome = await channel.send("c", "k1", Content(text="Hi"))
        assert isinstance(outcome, NotSent if repaired else Unknown)
        assert (path.stat().st_size == size) is repaired
        monkeypatch.undo()
        again = await channel.send("c", "k1", Content(text="Hi"))
        # Behind half a line nothing more is written: the next process takes it back.
        assert again == Sent("2") if repaired else isinstance(again, NotSent)
    with Transcript(path, "c") as paper:
        assert paper.wrote == ({"k1": 2} if repaired else {})
