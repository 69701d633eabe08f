"""The examples of every page run as they stand, and no block is left out."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, commands_of, known_commands, name_of, prose_of, run_page
from turnkeeper.cli.app import app

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))], ids=name_of
)
def test_the_examples_run(page: Path) -> None:
    run_page(page)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_the_commands_are_known(block: Block) -> None:
    """Those of `turnkeeper` with their arguments; extras, targets and programs by name."""
    for program, *arguments in commands_of(block):
        if program == "turnkeeper":
            app.parse_args(arguments, exit_on_error=False, print_error=False)
        elif program == "pip":
            assert arguments[0] == "install"
            named = re.fullmatch(r"turnkeeper(?:\[([\w,-]+)\])?", arguments[1])
            assert named, arguments
            assert {*filter(None, (named[1] or "").split(","))} <= PROJECT["project"]["optional-dependencies"].keys()
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), arguments
        elif program == "python":
            assert Path(arguments[0]).suffix == ".py" or arguments[0] == "-m", arguments
        else:
            assert program in ("export", "cd"), f"{block}: what is {program}?"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_prose_are_known(page: Path) -> None:
    for command in re.findall(r"`turnkeeper ([a-z][^`]*)`", prose_of(page)):
        name, *words = command.split()
        assert name in known_commands(), command
        parameters = known_commands()[name].assemble_argument_collection()
        options = {option for argument in parameters for option in argument.names}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, command


def test_operators_are_told_of_every_command() -> None:
    told = set(re.findall(r"`turnkeeper ([a-z-]+)", prose_of(ROOT / "docs" / "operating.md")))
    assert known_commands().keys() <= told


def test_no_block_is_left_out() -> None:
    """Each is run, parsed, compared with what is seen, or a picture in a text that has no examples above it."""
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    shown = {id(block.shown_below) for block in BLOCKS if block.language in ("python", "sh")}
    for block in BLOCKS:
        if block.language in readers:
            readers[block.language](block.text)
        elif block.language == "text":
            before = [one for one in blocks_of(block.page) if one.section == block.section and one.line < block.line]
            assert id(block) in shown or not before, f"{block}: nothing shows this"
        else:
            assert block.language in ("python", "sh"), f"{block}: say in which language it is, one that is tested"
    fences = sum(len(re.findall(r"^ *```\S", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == len(BLOCKS)
