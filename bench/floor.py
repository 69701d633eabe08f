"""The bare floor: the least that a durable step can cost from asyncio on SQLite, without a rule, a head or an index."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Floor:
    """One committed insert for each step: stdlib sqlite3 in one worker thread, WAL, synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = wal")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE step (id INTEGER PRIMARY KEY, turn INTEGER NOT NULL, body BLOB NOT NULL)"
        )

    def _insert(self, turn: int, body: bytes) -> None:
        self._connection.execute("INSERT INTO step (turn, body) VALUES (?, ?)", (turn, body))

    async def turn(self, number: int, bodies: list[bytes]) -> None:
        """Every step of one turn, one behind the other."""
        loop = asyncio.get_running_loop()
        for body in bodies:
            await loop.run_in_executor(self._executor, self._insert, number, body)

    def close(self) -> None:
        """Let go of thread and file."""
        self._executor.shutdown()
        self._connection.close()
