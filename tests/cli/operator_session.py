"""An operator's session at a terminal, typed and recorded: `python -m tests.cli.operator_session` writes it to its page.

A process charges a card and is killed with SIGKILL before it can write the result. The operator finds the turn, looks at it and
at the bank, settles the charge, and lets the turn finish.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT

PAGE: Final = ROOT / "docs" / "operating.md"
_BEGIN, _END = "<!-- recorded by tests/cli/operator_session.py -->\n```text\n", "```\n<!-- end of the recording -->"
_PATIENCE: Final = 60.0
_PAINT: Final = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")
"""Colours, bold letters, and what a shell tells its terminal."""

SHOP: Final = '''\
"""A shop's agent, which charges cards. The bank is a file: it does not forget, and does not ask twice."""

import asyncio
import os
import signal

from turnkeeper import Agent, Keeper, ScriptedModel, tool

PAY = {"role": "assistant", "tool_calls": [{"id": "c", "name": "charge", "arguments": '{"order": 4711, "cents": 500}'}]}


@tool
async def charge(order: int, cents: int) -> str:
    """Charge the customer of an order."""
    with open("bank.txt", "a") as bank:
        bank.write(f"order {order}: charged {cents} cents\\n")
    if "POWER_CUT" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"charged {cents} cents"


agent = Agent(ScriptedModel([PAY, "Order 4711 is paid."]), [charge])


async def main() -> None:
    async with await Keeper.open("sqlite:///turns.db") as keeper:
        await keeper.run(agent, "Please pay order 4711.", turn_id="order-4711")


if __name__ == "__main__":
    asyncio.run(main())
'''

PROMPT: Final = "$ "
TYPED: Final = (
    ("export TURNKEEPER_STORE=sqlite:///turns.db", PROMPT),
    ("turnkeeper list", PROMPT),
    ('turnkeeper release order-4711 --force --who ann --why "its machine has lost power"', PROMPT),
    ("turnkeeper retry order-4711 shop:agent --no-reply", PROMPT),
    ("turnkeeper list --attention", PROMPT),
    ("turnkeeper show order-4711", PROMPT),
    ("grep 4711 bank.txt", PROMPT),
    ("turnkeeper resolve order-4711", "unknown): "),
    ("happened", "is told of it: "),
    ("charged 500 cents", "the evidence: "),
    ("it is in the bank's list", "[ann]: "),
    ("", PROMPT),
    ("turnkeeper retry order-4711 shop:agent --no-reply", PROMPT),
    ("turnkeeper list", PROMPT),
    ("grep 4711 bank.txt", PROMPT),
)
"""What is typed, and what the screen ends with when it is done."""


class Terminal:
    """A shell in a pseudo-terminal, and what its screen has shown."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 132, 0, 0))
        # The shell's session takes the terminal as its own, as a login does: questions are asked there.
        login = "import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp('sh', ['sh', '-i'])"
        path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
        environment = {
            "PATH": path,
            "PS1": PROMPT,
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "HOME": str(folder),
        }
        self._shell = subprocess.Popen(
            [sys.executable, "-c", login],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "LOGNAME": "ann"},
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._shell.kill()
        self._shell.wait()
        os.close(self._ours)

    @property
    def screen(self) -> str:
        """What was shown until now, without paint."""
        return _PAINT.sub("", self._seen.decode(errors="ignore").replace("\r\n", "\n"))

    def wait_for(self, end: str, *, echo: str = "") -> None:
        """Read until the screen shows the echo of what was typed, and then ends with that."""
        start, deadline = len(self.screen), time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as ready:
            ready.register(self._ours, selectors.EVENT_READ)
            while not re.fullmatch(f"{re.escape(echo)}.*{re.escape(end)}", self.screen[start:], re.DOTALL):
                assert ready.select(deadline - time.monotonic()), (
                    f"this does not come to end with {end!r}:\n{self.screen}"
                )
                self._seen += os.read(self._ours, 65536)

    def type(self, line: str, end: str) -> None:
        """Type a line, and wait until the screen ends with that."""
        os.write(self._ours, f"{line}\n".encode())
        self.wait_for(end, echo=f"{line}\n")

    def interrupt(self, end: str) -> None:
        """Press Ctrl-C, and wait until the screen ends with that."""
        os.write(self._ours, b"\x03")
        self.wait_for(end, echo="^C")

    def end_of_input(self, end: str) -> None:
        """Press Ctrl-D, and wait until the screen ends with that."""
        os.write(self._ours, b"\x04")
        self.wait_for(end)


def record(folder: Path) -> str:
    """What the screen has shown at the end of the session. The folder then holds the store and the bank's list."""
    (folder / "shop.py").write_text(SHOP)
    killed = subprocess.run(
        [sys.executable, "shop.py"], cwd=folder, env={**os.environ, "POWER_CUT": "1"}, check=False, timeout=_PATIENCE
    )
    assert killed.returncode == -signal.SIGKILL
    with Terminal(folder) as terminal:
        terminal.wait_for(PROMPT)
        for line, end in TYPED:
            terminal.type(line, end)
        screen = terminal.screen
    return "".join(f"{line.rstrip()}\n" for line in screen.removesuffix(PROMPT).splitlines())


def shown(screen: str) -> str:
    """The screen without what differs from one time and machine to another: times, names of processes, widths."""
    host = re.escape(platform.node() or "host")
    screen = re.sub(rf"{host}:\d+(?= *│)", lambda found: "vm:4242".ljust(len(found[0])), screen)  # in a table's column
    screen = re.sub(rf"{host}:\d+", "vm:4242", screen)
    screen = re.sub(r"\d{4}-\d\d-\d\d (?=\d\d:)", "2026-03-01 ", screen)
    return re.sub(r"\d\d:\d\d:\d\d", "10:00:00", screen)


def comparable(recording: str) -> list[str]:
    """The lines of a recording without widths and numbers that differ: milliseconds, sizes."""
    lines = [re.sub(r"━+|─+", "━", re.sub(r" +", " ", line)).strip() for line in recording.splitlines()]
    lines = [re.sub(r"^(\d+ 10:00:00)( \d+)?( \d+) ", r"\1 ", line) for line in lines]
    return [re.sub(r"\d+ B\b", "0 B", line) for line in lines]


def recorded() -> str:
    """The recording on its page."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the page's recording anew."""
    with tempfile.TemporaryDirectory() as folder:
        recording = shown(record(Path(folder)))
    if comparable(recording) == comparable(recorded()):
        return  # nothing but times and sizes would change
    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    assert begin, "the page has no place for it"
    PAGE.write_text(before + begin + recording + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
