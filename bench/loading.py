"""Loading a turn of 100 rounds, beside a raw read of the same rows."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.drivers import Journal
from bench.findings import Finding
from bench.measured import Measured
from bench.workload import Shape, turns
from turnkeeper.turn.session import TurnCheckpointSession

_SHAPE: Final = Shape(100, 2, 2048)
_TIMES: Final = 150


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """The load of a new session, up to a snapshot; raw, the rows come as tuples from a thread of their own."""
    progress(f"loading {_SHAPE.rounds} rounds")
    (turn,) = turns(_SHAPE, 1)
    async with measured.open() as store:
        journal = Journal(store, turn, fused=False)
        await journal.start()
        for index in range(_SHAPE.rounds):
            await journal.round(index)
        executor = ThreadPoolExecutor(1)
        connection = sqlite3.connect(measured.url, isolation_level=None, check_same_thread=False)

        def raw() -> list[Any]:
            return connection.execute("SELECT seq, at, body FROM record WHERE log = 1 ORDER BY seq").fetchall()

        loads: list[float] = []
        reads: list[float] = []
        transcripts: list[float] = []
        rows: list[Any] = []
        for _ in range(_TIMES):
            start = time.perf_counter()
            rows = await asyncio.get_running_loop().run_in_executor(executor, raw)
            reads.append(time.perf_counter() - start)
            session = TurnCheckpointSession(store, turn.trace_id)
            start = time.perf_counter()
            snapshot = await session.load()
            loads.append(time.perf_counter() - start)
            assert snapshot is not None
            start = time.perf_counter()
            messages = snapshot.messages
            transcripts.append(time.perf_counter() - start)
            assert len(rows) == session.log.position.seq
            assert len(messages) == len(turn.messages) + _SHAPE.rounds * (1 + _SHAPE.tools)
        executor.shutdown()
        connection.close()
    ratio = statistics.median(load / read for load, read in zip(loads, reads, strict=True))
    more = {
        "rows": float(len(rows)),
        "ms": 1000 * statistics.median(loads),
        "raw ms": 1000 * statistics.median(reads),
        "transcript decoded, ms more": 1000 * statistics.median(transcripts),
    }
    return [Finding(f"loading {_SHAPE}", ratio, "x raw read", more, at_most=2)]
