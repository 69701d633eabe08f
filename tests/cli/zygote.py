"""Forks a process for each command that it is told: what takes a third of a second to load is loaded once.

A line of JSON for each command comes on standard input, and one with its exit status goes to standard output. It has no threads,
and opens nothing: what is open when a process is forked would be that process's too.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import signal
import sys
import threading
from typing import Any

from turnkeeper import cli
from turnkeeper.cli.app import main as command_line


def _become(told: dict[str, Any]) -> None:
    """Be the process that the command would have been started as."""
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["environment"])
    for number, path in enumerate((os.devnull, told["out"], told["err"])):
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["turnkeeper", *told["arguments"]]
    random.seed()
    signal.alarm(told["seconds"])


def main() -> None:
    """Fork until standard input ends."""
    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"{cli.__name__}.{module.name}")
    for store in ("sqlite", "postgres", "redis"):
        importlib.import_module(f"turnkeeper.stores.{store}")
    assert threading.active_count() == 1, "a lock that a thread holds stays locked in every child"
    answers = os.fdopen(os.dup(1), "w")
    commands = os.fdopen(os.dup(0))
    while line := commands.readline():
        process = os.fork()
        if not process:
            answers.close()
            commands.close()
            _become(json.loads(line))
            command_line()
            return
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
