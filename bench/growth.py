"""What a round costs late in a turn: time and bytes at rounds 10, 50, 100 and 200."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from bench.drivers import Journal
from bench.findings import Finding
from bench.measured import Measured
from bench.recording import recording
from bench.workload import Shape, turns

ROUNDS: Final = (10, 50, 100, 200)
_AROUND: Final = 4
"""Rounds before and behind each that are measured with it."""
_SETS: Final = 3


class _Round(NamedTuple):
    wall: float
    cpu: float
    stored: int


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """A turn at each of the rounds, going on in turns: what else the machine does weighs on all of them."""
    samples: dict[int, list[_Round]] = {number: [] for number in ROUNDS}
    for number in range(_SETS):
        progress(f"rounds {', '.join(map(str, ROUNDS))} ({number + 1} of {_SETS})")
        for depth, found in (await _set(measured, number)).items():
            samples[depth] += found
    return [finding for depth in ROUNDS for finding in _findings(depth, samples)]


async def _set(measured: Measured, number: int) -> dict[int, list[_Round]]:
    given = [turns(Shape(depth + _AROUND, 2, 2048), 1, seed=100 * number + depth)[0] for depth in ROUNDS]
    found: dict[int, list[_Round]] = {depth: [] for depth in ROUNDS}
    async with measured.open() as opened:
        store = recording(opened)
        journals = [Journal(store, turn, fused=False) for turn in given]

        async def prepare(depth: int, journal: Journal) -> None:
            await journal.start()
            for index in range(depth - _AROUND - 1):
                await journal.round(index)

        await asyncio.gather(*map(prepare, ROUNDS, journals))
        for step in range(-_AROUND, _AROUND + 1):
            for depth, journal in zip(ROUNDS, journals, strict=True):
                written = store.written[journal.session.key]
                before = sum(map(len, written))
                wall, cpu = time.perf_counter(), time.process_time()
                await journal.round(depth - 1 + step)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                found[depth].append(_Round(wall, cpu, sum(map(len, written)) - before))
    return found


def _findings(depth: int, samples: dict[int, list[_Round]]) -> list[Finding]:
    here, first = samples[depth], samples[ROUNDS[0]]
    wall = statistics.median(one.wall / other.wall for one, other in zip(here, first, strict=True))
    cpu = statistics.median(one.cpu / other.cpu for one, other in zip(here, first, strict=True))
    stored = statistics.mean(one.stored for one in here)
    measured = {
        "ms": 1000 * statistics.median(one.wall for one in here),
        "CPU ms": 1000 * statistics.median(one.cpu for one in here),
        "CPU x": cpu,
    }
    name = f"x round {ROUNDS[0]}"
    return [
        Finding(f"round {depth}: time", wall, name, measured, at_most=1.1),
        Finding(
            f"round {depth}: stored",
            stored / statistics.mean(one.stored for one in first),
            name,
            {"bytes": stored},
            at_most=1.1,
        ),
    ]
