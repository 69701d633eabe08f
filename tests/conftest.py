"""What every test may use: shared material, and stores by name."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from turnkeeper.log.keyring import Keyring
from turnkeeper.log.sealing import EncryptedStore
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


def pytest_configure() -> None:
    """A run that was started in the background ignores Ctrl-C, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


STORES = ("sqlite file", "sqlite memory", "postgres", "redis", "redis resp3", "redis cluster")
ENCRYPTED = " encrypted"
"""Behind a store's name: its records are. `also_encrypted` runs a module's tests on such ones too."""


def also_encrypted(*names: str) -> pytest.MarkDecorator:
    """Run the tests on every store, and with encrypted records on these; on the others in `make soak`."""
    later = [pytest.param(name + ENCRYPTED, marks=pytest.mark.soak) for name in STORES if name not in names]
    return pytest.mark.parametrize("store", [*STORES, *(name + ENCRYPTED for name in names), *later], indirect=True)


BOTH_PROTOCOLS = {"conformance", "crash", "stores", "transport"}
"""Folders whose tests run with both protocols of Redis every time. Elsewhere what is tested lies above the client."""


FEWER_STORES = {"engine", "conversation"}
"""Folders of what lies above the stores: every time on a file and on one server of each kind, on the others in `make soak`."""
OTHERS = {"sqlite memory", "redis cluster"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave stores to `make soak` where which one it is makes no difference."""
    for item in items:
        given: Any = getattr(item, "callspec", None)
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if given is None:
            continue
        names = {one for one in given.params.values() if isinstance(one, str)}
        later = "redis resp3" in names and folder not in BOTH_PROTOCOLS
        if later or (folder in FEWER_STORES and names & OTHERS):
            item.add_marker(pytest.mark.soak)


@asynccontextmanager
async def opened(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Store]:
    """An empty store of that name, on a real server where it needs one."""
    if name.endswith(ENCRYPTED):
        async with opened(name.removesuffix(ENCRYPTED), request, tmp_path) as store:
            yield EncryptedStore(store, Keyring({"new": bytes(32), "old": b"o" * 32}))
        return
    if name == "postgres":
        server: Server = request.getfixturevalue("postgres")
        url = server.url(request.getfixturevalue("postgres_database"))
        store = await PostgresStore.open(url)
    elif name == "redis cluster":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        cluster.flush()
        store = await RedisStore.open(cluster.url())
    elif name.startswith("redis"):
        redis: RedisServer = request.getfixturevalue("redis_server")
        redis.flush()
        store = await RedisStore.open(redis.url("protocol=3" if name == "redis resp3" else "protocol=2"))
    else:
        path = tmp_path / "turns.db" if name == "sqlite file" else ":memory:"
        store = await SqliteStore.open(path)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Every store that a behaviour has to be the same on."""
    async with opened(request.param, request, tmp_path) as store:
        yield store
