"""The store's schema in the database: whose it is, which version it has, and the migrations that bring it to this one's."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final, NamedTuple

import psycopg

from turnkeeper.errors import StoreForeign, StoreOutdated, StoreUnsuitable, StoreVersion
from turnkeeper.stores.postgres.address import Address
from turnkeeper.stores.postgres.lanes import Connection, ask

OLDEST_SERVER: Final = 130000
"""The oldest PostgreSQL that is tested, as libpq numbers them."""
_MIGRATION_PATIENCE: Final = 60
"""Seconds that a migrator waits for another one, or for who uses the tables."""

_LOOK: Final = b"""
SELECT
    count(*) FILTER (WHERE c.oid IS NOT NULL) + (SELECT count(*) FROM pg_proc p WHERE p.pronamespace = n.oid),
    EXISTS (
        SELECT FROM pg_attribute a JOIN pg_class m ON m.oid = a.attrelid
        WHERE m.relnamespace = n.oid AND m.relname = 'meta' AND a.attname IN ('name', 'value') HAVING count(*) = 2
    )
FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid
WHERE n.nspname = $1 GROUP BY n.oid
"""


class Migration(NamedTuple):
    """A step from one version of the schema to the next."""

    version: int
    """The version that it leads to."""
    name: str
    sql: str
    """`:schema` stands for the schema's quoted name."""


class Migrated(NamedTuple):
    """What a migration did: the version before (0: there was nothing), and the version after."""

    before: int
    after: int


def migrations() -> list[Migration]:
    """All that there are, in their order: `migrations/001_initial.sql` leads to version 1."""
    files = resources.files("turnkeeper.stores.postgres") / "migrations"
    names = sorted(file.name for file in files.iterdir() if file.name.endswith(".sql"))
    return [Migration(int(name[:3]), name, (files / name).read_text("utf-8")) for name in names]


def known_version() -> int:
    """The version that this process works with."""
    return migrations()[-1].version


async def check_server(connection: Connection, address: Address) -> bool:
    """Whether a pooler stands between us and the server, of a server that can be a store.

    Raises:
        StoreUnsuitable: it is too old, or the database keeps no Unicode.
    """
    if connection.pgconn.server_version < OLDEST_SERVER:
        oldest = OLDEST_SERVER // 10000
        found = connection.info.server_version // 10000
        raise StoreUnsuitable(address.where, f"is PostgreSQL {found}; {oldest} is the oldest that will do")
    ((encoding, backend),) = await ask(connection, b"SELECT current_setting('server_encoding'), pg_backend_pid()")
    if encoding != "UTF8":
        raise StoreUnsuitable(
            address.where, f"keeps its texts as {encoding}; create the database with the encoding UTF8"
        )
    # A pooler answers for the server when a session begins, and so gives a process number of its own.
    return backend != connection.pgconn.backend_pid


async def version(connection: Connection, address: Address) -> int:
    """The version of the store's schema; 0 where there is none, or an empty one.

    Raises:
        StoreForeign: the schema holds something that is not ours.
        StoreVersion: it is newer than this process.
    """
    rows = await ask(connection, _LOOK, [address.schema])
    if not rows or rows[0][0] == 0:
        return 0
    found: list[tuple[int]] = []
    if rows[0][1]:
        text = f"""SELECT value::bigint FROM "{address.schema}".meta WHERE name::text = 'turnkeeper_version'"""
        try:
            found = await ask(connection, text.encode())
        except psycopg.DataError:
            found = []  # a table of another program that happens to be called so
    if not found:
        raise StoreForeign(
            address.where,
            f'the schema "{address.schema}" belongs to something else; give ?schema=, it was left untouched',
        )
    known = known_version()
    if found[0][0] > known:
        raise StoreVersion(address.where, found[0][0], known)
    return found[0][0]


async def check(connection: Connection, address: Address) -> bool:
    """Whether there is a store of this process's version; False where there is none at all.

    Raises:
        StoreOutdated: it is older.
        StoreForeign, StoreVersion: see `version`.
    """
    found = await version(connection, address)
    if found and found < known_version():
        raise StoreOutdated(address.where, found, known_version())
    return found > 0


async def migrate(connection: Connection, address: Address) -> Migrated:
    """Bring the schema to this process's version, wholly or not at all; make it where there is none.

    Several migrators at once are safe: one works, the others wait for it and find the work done.

    Raises:
        StoreForeign, StoreVersion: the schema was left untouched.
        psycopg.Error: nothing was changed.
    """
    # A lock of the transaction, not of the session: it works behind a transaction pooler too.
    lock = hashlib.blake2b(f"turnkeeper migrate {address.schema}".encode(), digest_size=8).digest()
    await ask(connection, b"BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        await ask(connection, f"SET LOCAL lock_timeout = '{_MIGRATION_PATIENCE}s'".encode())
        await ask(connection, b"SELECT pg_advisory_xact_lock($1)", [int.from_bytes(lock, "big", signed=True)])
        before = await version(connection, address)
        if not await ask(connection, b"SELECT FROM pg_namespace WHERE nspname = $1", [address.schema]):
            await ask(connection, f'CREATE SCHEMA "{address.schema}"'.encode())
        for migration in migrations():
            if migration.version > before:
                # As one string without parameters, which may hold many statements.
                await connection.execute(migration.sql.replace(":schema", f'"{address.schema}"').encode())
                await ask(
                    connection,
                    f"""UPDATE "{address.schema}".meta SET value = $1 WHERE name = 'turnkeeper_version'""".encode(),
                    [migration.version],
                )
        await ask(connection, b"COMMIT")
    except BaseException:
        if not connection.closed:
            await ask(connection, b"ROLLBACK")
        raise
    return Migrated(before, max(before, known_version()))
