"""Redis servers in trouble or set up otherwise: memory, replicas, restarts, rights, versions; and what `doctor` says of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from tests.conformance.support import HEAD, append, bodies, whole
from tests.conformance.tally import adding, tally_log
from tests.servers.redis import RedisCluster, RedisServer, server, wait_until
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended
from turnkeeper.log.store import Promise
from turnkeeper.stores.opening import open_store
from turnkeeper.stores.redis import RedisStore

pytestmark = pytest.mark.anyio

PASSWORD = "p@ss w/rd:%41"


@pytest.fixture
def mine() -> Iterator[RedisServer]:
    """A server of the test's own, which it may set up as it likes."""
    with server() as started:
        yield started


async def refused(call: Callable[[], Awaitable[Any]], error: type[errors.StoreError]) -> errors.StoreError:
    """The typed error of a call that changed nothing."""
    with pytest.raises(error) as raised:
        await call()
    assert raised.value.applied is False
    return raised.value


# --- durability ------------------------------------------------------------------------------------------------


async def test_a_killed_server_has_kept_everything() -> None:
    """LOG-1: with appendfsync always, what was confirmed is there behind a SIGKILL of the server, and nothing half is."""
    with server(appendonly="yes", appendfsync="always") as mine:
        confirmed: list[int] = []
        async with await RedisStore.open(mine.url("patience=0.1")) as store:
            stop = asyncio.Event()

            async def write(number: int) -> None:
                position = NOWHERE
                with contextlib.suppress(errors.StoreUnavailable):
                    while not stop.is_set():
                        batch = [b"%d" % (position.seq + 1), b"%d" % (position.seq + 2)]
                        position = await append(store, f"k{number}", *batch, expected=position)
                confirmed.append(position.seq)

            writers = [asyncio.ensure_future(write(number)) for number in range(8)]
            while sum([(await store.read(f"k{number}")).position.seq for number in range(8)]) < 100:
                pass
            await asyncio.to_thread(mine.kill)
            await asyncio.gather(*writers)
        await asyncio.to_thread(mine.start)
        async with await RedisStore.open(mine.url()) as store:
            assert sum(confirmed) >= 100
            for number, tail in enumerate(await asyncio.gather(*(store.read(f"k{n}") for n in range(8)))):
                assert tail.position.seq % 2 == 0
                assert bodies(tail) == [b"%d" % seq for seq in range(1, tail.position.seq + 1)], number
            kept = sum([(await store.read(f"k{number}")).position.seq for number in range(8)])
            assert sum(confirmed) <= kept <= sum(confirmed) + 2 * 8


# --- memory ----------------------------------------------------------------------------------------------------


async def test_a_server_without_memory(mine: RedisServer) -> None:
    """LOG-1: OOM under noeviction is StoreFull with nothing changed; reads go on, and so do writes once there is room."""
    async with await RedisStore.open(mine.url()) as store:
        position = await append(store, "k", b"1")
        before = mine.run("DUMP", "tk:k")
        mine.run("CONFIG", "SET", "maxmemory", "1")
        await refused(lambda: store.append("k", [b"x" * 1000] * 3000, expected=position, head=HEAD), errors.StoreFull)
        await refused(lambda: store.append("new", [b"x"], expected=NOWHERE, head=HEAD), errors.StoreFull)
        assert mine.run("DUMP", "tk:k") == before
        assert (await store.read("k")).position == position
        assert (await store.read("new")).position == NOWHERE
        mine.run("CONFIG", "SET", "maxmemory", "0")
        await append(store, "k", b"2", expected=position)


# --- replicas --------------------------------------------------------------------------------------------------


async def test_a_replica_takes_no_writes(mine: RedisServer) -> None:
    """Field case 23: READONLY is tried for as long as patience lasts, then it is StoreReadOnly; reads go on."""
    async with await RedisStore.open(mine.url("patience=0.2")) as store:
        position = await append(store, "k", b"1")
        with server(replicaof=f"127.0.0.1 {mine.port}") as replica:
            wait_until(lambda: replica.run("EXISTS", "tk:k") == 1, "the replica has the log")
            async with await RedisStore.open(replica.url("patience=0.2")) as other:
                assert (await other.read("k")).position == position
                await refused(lambda: append(other, "k", b"2", expected=position), errors.StoreReadOnly)
                await refused(lambda: other.erase("k"), errors.StoreReadOnly)
                replicas = {p.name: p for p in await other.promises()}["replicas"]
                assert not replicas.holds
                assert replicas.found == "is a replica itself"
            async with await RedisStore.open(replica.url("patience=20")) as other:
                waiting = asyncio.ensure_future(append(other, "k", b"2", expected=position))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                replica.run("REPLICAOF", "NO", "ONE")  # a failover: the replica takes over
                assert (await waiting).seq == 2


async def test_too_few_replicas(mine: RedisServer) -> None:
    """A master that wants replicas and has none takes no appends: StoreReadOnly, nothing changed."""
    async with await RedisStore.open(mine.url("patience=0.1")) as store:
        mine.run("CONFIG", "SET", "min-replicas-to-write", "1")
        await refused(lambda: append(store, "k", b"1"), errors.StoreReadOnly)
        assert (await store.read("k")).position == NOWHERE


def confirms(master: RedisServer) -> bool:
    """Whether a replica confirms a write within a tenth of a second."""
    master.run("SET", "probe", "x")
    return master.run("WAIT", 1, 100) == 1


@asynccontextmanager
async def waiting_for_one(mine: RedisServer) -> AsyncGenerator[tuple[RedisStore, RedisServer]]:
    """A store that waits for one replica, and the replica."""
    with server(replicaof=f"127.0.0.1 {mine.port}") as replica:
        wait_until(lambda: confirms(mine), "the replica follows and confirms")
        async with await RedisStore.open(mine.url("wait=1&timeout=1&patience=0.2")) as store:
            yield store, replica


async def test_waiting_for_a_replica(mine: RedisServer) -> None:
    """`?wait=1`: what is confirmed is on the replica too."""
    async with waiting_for_one(mine) as (store, replica):
        position = NOWHERE
        for number in range(20):
            position = await append(store, "k", b"%d" % number, expected=position)
            assert replica.run("HGET", "tk:k", "tail") == b"%d" % position.seq


async def test_a_replica_that_does_not_confirm(mine: RedisServer) -> None:
    """`?wait=1`: without the replica nothing is confirmed: not by the append, and not by reading back what it wrote."""
    async with waiting_for_one(mine) as (store, replica):
        log = tally_log(store)
        await log.ask(adding(1, "a"))
        position = await append(store, "k", b"1")
        replica.pause()
        try:
            for call in (
                lambda: append(store, "k", b"2", expected=position),
                lambda: store.read("k"),
                lambda: log.ask(adding(10, "b")),
                lambda: log.ask(adding(10, "b")),
            ):
                with pytest.raises(errors.StoreUnavailable, match="0 of 1 replicas") as raised:
                    await call()
                assert raised.value.applied is None
        finally:
            replica.resume()
        wait_until(lambda: confirms(mine), "the replica goes on")
        assert await whole(store, "k") == [(1, b"1"), (2, b"2")]
        assert await log.ask(adding(10, "b")) == "known"
        assert (await log.read()).total == 11
        assert replica.run("HGET", "tk:tally", "tail") == b"2"


# --- who may do what -------------------------------------------------------------------------------------------


def everything_about(error: BaseException) -> str:
    """All that a log would show of an error."""
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("user", ["", "ghost"])
async def test_a_wrong_password(mine: RedisServer, scheme: str, user: str) -> None:
    """A user or password that is refused is StoreDenied at opening; neither the error nor its causes repeat the password."""
    mine.run("CONFIG", "SET", "requirepass", "secret")
    url = f"{scheme}://{user}:p%40ss%20w%2Frd%3A%2541@127.0.0.1:{mine.port}{'/main' if 'sentinel' in scheme else ''}"
    query = "?sentinel_password=p%40ss%20w%2Frd%3A%2541&patience=0" if "sentinel" in scheme else ""
    error = await refused(lambda: open_store(url + query), errors.StoreDenied)
    for secret in (PASSWORD, "p%40ss", "p@ss"):
        assert secret not in everything_about(error)


async def test_a_password_that_is_missing_or_right(mine: RedisServer) -> None:
    """Special characters of a password are written %XX in the URL; a password that is asked for and not given is StoreDenied."""
    mine.run("CONFIG", "SET", "requirepass", PASSWORD)
    await refused(lambda: RedisStore.open(mine.url()), errors.StoreDenied)
    url = f"redis://:p%40ss%20w%2Frd%3A%2541@127.0.0.1:{mine.port}"
    async with await RedisStore.open(url) as store:
        await append(store, "k", b"1")
        assert PASSWORD not in repr(store)
        assert PASSWORD not in repr(store.settings)
        mine.run("CONFIG", "SET", "requirepass", "other")
        mine.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await refused(lambda: store.read("k"), errors.StoreDenied)


NEEDED = (
    "+evalsha",
    "+eval",
    "+hmget",
    "+hget",
    "+hset",
    "+hdel",
    "+pexpireat",
    "+persist",
    "+exists",
    "+unlink",
    "+time",
)
NEEDED_FOR_LISTS = ("+zadd", "+zrem", "+zrangebylex", "+hello")


async def test_a_user_with_the_rights_that_are_needed(mine: RedisServer) -> None:
    """The rights that the guarantees page names are enough; what the server does not tell is said to be unknown."""
    keys = ("~tk:*", "~tk.heads:*")
    mine.run("ACL", "SETUSER", "keeper", "on", ">secret", *keys, *NEEDED, *NEEDED_FOR_LISTS)
    async with await RedisStore.open(f"redis://keeper:secret@127.0.0.1:{mine.port}") as store:
        position = await append(store, "k", b"1")
        await append(store, "k", b"2", expected=position, compact_through=1)
        assert [head.key async for head in store.heads()] == ["k"]
        promises = {promise.name: promise for promise in await store.promises()}
        for name in ("durable", "eviction", "replicas"):
            assert promises[name].found.startswith("unknown")
            assert not promises[name].holds
        assert await store.erase("k")


@pytest.mark.parametrize("missing", ["+hset", "+pexpireat", "+time", "+evalsha"])
async def test_a_user_without_a_right_that_is_needed(mine: RedisServer, missing: str) -> None:
    """A command that the user may not use is StoreDenied, and the log is not left half."""
    rights = [right for right in NEEDED if right != missing]
    mine.run("ACL", "SETUSER", "keeper", "on", ">secret", "~*", *rights, *NEEDED_FOR_LISTS)
    head = HEAD if missing != "+pexpireat" else type(HEAD)(kind="t", phase="p", ttl_ms=60_000)
    async with await RedisStore.open(f"redis://keeper:secret@127.0.0.1:{mine.port}") as store:
        with pytest.raises(errors.StoreDenied):
            await append(store, "k", b"1", b"2", head=head)
    async with await RedisStore.open(mine.url()) as store:
        assert await whole(store, "k") in ([], [(1, b"1"), (2, b"2")])


# --- what is no store ------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncGenerator[int]:
    """A server that gives the same answers, in order, on each connection, whatever it is asked; its port."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            for answer in answers:
                if not await reader.read(1 << 16):
                    break
                writer.write(answer)
            await reader.read(1 << 16)
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def info(text: str) -> bytes:
    """An INFO as a server sends it."""
    return b"$%d\r\n%s\r\n" % (len(text), text.encode())


HELLO = b"%1\r\n+proto\r\n:3\r\n"
SETINFO = b"+OK\r\n+OK\r\n"


@pytest.mark.parametrize(
    ("answers", "error", "cure"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], errors.StoreForeign, "is it the right port"),
        ([b"-ERR unknown command `HELLO`\r\n"], errors.StoreUnsuitable, "6.2"),
        ([HELLO, SETINFO, info("redis_version:6.0.16\r\n")], errors.StoreUnsuitable, "6.2"),
        ([HELLO, SETINFO, info("redis_version:5.0.3\r\n")], errors.StoreUnsuitable, "6.2"),
        ([HELLO, SETINFO, b"-LOADING Redis is loading the dataset in memory\r\n"], errors.StoreUnavailable, "loading"),
    ],
    ids=["http", "before 6", "6.0", "5", "loading"],
)
async def test_what_is_no_redis_or_too_old(answers: list[bytes], error: type[errors.StoreError], cure: str) -> None:
    """Opening says what is there and what to do about it."""
    async with answering(*answers) as port:
        raised = await refused(lambda: RedisStore.open(f"redis://127.0.0.1:{port}?timeout=1"), error)
        assert cure in str(raised)


@pytest.mark.parametrize(
    "version", ["redis_version:6.2.0", "redis_version:10.1.3", "redis_version:7.2.4\r\nvalkey_version:8.1.0"]
)
async def test_new_enough(version: str) -> None:
    """Version numbers are compared as numbers."""
    async with answering(HELLO, SETINFO, info(version)) as port:
        await (await RedisStore.open(f"redis://127.0.0.1:{port}?timeout=1")).close()


async def test_nobody_there(mine: RedisServer) -> None:
    """Opening does not wait for a server that is not there: it says so at once."""
    mine.kill()
    for url in (mine.url(), f"redis+cluster://127.0.0.1:{mine.port}", f"redis+sentinel://127.0.0.1:{mine.port}/main"):
        raised = await refused(lambda url=url: open_store(url), errors.StoreUnavailable)
        assert str(mine.port) in str(raised)


async def test_one_server_and_a_cluster_are_told_apart(mine: RedisServer, redis_cluster: RedisCluster) -> None:
    """The wrong scheme is named with the right one."""
    raised = await refused(
        lambda: RedisStore.open(f"redis+cluster://127.0.0.1:{mine.port}?patience=0"), errors.StoreUnsuitable
    )
    assert "write redis://" in str(raised)
    redis_cluster.flush()
    async with await RedisStore.open(redis_cluster.nodes[0].url("patience=0")) as store:
        for number in range(20):
            if redis_cluster.holder(redis_cluster.slot(f"tk:{number}")) != 0:
                raised = await refused(lambda number=number: store.read(f"{number}"), errors.StoreUnsuitable)
                assert "redis+cluster://" in str(raised)
                break


async def test_a_database_that_is_not_there(mine: RedisServer) -> None:
    """A number beyond the server's databases is refused with what to do."""
    raised = await refused(lambda: RedisStore.open(mine.url(database=99)), errors.StoreUnsuitable)
    assert "database" in str(raised)


# --- doctor ----------------------------------------------------------------------------------------------------


async def promised(url: str) -> dict[str, Promise]:
    """What a store promises, by name."""
    async with await RedisStore.open(url) as store:
        return {promise.name: promise for promise in await store.promises()}


async def test_what_doctor_says(mine: RedisServer) -> None:
    """LOG-1: durable, eviction and replicas are told as they are, and hold only where nothing confirmed can be lost."""
    found = await promised(mine.url())
    assert not found["durable"].holds
    assert "appendonly yes" in found["durable"].advice
    assert found["eviction"].holds
    assert found["replicas"] == found["replicas"]._replace(found="none", holds=True)
    assert found["server"].found.startswith(("Redis ", "Valkey "))
    assert found["clock"].holds

    mine.run("CONFIG", "SET", "appendonly", "yes")
    assert "everysec" in (await promised(mine.url()))["durable"].found
    assert not (await promised(mine.url()))["durable"].holds
    mine.run("CONFIG", "SET", "appendfsync", "always")
    assert (await promised(mine.url()))["durable"].holds
    assert (await promised(mine.url("protocol=2")))["durable"].holds

    for policy in ("allkeys-lru", "volatile-ttl"):
        mine.run("CONFIG", "SET", "maxmemory-policy", policy)
        eviction = (await promised(mine.url()))["eviction"]
        assert not eviction.holds
        assert policy in eviction.found

    with server(replicaof=f"127.0.0.1 {mine.port}") as replica:
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up", "the replica follows")
        assert not (await promised(mine.url()))["replicas"].holds
        assert (await promised(mine.url("wait=1")))["replicas"].holds
    store = RedisStore((await RedisStore.open(mine.url())).settings, clock_offset_ms=5000)
    async with store:
        assert not {promise.name: promise for promise in await store.promises()}["clock"].holds


async def test_what_doctor_says_of_a_cluster(redis_cluster: RedisCluster) -> None:
    """Nodes that differ are named."""
    found = await promised(redis_cluster.url())
    assert found["servers"].found == "cluster, 3 masters"
    assert found["eviction"].holds
    node = redis_cluster.nodes[1]
    node.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    try:
        eviction = (await promised(redis_cluster.url()))["eviction"]
        assert not eviction.holds
        assert f"{node.port}: maxmemory-policy allkeys-lfu" in eviction.found
    finally:
        node.run("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_promises_of_a_server_that_is_away(mine: RedisServer) -> None:
    """Nothing is made up: the error is typed."""
    async with await RedisStore.open(mine.url("patience=0.1")) as store:
        await asyncio.to_thread(mine.kill)
        with pytest.raises(errors.StoreUnavailable):
            await store.promises()


# --- sentinels -------------------------------------------------------------------------------------------------


def fails_over(sentinel: RedisServer) -> bool:
    """Make the replica the master; False if the sentinel does not know enough of it yet."""
    try:
        sentinel.run("SENTINEL", "FAILOVER", "main")
    except redis.ResponseError:
        return False
    return True


async def test_sentinels_name_the_master(mine: RedisServer) -> None:
    """The master is asked for, and asked for again when it has changed: READONLY is not seen by the caller."""
    with server(replicaof=f"127.0.0.1 {mine.port}") as replica, server() as other:
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up", "the replica follows")
        other.kill()
        configuration = other.folder / "sentinel.conf"
        configuration.write_text(
            f"sentinel monitor main 127.0.0.1 {mine.port} 1\nsentinel down-after-milliseconds main 60000\n"
        )
        sentinel = RedisServer(other.folder)
        sentinel.as_sentinel(configuration)
        try:
            async with await RedisStore.open(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0?patience=20") as store:
                position = await append(store, "k", b"1")
                assert mine.run("HGET", "tk:k", "tail") == b"1"
                wait_until(lambda: replica.run("HGET", "tk:k", "tail") == b"1", "the replica has it")
                wait_until(
                    lambda: sentinel.info("sentinel")["master0"]["slaves"] == 1, "the sentinel knows the replica"
                )
                wait_until(lambda: fails_over(sentinel), "the sentinel has looked at the replica")
                wait_until(lambda: replica.info("replication")["role"] == "master", "the replica took over")
                mine.run("REPLICAOF", "127.0.0.1", replica.port)  # as the sentinel tells it within ten seconds
                outcome = await store.append("k", [b"2"], expected=position, head=HEAD)
                assert isinstance(outcome, Appended)
                assert replica.run("HGET", "tk:k", "tail") == b"2"
            raised = await refused(
                lambda: open_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/nobody?patience=0"),
                errors.StoreUnavailable,
            )
            assert "nobody" in str(raised)
        finally:
            sentinel.stop()


def test_ci_has_a_server() -> None:
    """Where the tests run for good, Redis is there: nothing of this is skipped."""
    if "CI" in os.environ:
        with server() as started:
            assert started.run("PING") is True
