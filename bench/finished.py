"""What 10,000 finished turns take: in the store, and in the memory of the process that drove them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

from bench.drivers import Journal
from bench.findings import Finding
from bench.measured import Measured, opened
from bench.memory import resident
from bench.workload import Shape, stream

_TURNS: Final = 10_000
_WARM_UP: Final = 256
"""Turns until connections, buffers and caches have their size."""
_SHAPE: Final = Shape(1, 1, 512)
_AT_ONCE: Final = 64
_PROJECT: Final = Path(__file__).resolve().parents[1]


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """A process of its own drives the turns, so that nothing else is in its memory."""
    progress(f"memory of {_TURNS:,} finished turns")
    url = await measured.empty()
    empty = await measured.used()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.finished", url, cwd=_PROJECT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, "the process that drove the turns failed"
    before, after, seconds = json.loads(output)
    used = await measured.used() - empty
    async with opened(url) as store:
        bodies = [head.size async for head in store.heads()]
    count = _TURNS + _WARM_UP
    assert len(bodies) == count, "every turn is there, whole"
    each, body = used / count, sum(bodies) / count
    what = f"{_TURNS:,} finished turns of {_SHAPE}"
    return [
        Finding(
            f"{what}: in the store",
            each,
            "bytes a turn",
            {"bodies": body, "x bodies": each / body, "MiB of all": _TURNS * each / 2**20},
        ),
        Finding(
            f"{what}: in the process that drove them",
            (after - before) / _TURNS,
            "bytes a turn",
            {"MiB before": before / 2**20, "MiB behind": after / 2**20, "turns a second": _TURNS / seconds},
        ),
    ]


async def _drive(url: str) -> None:
    async with opened(url) as store:
        turns = stream(_SHAPE, _WARM_UP + _TURNS)

        async def drive(count: int) -> None:
            waiting = islice(turns, count)

            async def one_behind_the_other() -> None:
                for turn in waiting:
                    await Journal(store, turn, fused=True).turn()

            await asyncio.gather(*(one_behind_the_other() for _ in range(_AT_ONCE)))

        await drive(_WARM_UP)
        before, start = resident(), time.perf_counter()
        await drive(_TURNS)
        seconds = time.perf_counter() - start
        print(json.dumps([before, resident(), seconds]))


if __name__ == "__main__":
    asyncio.run(_drive(sys.argv[1]))
