"""Waiting at an empty queue in PostgreSQL."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.servers.postgres import Server
from turnkeeper.stores.postgres.store import PostgresStore
from turnkeeper.transport.opening import open_transport

pytestmark = pytest.mark.anyio


async def test_an_empty_queue_is_not_asked_all_the_time(
    postgres: Server, postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TR-11: who waits is woken, and asks the server at its beginning and its end."""
    asked: Counter[bytes] = Counter()
    ask = PostgresStore.ask

    async def counted(self: PostgresStore, statement: bytes, *arguments: Any, **options: Any) -> Any:
        asked[statement] += 1
        return await ask(self, statement, *arguments, **options)

    monkeypatch.setattr(PostgresStore, "ask", counted)
    queue = await open_transport(postgres.url(postgres_database))
    assert await queue.consume("a", wait_seconds=1.0) == []
    await queue.close()
    assert 0 < asked.total() < 20, asked
