"""Field case 07: a store used from another event loop, another thread, or a forked child works, or says at once why not."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from tests.cases.affinity import TURNS, WORKERS
from tests.conformance.support import listed
from tests.servers.postgres import Server
from tests.servers.redis import RedisCluster, RedisServer
from turnkeeper.stores.opening import open_store
from turnkeeper.turn_checkpoint import TurnPhase

pytestmark = pytest.mark.anyio

LONGEST = 60.0
"""Seconds until a program counts as hanging: the case's 20, and a slow machine."""
PROGRAMS = {
    "loops": TURNS,
    "threads": 3 * TURNS,
    "fork": 2 * TURNS + 1,
    "fork_in_loop": 2 * TURNS + 1,
    "prefork": WORKERS * TURNS,
}
"""The programs of `affinity`, and how many turns each has in the end."""


STORES = ("sqlite", "postgres", "redis", "redis client", "redis cluster")
LATER = {
    *(("redis client", program) for program in PROGRAMS if program != "loops"),
    *(("redis cluster", program) for program in PROGRAMS if program != "fork_in_loop"),
}
"""Left to `make soak`: these differ from "redis" in who makes the connections only."""


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind, empty."""
    fixture: Callable[[str], object] = request.getfixturevalue
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'turns.db'}"
    if request.param == "postgres":
        postgres = fixture("postgres")
        assert isinstance(postgres, Server)
        return postgres.url(str(fixture("postgres_database")))
    servers = fixture("redis_cluster" if request.param == "redis cluster" else "redis_server")
    assert isinstance(servers, RedisServer | RedisCluster)
    servers.flush()
    if request.param == "redis client":
        assert isinstance(servers, RedisServer)
        return f"client:{servers.port}"
    return servers.url()


def run(program: str, url: str, ledger: Path) -> None:
    """Run a program to its end. It has nothing to say: no warning of a connection or thread that was left over."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",
            "ignore::DeprecationWarning",
            "-m",
            "tests.cases.affinity",
            program,
            url,
            ledger,
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("url", "program"),
    [pytest.param(*pair, marks=[pytest.mark.soak] * (pair in LATER)) for pair in product(STORES, PROGRAMS)],
    indirect=["url"],
)
async def test_a_store_used_elsewhere(program: str, url: str, tmp_path: Path) -> None:
    """Every turn is COMPLETED, every reply went out once, and what is stored is sound."""
    ledger = tmp_path / "replies"
    run(program, url, ledger)
    sent = Counter(ledger.read_text().splitlines())
    assert len(sent) == PROGRAMS[program]
    assert set(sent.values()) == {1}
    here = url.replace("client:", "redis://127.0.0.1:")
    store = await open_store(here)
    try:
        heads = await listed(store)
        assert {head.labels["turn"] for head in heads} == set(sent)
        assert {head.phase for head in heads} == {TurnPhase.COMPLETED.value}
        assert {head.tail for head in heads} == {5}
    finally:
        await store.close()
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(tmp_path / "turns.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_store_in_memory_and_a_forked_child(tmp_path: Path) -> None:
    """What cannot be shared says so at the first call, with the cure."""
    run("memory", "sqlite:///:memory:", tmp_path / "replies")
