"""Turns beside the bare floor: wall and CPU time, one at a time and many at once; and what is written in one."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from bench.drivers import Driver
from bench.findings import Finding
from bench.measured import Measured
from bench.recording import IN_MEMORY, record, replay
from bench.workload import TURN, Turn, turns
from turnkeeper.log.store import Store

AT_ONCE: Final = {1: 60, 16: 8, 64: 5}
"""Turns at once, and how many batches of them are measured beside as many of the floor."""
_WARM_UP: Final = 1
_STORED: Final = 64


class Cost(NamedTuple):
    """Seconds for one turn."""

    wall: float
    cpu: float


async def measure(measured: Measured, drivers: Sequence[Driver], progress: Callable[[str], None]) -> list[Finding]:
    """Every driver at every number of turns at once; and the appends of the first one without what drives them."""
    found: list[Finding] = []
    for at_once, batches in AT_ONCE.items():
        given = turns(TURN, at_once * (batches + _WARM_UP), seed=at_once)
        for driver in drivers:
            progress(f"{driver.name}, {at_once} at once, beside the floor")
            written = await record(IN_MEMORY, driver, given)
            if driver is drivers[0]:
                alone = _Ours(f"appends alone of the {driver.name}", partial(_replayed, written))
                found.append(await _beside_floor(measured, alone, written, at_once))
            ours = _Ours(driver.name, partial(_driven, driver, given), driver.target, measured.least_throughput)
            found.append(await _beside_floor(measured, ours, written, at_once))
    return found


class _Ours(NamedTuple):
    """What is measured: does the turn of a number, and what it may cost beside the floor."""

    name: str
    run: Callable[[Store, int], Awaitable[None]]
    target: float | None = None
    least_throughput: float | None = None


def _driven(driver: Driver, given: list[Turn], store: Store, number: int) -> Awaitable[None]:
    return driver.run(store, given[number])


def _replayed(written: list[list[bytes]], store: Store, number: int) -> Awaitable[None]:
    return replay(store, f"turn:replayed-{number}", written[number])


async def _beside_floor(measured: Measured, ours: _Ours, written: list[list[bytes]], at_once: int) -> Finding:
    costs: list[Cost] = []
    floors: list[Cost] = []
    async with measured.open() as store, measured.floor() as floor:
        for first in range(0, len(written), at_once):
            # Small batches in turns: what else the machine does weighs on both.
            batch = range(first, first + at_once)
            costs.append(await _timed([ours.run(store, number) for number in batch]))
            floors.append(await _timed([floor.turn(number, written[number]) for number in batch]))
    return _compared(ours, at_once, costs[_WARM_UP:], floors[_WARM_UP:])


async def _timed(work: list[Awaitable[None]]) -> Cost:
    """What each piece of work costs when all are done at once."""
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*work)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall / len(work), cpu / len(work))


def _compared(ours: _Ours, at_once: int, costs: list[Cost], floors: list[Cost]) -> Finding:
    """The median of the ratios of neighbours in time."""
    pairs = list(zip(costs, floors, strict=True))
    walls = [mine.wall / floor.wall for mine, floor in pairs]
    low, ratio, high = statistics.quantiles(walls)
    more = {
        "ms a turn": 1000 * statistics.median(cost.wall for cost in costs),
        "floor": 1000 * statistics.median(cost.wall for cost in floors),
        "ratio": ratio,
        "quartiles": low,
        "and": high,
        "CPU ms": 1000 * statistics.median(cost.cpu for cost in costs),
        "CPU ratio": statistics.median(mine.cpu / floor.cpu for mine, floor in pairs),
    }
    what = f"{ours.name}, {at_once} at once"
    if at_once == 1:
        return Finding(f"{what}: time", ratio, "x floor", more, at_most=ours.target)
    least = ours.least_throughput if at_once == max(AT_ONCE) else None
    return Finding(f"{what}: throughput", 1 / ratio, "x floor", more, at_least=least)


async def count(measured: Measured, drivers: Sequence[Driver], progress: Callable[[str], None]) -> list[Finding]:
    """Durable writes of a turn, and the bytes that it takes in the store, beside what it consists of."""
    given = turns(TURN, _STORED, seed=2)
    payload = sum(turn.payload for turn in given)
    found: list[Finding] = []
    for driver in drivers:
        progress(f"{driver.name}: writes and bytes")
        url = await measured.empty()
        empty = await measured.used()
        written = await record(url, driver, given)
        in_store = await measured.used() - empty
        writes = {len(bodies) for bodies in written}
        assert len(writes) == 1, "turns of one shape take the same writes"
        bodies = sum(len(body) for turn in written for body in turn)
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
                    "the whole store, with heads, index and free space": in_store / payload,
                },
                at_most=0.8,
            ),
        ]
    return found
