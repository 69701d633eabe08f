"""Opening a SQLite file: is it ours, can it keep our promises, and which typed error says that it cannot."""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path
from typing import Final

from turnkeeper.errors import (
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnsuitable,
    StoreVersion,
)

APPLICATION_ID: Final = 0x544B5052  # "TKPR"
VERSION: Final = 1
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "9p",
        "virtiofs",
        "fuse.sshfs",
        "afs",
        "ceph",
        "glusterfs",
    }
)
"""File systems on which WAL's shared memory or the locks are known not to work between machines (field case 21)."""

# Records lie in the order of their writing, whatever log they belong to: a group commit then fills a few pages, where
# rows clustered by log would touch one page for each log (measured: a fifth of the time at 64 logs).
_SCHEMA: Final = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('clock_offset_ms', 0);
CREATE TABLE head (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    incarnation BLOB NOT NULL,
    tail INTEGER NOT NULL,
    compacted INTEGER NOT NULL,
    kind TEXT NOT NULL,
    phase TEXT NOT NULL,
    attention TEXT,
    owner TEXT,
    labels TEXT NOT NULL,
    ttl_ms INTEGER NOT NULL,
    keep_until INTEGER NOT NULL,
    size INTEGER NOT NULL,
    created INTEGER NOT NULL,
    updated INTEGER NOT NULL
);
CREATE INDEX head_attention ON head (attention) WHERE attention IS NOT NULL;
CREATE TABLE record (
    log INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE UNIQUE INDEX record_log_seq ON record (log, seq);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""

log = logging.getLogger(__name__)


def file_system_type(path: Path) -> str | None:
    """The type of the file system that holds `path`, where the system tells (Linux), else None."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return None
    target = path.resolve()
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields, _, described = line.partition(" - ")
        escaped = fields.split()[4].encode("latin-1", "backslashreplace")  # keeps what is not ASCII through unescaping
        mount_point = Path(escaped.decode("unicode_escape"))
        if target.is_relative_to(mount_point) and (best is None or len(mount_point.parts) >= best[0]):
            best = (len(mount_point.parts), described.split()[0])
    return best[1] if best else None


def typed(error: sqlite3.Error, where: str) -> StoreError:
    """Our error for one of SQLite's, told apart by its result code; SQLite's is its cause."""
    ours = _typed(error, where)
    ours.__cause__ = error
    return ours


def _typed(error: sqlite3.Error, where: str) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None) or 0
    text = str(error)
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreBusy(where, f"another process held the file for longer than the busy timeout ({text})")
        case sqlite3.SQLITE_FULL:
            return StoreFull(where, f"no space left ({text}); free space and try again")
        case sqlite3.SQLITE_READONLY:
            return StoreReadOnly(
                where, f"can be read but not written ({text}); check the file's and folder's permissions"
            )
        case sqlite3.SQLITE_NOTADB:
            return StoreForeign(where, "is not a SQLite file; give another path, it was left untouched")
        case sqlite3.SQLITE_CORRUPT:
            return StoreCorrupt(where, f"is damaged ({text}); keep the file and restore a copy")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return StoreReadOnly(where, f"cannot be opened ({text}); check that the folder exists and may be written")
        case _:
            return StoreUnavailable(where, f"SQLite failed ({text})")


def connect(path: str, *, busy_timeout: float, journal: str, max_bytes: int | None) -> sqlite3.Connection:
    """A connection for one thread, on a file that is ours; makes a new file ours.

    Raises:
        StoreForeign, StoreVersion, StoreUnsuitable, StoreReadOnly, StoreBusy, StoreCorrupt: the file is as it was.
    """
    memory = path == ":memory:"
    if not memory:
        _check_place(Path(path), journal)
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(path, timeout=busy_timeout, isolation_level=None, check_same_thread=False)
        _identify(connection, path)
        if not memory:
            mode = _set_journal(connection, journal, busy_timeout)
            if mode != journal:
                raise StoreUnsuitable(path, f"cannot use the journal mode {journal}, only {mode}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = OFF")
        if max_bytes is not None:
            page_size = connection.execute("PRAGMA page_size").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_size)}")
    except BaseException as e:
        if connection is not None:
            connection.close()
        if isinstance(e, sqlite3.Error):
            raise typed(e, path) from e
        raise
    return connection


def _set_journal(connection: sqlite3.Connection, journal: str, busy_timeout: float) -> str:
    """Set the journal mode, and give the one that is set.

    SQLite does not wait by itself here: it raises a read lock to a write lock, where the busy timeout does not hold.
    """
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            return connection.execute(f"PRAGMA journal_mode = {journal}").fetchone()[0]
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.005)


def _check_place(path: Path, journal: str) -> None:
    if path.is_file() and path.stat().st_size == 1:
        # SQLite would take it for an empty database, and overwrite it.
        raise StoreForeign(str(path), "is not a SQLite file; give another path, it was left untouched")
    kind = file_system_type(path)
    if kind not in NETWORK_FILE_SYSTEMS:
        return
    if journal == "wal":
        raise StoreUnsuitable(
            str(path),
            f"lies on a network file system ({kind}), where WAL can damage the file; use a local disk, a server "
            "(Redis, PostgreSQL), or ?journal=delete with a single process",
        )
    log.warning("%s lies on a network file system (%s): use it from a single process only", path, kind)


def _identify(connection: sqlite3.Connection, path: str) -> None:
    application, version, empty = _identity(connection)
    if application == APPLICATION_ID:
        if version > VERSION:
            raise StoreVersion(path, version, VERSION)
        return
    if application or version or not empty:
        raise StoreForeign(path, "is a SQLite file of another program; give another path, it was left untouched")
    # Before the first table: pages of erased logs can then be handed back without rewriting the file.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        faster = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if not faster:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if faster:  # another process made tables meanwhile: ours, or its own
        _identify(connection, path)


def _identity(connection: sqlite3.Connection) -> tuple[int, int, bool]:
    """Application id, version, and whether there are no tables: of one moment, as another process may be making it ours."""
    connection.execute("BEGIN")
    try:
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        tables: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    return application, version, not tables
