"""What every command has: help with examples that can be typed, JSON for programs, completion; and that asking is cheap."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import turnkeeper
from turnkeeper.cli.app import COMMANDS, Command, app

WITHOUT_JSON = {
    "export": "writes a document in the form that is asked for",
    "serve": "runs until it is told to stop",
    "worker": "runs until it is told to stop",
}

each_command = pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])


@each_command
def test_its_examples_can_be_typed(command: Command) -> None:
    """They are parsed as the command would, and are of this command."""
    assert command.examples
    for example in command.examples:
        program, name, *rest = shlex.split(example)
        assert (program, name) == ("turnkeeper", command.name)
        app.parse_args([name, *rest], exit_on_error=False, print_error=False)


def test_an_example_that_does_not_fit_is_found() -> None:
    """So the test above can fail."""
    for wrong in (["show"], ["show", "x", "--nonsense"], ["approve", "x", "first", "0"], ["nonsense"]):
        with pytest.raises(Exception, match=r"(?i)argument|option|command|convert|unable"):
            app.parse_args(wrong, exit_on_error=False, print_error=False)


@each_command
def test_its_help_shows_them(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    app([command.name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert command.summary in shown
    for example in command.examples:
        assert " ".join(example.split()) in shown


@each_command
def test_json_for_programs(command: Command) -> None:
    options = {name for argument in app[command.name].assemble_argument_collection() for name in argument.names}
    assert ("--json" in options) != (command.name in WITHOUT_JSON)


def test_help_of_the_command_itself() -> None:
    done = turnkeeper("--help")
    assert done.status == 0
    assert "Example:" in done.out
    for command in COMMANDS:
        assert f"│ {command.name} " in done.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("somewhere", [False, True])
def test_completion(shell: str, somewhere: bool, tmp_path: Path) -> None:
    """A script that knows the commands and their options, where the shell looks for it, or elsewhere."""
    where = ("--output", tmp_path / "script") if somewhere else ()
    done = turnkeeper("--install-completion", "--shell", shell, *where, environment={"HOME": str(tmp_path)})
    assert (done.status, done.err) == (0, "")
    told = Path(done.out.splitlines()[0].removeprefix("written to "))
    written = told.read_text()
    for word in ("resolve-message", "not-sent-by", "release", "older-than", "did_not_happen"):
        assert word in written
    if shell == "bash":
        subprocess.run(["bash", "-n", told], check=True, timeout=60)
    if somewhere:
        assert list(tmp_path.iterdir()) == [told], "nothing else is touched"


def test_completion_for_a_shell_that_is_not_known(tmp_path: Path) -> None:
    done = turnkeeper("--install-completion", environment={"HOME": str(tmp_path), "SHELL": "/bin/unheard-of"})
    assert (done.status, "--shell" in done.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_help_of_all_and_completion_need_no_extra(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules.update(dict.fromkeys(['cryptography', 'httpx2', 'opentelemetry', 'psycopg', 'redis']))\n"
        "sys.modules.update(dict.fromkeys(['anthropic', 'openai', 'starlette', 'uvicorn', 'yaml']))\n"
        "from turnkeeper.cli.app import COMMANDS, app\n"
        "for command in COMMANDS: app([command.name, '--help'])\n"
        "app(['--install-completion', '--shell', 'bash', '--output', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "script"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


LIGHT = {"cyclopts", "rich"}
"""What help may load: the parser, and what prints its tables."""
HEAVY = [
    *["anyio", "anthropic", "asyncio", "cryptography", "httpx2", "markdown_it", "msgspec", "openai", "opentelemetry"],
    *["psycopg", "pygments", "redis", "sqlite3", "starlette", "uvicorn", "yaml"],
]
"""What takes time to load, and what is an extra."""


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["show", "--help"]], ids=["nothing", "help", "version", "of a command"]
)
def test_asking_for_help_loads_little(arguments: list[str]) -> None:
    """Neither Turnkeeper's other modules nor what they need; a command's help loads what that command needs, and no extra."""
    code = (
        "import sys\nfrom turnkeeper.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('LOADED', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    modules = done.stdout.rpartition("LOADED")[2].split()
    packages = {module.partition(".")[0] for module in modules}
    assert packages >= LIGHT
    of_a_command = len(arguments) > 1
    assert packages & {*HEAVY} <= ({"anyio", "asyncio", "msgspec", "sqlite3"} if of_a_command else set[str]())
    if not of_a_command:
        ours = {module for module in modules if module.startswith("turnkeeper")}
        assert ours == {"turnkeeper", "turnkeeper.cli", "turnkeeper.cli.app", "turnkeeper.errors"}
