"""Opening a PostgreSQL store: whose schema it is, which version, how it is brought up to date, and what stands in the way."""

from __future__ import annotations

import asyncio
import builtins
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.conformance.support import append, whole
from tests.servers.postgres import PASSWORD, Server, free_port
from turnkeeper import errors
from turnkeeper.log.record import Position
from turnkeeper.stores.opening import open_store
from turnkeeper.stores.postgres import PostgresStore, schema
from turnkeeper.stores.postgres.address import parse

pytestmark = pytest.mark.anyio

EXPECTED = Path(__file__).with_name("postgres_schema.txt")
_DESCRIBE = """
SELECT 'table ' || c.relname || ' ' || coalesce(array_to_string(c.reloptions, ', '), '') FROM pg_class c
    WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r'
UNION ALL SELECT 'column ' || c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
        || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END || CASE a.attidentity WHEN 'a' THEN ' identity' ELSE '' END
        || ' storage ' || a.attstorage::text || coalesce(' collate ' || l.collname, '')
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_collation l ON l.oid = a.attcollation
    WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL SELECT 'index ' || pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    WHERE c.relnamespace = '{schema}'::regnamespace
UNION ALL SELECT 'function ' || p.proname || '(' || pg_get_function_arguments(p.oid) || ') returns '
        || pg_get_function_result(p.oid) || ' ' || p.provolatile::text
    FROM pg_proc p WHERE p.pronamespace = '{schema}'::regnamespace
UNION ALL SELECT 'trigger ' || pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
    WHERE c.relnamespace = '{schema}'::regnamespace AND NOT t.tgisinternal
UNION ALL SELECT 'meta ' || name || ' ' || value FROM {schema}.meta
ORDER BY 1
"""


def described(server: Server, database: str, name: str = "turnkeeper") -> list[str]:
    """Everything that is in a schema, a line each, in an order."""
    rows = server.run(_DESCRIBE.format(schema=name), database=database)
    return [row[0].replace(f"{name}.", "").strip() for row in rows]


# --- making it -------------------------------------------------------------------------------------------------


async def test_opening_makes_the_schema(postgres: Server, database: str) -> None:
    """An empty database becomes a store with all migrations applied; opened again, it is the same store."""
    async with await PostgresStore.open(postgres.url(database)) as store:
        await append(store, "k", b"1")
    assert described(postgres, database) == EXPECTED.read_text().splitlines()
    async with await PostgresStore.open(postgres.url(database), create=False) as store:
        assert await whole(store, "k") == [(1, b"1")]


async def test_migrating_makes_the_same_schema(postgres: Server, database: str) -> None:
    """`migrate` on an empty database leads to what opening leads to, and has nothing to do afterwards."""
    latest = schema.migrations()[-1].version
    assert await PostgresStore.migrate(postgres.url(database)) == (0, latest)
    assert described(postgres, database) == EXPECTED.read_text().splitlines()
    assert await PostgresStore.migrate(postgres.url(database)) == (latest, latest)


def test_migrations_are_numbered_without_a_gap() -> None:
    """Each migration leads to the version that its name says, from 1 on."""
    found = schema.migrations()
    assert [migration.version for migration in found] == list(range(1, len(found) + 1))
    assert all(re.fullmatch(r"\d{3}_[a-z_]+\.sql", migration.name) for migration in found)


async def test_a_schema_of_another_name(postgres: Server, database: str) -> None:
    """`?schema=` puts a store beside another in one database; they do not meet."""
    async with (
        await PostgresStore.open(postgres.url(database)) as one,
        await PostgresStore.open(postgres.url(database, schema="other_1")) as other,
    ):
        await append(one, "k", b"one")
        await append(other, "k", b"other")
        await append(one, "l", b"one")
        assert await whole(one, "k") == [(1, b"one")]
        assert await whole(other, "k") == [(1, b"other")]
        assert await whole(other, "l") == []
    assert described(postgres, database, "other_1") == EXPECTED.read_text().splitlines()


async def test_an_empty_schema_is_used(postgres: Server, database: str) -> None:
    """A role that may not make schemas is given an empty one of its own by an administrator."""
    postgres.run("CREATE SCHEMA turnkeeper", database=database)
    await (await PostgresStore.open(postgres.url(database))).close()
    assert described(postgres, database) == EXPECTED.read_text().splitlines()


async def test_all_open_an_empty_database_at_once(postgres: Server, database: str) -> None:
    """Eight workers start together: one makes the schema, all work in it."""
    stores = await asyncio.gather(*(PostgresStore.open(postgres.url(database, pool_size=1)) for _ in range(8)))
    for number, store in enumerate(stores):
        await append(store, f"k{number}", b"x")
    assert [head.key async for head in stores[0].heads()] == [f"k{number}" for number in range(8)]
    for store in stores:
        await store.close()


async def test_a_store_that_is_not_to_be_made(postgres: Server, database: str) -> None:
    """With `create` off, nothing is made."""
    with pytest.raises(errors.StoreMissing):
        await PostgresStore.open(postgres.url(database), create=False)
    assert postgres.run("SELECT FROM pg_namespace WHERE nspname = 'turnkeeper'", database=database) == []


# --- versions --------------------------------------------------------------------------------------------------


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> list[schema.Migration]:
    """The migrations of a later release, which a test may change; not in force until it calls `append`."""
    real = schema.migrations()
    later = list(real)
    monkeypatch.setattr(schema, "migrations", lambda: later)
    return later


async def test_an_older_schema_is_left_for_migrate(
    postgres: Server, database: str, following: list[schema.Migration]
) -> None:
    """Opening an older schema is refused, and names the remedy; `migrate` keeps every log; an old process goes on."""
    url = postgres.url(database)
    async with await PostgresStore.open(url) as old:
        known = following[-1].version
        position = await append(old, "k", b"1")
        following.append(schema.Migration(known + 1, "a.sql", "ALTER TABLE :schema.head ADD COLUMN later integer;"))
        before = described(postgres, database)
        with pytest.raises(errors.StoreOutdated, match="turnkeeper migrate") as raised:
            await PostgresStore.open(url)
        assert (raised.value.found, raised.value.known, raised.value.applied) == (known, known + 1, False)
        assert described(postgres, database) == before
        assert await PostgresStore.migrate(url) == (known, known + 1)
        assert "column head.later integer storage p" in described(postgres, database)
        await append(old, "k", b"2", expected=position)
        async with await PostgresStore.open(url) as new:
            assert await whole(new, "k") == [(1, b"1"), (2, b"2")]


async def test_migrators_at_once(postgres: Server, database: str, following: list[schema.Migration]) -> None:
    """Of four migrators one works; the others wait for it and find the work done."""
    await PostgresStore.migrate(postgres.url(database))
    known = following[-1].version
    following.append(schema.Migration(known + 1, "a.sql", "CREATE TABLE :schema.later (id integer);"))
    done = await asyncio.gather(*(PostgresStore.migrate(postgres.url(database)) for _ in range(4)))
    assert sorted(done) == [(known, known + 1), *[(known + 1, known + 1)] * 3]


async def test_a_failing_migration_changes_nothing(
    postgres: Server, database: str, following: list[schema.Migration]
) -> None:
    """Of two migrations the second fails: the schema is as it was, and usable by the old release."""
    await PostgresStore.migrate(postgres.url(database))
    before = described(postgres, database)
    known = following[-1].version
    following.append(schema.Migration(known + 1, "a.sql", "CREATE TABLE :schema.later (id integer);"))
    following.append(schema.Migration(known + 2, "b.sql", "CREATE TABLE :schema.even_later (id nonsense);"))
    with pytest.raises(errors.StoreError) as raised:
        await PostgresStore.migrate(postgres.url(database))
    assert raised.value.applied is False
    assert described(postgres, database) == before
    del following[-2:]
    await (await PostgresStore.open(postgres.url(database))).close()


async def test_a_newer_schema_is_left_alone(postgres: Server, database: str) -> None:
    """A store of a later release is refused by opening and by migrating, and stays as it is."""
    known = schema.migrations()[-1].version
    await PostgresStore.migrate(postgres.url(database))
    postgres.run("UPDATE turnkeeper.meta SET value = 99 WHERE name = 'turnkeeper_version'", database=database)
    before = described(postgres, database)
    for refused in (PostgresStore.open, PostgresStore.migrate):
        with pytest.raises(errors.StoreVersion) as raised:
            await refused(postgres.url(database))
        assert (raised.value.found, raised.value.known) == (99, known)
    assert described(postgres, database) == before


@pytest.mark.parametrize(
    "theirs",
    [
        "CREATE TABLE turnkeeper.orders (id integer)",
        "CREATE TABLE turnkeeper.meta (key text, value text)",
        "CREATE TABLE turnkeeper.meta AS SELECT 'turnkeeper_version'::text AS name, 'not a number'::text AS value",
        "CREATE TABLE turnkeeper.meta AS SELECT 'version'::text AS name, 1::bigint AS value",
        "CREATE VIEW turnkeeper.head AS SELECT 1 AS id",
        "CREATE FUNCTION turnkeeper.append_v1() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    ],
)
async def test_a_schema_of_something_else_is_left_alone(postgres: Server, database: str, theirs: str) -> None:
    """A schema called `turnkeeper` that another program filled is refused by opening and by migrating."""
    postgres.run("CREATE SCHEMA turnkeeper", database=database)
    postgres.run(theirs, database=database)
    count = "SELECT (SELECT count(*) FROM pg_class), (SELECT count(*) FROM pg_proc)"
    before = postgres.run(count, database=database)
    for refused in (PostgresStore.open, PostgresStore.migrate):
        with pytest.raises(errors.StoreForeign, match="schema") as raised:
            await refused(postgres.url(database))
        assert raised.value.applied is False
    assert postgres.run(count, database=database) == before


# --- servers ---------------------------------------------------------------------------------------------------


async def test_nobody_listens() -> None:
    """A refused connection is told at once, with the place, and that nothing was applied."""
    port = free_port()
    with pytest.raises(errors.StoreUnavailable, match=str(port)) as raised:
        await PostgresStore.open(f"postgresql://me:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/db")
    assert raised.value.applied is False
    assert PASSWORD not in str(raised.value)


async def test_no_such_host_or_database(postgres: Server) -> None:
    """A name that is not there: of the host, of the database, of the role."""
    with pytest.raises(errors.StoreUnavailable, match=r"nowhere\.invalid"):
        await PostgresStore.open("postgresql://nowhere.invalid/db")
    with pytest.raises(errors.StoreMissing, match="no_such_database"):
        await PostgresStore.open(postgres.url("no_such_database"))
    with pytest.raises(errors.StoreDenied, match="no_such_role"):
        await PostgresStore.open(postgres.url("postgres", user="no_such_role"))


async def test_passwords_are_never_told(
    postgres: Server, database: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wrong password, a missing one, a refused role: StoreDenied, without the password in any text, trace or log."""
    caplog.set_level("DEBUG")
    postgres.run(f"CREATE ROLE locked LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
    postgres.run("CREATE ROLE stranger LOGIN")
    try:
        right, wrong = quote(PASSWORD, safe=""), quote(PASSWORD + "!", safe="")
        for user in (f"locked:{wrong}", "locked", f"stranger:{right}"):
            with pytest.raises(errors.StoreDenied) as raised:
                await PostgresStore.open(postgres.url(database, user=user))
            shown: BaseException | None = raised.value
            while shown is not None:
                assert PASSWORD not in f"{shown} {shown!r}"
                shown = shown.__cause__ or shown.__context__
        async with await PostgresStore.open(postgres.url(database, user=f"locked:{right}")) as store:
            await append(store, "k", b"x")
            assert PASSWORD not in f"{store.address.where} {await store.promises()}"
            postgres.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'locked'")
            assert await whole(store, "k") == [(1, b"x")]
    finally:
        postgres.run("DROP ROLE stranger")
        postgres.run("REASSIGN OWNED BY locked TO postgres", database=database)
        postgres.run("DROP ROLE locked")
    out, err = capfd.readouterr()
    for text in (out, err, caplog.text):
        assert PASSWORD not in text
        assert right not in text


async def test_a_role_without_rights(postgres: Server, database: str) -> None:
    """A role that may not make the schema, and one that may not use it: StoreDenied, nothing changed."""
    postgres.run("CREATE ROLE guest LOGIN")
    try:
        with pytest.raises(errors.StoreDenied):
            await PostgresStore.open(postgres.url(database, user="guest"))
        await PostgresStore.migrate(postgres.url(database))
        with pytest.raises(errors.StoreDenied):
            await PostgresStore.open(postgres.url(database, user="guest"))
        postgres.run("GRANT USAGE ON SCHEMA turnkeeper TO guest", database=database)
        postgres.run("GRANT SELECT ON ALL TABLES IN SCHEMA turnkeeper TO guest", database=database)
        async with await PostgresStore.open(postgres.url(database, user="guest")) as store:
            assert await whole(store, "k") == []
            with pytest.raises(errors.StoreDenied) as raised:
                await append(store, "k", b"x")
            assert raised.value.applied is False
    finally:
        postgres.run("DROP OWNED BY guest", database=database)
        postgres.run("DROP ROLE guest")


async def test_a_server_that_is_too_old(postgres: Server, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is not tested is refused before anything is made."""
    monkeypatch.setattr(schema, "OLDEST_SERVER", 990000)
    with pytest.raises(errors.StoreUnsuitable, match="99 is the oldest"):
        await PostgresStore.open(postgres.url(database))
    assert postgres.run("SELECT FROM pg_namespace WHERE nspname = 'turnkeeper'", database=database) == []


async def test_a_database_without_unicode(postgres: Server) -> None:
    """A database of one byte for each character cannot keep every key."""
    postgres.run("CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'")
    try:
        with pytest.raises(errors.StoreUnsuitable, match="UTF8"):
            await PostgresStore.open(postgres.url("latin"))
    finally:
        postgres.drop("latin")


# --- URLs ------------------------------------------------------------------------------------------------------


async def test_the_keeper_opens_it(postgres: Server, database: str) -> None:
    """Both spellings of the scheme, options of ours and of libpq's."""
    for scheme in ("postgresql", "postgres"):
        url = postgres.url(database, pool_size=2, busy_timeout=1.5, application_name="mine", sslmode="disable")
        store: Any = await open_store(url.replace("postgresql", scheme, 1))
        try:
            await append(store, f"{scheme}", b"x")
            assert (store.address.pool_size, store.address.busy_timeout) == (2, 1.5)
            assert postgres.run("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'mine'") == [(1,)]
        finally:
            await store.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://h/db?pool_size=0", "pool_size=0"),
        ("postgresql://h/db?pool_size=many", "a number"),
        ("postgresql://h/db?busy_timeout=0", "busy_timeout=0"),
        ("postgresql://h/db?pooler=yes", "0 or 1"),
        ("postgresql://h/db?schema=pg_mine", "schema=pg_mine"),
        ("postgresql://h/db?schema=a%22b", "schema="),
        ("postgresql://h/db?schmea=x", "the option schmea is not known"),
        ("postgresql://h/db?schema", "postgresql://USER"),
        ("postgresql://me:ge[heim@h/db", "percent-encoded"),
        ("postgresql://me:ge#heim@h/db", "percent-encoded"),
        ("postgresql://me:ge/heim@h/db", "percent-encoded"),
        ("postgresql://me:ge%zzheim@h/db", "percent-encoded"),
    ],
)
async def test_urls_that_cannot_be_read(url: str, said: str) -> None:
    """A mistake in a URL is told before anything is connected, and never with the password in it."""
    with pytest.raises(errors.UnknownStoreUrl, match=re.escape(said)) as raised:
        await open_store(url)
    assert "heim" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_what_is_shown_of_a_url() -> None:
    """Hosts, port, database and schema; neither user nor password."""
    address = parse("postgresql://me:secret@one.example,two.example:5433/db?schema=s&target_session_attrs=read-write")
    assert address.where == "postgresql one.example,two.example:5432,5433/db schema s".replace("5432", "")
    assert "target_session_attrs=read-write" in address.conninfo
    assert "tcp_user_timeout=30000" in address.conninfo
    assert "connect_timeout=1" in parse("postgresql://h/db?connect_timeout=1").conninfo


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where psycopg is not installed, the error names the extra."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("turnkeeper.stores.postgres"):
            raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(errors.UnknownStoreUrl, match=r"turnkeeper\[postgres\]"):
        await open_store("postgresql://h/db")


async def test_a_closed_store(postgres: Server, database: str) -> None:
    """Every call on a closed store says so; closing it again does nothing."""
    store = await PostgresStore.open(postgres.url(database))
    await store.close()
    await store.close()
    for call in (append(store, "k", b"x"), store.read("k"), store.erase("k"), store.promises(), store.tidy()):
        with pytest.raises(errors.StoreClosed):
            await call
    assert postgres.run("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database]) == [(0,)]


async def test_keys_that_postgresql_cannot_keep(postgres: Server, database: str) -> None:
    """Case 09: NUL, half a surrogate pair and an endless key are refused with a typed error, and their neighbours get in."""
    async with await PostgresStore.open(postgres.url(database, pool_size=1)) as store:
        odd = ["nul\x00", "half \ud800", os.urandom(4000).hex()]
        calls = [append(store, key, b"x") for key in (*odd, "good 1", "good 2")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [errors.InvalidInput] * 3 + [Position] * 2
        assert [head.key async for head in store.heads()] == ["good 1", "good 2"]
