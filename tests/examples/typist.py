"""Somebody at the console of an example: types, reads, kills the process and starts it again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 60
"""Seconds until something that is waited for counts as not coming."""


class Typist:
    """One conversation with an example, over as many processes as it takes."""

    def __init__(self, example: str, folder: Path) -> None:
        self._command = [sys.executable, "-W", "error", str(EXAMPLES / example), "--lease", "1"]
        self.folder = folder
        self.transcript = folder / "transcript.jsonl"
        self._process: subprocess.Popen[str] | None = None
        self._follower = Thread()
        self._news = Condition()
        self._shown: list[str] = []
        self._read = 0

    def start(self, *options: str) -> None:
        """Start it; where it runs, kill it before."""
        self.kill()
        store = f"sqlite:///{self.folder}/store.db"
        command = [*self._command, "--store", store, "--transcript", str(self.transcript), *options]
        self._shown, self._read = [], 0
        pipe = subprocess.PIPE
        with (self.folder / "errors.txt").open("a") as errors:
            process = subprocess.Popen(command, cwd=self.folder, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        self._process = process
        self._follower = Thread(target=self._follow, args=(process, self._shown))
        self._follower.start()

    def _follow(self, process: subprocess.Popen[str], shown: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                shown.append(line.rstrip("\n"))
                self._news.notify_all()

    def type(self, line: str) -> None:
        """Type a line."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read(self, wanted: str) -> str:
        """Wait until a line with `wanted` is shown that was not read before; the line."""
        found: list[str] = []

        def seen() -> bool:
            while not found and self._read < len(self._shown):
                line = self._shown[self._read]
                self._read += 1
                found.extend([line] if wanted in line else [])
            return bool(found)

        with self._news:
            assert self._news.wait_for(seen, PATIENCE), f"{wanted!r} is not shown: {self._shown} {self.errors()}"
        return found[0]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}: does not come {self.errors()}"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._end(process)

    def finish(self) -> None:
        """End the input, and wait until everything is done."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        try:
            assert process.wait(PATIENCE) == 0, self.errors()
        finally:
            process.kill()
            self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.wait(PATIENCE)
        self._follower.join(PATIENCE)
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()

    # --- what stands in its files --------------------------------------------------------------------------

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The transcript's lines, or those of one kind."""
        found = rows(self.transcript)
        return [one for one in found if kind in (None, one["line"])]

    def errors(self) -> str:
        """What its processes have complained of."""
        return (self.folder / "errors.txt").read_text()

    def wrote(self) -> list[str]:
        """The texts that were sent."""
        return [one["text"] for one in self.lines("wrote")]


def rows(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
