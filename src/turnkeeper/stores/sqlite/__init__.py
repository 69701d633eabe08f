"""The embedded default: logs in one SQLite file, shared by the processes of one machine."""

from turnkeeper.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
