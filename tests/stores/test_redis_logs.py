"""Logs in Redis: what their hashes hold and for how long, what the scripts touch, what is refused, and the index of heads."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conformance.support import HEAD, append, bodies, listed, whole
from tests.servers.redis import Monitor, RedisCluster, RedisServer, wait_until
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, Head, Position, Record
from turnkeeper.stores.redis import RedisLifecycle, RedisStore
from turnkeeper.stores.redis.index import Index
from turnkeeper.turn.identity import trace_hash

pytestmark = pytest.mark.anyio

MINUTE = 60_000
FOR_EVER = ("tk.heads:",)
"""What keys without a time to live begin with, beside logs whose writers want none."""


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The tests' server, empty."""
    redis_server.flush()
    return redis_server


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[RedisStore]:
    """A store on it."""
    async with await RedisStore.open(redis.url()) as opened:
        yield opened


def without_ttl(redis: RedisServer) -> list[str]:
    """Keys that stay for ever."""
    keys = sorted(key.decode() for key in redis.run("KEYS", "*"))
    return [key for key in keys if redis.run("PTTL", key) == -1]


# --- the hash --------------------------------------------------------------------------------------------------


async def test_scalars_are_readable(redis: RedisServer, store: RedisStore) -> None:
    """T1.1: one hash a log, its scalars as text that an operator can read, one field a record."""
    head = Head(kind="turn", phase="STARTED", owner="worker-1", labels={"turn": "t-1"}, ttl_ms=MINUTE, keep_until=7)
    position = await append(store, "turn:{abc}:primary", b"one", b"two", head=head)
    fields: dict[bytes, bytes] = redis.run("HGETALL", "tk:turn:{abc}:primary")
    at = fields.pop(b"created")
    assert fields.pop(b"updated") == at
    assert fields == {
        b"tk": b"1",
        b"life": position.incarnation.hex().encode(),
        b"tail": b"2",
        b"compacted": b"0",
        b"skew": b"0",
        b"kind": b"turn",
        b"phase": b"STARTED",
        b"attention": b"null",
        b"owner": b'"worker-1"',
        b"labels": b'{"turn":"t-1"}',
        b"ttl_ms": b"60000",
        b"keep_until": b"7",
        b"size": b"6",
        b"1": at + b":one",
        b"2": at + b":two",
    }


async def test_absent_and_empty_are_two_things(store: RedisStore) -> None:
    """LOG-8: None and the empty text come back as what they were, also where one replaced the other."""
    position = await append(store, "k", b"1", head=replace(HEAD, attention="", owner=None))
    assert [(head.attention, head.owner) for head in await listed(store)] == [("", None)]
    await append(store, "k", b"2", expected=position, head=replace(HEAD, attention=None, owner=""))
    assert [(head.attention, head.owner) for head in await listed(store)] == [(None, "")]


@pytest.mark.parametrize("count", [999, 1000, 1001, 12_345])
async def test_thousands_of_records(store: RedisStore, count: int) -> None:
    """LOG-1, LOG-2: more records than Lua's stack holds, in one append, in one Behind, and dropped in one compaction."""
    batch = [b"%d" % number for number in range(count)]
    position = await append(store, "k", *batch)
    assert await whole(store, "k") == list(enumerate(batch, 1))
    behind = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD)
    assert isinstance(behind, Behind)
    assert bodies(behind.tail) == batch
    await append(store, "k", b"snapshot", expected=position, compact_through=count)
    assert await whole(store, "k") == [(count + 1, b"snapshot")]


async def test_compaction_leaves_no_record_behind(redis: RedisServer, store: RedisStore) -> None:
    """LOG-5: fields of compacted records are gone from the hash, also where compactions reach back over each other."""
    position = await append(store, "k", *[b"x"] * 10)
    position = await append(store, "k", b"s", expected=position, compact_through=4)
    position = await append(store, "k", b"t", expected=position, compact_through=2)
    await append(store, "k", b"u", expected=position, compact_through=11)
    numbers = sorted(int(field) for field in redis.run("HKEYS", "tk:k") if field.isdigit())
    assert numbers == [12, 13]


# --- retention -------------------------------------------------------------------------------------------------


async def test_the_time_to_live_comes_with_the_append(redis: RedisServer, store: RedisStore) -> None:
    """LOG-9, T1.6: set in the same script, extended by appends, ended by a ttl of 0, and never touched by a read."""

    def left() -> int:
        return redis.run("PTTL", "tk:k")

    position = await append(store, "k", b"1", head=replace(HEAD, ttl_ms=10 * MINUTE))
    assert 9 * MINUTE < left() <= 10 * MINUTE
    redis.run("PEXPIRE", "tk:k", MINUTE)
    await store.read("k")
    await listed(store)
    assert isinstance(await store.append("k", [b"x"], expected=NOWHERE, head=replace(HEAD, ttl_ms=99 * MINUTE)), Behind)
    assert left() <= MINUTE
    position = await append(store, "k", b"2", expected=position, head=replace(HEAD, ttl_ms=20 * MINUTE))
    assert 19 * MINUTE < left() <= 20 * MINUTE
    position = await append(store, "k", b"3", expected=position, head=HEAD)
    assert left() == -1
    await append(store, "k", b"4", expected=position, head=replace(HEAD, ttl_ms=MINUTE))
    assert 0 < left() <= MINUTE


async def test_the_proof_deadline_outlasts_the_ttl(redis: RedisServer, store: RedisStore) -> None:
    """LOG-9, T1.7: never dropped before `keep_until`, also with the test clock moved, and for ever means for ever."""
    now = (await store.read("k")).now
    await append(store, "k", b"1", head=replace(HEAD, ttl_ms=1, keep_until=now + 30 * MINUTE))
    assert 29 * MINUTE < redis.run("PTTL", "tk:k") <= 30 * MINUTE
    await store.advance_clock(20 * MINUTE)
    await append(store, "l", b"1", head=replace(HEAD, ttl_ms=1, keep_until=now + 30 * MINUTE))
    assert 9 * MINUTE < redis.run("PTTL", "tk:l") <= 10 * MINUTE
    await append(store, "m", b"1", head=replace(HEAD, ttl_ms=2**60, keep_until=2**62))
    assert redis.run("PTTL", "tk:m") > 2**52


async def test_what_has_expired_is_gone(redis: RedisServer, store: RedisStore) -> None:
    """LOG-5, LOG-9: who knew the expired log is told that it is gone, and a listing drops it from the index."""
    position = await append(store, "k", b"1", head=replace(HEAD, ttl_ms=1))
    wait_until(lambda: redis.run("EXISTS", "tk:k") == 0, "the log expires")
    outcome = await store.append("k", [b"2"], expected=position, head=HEAD)
    assert isinstance(outcome, Behind)
    assert (outcome.tail.position, outcome.tail.restart) == (NOWHERE, True)
    assert await listed(store) == []
    assert [key for key in redis.run("KEYS", "tk.heads:*") if redis.run("ZCARD", key)] == []


async def test_no_key_leaks(redis: RedisServer, store: RedisStore) -> None:
    """LOG-9: whatever is done, every key has a time to live, but for the index and for logs whose writers want none."""
    mortal = replace(HEAD, ttl_ms=MINUTE)
    lifecycle = RedisLifecycle(store, trace_hash)
    position = NOWHERE
    for number in range(40):
        position = await append(store, f"k{number}", b"1", b"2", head=mortal)
        await append(store, f"k{number}", b"3", expected=position, head=mortal, compact_through=2)
        await lifecycle.advance(f"t{number}", None, "PROCESSING")
        await lifecycle.stage(f"nobody{number}")
        await store.read(f"nobody{number}")
        await store.append(f"nobody{number}", [b"x"], expected=NOWHERE, head=HEAD, guard=Guard(not_after=1))
        await store.append(f"nobody{number}", [b"x"], expected=Position(b"12345678", 3), head=HEAD)
        await store.erase(f"nobody{number}")
    await store.restore("restored", [Record(1, 5, b"x")], position=position, compacted=0, head=mortal)
    await append(store, "for ever", b"1")
    await listed(store)
    await store.rebuild_index()
    await store.promises()
    assert len(redis.run("KEYS", "tk*")) > 80
    assert [key for key in without_ttl(redis) if not key.startswith(FOR_EVER)] == ["tk:for ever"]


# --- time ------------------------------------------------------------------------------------------------------


async def test_a_servers_clock_that_was_set_back(redis: RedisServer, store: RedisStore) -> None:
    """LOG-3: the log's clock stands still for nobody: it goes on from the last record, and a lease ends after its length."""
    position = await append(store, "k", b"1", head=replace(HEAD, ttl_ms=MINUTE))
    ahead = (await store.read("k")).now + 120 * MINUTE
    redis.run("HSET", "tk:k", "updated", ahead)  # as if it had been written before the clock was set back by two hours
    first = await store.read("k")
    assert ahead <= first.now < ahead + MINUTE
    outcome = await store.append("k", [b"2"], expected=position, head=HEAD, guard=Guard(not_before=ahead + 5 * MINUTE))
    assert not isinstance(outcome, Appended)
    await store.advance_clock(5 * MINUTE)
    outcome = await store.append("k", [b"2"], expected=position, head=HEAD, guard=Guard(not_before=ahead + 5 * MINUTE))
    assert isinstance(outcome, Appended)
    assert outcome.at >= ahead + 5 * MINUTE


# --- the scripts -----------------------------------------------------------------------------------------------


async def use_everything(store: RedisStore, key: str) -> None:
    """Each script, each answer of it."""
    head = replace(HEAD, ttl_ms=MINUTE, attention="x")
    position = await append(store, key, b"1", b"2", head=head)
    position = await append(store, key, b"3", expected=position, compact_through=2)
    await store.append(key, [b"x"], expected=NOWHERE, head=HEAD)
    await store.append(key, [b"x"], expected=position, head=HEAD, guard=Guard(not_after=1))
    await store.read(key)
    await store.read(key, after=position)
    await store.erase(key, unchanged_since=1)
    await store.erase(key)
    await store.restore(key, [Record(1, 5, b"x")], position=position, compacted=0, head=head)
    lifecycle = RedisLifecycle(store, trace_hash)
    await lifecycle.advance(key, None, "PROCESSING")
    await lifecycle.advance(key, "PROCESSING", "ANSWERED")
    await listed(store)


async def test_a_script_touches_the_key_that_it_was_given(redis: RedisServer, store: RedisStore) -> None:
    """Field case 23: every script names one key, and nothing else is touched from inside of it."""
    with Monitor(redis) as monitor:
        await use_everything(store, "turn:{abc}:primary")
        key, scripts, inside = b"", 0, 0
        for by_script, words in monitor.seen():
            if words[0].upper() in (b"EVAL", b"EVALSHA"):
                assert words[2] == b"1"
                key, scripts = words[3], scripts + 1
            elif by_script and words[0] != b"TIME":
                assert words[1] == key
                inside += 1
    assert scripts >= 11
    assert inside >= 20


async def test_keys_of_a_trace_share_a_slot(redis_cluster: RedisCluster) -> None:
    """T1.2, T4: the logs of a trace's scopes and its lifecycle have one hash tag; other keys of a store may lie anywhere."""
    redis_cluster.flush()
    async with await RedisStore.open(redis_cluster.url()) as store:
        tag = trace_hash("t-1")
        for scope in ("primary", "run-1"):
            await append(store, f"turn:{{{tag}}}:{scope}", b"x")
        await RedisLifecycle(store, trace_hash).advance("t-1", None, "PROCESSING")
        keys = [key for node in redis_cluster.nodes for key in node.run("KEYS", "*") if tag.encode() in key]
        assert len(keys) == 3
        assert len({redis_cluster.slot(key) for key in keys}) == 1
        others = [f"k{number}" for number in range(30)]
        await asyncio.gather(*(append(store, key, b"x") for key in others))
        assert len({redis_cluster.slot(f"tk:{key}") for key in others}) > 20
        assert sorted(head.key for head in await listed(store)) == sorted(
            [*others, *(f"turn:{{{tag}}}:{scope}" for scope in ("primary", "run-1"))]
        )


async def test_a_server_that_has_forgotten_the_scripts(redis: RedisServer, store: RedisStore) -> None:
    """Field case 23: NOSCRIPT, behind SCRIPT FLUSH or on a new server, is not seen by the caller."""
    position = await append(store, "k", b"1")
    for number in range(3):
        redis.run("SCRIPT", "FLUSH")
        position = await append(store, "k", b"%d" % number, expected=position)
        redis.run("SCRIPT", "FLUSH")
        assert (await store.read("k")).position == position
    assert len(await whole(store, "k")) == 4


# --- what is refused -------------------------------------------------------------------------------------------

Call = Any


def calls(store: RedisStore, known: Position) -> list[Call]:
    """Every call on the log `k`."""
    return [
        lambda: store.append("k", [b"x"], expected=NOWHERE, head=HEAD),
        lambda: store.append("k", [b"x"], expected=known, head=HEAD),
        lambda: store.read("k"),
        lambda: store.erase("k"),
        lambda: store.restore("k", [Record(1, 5, b"x")], position=known, compacted=0, head=HEAD),
    ]


@pytest.mark.parametrize(
    "command",
    [
        ("SET", "tk:k", "text"),
        ("RPUSH", "tk:k", "a"),
        ("HSET", "tk:k", "field", "value"),
        ("HSET", "tk:k", "tk", "not a number"),
        ("HSET", "tk:k", "tk", "1", "life", "aa"),
        ("XADD", "tk:k", "1-1", "a", "b"),
    ],
    ids=["text", "list", "hash", "not a version", "no tail", "stream"],
)
async def test_a_key_of_somebody_else(redis: RedisServer, store: RedisStore, command: tuple[str, ...]) -> None:
    """T1: what is no log is refused with a typed error and left as it is; a listing goes past it."""
    redis.run(*command)
    before = redis.run("DUMP", "tk:k")
    for call in calls(store, Position(b"12345678", 1)):
        with pytest.raises(errors.StoreForeign) as raised:
            await call()
        assert raised.value.applied is False
    assert redis.run("DUMP", "tk:k") == before
    await append(store, "l", b"x")
    assert [head.key for head in await listed(store)] == ["l"]


async def test_a_log_of_a_newer_version(redis: RedisServer, store: RedisStore) -> None:
    """Ambiguity 24 of flows.md: a log that a newer version wrote is refused by name, and left as it is."""
    known = await append(store, "k", b"1")
    redis.run("HSET", "tk:k", "tk", "2")
    before = redis.run("DUMP", "tk:k")
    for call in calls(store, known):
        with pytest.raises(errors.StoreVersion) as raised:
            await call()
        assert (raised.value.found, raised.value.known, raised.value.applied) == (2, 1, False)
    assert redis.run("DUMP", "tk:k") == before


async def test_a_log_that_was_rolled_back(redis: RedisServer, store: RedisStore) -> None:
    """LOG-5: who knew more than is there (a failover lost it) must not go on; a new reader gets what there is."""
    first = await append(store, "k", b"1")
    copy = redis.run("DUMP", "tk:k")
    second = await append(store, "k", b"2", expected=first)
    redis.run("RESTORE", "tk:k", 0, copy, "REPLACE")
    for call in (
        lambda: store.append("k", [b"x"], expected=second, head=HEAD),
        lambda: store.read("k", after=second),
    ):
        with pytest.raises(errors.StoreRolledBack) as raised:
            await call()
        assert raised.value.applied is False
    assert await whole(store, "k") == [(1, b"1")]
    await append(store, "k", b"3", expected=first)


async def test_a_log_that_somebody_has_damaged(redis: RedisServer, store: RedisStore) -> None:
    """LOG-5: a record that is missing in the middle is said, not passed over."""
    await append(store, "k", b"1", b"2", b"3")
    redis.run("HDEL", "tk:k", "2")
    with pytest.raises(errors.StoreCorrupt, match="no record 2"):
        await store.read("k")


# --- the index -------------------------------------------------------------------------------------------------


def index_of(redis: RedisServer) -> list[bytes]:
    """Every entry."""
    return sorted(name for key in redis.run("KEYS", "tk.heads:*") for name in redis.run("ZRANGE", key, 0, -1))


async def test_rebuilding_the_index(redis: RedisServer, store: RedisStore) -> None:
    """LOG-8: the index can be thrown away: it is found again in the logs, and entries without a log are dropped."""
    keys = sorted(f"k{number}" for number in range(700))
    await asyncio.gather(*(append(store, key, b"x") for key in keys))
    redis.run("DEL", *redis.run("KEYS", "tk.heads:*"))
    redis.run("ZADD", f"tk.heads:{zlib.crc32(b'ghost') % 16}", 0, "ghost")
    redis.run("HSET", "tk:foreign", "a", "b")
    assert await listed(store) == []
    assert await store.rebuild_index() == 700
    assert [head.key for head in await listed(store)] == keys
    assert index_of(redis) == [key.encode() for key in keys]


async def test_rebuilding_the_index_of_a_cluster(redis_cluster: RedisCluster) -> None:
    """LOG-8: the keys of every node are found."""
    redis_cluster.flush()
    async with await RedisStore.open(redis_cluster.url()) as store:
        keys = sorted(f"k{number}" for number in range(90))
        await asyncio.gather(*(append(store, key, b"x") for key in keys))
        for node in redis_cluster.nodes:
            for key in node.run("KEYS", "tk.heads:*"):
                node.run("DEL", key)
        assert await listed(store) == []
        assert await store.rebuild_index() == 90
        assert [head.key for head in await listed(store)] == keys


async def test_a_log_whose_creator_died_before_it_was_listed(redis: RedisServer, store: RedisStore) -> None:
    """LOG-8: between creation and index the process died; whoever goes on with the log enters it."""
    position = await append(store, "k", b"1")
    redis.run("DEL", *redis.run("KEYS", "tk.heads:*"))
    async with await RedisStore.open(redis.url()) as other:
        assert await listed(other) == []
        await append(other, "k", b"2", expected=position)
        assert [head.key for head in await listed(other)] == ["k"]


async def test_the_index_stays_near_the_logs(redis: RedisServer, store: RedisStore) -> None:
    """LOG-8, LOG-9: of logs that nobody lists, what has expired does not pile up in the index."""
    for _ in range(12):
        keys = [f"turn:{secrets.token_hex(8)}" for _ in range(100)]
        await asyncio.gather(*(append(store, key, b"x", head=replace(HEAD, ttl_ms=MINUTE)) for key in keys))
        redis.run("DEL", *(f"tk:{key}" for key in keys))  # as if their time were over
    assert 100 <= len(index_of(redis)) < 400
    await store.tidy()
    assert index_of(redis) == []


async def test_an_entry_dropped_while_its_log_is_made_again(
    redis: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOG-8: whoever saw the log gone, and is slow, does not unlist the next life of its key."""
    await append(store, "k", b"1")
    redis.run("DEL", "tk:k")
    really = Index._there  # pyright: ignore[reportPrivateUsage]  # the moment between looking and dropping
    async with await RedisStore.open(redis.url()) as other:
        made = False

        async def look_then_made(self: Index, server: Any, names: Sequence[bytes]) -> set[bytes]:
            nonlocal made
            found = await really(self, server, names)
            if names and not made:
                made = True
                await append(other, "k", b"2")
            return found

        monkeypatch.setattr(Index, "_there", look_then_made)
        assert await listed(store) == []
        assert made
        assert [head.key for head in await listed(other)] == ["k"]


async def test_two_stores_on_one_server(redis: RedisServer, store: RedisStore) -> None:
    """A name of its own keeps a store's keys apart from another's."""
    async with await RedisStore.open(redis.url("name=other-app")) as other:
        await append(store, "k", b"1")
        await append(other, "k", b"2")
        assert await whole(store, "k") == [(1, b"1")]
        assert await whole(other, "k") == [(1, b"2")]
        assert [head.key for head in await listed(other)] == ["k"]
        assert await other.rebuild_index() == 1
    assert sorted(redis.run("KEYS", "*:k")) == [b"other-app:k", b"tk:k"]
