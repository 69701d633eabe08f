"""A consumer process for the crash tests: it writes down what it does before and behind each acknowledgement."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Final

from turnkeeper.errors import StoreError
from turnkeeper.transport.opening import open_transport

LEASE: Final = 0.5
LIMIT: Final = 10_000
"""Attempts: what is killed again and again is not dead for it here."""


def consume(url: str, ledger: str) -> None:
    """Consume until killed."""
    asyncio.run(_consume(url, Path(ledger)))


async def _consume(url: str, ledger: Path) -> None:
    queue = await open_transport(url, max_attempts=LIMIT)
    name = f"worker {os.getpid()}"
    # One write for a line, so that lines of several processes do not mix, and a killed one leaves none half.
    lines = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        try:
            for delivery in await queue.consume(name, count=3, wait_seconds=5, lease_seconds=LEASE):
                os.write(lines, f"handled {delivery.id} {delivery.key}\n".encode())
                await asyncio.sleep(random.uniform(0, 0.01))
                what = random.random()
                if what < 0.1:
                    await queue.retry_later(delivery, delay=0.05, reason="chance")
                elif what < 0.2:
                    await queue.release(delivery)
                elif await queue.acknowledge(delivery):
                    os.write(lines, f"acknowledged {delivery.id} {delivery.key}\n".encode())
        except StoreError:
            await asyncio.sleep(0.05)
