"""Opening a store by its URL: the only place that knows every store, each imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from turnkeeper.errors import UnknownStoreUrl
from turnkeeper.log.store import Store

if TYPE_CHECKING:
    from turnkeeper.log.keyring import Keyring


async def open_store(url: str, *, create: bool = True, keyring: Keyring | None = None) -> Store:
    """Open the store of a URL: `sqlite:///relative.db`, `sqlite:////absolute.db`, `sqlite:///:memory:`, or a file's path;
    `postgresql://USER@HOST/DATABASE`; `redis://HOST/DB`, `redis+cluster://HOST:PORT,HOST:PORT`,
    `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`, with TLS `rediss…`.

    With `create` False, a store that is not there is an error. With a keyring, records are encrypted (docs/security.md).

    Options of SQLite: `?busy_timeout=SECONDS`, `?journal=delete`, `?max_bytes=N`; of PostgreSQL: `?schema=NAME`,
    `?pool_size=N`, `?busy_timeout=SECONDS`, `?pooler=1`, and libpq's; of Redis: `?wait=REPLICAS`, `?timeout=SECONDS`,
    `?patience=SECONDS`, `?connections=N`, `?name=PREFIX`, `?protocol=2`, and `ssl_…` for TLS.

    Raises:
        UnknownStoreUrl: the scheme or an option is not known.
        StoreError: the store cannot be used; says why.
        KeyUnavailable: the keyring's current key cannot be had.
    """
    if keyring is None:
        return await _open(url, create=create)
    from turnkeeper.log.sealing import EncryptedStore

    await keyring.ready()
    return EncryptedStore(await _open(url, create=create), keyring)


async def _open(url: str, *, create: bool) -> Store:
    if url.startswith(("postgresql:", "postgres:")):
        return await _open_postgres(url, create=create)
    if url.startswith(("redis:", "rediss:", "redis+", "rediss+")):
        return await _open_redis(url)
    parts = urlsplit(url)
    if parts.scheme not in ("", "sqlite"):
        known = (
            "sqlite:///PATH, postgresql://HOST/DB, redis://HOST/DB, redis+cluster://HOST, redis+sentinel://HOST/SERVICE"
        )
        raise UnknownStoreUrl(f"{parts.scheme}: is not a store that is known here; known: {known}")
    from turnkeeper.stores.sqlite import SqliteStore

    if not parts.scheme:
        return await SqliteStore.open(url, create=create)
    path = unquote(parts.path).removeprefix("/")
    if parts.netloc or not path:
        raise UnknownStoreUrl(f"{url!r} names no file: write sqlite:///relative.db or sqlite:////absolute.db")
    options: dict[str, Any] = {}
    kinds = {"busy_timeout": float, "journal": str, "max_bytes": int}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        try:
            options[name] = kinds[name](value)
        except (KeyError, ValueError) as e:
            raise UnknownStoreUrl(f"the option {name}={value} is not known; known: {', '.join(kinds)}") from e
    if options.get("journal", "wal") not in ("wal", "delete"):
        raise UnknownStoreUrl(f"journal={options['journal']}: wal or delete")
    return await SqliteStore.open(path, create=create, **options)


async def _open_postgres(url: str, *, create: bool) -> Store:
    try:
        from turnkeeper.stores.postgres import PostgresStore
    except ImportError as e:  # of psycopg, or by psycopg of the system's libpq
        raise UnknownStoreUrl(f"postgresql: needs psycopg ({e}); pip install 'turnkeeper[postgres]'") from e
    return await PostgresStore.open(url, create=create)


async def migrate_store(url: str) -> tuple[int, int]:
    """Bring a store's schema to this version's: the versions before and after. Only PostgreSQL's needs it.

    Raises:
        UnknownStoreUrl: the store has no schema to migrate, or is not known.
        StoreError: nothing was changed.
    """
    if not url.startswith(("postgresql:", "postgres:")):
        raise UnknownStoreUrl("only PostgreSQL stores are migrated; others are made and read as they are")
    try:
        from turnkeeper.stores.postgres import PostgresStore
    except ImportError as e:
        raise UnknownStoreUrl(f"postgresql: needs psycopg ({e}); pip install 'turnkeeper[postgres]'") from e
    migrated = await PostgresStore.migrate(url)
    return migrated.before, migrated.after


async def _open_redis(url: str) -> Store:
    try:
        from turnkeeper.stores.redis import RedisStore
    except ImportError as e:
        raise UnknownStoreUrl(f"redis: needs redis-py ({e}); pip install 'turnkeeper[redis]'") from e
    return await RedisStore.open(url)
