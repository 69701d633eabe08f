"""The stores of the crash tests, as lanes of real servers that are started when a test asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.nursery import Nursery
from tests.crash.places import LANES, Lanes, Stage
from tests.crash.sealed import SEALED, sealed
from tests.servers.postgres import Server
from tests.servers.redis import RedisCluster, RedisServer


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for the files. In memory where the system has such a one: a killed process's writes are kept there as well."""
    shared_memory = Path("/dev/shm")
    if not os.access(shared_memory, os.W_OK):
        yield tmp_path
    else:
        with TemporaryDirectory(dir=shared_memory, prefix="turnkeeper-") as made:
            yield Path(made)


@pytest.fixture(scope="session")
def lanes() -> Iterator[Lanes]:
    """The helper processes, and threads to wait for them."""
    with ExitStack() as stack:
        made = Lanes([stack.enter_context(closing(Nursery())) for _ in range(LANES)])
        stack.enter_context(made.threads)
        yield made


@pytest.fixture(scope="session")
def lane_databases(postgres: Server) -> Iterator[list[str]]:
    """A database for each lane, with the clock and the tables of the turns in it."""
    databases = [postgres.database() for _ in range(LANES)]
    yield databases
    for database in databases:
        postgres.drop(database)


@pytest.fixture
def stage(request: pytest.FixtureRequest, lanes: Lanes, folder: Path) -> Stage:
    """The store that the test is parametrised with."""
    name: str = request.param
    return Stage(name, lanes, folder, _urls(name, request))


def _urls(name: str, request: pytest.FixtureRequest) -> Callable[[int, Path], str]:
    if name.endswith(SEALED):
        plain = _urls(name.removesuffix(SEALED), request)
        return lambda lane, folder: sealed(plain(lane, folder))
    if name == "postgres":
        server: Server = request.getfixturevalue("postgres")
        databases: list[str] = request.getfixturevalue("lane_databases")
        return lambda lane, _folder: server.url(databases[lane])
    if name == "redis cluster":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        return lambda _lane, _folder: cluster.url()
    if name.startswith("redis"):
        redis: RedisServer = request.getfixturevalue("redis_server")
        return lambda _lane, _folder: redis.url("protocol=3" if name == "redis resp3" else "protocol=2")
    return lambda _lane, folder: f"sqlite:///{folder}/turns.db"
