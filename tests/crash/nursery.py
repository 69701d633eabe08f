"""A small helper process that forks one child for each job: a process of its own in milliseconds, ready to be killed.

The test process cannot fork by itself: it has threads. The helper imports everything once and never starts a thread.
Jobs and answers are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, Final, NamedTuple

SCENES: Final = ("scenario", "flow_scenario", "flow_workers")
"""Modules of this package whose `perform` does a job; `warm_up` does a short one, at a path."""
_PROJECT: Final = Path(__file__).resolve().parents[2]
_LONGEST: Final = 60.0
"""Seconds after which a job counts as hanging: nothing in it waits for anything."""


class Ended(NamedTuple):
    """How a job's process ended: the signal that killed it, or None; and what it had to say."""

    killed_by: int | None
    answer: dict[str, Any]


class Nursery:
    """The test's side of the helper process."""

    def __init__(self, *scenes: str) -> None:
        self._helper = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.crash.nursery", *(scenes or SCENES)],
            cwd=_PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: dict[str, Any], scene: str = "scenario") -> Ended:
        """Run a job of that module of `tests.crash` in a process of its own, to its end or its death."""
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        print(json.dumps([scene, job]), file=self._helper.stdin, flush=True)
        line = self._helper.stdout.readline()
        assert line, "the helper process died"
        ended = Ended(**json.loads(line))
        assert "error" not in ended.answer, f"{job}:\n{ended.answer['error']}"
        assert ended.killed_by in (None, signal.SIGKILL), f"{job}: killed by signal {ended.killed_by}"
        return ended

    def close(self) -> None:
        """End the helper."""
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.close()
        self._helper.wait()
        self._helper.stdout.close()


def _child(scene: str, job: dict[str, Any], answer: int) -> None:
    gc.disable()  # a child is short-lived, and a collection would copy what it shares with the helper
    module = importlib.import_module(f"tests.crash.{scene}")
    try:
        told = asyncio.run(module.perform(**job))
    except BaseException:
        told = {"error": traceback.format_exc()}
    with os.fdopen(answer, "w") as pipe:
        json.dump(told, pipe)
    os._exit(0)


def _heard(pipe: int, process: int) -> dict[str, Any]:
    """What the child says until it ends, or is ended for saying nothing too long."""
    said = b""
    while True:
        if not select.select([pipe], [], [], _LONGEST)[0]:
            os.kill(process, signal.SIGKILL)
            return {"error": f"nothing happened for {_LONGEST} s"}
        part = os.read(pipe, 1 << 16)
        if not part:
            return json.loads(said) if said else {}
        said += part


def _warm_up(scenes: list[str]) -> None:
    """Load what is otherwise loaded at its first use, so that no child has to, and do one job. Leaves nothing open: a
    connection that is there when children are forked would be every child's."""
    for store in ("sqlite", "postgres", "redis"):
        importlib.import_module(f"turnkeeper.stores.{store}")
    with tempfile.TemporaryDirectory(prefix="turnkeeper-") as folder:
        for scene in scenes:
            module = importlib.import_module(f"tests.crash.{scene}")
            asyncio.run(module.warm_up(f"{folder}/{scene}"))


def main() -> None:
    """Fork a child for each line of the standard input, and tell how it ended."""
    _warm_up(sys.argv[1:])
    assert threading.active_count() == 1, "a lock that a thread holds stays locked in every child"
    gc.freeze()
    for line in sys.stdin:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            scene, job = json.loads(line)
            _child(scene, job, writing)
        os.close(writing)
        answer = _heard(reading, process)
        os.close(reading)
        _, status = os.waitpid(process, 0)
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        print(json.dumps({"killed_by": killed_by, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
