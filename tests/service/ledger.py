"""What really happened, outside the store: effects and sent messages, in a SQLite file that many processes write."""

from __future__ import annotations

import sqlite3
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS effect (id INTEGER PRIMARY KEY, operation TEXT, conversation TEXT, number INTEGER);
CREATE TABLE IF NOT EXISTS sent (id INTEGER PRIMARY KEY, key TEXT UNIQUE, conversation TEXT, text TEXT);
CREATE TABLE IF NOT EXISTS repeated (id INTEGER PRIMARY KEY, key TEXT);
"""


class Ledger:
    """One process's access to it."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = wal")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.executescript(_TABLES)

    def do(self, operation: str, conversation: str, number: int) -> None:
        """An effect: one more row each time."""
        self._connection.execute(
            "INSERT INTO effect (operation, conversation, number) VALUES (?, ?, ?)", (operation, conversation, number)
        )

    def done(self, operation: str) -> bool:
        """Whether an effect was done."""
        query = "SELECT 1 FROM effect WHERE operation = ?"
        return self._connection.execute(query, (operation,)).fetchone() is not None

    def send(self, key: str, conversation: str, text: str) -> str:
        """A platform that knows a key again: the second message with it is the first one."""
        put = "INSERT OR IGNORE INTO sent (key, conversation, text) VALUES (?, ?, ?)"
        if not self._connection.execute(put, (key, conversation, text)).rowcount:
            self._connection.execute("INSERT INTO repeated (key) VALUES (?)", (key,))
        (row,) = self._connection.execute("SELECT id FROM sent WHERE key = ?", (key,)).fetchone()
        return str(row)

    def effects(self) -> list[tuple[str, int]]:
        """Conversation and number of every effect, as often as it was done."""
        return self._connection.execute("SELECT conversation, number FROM effect ORDER BY id").fetchall()

    def texts(self) -> dict[str, list[str]]:
        """By conversation, what a person sees, in order."""
        found: dict[str, list[str]] = {}
        for conversation, text in self._connection.execute("SELECT conversation, text FROM sent ORDER BY id"):
            found.setdefault(conversation, []).append(text)
        return found

    def sent(self) -> int:
        """How many messages a person sees."""
        return self._connection.execute("SELECT count(*) FROM sent").fetchone()[0]
