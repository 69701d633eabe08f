"""The portable checkpoint and the events of a turn of 100 rounds, beside a raw read of the same rows."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.findings import Finding
from bench.loop import LOOP
from bench.measured import Measured
from bench.workload import Shape, turns
from turnkeeper import Keeper

_SHAPE: Final = Shape(100, 2, 2048)
_TIMES: Final = 40


async def _seconds(call: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await call
    return time.perf_counter() - start


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """Each from the store on: read, decode, project. Events hold the whole conversation again and again (2.4)."""
    progress(f"projecting {_SHAPE.rounds} rounds")
    (turn,) = turns(_SHAPE, 1)
    async with measured.open() as store:
        await LOOP[1].run(store, turn)
        keeper = Keeper(store)
        executor = ThreadPoolExecutor(1)
        connection = sqlite3.connect(measured.url, isolation_level=None, check_same_thread=False)

        def raw() -> list[Any]:
            return connection.execute("SELECT seq, at, body FROM record WHERE log = 1 ORDER BY seq").fetchall()

        async def read() -> None:
            await asyncio.get_running_loop().run_in_executor(executor, raw)

        reads: list[float] = []
        checkpoints: list[float] = []
        events: list[float] = []
        for _ in range(_TIMES):
            reads.append(await _seconds(read()))
            checkpoints.append(await _seconds(keeper.checkpoint(turn.trace_id)))
            events.append(await _seconds(keeper.events(turn.trace_id)))
        rows, told = len(raw()), await keeper.events(turn.trace_id)
        checkpoint = await keeper.checkpoint(turn.trace_id)
        assert checkpoint is not None
        assert checkpoint.completed_model_iterations == _SHAPE.rounds + 1
        executor.shutdown()
        connection.close()
    more = {"rows": float(rows), "raw ms": 1000 * statistics.median(reads)}
    return [
        _finding(f"read and projected, the last checkpoint of {_SHAPE}", checkpoints, reads, more, at_most=2),
        _finding(f"read and projected, all events of {_SHAPE}", events, reads, {**more, "events": float(len(told))}),
    ]


def _finding(
    what: str, times: list[float], reads: list[float], more: dict[str, float], at_most: float | None = None
) -> Finding:
    ratio = statistics.median(one / read for one, read in zip(times, reads, strict=True))
    return Finding(what, ratio, "x raw read", {**more, "ms": 1000 * statistics.median(times)}, at_most=at_most)
