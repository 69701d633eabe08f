"""Logs in a PostgreSQL schema, shared by the processes of many machines; needs the extra `postgres`."""

from turnkeeper.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
