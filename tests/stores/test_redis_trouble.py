"""What Redis answers when something is wrong, whether it is tried again, and which typed error it is in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio.connection import Connection

from tests.conformance.support import HEAD, append
from tests.servers.redis import RedisServer, server
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE
from turnkeeper.moving import copy_logs, digest
from turnkeeper.stores.redis import RedisStore
from turnkeeper.stores.redis.settings import parse
from turnkeeper.stores.redis.trouble import refused
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

SCRIPT = "Error running script (call to f_0123456789012345678901234567890123456789): @user_script:9: @user_script: 9: "
"""What Redis before 7 puts in front of an error from inside a script."""

ANSWERS = [
    ("OOM command not allowed when used memory > 'maxmemory'.", errors.StoreFull, False, False),
    (f"ERR {SCRIPT}-OOM command not allowed when used memory > 'maxmemory'.", errors.StoreFull, False, False),
    ("READONLY You can't write against a read only replica.", errors.StoreReadOnly, False, True),
    (f"ERR {SCRIPT}-READONLY You can't write against a read only replica.", errors.StoreReadOnly, False, True),
    (
        "READONLY You can't write against a read only replica. script: 01, on @user_script:9.",
        errors.StoreReadOnly,
        False,
        True,
    ),
    ("NOREPLICAS Not enough good replicas to write.", errors.StoreReadOnly, False, True),
    (
        "MISCONF Redis is configured to save RDB snapshots, but it's unable to persist.",
        errors.StoreReadOnly,
        False,
        False,
    ),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", errors.StoreForeign, False, False),
    (
        f"ERR {SCRIPT}WRONGTYPE Operation against a key holding the wrong kind of value",
        errors.StoreForeign,
        False,
        False,
    ),
    ("BUSY Redis is busy running a script. You can only call SCRIPT KILL.", errors.StoreBusy, False, True),
    ("LOADING Redis is loading the dataset in memory", errors.StoreUnavailable, False, True),
    ("CLUSTERDOWN The cluster is down", errors.StoreUnavailable, False, True),
    ("CLUSTERDOWN Hash slot not served", errors.StoreUnavailable, False, True),
    ("MASTERDOWN Link with MASTER is down", errors.StoreUnavailable, False, True),
    ("TRYAGAIN Multiple keys request during rehashing of slot", errors.StoreUnavailable, False, True),
    ("MOVED 866 127.0.0.1:7001", errors.StoreUnsuitable, False, False),
    ("NOAUTH Authentication required.", errors.StoreDenied, False, False),
    ("WRONGPASS invalid username-password pair or user is disabled.", errors.StoreDenied, False, False),
    ("NOPERM this user has no permissions to run the 'evalsha' command", errors.StoreDenied, False, False),
    ("ERR The user executing the script can't run this command or subcommand", errors.StoreDenied, None, False),
    ("ERR unknown command `EVALSHA`", errors.StoreUnsuitable, False, False),
    ("ERR This instance has cluster support disabled", errors.StoreUnsuitable, False, False),
    ("ERR DB index is out of range", errors.StoreUnsuitable, False, False),
    ("ERR something that nobody has seen before", errors.StoreUnavailable, None, False),
]


@pytest.mark.parametrize(("answer", "error", "applied", "passing"), ANSWERS, ids=[a[0][:50] for a in ANSWERS])
def test_what_an_answer_means(answer: str, error: type[errors.StoreError], applied: bool | None, passing: bool) -> None:
    """Each answer of a server has a type, says whether anything was changed, and is tried again only if it may pass."""
    parser: Any = Connection()._parser  # pyright: ignore[reportPrivateUsage]  # as it is parsed off the wire
    parsed = parser.parse_error(answer)
    verdict = refused(parsed, "redis://h")
    assert type(verdict.error) is error
    assert (verdict.error.applied, verdict.passing) == (applied, passing)
    assert verdict.error.__cause__ is parsed
    assert str(verdict.error).startswith("redis://h: ")


HELLO = b"%1\r\n+proto\r\n:3\r\n"
SETINFO = b"+OK\r\n+OK\r\n"
NOTHING = b"*6\r\n:2\r\n:7\r\n$0\r\n\r\n:0\r\n:0\r\n:0\r\n"
"""What the read script answers for a log that is not there, at the time 7."""


@asynccontextmanager
async def saying(*answers: bytes) -> AsyncGenerator[RedisStore]:
    """A store on a server that gives these answers to the commands that come, the last one again and again."""
    left = [*answers]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greetings = [HELLO, SETINFO]
        with suppress(OSError):
            while await reader.read(1 << 16):
                writer.write(greetings.pop(0) if greetings else left.pop(0) if len(left) > 1 else left[0])
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, RedisStore(parse(f"redis://127.0.0.1:{port}?patience=0.3&timeout=5")) as store:
        yield store


PASSING = [
    b"-LOADING Redis is loading\r\n",
    b"-CLUSTERDOWN down\r\n",
    b"-TRYAGAIN rehashing\r\n",
    b"-MASTERDOWN down\r\n",
]


@pytest.mark.parametrize("answer", PASSING)
async def test_what_passes_is_waited_for(answer: bytes) -> None:
    """Field case 23: tried again, with pauses, until it passes; the caller sees nothing of it."""
    async with saying(answer, answer, answer, NOTHING) as store:
        tail = await store.read("k")
        assert (tail.position, tail.now) == (NOWHERE, 7)


@pytest.mark.parametrize("answer", PASSING)
async def test_what_does_not_pass_is_said_within_the_stated_time(answer: bytes) -> None:
    """Field case 23: behind patience a typed error, also of an append, which changed nothing."""
    async with saying(answer) as store:
        for call in (lambda: store.read("k"), lambda: store.append("k", [b"x"], expected=NOWHERE, head=HEAD)):
            began = time.monotonic()
            with pytest.raises(errors.StoreUnavailable) as raised:
                await call()
            assert raised.value.applied is False
            assert 0.3 <= time.monotonic() - began < 5


@pytest.fixture
def mine() -> Iterator[RedisServer]:
    """A server of the test's own."""
    with server(**{"lua-time-limit": "10"}) as started:
        yield started


async def test_a_server_that_runs_somebodys_slow_script(mine: RedisServer) -> None:
    """BUSY is waited for as long as patience lasts, and then it is StoreBusy with nothing changed."""

    def run_slow_script() -> None:
        with suppress(redis.exceptions.ResponseError):  # it is killed in the end
            mine.run("EVAL", "while true do end", 0)

    async with (
        await RedisStore.open(mine.url("patience=0.1")) as store,
        await RedisStore.open(mine.url("patience=20")) as patient,
    ):
        position = await append(store, "k", b"1")
        await patient.read("k")
        slow = asyncio.ensure_future(asyncio.to_thread(run_slow_script))
        raised: errors.StoreBusy | None = None
        while raised is None:
            try:
                position = await append(store, "k", b"x", expected=position)
            except errors.StoreBusy as e:
                raised = e
        assert raised.applied is False
        waiting = asyncio.ensure_future(patient.read("k"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert mine.raw("SCRIPT", "KILL") == b"+OK"
        assert (await waiting).position == position
        await slow


# --- moving logs -----------------------------------------------------------------------------------------------


async def test_logs_move_there_and_back(redis_server: RedisServer) -> None:
    """Logs copied to Redis and on to another store are the same byte for byte, with lives, times and heads."""
    redis_server.flush()
    async with (
        await SqliteStore.open(":memory:") as source,
        await RedisStore.open(redis_server.url()) as middle,
        await SqliteStore.open(":memory:") as target,
    ):
        for number in range(30):
            head = type(HEAD)(kind="turn", phase="P", attention=None if number % 2 else "", labels={"n": str(number)})
            position = await append(
                source, f"k{number}", *[bytes([number]) * size for size in range(number + 1)], head=head
            )
            if number % 3 == 0:
                await append(source, f"k{number}", b"s", expected=position, head=head, compact_through=number // 2)
        for one, other in ((source, middle), (middle, target)):
            copied = await copy_logs(one, other)
            assert (copied.copied, copied.verified) == (30, 30)
            again = await copy_logs(one, other)
            assert (again.copied, again.already_there) == (0, 30)
        assert [head async for head in source.heads()] == [head async for head in target.heads()]
        for number in range(30):
            ours, theirs = await source.read(f"k{number}"), await target.read(f"k{number}")
            assert (ours.position, digest(ours)) == (theirs.position, digest(theirs))
            outcome = await middle.append(f"k{number}", [b"on"], expected=ours.position, head=HEAD)
            assert type(outcome).__name__ == "Appended"
