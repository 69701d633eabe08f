"""Real processes that start their work at one moment, for tests of what several of them do to one store."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import anyio

SPAWN = mp.get_context("spawn")
"""New interpreters: nothing of the test's process is inherited, as between real workers."""
PATIENCE = 60
"""Seconds until a process that waits for another gives up."""


class Crew:
    """Processes that each run `work(number, *arguments)` in an event loop of their own."""

    def __init__(self, count: int, work: Callable[..., Any], *arguments: Any) -> None:
        # Kept here until the end: the system drops a barrier that nobody holds before the processes have opened it.
        self._held = SPAWN.Barrier(count), arguments
        self._pipes = [SPAWN.Pipe(duplex=False) for _ in range(count)]
        self._processes = [
            SPAWN.Process(target=_run, args=(self._held[0], sender, work, (number, *arguments)))
            for number, (_, sender) in enumerate(self._pipes)
        ]

    def start(self) -> None:
        """Let them begin."""
        for process, (_, sender) in zip(self._processes, self._pipes, strict=True):
            process.start()
            sender.close()  # so that the death of the process is the end of the pipe

    def bring(self) -> Sequence[Any]:
        """Wait for them, and give what they returned, by number."""
        with ExitStack() as stack:
            for process, (receiver, _) in zip(self._processes, self._pipes, strict=True):
                stack.callback(process.join, PATIENCE)
                stack.enter_context(receiver)
            answers = [receiver.recv() for receiver, _ in self._pipes]
        failed = [failure for failure, _ in answers if failure is not None]
        assert not failed, failed
        return [answer for _, answer in answers]


def crew(count: int, work: Callable[..., Any], *arguments: Any) -> Sequence[Any]:
    """Run `work` in `count` processes, and give what they returned."""
    started = Crew(count, work, *arguments)
    started.start()
    return started.bring()


def _run(barrier: Any, sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    async def main() -> Any:
        barrier.wait(PATIENCE)
        return await work(*arguments)

    try:
        sender.send((None, anyio.run(main)))
    except BaseException as e:
        sender.send((f"{type(e).__name__}: {e}", None))
        raise
