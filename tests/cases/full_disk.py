"""A disk that is full at a chosen statement: SQLite's own SQLITE_FULL, with what it does to the transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

Loss = Literal["transaction", "statement"]
"""What SQLITE_FULL undoes: SQLite rolls the whole transaction back by itself, or only the statement that met it."""

_NO_MORE = "PRAGMA max_page_count = 1"
_MORE = "PRAGMA max_page_count = 1073741823"
_FILL: dict[Loss, str] = {
    "transaction": "INSERT INTO ballast VALUES (zeroblob(5000000))",
    "statement": "INSERT INTO ballast SELECT zeroblob(2000000) FROM (SELECT 1 UNION SELECT 2 UNION SELECT 3)",
}


class FullDisk:
    """When the disk fills up: at which statement of the writer's next transactions, and what SQLite loses over it."""

    def __init__(self) -> None:
        self.at = 0
        self.loss: Loss = "transaction"
        self.met = ""
        """The statement that met the full disk."""
        self._writing = False

    def fill(self, at: int, loss: Loss) -> None:
        """Let the nth statement from the writer's next BEGIN on meet a full disk."""
        self.at, self.loss, self.met, self._writing = at, loss, "", False

    def free(self) -> None:
        """There is space again."""
        self.at = 0

    def before(self, connection: FillingConnection, sql: str) -> None:
        """Count a statement; raise SQLite's error where it is the one."""
        if sql.startswith("BEGIN IMMEDIATE"):
            self._writing = True
        if not self.at or not self._writing:
            return
        self.at -= 1
        if not self.at:
            self.met = sql
            connection.fill(_FILL[self.loss])


class FillingConnection(sqlite3.Connection):
    """A connection of the store's threads on a disk that `disk` says is full."""

    disk: FullDisk

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """See `sqlite3.Connection`."""
        self.disk.before(self, sql)
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """See `sqlite3.Connection`."""
        self.disk.before(self, sql)
        return super().executemany(sql, parameters)

    def set_authorizer(self, authorizer_callback: Any) -> None:
        """See `sqlite3.Connection`."""
        self._authorizer = authorizer_callback
        super().set_authorizer(authorizer_callback)

    def fill(self, statement: str) -> None:
        """Write more than there is space for, inside whatever transaction is open."""
        authorizer = getattr(self, "_authorizer", None)
        super().set_authorizer(None)
        super().execute(_NO_MORE)
        try:
            super().execute(statement)
        finally:
            super().execute(_MORE)
            super().set_authorizer(authorizer)
        raise AssertionError("the disk is not full")


@contextmanager
def filling(monkeypatch: pytest.MonkeyPatch) -> Generator[FullDisk]:
    """Stores that are opened meanwhile lie on the disk that is given."""
    disk = FullDisk()
    connection_class = type("Connection", (FillingConnection,), {"disk": disk})
    connect = sqlite3.connect

    def connecting(path: str, **options: Any) -> sqlite3.Connection:
        return connect(path, factory=connection_class, **options)

    with monkeypatch.context() as patch:
        patch.setattr("turnkeeper.stores.sqlite.schema.sqlite3.connect", connecting)
        yield disk


def make_ballast(path: Path) -> None:
    """The table that `FullDisk` fills, beside the store's own."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS ballast (blob BLOB)")


def dump(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, and the schema, as another process reads them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        tables = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY 1")
        ]
        found = {
            table: connection.execute(f"SELECT rowid, * FROM {table}").fetchall() for table in tables if table != "meta"
        }
        found["meta"] = connection.execute("SELECT * FROM meta").fetchall()
        found["schema"] = connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()
        return found
