"""Questions to whoever sits at the terminal, for what was not given on the command line."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Sequence

import anyio

from turnkeeper.errors import InvalidInput


def somebody_is_there() -> bool:
    """Whether questions can be asked."""
    return sys.stdin.isatty()


async def asked(
    given: str | None, option: str, question: str, *, choices: Sequence[str] = (), default: str | None = None
) -> str:
    """What was given, or else the answer to a question; with `choices`, one of them, or its beginning.

    Raises:
        InvalidInput: it was not given, and nobody is there to be asked; or nobody answers.
    """
    if given is not None:
        return given
    if not somebody_is_there():
        raise InvalidInput(option, "is needed (on a terminal it is asked for)")
    told = f" ({'/'.join(choices)})" if choices else "" if default is None else f" [{default}]"
    while True:
        line = await _line(f"{question}{told}: ")
        if not line:
            raise InvalidInput(option, "was not answered")
        answer = line.strip() or default or ""
        fitting = [choice for choice in choices if answer and choice.startswith(answer.replace(" ", "_"))]
        if choices and len(fitting) == 1:
            return fitting[0]
        if answer and not choices:
            return answer


async def _line(prompt: str) -> str:
    sys.stderr.write(prompt)  # on the output is the result alone
    sys.stderr.flush()
    # Waited for by the event loop, so that Ctrl-C ends the command at once. A terminal hands out one line at a time.
    await anyio.wait_readable(sys.stdin)
    return os.read(sys.stdin.fileno(), 65536).decode(errors="replace")


async def asked_who(given: str | None) -> str:
    """Who decides; whoever is logged in, if he says nothing else."""
    return await asked(given, "--who", "Who decides", default=getpass.getuser() if somebody_is_there() else None)


async def asked_why(given: str | None) -> str:
    """The evidence."""
    return await asked(given, "--why", "What is the evidence")
