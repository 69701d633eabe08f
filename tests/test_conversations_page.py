"""The examples of docs/conversations.md run as they stand: code blocks, and the dialogues below them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from turnkeeper import DidNotHappen, Happened, Keeper
from turnkeeper.conversation.channel import FindingChannel, NotSent, Refused, Sent, Unknown
from turnkeeper.conversation.message import Button, Content
from turnkeeper.stores.sqlite import SqliteStore

PAGE = (Path(__file__).parents[1] / "docs" / "conversations.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def blocks(section: str, language: str = "python") -> list[str]:
    """The blocks of a section."""
    return re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)


FIRST, PREAMBLE = blocks("A flow")
DIALOGUES = [name for name in SECTIONS if blocks(name, "text")]


class Said(NamedTuple):
    """One line of a dialogue, and what the flow sends then."""

    line: str
    answers: list[str]


def dialogue(text: str) -> list[Said]:
    """A dialogue as what happens, and what is sent because of it."""
    said: list[Said] = []
    for line in text.splitlines():
        if line.startswith(("> ", "(")):
            said.append(Said(line, []))
        else:
            said[-1].answers.append(line)
    return said


def test_every_block_is_run() -> None:
    """By one of the tests here."""
    apart = {"A flow": 2, "In your own program": 1, "Writing a channel": 1}
    found = {name: len(blocks(name)) for name in SECTIONS if blocks(name)}
    assert found == apart | dict.fromkeys(DIALOGUES, 1)
    assert len(DIALOGUES) == 6


@pytest.mark.anyio
@pytest.mark.parametrize("section", DIALOGUES)
async def test_dialogue(section: str) -> None:
    names: dict[str, Any] = {}
    exec(PREAMBLE, names)
    exec(blocks(section)[0], names)
    store, platform = await SqliteStore.open(":memory:"), Platform()
    lines = dialogue(blocks(section, "text")[0])
    assert lines
    events = 0
    while lines:
        async with replica(store, names["flow"], platform) as person:
            while lines:
                line, answers = lines.pop(0)
                before = len(platform.texts())
                if line == "(killed)":
                    assert answers == []
                    break
                if later := re.fullmatch(r"\((\d+) seconds later\)", line):
                    await store.advance_clock(int(later[1]) * 1000)
                    await person.bot.process("c")
                    await person.bot.process("c")
                else:
                    events += 1
                    await person.says(line.removeprefix("> "), event_id=str(events))
                assert platform.texts()[before:] == answers, line
    await store.close()


def test_first_example_runs(tmp_path: Path) -> None:
    """In the console, by a process for each line; each shows again where the conversation stands."""
    (tmp_path / "greeting.py").write_text(FIRST)
    shown = ""
    for typed in ("hi\n", "Ann\n", "red\n"):
        command = [sys.executable, "-W", "error", "greeting.py"]
        done = subprocess.run(
            command, cwd=tmp_path, input=typed, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stderr == ""
        shown += done.stdout
    assert shown.splitlines() == [
        *["What is your name?"] * 2,
        *["Which colour do you like, Ann?"] * 2,
        "Ann likes red.",
    ]


@pytest.mark.anyio
async def test_in_your_own_program() -> None:
    names: dict[str, Any] = {}
    exec(PREAMBLE, names)
    exec(blocks("Asking")[0], names)
    flow = names["flow"]
    exec(blocks("In your own program")[0], names)
    platform = Platform()
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        await names["serve"](keeper, flow, platform)
        await names["serve"](keeper, flow, platform)
    assert platform.texts("chat-17") == ["Which size?"]


@pytest.mark.anyio
async def test_the_channel() -> None:
    names: dict[str, Any] = {}
    exec(blocks("Writing a channel")[0], names)
    answers: dict[str, Any] = {}
    asked: list[Any] = []

    def platform(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            known = [one for one in asked if one["metadata"] == request.url.params["metadata"]]
            return httpx2.Response(200, json=[{"id": 7} for _ in known])
        asked.append(json.loads(request.content))
        answer = answers["next"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(platform), base_url="http://platform") as client:
        channel: Any = names["MyChannel"](client)
        assert isinstance(names["MyChannel"](client), FindingChannel)
        content = Content(text="Hi", buttons=(Button("Yes"),))
        for answer, outcome in (
            (httpx2.Response(200, json={"id": 5}), Sent("5")),
            (httpx2.Response(429, headers={"retry-after": "3"}), Refused("too many messages", retry_after=3.0)),
            (httpx2.Response(400, text="no"), Refused("no")),
            (httpx2.Response(503), Unknown("status 503")),
            (httpx2.ReadTimeout("slow"), Unknown("slow")),
            (httpx2.ConnectError("down"), NotSent("down")),
        ):
            answers["next"] = answer
            assert await channel.send("c", "k", content) == outcome
        assert asked[0] == {"text": "Hi", "buttons": ["Yes"], "metadata": "k"}
        assert await channel.find("c", "k") == Happened("7")
        assert await channel.find("c", "other") == DidNotHappen()
