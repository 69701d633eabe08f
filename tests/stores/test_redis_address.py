"""Where a Redis store is: from a URL, or from a client that the host has already; and which errors say what is wrong with it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.cluster import LoadBalancingStrategy

from tests.conformance.support import append, listed, whole
from tests.servers.redis import RedisCluster as Cluster
from tests.servers.redis import RedisServer
from turnkeeper.errors import InvalidInput, UnknownStoreUrl
from turnkeeper.log.store import as_store
from turnkeeper.stores.opening import open_store
from turnkeeper.stores.redis import RedisLifecycle, RedisStore
from turnkeeper.stores.redis.settings import Address, of_client, parse
from turnkeeper.turn.identity import trace_hash
from turnkeeper.turn.lifecycle import STAGES, project
from turnkeeper.turn_checkpoint import TurnCheckpointSession, TurnPhase

pytestmark = pytest.mark.anyio


@pytest.fixture
def empty(redis_server: RedisServer) -> RedisServer:
    """The tests' server, empty."""
    redis_server.flush()
    return redis_server


# --- URLs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "where", "kind", "addresses", "connection"),
    [
        ("redis://h", "redis://h:6379", "single", [("h", 6379)], {}),
        ("redis://", "redis://localhost:6379", "single", [("localhost", 6379)], {}),
        ("redis://h:7/3", "redis://h:7/3", "single", [("h", 7)], {"db": 3}),
        ("redis://[::1]:7", "redis://[::1]:7", "single", [("::1", 7)], {}),
        (
            "redis://u:p%40%2F@h/0",
            "redis://h:6379",
            "single",
            [("h", 6379)],
            {"username": "u", "password": "p@/", "db": 0},
        ),
        ("redis://:p@h", "redis://h:6379", "single", [("h", 6379)], {"password": "p"}),
        ("redis://:a@b:c@h", "redis://h:6379", "single", [("h", 6379)], {"password": "a@b:c"}),
        ("redis+cluster://a:1,b", "redis+cluster://a:1,b:6379", "cluster", [("a", 1), ("b", 6379)], {}),
        (
            "redis+cluster://:p@[::1]:1,b:2",
            "redis+cluster://[::1]:1,b:2",
            "cluster",
            [("::1", 1), ("b", 2)],
            {"password": "p"},
        ),
        (
            "redis+sentinel://a,b:2/m/4",
            "redis+sentinel://a:26379,b:2/m/4",
            "sentinel",
            [("a", 26379), ("b", 2)],
            {"db": 4},
        ),
        ("rediss+sentinel://a/m", "rediss+sentinel://a:26379/m", "sentinel", [("a", 26379)], {}),
        ("rediss://h?ssl_ca_certs=/c", "rediss://h:6379", "single", [("h", 6379)], {"ssl_ca_certs": "/c"}),
    ],
)
def test_urls(url: str, where: str, kind: str, addresses: list[tuple[str, int]], connection: dict[str, Any]) -> None:
    """Every form; `where` is for people and holds no secret."""
    found = parse(url)
    assert (found.where, found.kind, [*found.addresses], {**found.connection}) == (where, kind, addresses, connection)
    assert found.connection_class.__name__ == ("SSLConnection" if url.startswith("rediss") else "Connection")


def test_options() -> None:
    """Options of the store and of its connections."""
    found = parse(
        "rediss+sentinel://a/m?timeout=2.5&patience=0&wait=2&connections=7&name=app&protocol=2&sentinel_password=x"
    )
    assert (found.timeout, found.patience, found.wait, found.connections, found.name) == (2.5, 0.0, 2, 7, "app")
    assert {**found.connection} == {"protocol": 2}
    assert {**found.sentinel} == {"password": "x", "protocol": 2}
    assert parse("rediss://h?ssl_check_hostname=False").connection == {"ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h:x", "port"),
        ("redis://h:0", "port"),
        ("redis://h:99999", "port"),
        ("redis://a,b", "redis\\+cluster"),
        ("redis://h/three", "db"),
        ("redis://h/3/4", "part too many"),
        ("redis://h?db=x", "db"),
        ("redis://h?colour=red", "colour is not known; known: timeout"),
        ("redis://h?wait=many", "wait"),
        ("redis://h?wait=-1", "wait"),
        ("redis://h?timeout=0", "timeout"),
        ("redis://h?connections=0", "connections"),
        ("redis://h?name={x}", "name"),
        ("redis://h?ssl_ca_certs=/c", "rediss://"),
        ("redis+cluster://h/3", "database"),
        ("redis+sentinel://h", "service"),
        ("redis+unix://h", "known: redis, rediss"),
        ("redis://h?sentinel_password=hidden", "sentinel_password is not known"),
    ],
)
async def test_urls_that_are_wrong(url: str, says: str) -> None:
    """Refused before anything is connected; the error says which part, and repeats no password."""
    hidden = url.replace("://", "://user:hidden@")
    for given in (url, hidden):
        with pytest.raises((UnknownStoreUrl, InvalidInput), match=says) as raised:
            await open_store(given)
        assert "hidden" not in str(raised.value)


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without redis-py says what to install."""
    for name in [name for name in sys.modules if name.startswith("turnkeeper.stores.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UnknownStoreUrl, match=r"pip install 'turnkeeper\[redis\]'"):
        await open_store("redis://localhost")


# --- clients that are there already ----------------------------------------------------------------------------


@pytest.fixture
async def clients(empty: RedisServer, redis_cluster: Cluster) -> AsyncIterator[list[Any]]:
    """Clients as hosts make them."""
    redis_cluster.flush()
    pool = ConnectionPool(port=empty.port, db=3, protocol=2)
    balanced = LoadBalancingStrategy.ROUND_ROBIN
    made: list[Any] = [
        Redis(port=empty.port),
        Redis(port=empty.port, protocol=2, decode_responses=True, health_check_interval=1),
        Redis(port=empty.port, db=2, single_connection_client=True),
        Redis(connection_pool=pool),
        RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", redis_cluster.nodes[1].port)], decode_responses=True),
        RedisCluster(
            host="127.0.0.1",
            port=redis_cluster.nodes[0].port,
            load_balancing_strategy=balanced,
        ),
    ]
    yield made
    for client in made:
        await client.aclose()
    await pool.aclose()


async def test_a_store_on_the_servers_of_a_client(clients: list[Any]) -> None:
    """Whatever the client was made for: replies that are decoded, retries, another database, a cluster."""
    for client in clients:
        await client.ping()
        async with RedisStore.from_client(client, patience=1.0) as store:
            await append(store, "k", b"\xff\x00")
            assert await whole(store, "k") == [(1, b"\xff\x00")]
            assert [head.key for head in await listed(store)] == ["k"]
            assert await client.hget("tk:k", "tail") in (b"1", "1")
            assert await store.erase("k")
        await client.ping()


async def test_a_session_on_a_client(clients: list[Any]) -> None:
    """T1, T2: the seed's own call, with a client in the place of a store; another process finds the turn under its key."""
    for client in clients:
        session = TurnCheckpointSession(client, "t-1", ttl_seconds=60)
        await session.start([{"role": "user", "content": "hello"}], [], {})
        await session.save_final_model("hi")
        await session.reserve_final_delivery("r", "hi", {})
        await session.mark_delivered("r", "m")
        assert (await session.mark_completed()).completed
        assert 50_000 < await client.pttl(f"tk:{session.key}") <= 60_000
        other = TurnCheckpointSession(client, "t-1")
        assert other.redis is session.redis
        snapshot = await other.load()
        assert snapshot is not None
        assert snapshot.phase is TurnPhase.COMPLETED
        assert isinstance(session.redis, RedisStore)
        await session.redis.erase(session.key)


async def test_a_client_of_sentinels() -> None:
    """Its sentinels, service and settings are found; nothing has to be connected for that."""
    sentinel: Any = Sentinel([("a", 1), ("b", 2)], sentinel_kwargs={"password": "x"}, socket_timeout=3)
    found = of_client(sentinel.master_for("main", db=4, password="y", decode_responses=True))
    assert (found.kind, found.service, found.addresses) == ("sentinel", "main", (Address("a", 1), Address("b", 2)))
    assert found.where == "redis+sentinel://a:1,b:2/main"
    assert found.sentinel["password"] == "x"
    assert (found.connection["password"], found.connection["db"], found.connection["socket_timeout"]) == ("y", 4, 3)
    assert "decode_responses" not in found.connection


@pytest.mark.parametrize("given", [None, "redis://localhost", object(), 7])
def test_what_is_neither_store_nor_client(given: Any) -> None:
    """Refused at once, and not at the first call."""
    with pytest.raises(InvalidInput, match="must be a store, or a client of redis"):
        TurnCheckpointSession(given, "t-1")


def test_a_client_that_blocks() -> None:
    """redis-py's client without asyncio cannot be used; the error says which one can."""
    client = redis.Redis()
    with pytest.raises(InvalidInput, match=r"redis\.asyncio"):
        as_store(client)  # pyright: ignore[reportArgumentType]  # that is what is tested
    client.close()


async def test_a_client_has_one_store(empty: RedisServer) -> None:
    """Every session of a client shares its store; behind the client's life the store's connections are closed."""
    client = Redis(port=empty.port)
    store = RedisStore.from_client(client)
    assert as_store(client) is store
    assert as_store(store) is store
    assert RedisStore.from_client(client, wait=0) is not store
    await append(store, "k", b"1")
    assert empty.info("clients")["connected_clients"] == 2
    del client, store
    gc.collect()
    for _ in range(200):
        if empty.info("clients")["connected_clients"] == 1:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("the store's connection is still there")


# --- the lifecycle ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["one server", "cluster"])
async def lifecycle(request: pytest.FixtureRequest) -> AsyncIterator[RedisLifecycle]:
    """A lifecycle on a server, and on a cluster."""
    servers: RedisServer | Cluster = request.getfixturevalue(
        "redis_server" if request.param == "one server" else "redis_cluster"
    )
    servers.flush()
    async with await RedisStore.open(servers.url()) as store:
        yield RedisLifecycle(store, trace_hash)


async def test_stages_behind_their_predecessors(lifecycle: RedisLifecycle) -> None:
    """T4: predecessor-checked, the same stage again is harmless, never back and never past one."""
    assert await lifecycle.stage("t") is None
    assert not await lifecycle.advance("t", "PROCESSING", "ANSWERED")
    assert await lifecycle.stage("t") is None
    for predecessor, stage in zip([None, *STAGES], STAGES, strict=False):
        assert await lifecycle.advance("t", predecessor, stage)
        assert await lifecycle.advance("t", predecessor, stage)
        assert await lifecycle.stage("t") == stage
    assert not await lifecycle.advance("t", None, "PROCESSING")
    assert not await lifecycle.advance("t", "PROCESSING", "ANSWERED")
    assert await lifecycle.stage("t") == "DELIVERED"
    assert await lifecycle.stage("other") is None


async def test_projecting(lifecycle: RedisLifecycle) -> None:
    """T4: a projection that is several stages behind walks through them; what the consumer has taken over is left alone."""
    await project(lifecycle, "t", TurnPhase.DELIVERY_RESERVED)
    assert await lifecycle.stage("t") == "DELIVERING"
    await project(lifecycle, "t", TurnPhase.STARTED)
    assert await lifecycle.stage("t") == "DELIVERING"
    assert await lifecycle.advance("t", "DELIVERING", "QUARANTINED")
    await project(lifecycle, "t", TurnPhase.COMPLETED)
    assert await lifecycle.stage("t") == "QUARANTINED"


async def test_many_project_at_once(lifecycle: RedisLifecycle) -> None:
    """T4: workers that project the same turn at once end at the furthest stage, and none goes back."""
    phases = [TurnPhase.STARTED, TurnPhase.FINAL_MODEL_SAVED, TurnPhase.COMPLETED] * 5
    await asyncio.gather(*(project(lifecycle, "t", phase) for phase in phases))
    assert await lifecycle.stage("t") == "DELIVERED"


async def test_a_stage_is_kept_for_its_time(empty: RedisServer) -> None:
    """T4: recorded with the server's time, and for as long as was asked for; repeating it does not prolong it."""
    async with await RedisStore.open(empty.url()) as store:
        lifecycle = RedisLifecycle(store, trace_hash, ttl_seconds=60)
        await lifecycle.advance("t", None, "PROCESSING")
        key = lifecycle.key("t")
        assert 50_000 < empty.run("PTTL", key) <= 60_000
        seconds, _ = empty.run("TIME")
        assert abs(int(empty.run("HGET", key, "at")) - int(seconds) * 1000) < 60_000
        empty.run("PEXPIRE", key, 30_000)
        await lifecycle.advance("t", None, "PROCESSING")
        assert empty.run("PTTL", key) <= 30_000


async def test_a_session_projects_its_phases(lifecycle: RedisLifecycle, empty: RedisServer) -> None:
    """T4: a session with a lifecycle keeps it behind what is durable; COMPLETED is projected as DELIVERED."""
    async with await RedisStore.open(empty.url()) as store:
        session = TurnCheckpointSession(store, "t", lifecycle=lifecycle)
        await session.start([{"role": "user", "content": "hello"}])
        assert await lifecycle.stage("t") == "PROCESSING"
        await session.save_final_model("hi")
        assert await lifecycle.stage("t") == "ANSWERED"
        await session.reserve_final_delivery("r", "hi")
        await session.mark_delivered("r", "m")
        await session.mark_completed()
        assert await lifecycle.stage("t") == "DELIVERED"
