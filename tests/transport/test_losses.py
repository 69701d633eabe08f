"""TR-10: what is deleted behind the transport's back is noticed, told, and holds up nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.servers.postgres import Server
from tests.servers.redis import RedisServer
from tests.transport.support import ClockedTransport, Place, drain, place_named, take, take_one
from turnkeeper.transport.protocol import Delivery, Depth

pytestmark = pytest.mark.anyio

PREFIX = "tk:{default-0}:"


async def test_a_held_entry_is_deleted_from_the_file(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Who holds it is refused, and tells; the others go on."""
    async with place_named("sqlite file", request, tmp_path) as place:
        queue = await place.open()
        held = await _held_and_waiting(queue)
        with closing(sqlite3.connect(tmp_path / "turns.db")) as connection, connection:
            connection.execute("DELETE FROM queue_entry WHERE state = 'held'")
        await _is_told(place, queue, held)


async def test_a_held_entry_is_deleted_from_the_table(
    tmp_path: Path, request: pytest.FixtureRequest, postgres: Server, postgres_database: str
) -> None:
    """The same in PostgreSQL."""
    async with place_named("postgres", request, tmp_path) as place:
        queue = await place.open()
        held = await _held_and_waiting(queue)
        postgres.run("DELETE FROM turnkeeper.queue_entry WHERE state = 'held'", database=postgres_database)
        await _is_told(place, queue, held)


async def test_everything_is_lost(tmp_path: Path, request: pytest.FixtureRequest, redis_server: RedisServer) -> None:
    """FLUSHALL, as a restart without persistence would: who holds something tells; the queue goes on at once."""
    async with place_named("redis", request, tmp_path) as place:
        queue = await place.open()
        held = await _held_and_waiting(queue)
        redis_server.flush()
        await queue.publish("k", b"waits")
        await _is_told(place, queue, held)


async def _held_and_waiting(queue: ClockedTransport) -> Delivery:
    await queue.publish("k", b"held")
    held = await take_one(queue)
    await queue.publish("k", b"waits")
    return held


async def _is_told(place: Place, queue: ClockedTransport, held: Delivery) -> None:
    assert not await queue.extend(held, 30)
    assert not await queue.acknowledge(held)
    assert [entry for lost in place.lost for entry in lost.ids] == [held.id]
    assert await drain(queue) == [b"waits"]


async def test_the_table_is_dropped(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It is made anew and that is told, whoever notices first; also who waits finds what is published then."""
    async with place_named("sqlite file", request, tmp_path) as place:
        queue = await place.open()
        await queue.publish("k", b"lost")
        for _ in range(2):
            with closing(sqlite3.connect(tmp_path / "turns.db")) as connection, connection:
                connection.execute("DROP TABLE queue_entry")
            assert await queue.consume("a", wait_seconds=0.1) == []
        assert [(lost.ids, lost.number) for lost in place.lost] == [((), None)] * 2
        await queue.publish("k", b"new")
        assert await drain(queue) == [b"new"]


async def test_parked_entries_are_lost(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> None:
    """A delayed entry whose content is gone is missed by its id when its time comes."""
    async with place_named("redis", request, tmp_path) as place:
        queue = await place.open()
        entry = await queue.publish("k", b"x", delay=10)
        redis_server.run("DEL", f"{PREFIX}parked")
        await queue.advance_clock(10_100)
        assert await take(queue) == []
        assert [lost.ids for lost in place.lost] == [(entry,)]
        assert await queue.depth() == Depth(0, 0, 0, 0)


async def test_the_holders_are_lost(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> None:
    """Where it is forgotten who holds what, entries come again from the pending list, with the attempts that it counted."""
    async with place_named("redis", request, tmp_path) as place:
        queue = await place.open()
        await queue.publish("k", b"x")
        held = await take_one(queue)
        redis_server.run("DEL", f"{PREFIX}held", f"{PREFIX}leases")
        found = await queue.consume("b", wait_seconds=10, lease_seconds=0.05)
        assert [(delivery.id, delivery.attempt) for delivery in found] == [(held.id, 2)]
        assert not await queue.acknowledge(held)


async def test_a_dead_letter_is_lost(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> None:
    """A letter whose content is gone is neither listed nor revived as something empty."""
    async with place_named("redis", request, tmp_path) as place:
        queue = await place.open()
        entry = await queue.publish("k", b"x")
        await queue.dead_letter(await take_one(queue), reason="no")
        redis_server.run("DEL", f"{PREFIX}letters")
        assert await queue.dead_letters() == []
        assert not await queue.revive(entry)
        assert await queue.depth() == Depth(0, 0, 0, 0)


async def test_what_others_put_in_the_stream(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> None:
    """TR-7: it is no entry of ours, and is a dead letter with what was in it, not a crash and not an empty message."""
    async with place_named("redis", request, tmp_path) as place:
        queue = await place.open()
        redis_server.run("XADD", f"{PREFIX}stream", "*", "n", b"\xff", "m", "2")
        await queue.publish("k", b"ours")
        assert await drain(queue) == [b"ours"]
        (dead,) = await queue.dead_letters()
        assert (dead.key, dead.body, dead.attempts) == ("", b"n=\xff\nm=2", 0)
        assert await queue.discard(dead.id)
        assert place.lost == []
