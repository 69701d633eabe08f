"""The transaction that a transactional tool gets: SQL on its own tables, nothing that would end or outlive it."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

_OURS: Final = frozenset({"head", "record", "meta"})
_WRITES: Final = frozenset(
    {
        sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_UPDATE,
        sqlite3.SQLITE_DELETE,
        sqlite3.SQLITE_DROP_TABLE,
        sqlite3.SQLITE_ALTER_TABLE,
    }
)
_NEVER: Final = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_PRAGMA,
    }
)


class Transaction:
    """SQL inside the store's transaction. Valid only while the tool runs; statements of its own, no COMMIT.

    Tables of the tool live in the same file; those of Turnkeeper can be read, not written.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection: sqlite3.Connection | None = connection

    @classmethod
    @contextmanager
    def on(cls, connection: sqlite3.Connection) -> Generator[Transaction]:
        """A transaction that is over when the block ends."""
        transaction = cls(connection)
        connection.set_authorizer(_authorize)
        try:
            yield transaction
        finally:
            transaction._connection = None
            connection.set_authorizer(None)

    def execute(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement, and give its rows.

        Raises:
            sqlite3.Error: as SQLite says; statements that end the transaction or touch the store's tables are refused.
        """
        if self._connection is None:
            raise sqlite3.ProgrammingError("the transaction of this tool is over")
        return self._connection.execute(sql, parameters).fetchall()


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
    if action in _NEVER or (action in _WRITES and {first, second} & _OURS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK
