"""The transaction that a transactional tool gets: SQL on its own tables, nothing that would end or outlive it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

_OURS: Final = frozenset({"head", "record", "meta", "queue_entry"})
_WRITES: Final = frozenset(
    {
        sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_UPDATE,
        sqlite3.SQLITE_DELETE,
        sqlite3.SQLITE_DROP_TABLE,
    }
)
"""Actions that name the table first."""
_CHANGES: Final = frozenset(
    {
        sqlite3.SQLITE_ALTER_TABLE,
        sqlite3.SQLITE_CREATE_INDEX,
        sqlite3.SQLITE_DROP_INDEX,
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_DROP_TRIGGER,
    }
)
"""Actions that name the table second."""
_NEVER: Final = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_PRAGMA,
        # Temporary things stay on the store's connection, and one named like a table of the store would hide it.
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
    }
)
_STORAGE: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)
"""Results that are the store's trouble, whoever's statement met them."""


class EffectRaised(Exception):
    """Carries an error of a tool's own SQL past the store's typed errors, to the caller of the tool."""

    def __init__(self, error: sqlite3.Error) -> None:
        super().__init__(str(error))
        self.error = error


class Transaction:
    """SQL inside the store's transaction. Valid only while the tool runs; statements of its own, no COMMIT.

    Tables of the tool live in the same file; those of Turnkeeper can be read, not written.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection: sqlite3.Connection | None = connection
        self._lost: sqlite3.Error | None = None

    def execute(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement, and give its rows.

        Raises:
            sqlite3.Error: as SQLite says; statements that end the transaction or touch the store's tables are refused.
        """
        if self._connection is None:
            raise sqlite3.ProgrammingError("the transaction of this tool is over")
        self.check()
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as e:
            if not self._connection.in_transaction:
                self._lost = e
            raise

    def check(self) -> None:
        """Raise the error with which SQLite rolled the whole transaction back, where it did (a full disk, `OR ROLLBACK`).

        A tool may have swallowed it; whatever it ran from then on would be stored on its own (field case 22).
        """
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Let nothing more run."""
        self._connection = None


def run_effect(connection: sqlite3.Connection, effect: Callable[[Transaction], T]) -> T:
    """Run a tool's effect in the transaction that `connection` is in.

    Raises:
        EffectRaised: the tool's SQL was wrong.
        sqlite3.Error: the store failed under it.
    """
    transaction = Transaction(connection)
    connection.set_authorizer(_authorize)
    try:
        result = effect(transaction)
        transaction.check()
    except sqlite3.Error as e:
        if getattr(e, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _STORAGE:
            raise
        raise EffectRaised(e) from e
    finally:
        transaction.end()
        connection.set_authorizer(None)
    return result


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
    ours = (action in _WRITES and first in _OURS) or (action in _CHANGES and second in _OURS)
    return sqlite3.SQLITE_DENY if ours or action in _NEVER else sqlite3.SQLITE_OK
