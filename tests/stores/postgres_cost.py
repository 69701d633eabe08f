"""What an append costs beside the floor, one committed INSERT of the same bytes: `python -m tests.stores.postgres_cost`.

On a server with fsync, of the tests' own. Floor and store take turns, so that what else the machine does weighs on both.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Final

import psycopg

from tests.conformance.support import HEAD
from tests.servers.postgres import Server, server
from turnkeeper.log.record import NOWHERE, Appended
from turnkeeper.stores.postgres import PostgresStore

AT_ONCE: Final = {1: (100, 15), 16: (20, 9), 64: (10, 9)}
"""Writers at once: steps of each in one repetition, and repetitions."""
SIZE: Final = 700
"""Bytes of a step: a compressed tool result with what belongs to it."""

Steps = Callable[[int, int], Awaitable[None]]


async def main() -> None:
    """Measure and print."""
    with server(fsync="on", full_page_writes="on", max_connections="100") as made:
        made.initialise()
        made.start()
        for at_once, (steps, repetitions) in AT_ONCE.items():
            for connections in sorted({min(at_once, 4), at_once}):
                await beside(made, at_once, steps, repetitions, connections)


async def beside(made: Server, at_once: int, steps: int, repetitions: int, connections: int) -> None:
    """Print the ratio at `at_once` writers, the floor with as many connections as given; the store with its default."""
    database = made.database()
    made.run(
        "CREATE TABLE floor (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea NOT NULL)",
        database=database,
    )
    url = made.url(database)
    pool: asyncio.LifoQueue[psycopg.AsyncConnection] = asyncio.LifoQueue()
    for _ in range(connections):
        pool.put_nowait(await psycopg.AsyncConnection.connect(url, autocommit=True))
    body = os.urandom(SIZE)

    async def floor(_writer: int, count: int) -> None:
        for _ in range(count):
            connection = await pool.get()
            await connection.execute(b"INSERT INTO floor (body) VALUES (%b)", (body,))
            pool.put_nowait(connection)

    async with await PostgresStore.open(url) as store:
        position = [NOWHERE] * at_once

        async def ours(writer: int, count: int) -> None:
            for _ in range(count):
                outcome = await store.append(f"k{writer}", [body], expected=position[writer], head=HEAD)
                assert isinstance(outcome, Appended)
                position[writer] = outcome.position

        pairs: list[tuple[float, float]] = []
        for repetition in range(repetitions + 1):
            pair = await timed(ours, at_once, steps), await timed(floor, at_once, steps)
            if repetition:  # the first warms up
                pairs.append(pair)
    while not pool.empty():
        await pool.get_nowait().close()
    made.drop(database)
    ratios = sorted(one / other for one, other in pairs)
    low, middle, high = statistics.quantiles(ratios)
    each, bare = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    print(
        f"{at_once:2} at once, floor with {connections:2} connections: {middle:.2f} of the floor's time "
        f"(quartiles {low:.2f} to {high:.2f}), {each:.0f} us an append beside {bare:.0f} us"
    )


async def timed(steps: Steps, at_once: int, count: int) -> float:
    """Seconds for one step while `at_once` writers make `count` each."""
    began = time.perf_counter()
    await asyncio.gather(*(steps(writer, count) for writer in range(at_once)))
    return (time.perf_counter() - began) / (at_once * count)


if __name__ == "__main__":
    asyncio.run(main())
