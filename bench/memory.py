"""Resident memory of a process that holds 1,000 open turns of 10 rounds; each kind in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.drivers import Journal
from bench.findings import Finding
from bench.measured import Measured, opened
from bench.workload import Shape, stream
from turnkeeper.turn.session import TurnCheckpointSession

_TURNS: Final = 1000
_SHAPE: Final = Shape(10, 2, 2048)
_AT_ONCE: Final = 64
_PROJECT: Final = Path(__file__).resolve().parents[1]


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """A process that drove the turns itself, then one that loads them as they stand."""
    found: list[Finding] = []
    url = await measured.empty()
    for kind in ("driven", "loaded"):
        progress(f"memory of {_TURNS:,} turns, {kind}")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.memory",
            kind,
            url,
            cwd=_PROJECT,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, f"the process of {kind} turns failed"
        before, after = json.loads(output)
        found.append(
            Finding(
                f"process with {_TURNS:,} open turns of {_SHAPE}, {kind}",
                after / 2**20,
                "MiB",
                {"MiB without": before / 2**20, "KiB a turn": (after - before) / 1024 / _TURNS},
            )
        )
    return found


def resident() -> int:
    """Bytes of this process that are in memory, behind a collection of what nobody holds."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


async def _hold(kind: str, url: str) -> None:
    held: list[TurnCheckpointSession] = []
    async with opened(url) as store:
        before = resident()
        waiting = stream(_SHAPE, _TURNS)

        async def drive() -> None:
            for turn in waiting:
                journal = Journal(store, turn, fused=True)
                await journal.start()
                for index in range(_SHAPE.rounds):
                    await journal.round(index)
                held.append(journal.session)

        async def load() -> None:
            for turn in stream(Shape(0, 0, 0), _TURNS):
                held.append(TurnCheckpointSession(store, turn.trace_id))
                await held[-1].load()

        await (load() if kind == "loaded" else asyncio.gather(*(drive() for _ in range(_AT_ONCE))))
        assert all(session.log.cached.current_round == _SHAPE.rounds - 1 for session in held)
        print(json.dumps([before, resident()]))


if __name__ == "__main__":
    asyncio.run(_hold(*sys.argv[1:]))
