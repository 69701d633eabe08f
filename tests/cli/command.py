"""Runs the real `turnkeeper` command as a process."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_PROJECT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "COLUMNS": "160", "NO_COLOR": "1"}


class Done(NamedTuple):
    """How the command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output."""
        return json.loads(self.out)


class _Zygote:
    """The process that the commands are forked from."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.zygote"],
            cwd=_PROJECT,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(self, **told: Any) -> int:
        """Run a command to its end; its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._one_at_a_time:
            print(json.dumps(told), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


def turnkeeper(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 110, environment: Mapping[str, str] | None = None
) -> Done:
    """Run the command to its end, with nothing but these variables of the environment."""
    with tempfile.TemporaryDirectory(prefix="turnkeeper-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = _zygote().run(
            arguments=[str(argument) for argument in arguments],
            cwd=str(cwd or os.getcwd()),
            environment={**_ENVIRONMENT, **(environment or {})},
            out=str(out),
            err=str(err),
            seconds=math.ceil(timeout),
        )
        done = Done(status, out.read_text(), err.read_text())
    if status == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(list(map(str, arguments)), timeout, done.out, done.err)
    return done
