"""Field case 14: a message that cannot be read, and one that kills its consumer, end as dead letters and hold up nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.cases.poisoned import KILLS, LIMIT
from tests.cases.streams import pending
from tests.conftest import shared_json
from tests.servers.redis import RedisServer
from turnkeeper.transport.opening import open_transport
from turnkeeper.transport.protocol import LEASE_ENDED, LIMIT_REACHED, Depth
from turnkeeper.transport.redis_streams import RedisTransport
from turnkeeper.turn.lifecycle import project
from turnkeeper.turn.names import TurnPhase

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/14-poison-message.json")
EXPECTED = CASE["expected"]
PROJECT = Path(__file__).resolve().parents[2]
UNREADABLE = b"\xff\xfe\x00"
GOOD = [f"G{number}" for number in range(1, EXPECTED["good_processed_once"] + 1)]


def supervise(url: str, ledger: Path) -> int:
    """Start the worker again whenever it dies; how often it did."""
    for deaths in range(EXPECTED["P2_process_deaths_at_most"] + 1):
        command = [sys.executable, "-m", "tests.cases.poisoned", url, str(ledger)]
        ended = subprocess.run(command, cwd=PROJECT, timeout=60, check=False).returncode
        if ended == 0:
            return deaths
        assert ended == 137
    raise AssertionError("the worker died more often than the delivery limit allows")


@pytest.mark.parametrize("where", ["sqlite", "redis"])
async def test_poison(where: str, redis_server: RedisServer, tmp_path: Path) -> None:
    """TR-7, TR-8: two dead letters with all that is known; G1 to G10 once each, before the killer's last attempt; the turn that
    the killer had opened is still active, and never completed."""
    redis_server.flush()
    url = redis_server.url() if where == "redis" else f"sqlite:///{tmp_path}/queue.db"
    ledger = tmp_path / "ledger"
    queue = await open_transport(url)
    first = await queue.publish("c", UNREADABLE)
    second = await queue.publish("c", KILLS.encode())
    for body in GOOD:
        await queue.publish("c", body.encode())
    if isinstance(queue, RedisTransport):
        await project(queue.lifecycle("c"), "turn of P2", TurnPhase.STARTED)

    assert await anyio.to_thread.run_sync(supervise, url, ledger) <= EXPECTED["P2_process_deaths_at_most"]

    lines = [line.split() for line in ledger.read_text().splitlines()]
    assert [text for text, _ in lines] == GOOD
    dead = await queue.dead_letters()
    assert [letter.id for letter in dead] == [first, second]
    assert len(dead) == EXPECTED["dead_letter_entries"]
    assert [(letter.body, letter.attempts) for letter in dead] == [(UNREADABLE, LIMIT), (KILLS.encode(), LIMIT)]
    assert dead[0].reason == "does not decode: invalid start byte"
    assert dead[1].reason == LIMIT_REACHED
    assert [failure.reason for failure in dead[1].history] == [LEASE_ENDED] * LIMIT
    assert max(int(at) for _, at in lines) <= dead[1].history[1].at, EXPECTED["good_done_before_poison_gives_up"]
    assert await queue.depth() == Depth(0, 0, 0, 2)
    if isinstance(queue, RedisTransport):
        assert pending(redis_server) == EXPECTED["xpending_at_end"]
        assert [active.trace_id for active in await queue.active()] == ["turn of P2"]
        assert await queue.lifecycle("c").stage("turn of P2") == "PROCESSING"
    await queue.close()
