"""What stands on the pages of the documentation: blocks, headings, links; and how their examples are run."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from turnkeeper.cli.app import app
from turnkeeper.conversation.flow import Flow
from turnkeeper.stores.sqlite import SqliteStore

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$", re.S | re.M
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: what stands behind its fence.
        shown_below: the next block, where it is a `text` in the same section: what is seen when this one is run.
    """

    page: Path
    line: int
    section: str
    language: str
    text: str
    shown_below: Block | None = None

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """A page's path in the project."""
    return page.relative_to(ROOT).as_posix()


@cache
def prose_of(page: Path) -> str:
    """A page without its fenced blocks, line for line."""
    return _FENCED.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())


def headings_of(page: Path) -> dict[int, str]:
    """The headings by their lines."""
    return {
        number: line.lstrip("#").strip()
        for number, line in enumerate(prose_of(page).splitlines(), 1)
        if re.match(r"#{1,6} ", line)
    }


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    """The fenced blocks, in order."""
    text, headings = page.read_text(), headings_of(page)
    found: list[Block] = []
    for match in reversed(list(_FENCED.finditer(text))):
        line = text.count("\n", 0, match.start()) + 1
        section = next((title for number, title in reversed(headings.items()) if number < line), "")
        below = found[0] if found and found[0].language == "text" and found[0].section == section else None
        body = textwrap.dedent(match["text"])
        found.insert(0, Block(page, line, section, match["language"], body, below))
    return tuple(found)


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command in an `sh` block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in shlex.split(line, comments=True):
            if word == "&&":
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


def run_page(page: Path, until: str | None = None) -> dict[str, Any]:
    """Run the examples of a page, one behind the other as one program, in the working directory; what they define.

    What is shown below an example has to be what it prints, or a dialogue with its flow; below commands, what the last of them
    prints. Commands without anything below them are not run, but for what they export.

    Args:
        until: stop behind the section of this heading.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    passed, seen = False, ""
    for block in blocks_of(page):
        if passed and block.section != until:
            break
        passed = block.section == until
        if block.language == "python":
            code = compile("\n" * block.line + block.text, name_of(page), "exec")
            seen = _printed(partial(exec, code, names))
        elif block.language == "sh":
            seen = _run_commands(block)
        else:
            continue
        if block.shown_below is not None:
            wanted = block.shown_below.text
            if wanted.startswith("> "):
                asyncio.run(_talk(names["flow"], wanted))
            else:
                _compare(wanted, seen, block.shown_below)
    return names


def _run_commands(block: Block) -> str:
    """Set the variables that a block exports; run its commands if what they print is shown, and give that of the last."""
    seen = ""
    for words in commands_of(block):
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            done = subprocess.run(["bash", "-c", f'printf %s "{value}"'], capture_output=True, text=True, check=True)
            os.environ[name] = done.stdout
        elif block.shown_below is not None:
            assert words[0] == "turnkeeper", block
            seen = _printed(partial(app, words[1:]))
    return seen


def _printed(run: Callable[[], object]) -> str:
    """What is printed meanwhile, with nobody at standard input."""
    out = io.StringIO()
    with open(os.devnull) as nobody, contextlib.redirect_stdout(out), _standard_input(nobody):
        run()
    return out.getvalue()


@contextlib.contextmanager
def _standard_input(file: Any) -> Generator[None]:
    before, sys.stdin = sys.stdin, file
    try:
        yield
    finally:
        sys.stdin = before


def _compare(wanted: str, seen: str, where: Block) -> None:
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(wanted, seen, flags):
        example = doctest.Example("", wanted)
        raise AssertionError(f"{where}\n{checker.output_difference(example, seen, flags)}")


async def _talk(flow: Flow, dialogue: str) -> None:
    """A dialogue: `> ` is what a person types, a line in brackets what happens, the rest what the flow sends."""
    store, platform = await SqliteStore.open(":memory:"), Platform()
    lines = dialogue.splitlines()
    typed = 0
    while lines:
        async with replica(store, flow, platform) as person:
            while lines:
                line, before = lines.pop(0), len(platform.texts())
                if line == "(killed)":
                    break
                if later := re.fullmatch(r"\((\d+) seconds later\)", line):
                    await store.advance_clock(int(later[1]) * 1000)
                    await person.bot.process("c")
                    await person.bot.process("c")
                else:
                    assert line.startswith("> "), line
                    typed += 1
                    await person.says(line.removeprefix("> "), event_id=str(typed))
                answers = platform.texts()[before:]
                shown = [lines.pop(0) for _ in "\n".join(answers).splitlines() if lines]
                assert shown == "\n".join(answers).splitlines(), line
    await store.close()


def anchor_of(heading: str) -> str:
    """What a git host calls a heading in a link."""
    bare = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")


def known_commands() -> dict[str, Any]:
    """The commands of `turnkeeper`, by name."""
    return {name: cast("Any", app[name]) for name in app if not name.startswith("-")}
