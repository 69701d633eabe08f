"""Turns beside the bare floor: wall and CPU time, one at a time and many at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from bench.drivers import Driver
from bench.floor import Floor
from bench.recording import record
from bench.scratch import scratch
from bench.workload import TURN, Turn, turns
from turnkeeper.stores.sqlite import SqliteStore

AT_ONCE: Final = {1: (12, 25), 16: (32, 11), 64: (64, 9)}
"""Turns at once: how many turns one repetition has in all, and how many repetitions there are."""


class Cost(NamedTuple):
    """Seconds for one turn."""

    wall: float
    cpu: float


class Ratio(NamedTuple):
    """A driver beside its floor, at one number of turns at once: medians for one turn, ratios of neighbours in time."""

    driver: str
    at_once: int
    ours: Cost
    floor: Cost
    wall: float
    wall_quartiles: tuple[float, float]
    cpu: float
    target: float
    """Largest ratio of the wall times that is wanted."""

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.wall <= self.target


async def measure(drivers: Sequence[Driver], report: Callable[[str], None]) -> list[Ratio]:
    """Every driver at every number of turns at once."""
    found: list[Ratio] = []
    for at_once, (count, repetitions) in AT_ONCE.items():
        given = turns(TURN, count, seed=at_once)
        for driver in drivers:
            report(f"{driver.name} beside the floor, {at_once} at once")
            found.append(await _beside_floor(driver, given, at_once, repetitions))
    return found


async def _beside_floor(driver: Driver, given: list[Turn], at_once: int, repetitions: int) -> Ratio:
    written = await record(driver, given)
    pairs: list[tuple[Cost, Cost]] = []
    for repetition in range(repetitions + 1):
        # Neighbours in time, so that what else the machine does weighs on both; the first pair warms up.
        pair = (await _ours(driver, given, at_once), await _floor(written, at_once))
        if repetition:
            pairs.append(pair)
    walls = [ours.wall / floor.wall for ours, floor in pairs]
    low, _, high = statistics.quantiles(walls)
    return Ratio(
        driver.name,
        at_once,
        _median([ours for ours, _ in pairs]),
        _median([floor for _, floor in pairs]),
        statistics.median(walls),
        (low, high),
        statistics.median(ours.cpu / floor.cpu for ours, floor in pairs),
        # At 64 at once: three times the floor's throughput.
        driver.target if at_once == 1 else 1 / 3 if at_once == 64 else 1.0,
    )


def _median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.wall for c in costs), statistics.median(c.cpu for c in costs))


async def _ours(driver: Driver, given: list[Turn], at_once: int) -> Cost:
    with scratch() as folder:
        async with await SqliteStore.open(folder / "turns.db") as store:
            return await _timed([lambda turn=turn: driver.run(store, turn) for turn in given], at_once)


async def _floor(written: list[list[bytes]], at_once: int) -> Cost:
    with scratch() as folder:
        floor = Floor(folder / "floor.db")
        try:
            return await _timed(
                [lambda n=n, bodies=bodies: floor.turn(n, bodies) for n, bodies in enumerate(written)], at_once
            )
        finally:
            floor.close()


async def _timed(jobs: list[Callable[[], Awaitable[None]]], at_once: int) -> Cost:
    """What one job costs when `at_once` of them run at any time."""
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            await job()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(at_once)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall / len(jobs), cpu / len(jobs))
