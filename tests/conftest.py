"""What every test may use: shared material, and stores by name."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from turnkeeper.log.store import Store
from turnkeeper.stores.postgres import PostgresStore
from turnkeeper.stores.redis import RedisStore
from turnkeeper.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from tests.servers.postgres import Server
    from tests.servers.redis import RedisCluster, RedisServer

pytest_plugins = ["tests.servers.postgres", "tests.servers.redis"]

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared_json(name: str) -> Any:
    """A JSON file of the shared material; skips the test where the folder is missing."""
    path = SHARED / name
    if not path.exists():
        missing = f"the shared material is not beside the project ({name})"
        if "CI" in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)
    return json.loads(path.read_text())


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, which the stores' clients need."""
    return "asyncio"


@pytest.fixture(params=["sqlite file", "sqlite memory", "postgres", "redis", "redis resp3", "redis cluster"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Every store that a behaviour has to be the same on."""
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres")
        url = server.url(request.getfixturevalue("postgres_database"))
        opened: Store = await PostgresStore.open(url)
    elif request.param == "redis cluster":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        cluster.flush()
        opened = await RedisStore.open(cluster.url())
    elif request.param.startswith("redis"):
        redis: RedisServer = request.getfixturevalue("redis_server")
        redis.flush()
        opened = await RedisStore.open(redis.url("protocol=3" if request.param == "redis resp3" else "protocol=2"))
    else:
        path = tmp_path / "turns.db" if request.param == "sqlite file" else ":memory:"
        opened = await SqliteStore.open(path)
    try:
        yield opened
    finally:
        await opened.close()
