"""The booking ledger: what the outside world has seen, in a file of its own. It never drops a second row for the same thing."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

_SCHEMA = """
CREATE TABLE IF NOT EXISTS effect (
    id INTEGER PRIMARY KEY, operation_id TEXT NOT NULL, turn TEXT NOT NULL, tool TEXT NOT NULL, arguments TEXT NOT NULL,
    pid INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS effect_operation ON effect (operation_id);
CREATE TABLE IF NOT EXISTS reply (id INTEGER PRIMARY KEY, key TEXT NOT NULL, turn TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS reply_key ON reply (key);
CREATE TABLE IF NOT EXISTS model_call (id INTEGER PRIMARY KEY, turn TEXT NOT NULL, round INTEGER NOT NULL);
"""


class Effect(NamedTuple):
    """One thing that was done."""

    id: int
    operation_id: str
    turn: str
    tool: str


class Ledger:
    """A SQLite file that tools and channels write to; every call adds a row."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing that it has written; only a machine that loses power could.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def do(self, operation_id: str, turn: str, tool: str, arguments: str, pid: int) -> None:
        """Book, change, cancel or send something."""
        row = (operation_id, turn, tool, arguments, pid)
        self._connection.execute(
            "INSERT INTO effect (operation_id, turn, tool, arguments, pid) VALUES (?, ?, ?, ?, ?)", row
        )

    def effects(self, operation_id: str | None = None) -> list[Effect]:
        """What was done, or what was done under one operation id."""
        rows = self._connection.execute(
            "SELECT id, operation_id, turn, tool FROM effect WHERE operation_id = coalesce(?, operation_id) ORDER BY id",
            (operation_id,),
        )
        return list(map(Effect._make, rows))

    def send(self, key: str, turn: str, text: str) -> str:
        """Send a reply; gives its message id."""
        row = self._connection.execute(
            "INSERT INTO reply (key, turn, text) VALUES (?, ?, ?) RETURNING id", (key, turn, text)
        ).fetchone()
        return f"message-{row[0]}"

    def find_reply(self, key: str) -> str | None:
        """The message id of a sent reply."""
        row = self._connection.execute("SELECT id FROM reply WHERE key = ? ORDER BY id", (key,)).fetchone()
        return None if row is None else f"message-{row[0]}"

    def replies(self) -> list[tuple[str, str]]:
        """(turn, text) of every reply sent."""
        return list(self._connection.execute("SELECT turn, text FROM reply ORDER BY id"))

    def note_model_call(self, turn: str, round_index: int) -> None:
        """The provider's own count of what it was asked."""
        self._connection.execute("INSERT INTO model_call (turn, round) VALUES (?, ?)", (turn, round_index))

    def model_calls(self) -> int:
        """How often the provider was asked."""
        count: int = self._connection.execute("SELECT count(*) FROM model_call").fetchone()[0]
        return count
