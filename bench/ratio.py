"""Turns beside the bare floor: wall and CPU time, one at a time and many at once; and what is written in one."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from bench.drivers import Driver
from bench.findings import Finding
from bench.floor import Floor
from bench.recording import record, stored_in_file
from bench.scratch import scratch
from bench.workload import TURN, turns
from turnkeeper.stores.sqlite import SqliteStore

AT_ONCE: Final = {1: 120, 16: 8, 64: 5}
"""Turns at once, and how many batches of them are measured beside as many of the floor."""
_WARM_UP: Final = 1
_STORED: Final = 64


class Cost(NamedTuple):
    """Seconds for one turn."""

    wall: float
    cpu: float


async def measure(drivers: Sequence[Driver], progress: Callable[[str], None]) -> list[Finding]:
    """Every driver at every number of turns at once."""
    found: list[Finding] = []
    for at_once, batches in AT_ONCE.items():
        for driver in drivers:
            progress(f"{driver.name}, {at_once} at once, beside the floor")
            found.append(await _beside_floor(driver, at_once, batches))
    return found


async def _beside_floor(driver: Driver, at_once: int, batches: int) -> Finding:
    given = turns(TURN, at_once * (batches + _WARM_UP), seed=at_once)
    written = await record(driver, given)
    ours: list[Cost] = []
    floors: list[Cost] = []
    with scratch() as folder:
        floor = Floor(folder / "floor.db")
        try:
            async with await SqliteStore.open(folder / "turns.db") as store:
                for first in range(0, len(given), at_once):
                    # Small batches in turns: what else the machine does weighs on both.
                    batch = range(first, first + at_once)
                    ours.append(await _timed([driver.run(store, given[number]) for number in batch]))
                    floors.append(await _timed([floor.turn(number, written[number]) for number in batch]))
        finally:
            floor.close()
    return _compared(driver, at_once, ours[_WARM_UP:], floors[_WARM_UP:])


async def _timed(work: list[Awaitable[None]]) -> Cost:
    """What each piece of work costs when all are done at once."""
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*work)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall / len(work), cpu / len(work))


def _compared(driver: Driver, at_once: int, ours: list[Cost], floors: list[Cost]) -> Finding:
    """The median of the ratios of neighbours in time."""
    pairs = list(zip(ours, floors, strict=True))
    walls = [mine.wall / floor.wall for mine, floor in pairs]
    low, ratio, high = statistics.quantiles(walls)
    more = {
        "ms a turn": 1000 * statistics.median(cost.wall for cost in ours),
        "floor": 1000 * statistics.median(cost.wall for cost in floors),
        "ratio": ratio,
        "quartiles": low,
        "and": high,
        "CPU ms": 1000 * statistics.median(cost.cpu for cost in ours),
        "CPU ratio": statistics.median(mine.cpu / floor.cpu for mine, floor in pairs),
    }
    what = f"{driver.name}, {at_once} at once"
    if at_once == 1:
        return Finding(f"{what}: time", ratio, "x floor", more, at_most=driver.target)
    return Finding(f"{what}: throughput", 1 / ratio, "x floor", more, at_least=3 if at_once == max(AT_ONCE) else None)


async def count(drivers: Sequence[Driver], progress: Callable[[str], None]) -> list[Finding]:
    """Durable writes of a turn, and the bytes that it takes in the store, beside what it consists of."""
    given = turns(TURN, _STORED, seed=2)
    payload = sum(turn.payload for turn in given)
    found: list[Finding] = []
    for driver in drivers:
        progress(f"{driver.name}: writes and bytes")
        written = await record(driver, given)
        writes = {len(bodies) for bodies in written}
        assert len(writes) == 1, "turns of one shape take the same writes"
        bodies = sum(len(body) for turn in written for body in turn)
        in_file = await stored_in_file(driver, given)
        effects = TURN.effects
        found += [
            Finding(
                f"{driver.name}: durable writes of {TURN}",
                writes.pop(),
                "writes",
                {"effects": effects},
                at_most=effects + 2 if driver.fewest_writes else None,
            ),
            Finding(
                f"{driver.name}: stored",
                bodies / payload,
                "x payload",
                {
                    "bytes a turn": bodies / _STORED,
                    "payload": payload / _STORED,
                    "the whole file, with heads, index and free space": in_file / payload,
                },
                at_most=0.8,
            ),
        ]
    return found
