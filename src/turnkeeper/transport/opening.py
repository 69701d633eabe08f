"""Opening a queue by its store's URL, or in a store that is open already."""

from __future__ import annotations

from typing import Any

from turnkeeper.errors import UnknownStoreUrl
from turnkeeper.log.store import Store, as_kept
from turnkeeper.stores.opening import open_store
from turnkeeper.transport.base import BaseTransport
from turnkeeper.transport.protocol import MAX_ATTEMPTS, OnLost


async def open_transport(
    url: str, queue: str = "default", *, max_attempts: int = MAX_ATTEMPTS, on_lost: OnLost | None = None
) -> BaseTransport:
    """Open a queue beside the logs of a store; URLs and their options are those of `turnkeeper.stores.opening.open_store`.

    Args:
        queue: its name: 1 to 64 letters, digits, - and _.
        max_attempts: deliveries of an entry before it is a dead letter; the same in all processes.
        on_lost: told of what was lost (TR-10); it is logged in any case.

    Raises:
        UnknownStoreUrl: the scheme or an option is not known.
        InvalidInput: the name or the limit cannot be.
        StoreError: the store cannot be used; says why.
    """
    store = await open_store(url)
    try:
        return await transport_in(store, queue, max_attempts=max_attempts, on_lost=on_lost, closes=True)
    except BaseException:
        await store.close()
        raise


async def transport_in(
    store: Store,
    queue: str = "default",
    *,
    max_attempts: int = MAX_ATTEMPTS,
    on_lost: OnLost | None = None,
    closes: bool = False,
) -> BaseTransport:
    """A queue in a store that is open already, through its connections. See `open_transport`.

    Args:
        closes: whether closing the transport closes the store.

    Raises:
        UnknownStoreUrl: it is a store that no transport knows.
    """
    store = as_kept(store)
    # By name, so that nothing of a server's is imported for a store of another kind.
    kind = type(store).__name__
    if kind == "RedisStore":
        return await _in_redis(store, queue, max_attempts=max_attempts, on_lost=on_lost, closes=closes)
    if kind == "PostgresStore":
        return await _in_postgres(store, queue, max_attempts=max_attempts, on_lost=on_lost, closes=closes)
    if kind == "SqliteStore":
        return await _in_sqlite(store, queue, max_attempts=max_attempts, on_lost=on_lost, closes=closes)
    raise UnknownStoreUrl(f"there is no transport in a {kind}")


async def _in_sqlite(store: Store, queue: str, **options: Any) -> BaseTransport:
    from turnkeeper.stores.sqlite import SqliteStore
    from turnkeeper.transport.sqlite import SqliteTransport

    assert isinstance(store, SqliteStore)
    return await SqliteTransport.open(store, queue, **options)


async def _in_redis(store: Store, queue: str, **options: Any) -> BaseTransport:
    from turnkeeper.stores.redis import RedisStore
    from turnkeeper.transport.redis_streams import RedisTransport

    assert isinstance(store, RedisStore)
    return await RedisTransport.open(store, queue, **options)


async def _in_postgres(store: Store, queue: str, **options: Any) -> BaseTransport:
    from turnkeeper.stores.postgres import PostgresStore
    from turnkeeper.transport.postgres import PostgresTransport

    assert isinstance(store, PostgresStore)
    return PostgresTransport(store, queue, **options)
