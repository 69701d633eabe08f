"""Which typed error says what PostgreSQL, or the way to it, answered; and whether anything can have been applied (LOG-6)."""

from __future__ import annotations

import psycopg

from turnkeeper.errors import (
    InvalidInput,
    StoreBusy,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
    TurnkeeperError,
)

# libpq gives no SQLSTATE for a connection that was refused, only the server's text. It is English unless the server was set to
# another language; then these become StoreUnavailable, with that text.
_DENIED = (
    "authentication failed",
    "no pg_hba.conf entry",
    "pg_hba.conf rejects",
    "no password supplied",
    "is not permitted to log in",
    "permission denied for database",
)
_FULL_HOUSE = ("too many connections", "too many clients", "remaining connection slots", "no more connections allowed")
_LOST_STATES = ("57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04")
"""The server ended the session: shut down, terminated by an administrator, idle for too long."""
_TRANSIENT = ("40001", "40P01")


def lost(error: psycopg.Error) -> bool:
    """Whether the connection is gone, so that nobody knows what became of what was asked on it."""
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state in _LOST_STATES or state.startswith("08")


def transient(error: psycopg.Error) -> bool:
    """Whether the statement was undone for the sake of others, and is likely to work when it is repeated at once."""
    return error.sqlstate in _TRANSIENT


def full_house(error: psycopg.Error) -> bool:
    """Whether the server, or a pooler, takes no more connections."""
    return any(text in str(error) for text in _FULL_HOUSE)


def not_connected(error: psycopg.Error, where: str) -> StoreError:
    """Our error for a connection that could not be made: nothing was asked yet."""
    text = _first_line(error)
    ours: StoreError
    if any(part in text for part in _DENIED) or ('role "' in text and "does not exist" in text):
        ours = StoreDenied(where, f"PostgreSQL does not let this user in ({text})")
    elif 'database "' in text and "does not exist" in text:
        ours = StoreMissing(where, f"there is no such database ({text}); create it first")
    elif full_house(error):
        ours = StoreBusy(where, f"PostgreSQL takes no more connections ({text}); lower pool_size, or use a pooler")
    else:
        ours = StoreUnavailable(where, f"PostgreSQL cannot be reached ({text})", applied=False)
    ours.__cause__ = error
    return ours


def of_the_store(error: psycopg.Error) -> bool:
    """Whether it is the store's trouble, whoever's statement met it, and not a mistake in the statement."""
    state = error.sqlstate
    if state is None:
        return lost(error)
    return state[:2] in ("08", "40", "53", "57", "58", "XX") or state in ("25006", "25P03", "25P04", "55P03")


def typed(error: psycopg.Error | UnicodeEncodeError, where: str) -> TurnkeeperError:
    """Our error for a statement that failed; theirs is its cause."""
    ours = _typed(error, where)
    ours.__cause__ = error
    return ours


def _typed(error: psycopg.Error | UnicodeEncodeError, where: str) -> TurnkeeperError:
    text = _first_line(error)
    if isinstance(error, UnicodeEncodeError):
        return InvalidInput("key or head", "holds half of a surrogate pair, which PostgreSQL's texts cannot")
    if lost(error):
        return StoreUnavailable(where, f"the connection was lost ({text})")
    state = error.sqlstate or ""
    match state:
        case "":
            return InvalidInput("key or head", text)
        case "25006":
            return StoreReadOnly(where, f"can be read but not written: a replica, or set read-only ({text})")
        case "53100":
            return StoreFull(where, f"no space left ({text}); free space and try again")
        case "42501":
            return StoreDenied(where, f"the user lacks a right ({text})")
        case "55P03" | "57014" | "53300" | "40001" | "40P01":
            return StoreBusy(where, f"others held it for longer than the busy timeout ({text})")
        case "3F000" | "42P01" | "42883":
            return StoreMissing(where, f"the store's schema is not what it was when it was opened ({text})")
        case "54000":
            return InvalidInput("key", f"is too long for PostgreSQL's index ({text})")
        case "XX001" | "XX002":
            return StoreCorrupt(where, f"the server found damaged data ({text}); restore a copy")
        case _:
            # The server answered with an error, so it has undone the statement.
            return StoreUnavailable(where, f"PostgreSQL failed ({state}: {text})", applied=False)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
