"""A worker process for field case 14: bad messages fail, or kill it; good ones go into a ledger."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Final

from turnkeeper.transport.opening import open_transport
from turnkeeper.transport.protocol import Delivery

LIMIT: Final = 5
LEASE: Final = 0.3
KILLS: Final = "P2"
"""The message whose handler ends the process before anybody can catch it."""


async def main(url: str, ledger: Path) -> None:
    """Handle what comes, until two messages are dead and nothing else is left."""
    queue = await open_transport(url, max_attempts=LIMIT)
    while True:
        for delivery in await queue.consume(f"worker {os.getpid()}", wait_seconds=LEASE, lease_seconds=LEASE):
            await handle(delivery, ledger)
            try:
                delivery.body.decode()
            except UnicodeDecodeError as e:
                await queue.retry_later(delivery, delay=0.05, reason=f"does not decode: {e.reason}")
            else:
                await queue.acknowledge(delivery)
        depth = await queue.depth()
        if depth.dead == 2 and not (depth.ready or depth.delayed or depth.in_flight):
            break
    await queue.close()


async def handle(delivery: Delivery, ledger: Path) -> None:
    """What the message asks for."""
    text = delivery.body.decode(errors="replace")
    if text == KILLS:
        os._exit(137)
    if text.startswith("G"):
        with ledger.open("a") as lines:
            print(text, time.time_ns() // 1_000_000, file=lines, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
