"""Field case 23: scripts in a Redis Cluster whose slots move, whose nodes forget scripts, change roles, and go away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
from redis.crc import key_slot

from tests.cases.script import STEPS, Script
from tests.conformance.support import HEAD, append, bodies, listed, whole
from tests.servers.redis import Monitor, RedisCluster, RedisServer, cluster, server, wait_until
from turnkeeper import errors
from turnkeeper.log.record import NOWHERE, Appended
from turnkeeper.stores.redis import RedisLifecycle, RedisStore
from turnkeeper.turn.identity import trace_hash
from turnkeeper.turn_checkpoint import TurnPhase

pytestmark = pytest.mark.anyio

T = TypeVar("T")

TURNS = 100
AT_ONCE = 10


@pytest.fixture
def nodes() -> Iterator[RedisCluster]:
    """A cluster of the test's own, with nodes that notice within a second that one is away."""
    with cluster(node_timeout_ms=1000) as made:
        yield made


def errors_of(nodes: RedisCluster) -> Counter[str]:
    """How many errors of each kind the nodes have answered with."""
    found: Counter[str] = Counter()
    for node in nodes.nodes:
        for name, value in node.info("errorstats").items():
            found[name.removeprefix("errorstat_")] += int(value["count"])
    return found


async def run_turns(store: RedisStore, moved: asyncio.Event) -> Counter[str]:
    """Turns, some at a time, each with two effects; waits between two of its steps for the next upset, now and then."""
    ledger: Counter[str] = Counter()
    lifecycle = RedisLifecycle(store, trace_hash)
    room = asyncio.Semaphore(AT_ONCE)

    async def turn(number: int) -> None:
        async with room:
            script = Script(store, ledger, trace=f"turn-{number}")
            half = len(STEPS) // 2
            await script.steps(STEPS[:half])
            if number % AT_ONCE == 0:
                moved.clear()
                await moved.wait()
            await script.steps(STEPS[half:])
            for predecessor, stage in ((None, "PROCESSING"), ("PROCESSING", "ANSWERED")):
                assert await lifecycle.advance(script.trace, predecessor, stage)

    await asyncio.gather(*(turn(number) for number in range(TURNS)))
    return ledger


async def beside(upset: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Do the work while things are upset again and again; what goes wrong with either fails the test."""
    upsetting, working = asyncio.ensure_future(upset), asyncio.ensure_future(work)
    await asyncio.wait([upsetting, working], return_when=asyncio.FIRST_COMPLETED)
    if upsetting.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await upsetting
        raise AssertionError("nothing is upset any more")
    upsetting.cancel()
    await asyncio.gather(upsetting, return_exceptions=True)
    return await working


async def all_completed(store: RedisStore, ledger: Counter[str]) -> None:
    """Every turn is through, every effect happened once, and the listing knows them all."""
    assert len(ledger) == 2 * TURNS
    assert set(ledger.values()) == {1}
    heads = await listed(store)
    assert len(heads) == TURNS
    assert {head.phase for head in heads} == {TurnPhase.COMPLETED.value}


async def test_turns_while_slots_move_and_scripts_are_forgotten(nodes: RedisCluster) -> None:
    """100 turns: their slots move under them (ASK, MOVED) and SCRIPT FLUSH takes the scripts away (NOSCRIPT): nobody sees it.

    No script names more than one key, none touches another one, and no node answers CROSSSLOT.
    """
    with ExitStack() as stack:
        monitors = [stack.enter_context(Monitor(node)) for node in nodes.nodes]
        async with await RedisStore.open(nodes.url()) as store:
            moved = asyncio.Event()
            names: set[str] = set()

            async def upset() -> None:
                number = 0
                while True:
                    for node in nodes.nodes:
                        node.run("SCRIPT", "FLUSH")
                    slot = nodes.slot(Script(store, Counter(), trace=f"turn-{number % TURNS}").session.key)
                    target = (nodes.holder(slot) + 1) % len(nodes.nodes)
                    names.update(names_in(slot))
                    await half_moved(nodes, store, slot, target)
                    number += AT_ONCE // 2
                    moved.set()
                    await asyncio.sleep(0)

            ledger = await beside(upset(), run_turns(store, moved))
            for key in names:
                await store.erase(key)
            await all_completed(store, ledger)
        scripts = 0
        for monitor in monitors:
            key = b""
            for by_script, words in monitor.seen():
                if words[0].upper() in (b"EVAL", b"EVALSHA"):
                    assert words[2] == b"1"
                    key, scripts = words[3], scripts + 1
                elif by_script and words[0] != b"TIME":
                    assert words[1] == key
    assert scripts > TURNS * len(STEPS)
    met = errors_of(nodes)
    assert met["NOSCRIPT"] > 0
    assert met["MOVED"] > 0
    assert met["ASK"] > 0
    assert met["CROSSSLOT"] == 0


async def half_moved(nodes: RedisCluster, store: RedisStore, slot: int, target: int) -> None:
    """Move a slot, with a log made and one continued while the move is half done: the one ASKs, the other does not."""
    old, new = names_in(slot)
    await store.erase(new)
    await store.erase(old)
    known = await append(store, old, b"1")
    position = NOWHERE

    async def in_between() -> None:
        nonlocal known, position
        known = await append(store, old, b"2", expected=known)
        position = await append(store, new, b"1")
        position = await append(store, new, b"2", expected=position)
        assert bodies(await store.read(new)) == [b"1", b"2"]

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(
        nodes.move, slot, target, before_keys=lambda: asyncio.run_coroutine_threadsafe(in_between(), loop).result(30)
    )
    for key, expected in ((old, known), (new, position)):
        await append(store, key, b"3", expected=expected)
        assert await whole(store, key) == [(1, b"1"), (2, b"2"), (3, b"3")]
        await store.erase(key)


def names_in(slot: int) -> tuple[str, str]:
    """Two keys whose hashes lie in the slot."""
    tag = next(number for number in range(1_000_000) if key_slot(b"%d" % number) == slot)
    return f"{{{tag}}}:old", f"{{{tag}}}:new"


async def test_an_owner_becomes_a_replica(nodes: RedisCluster) -> None:
    """A planned failover while turns run: the old master's answers lead to the new one, and nobody sees it."""
    with server(**{"cluster-enabled": "yes", "cluster-node-timeout": "1000"}) as replica:
        replica.run("CLUSTER", "MEET", "127.0.0.1", nodes.nodes[0].port)
        first = nodes.ids()[0]
        wait_until(lambda: knows(replica, first), "the replica knows its master")
        replica.run("CLUSTER", "REPLICATE", first)
        wait_until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows")
        wait_until(
            lambda: all(b"slave " + first.encode() in n.raw("CLUSTER", "NODES") for n in nodes.nodes), "all know it"
        )
        async with await RedisStore.open(nodes.url()) as store:
            moved = asyncio.Event()

            async def fail_over() -> None:
                await asyncio.to_thread(replica.run, "CLUSTER", "FAILOVER")
                await asyncio.to_thread(
                    wait_until, lambda: replica.info("replication")["role"] == "master", "the replica takes over"
                )
                while True:
                    moved.set()
                    await asyncio.sleep(0.01)

            await all_completed(store, await beside(fail_over(), run_turns(store, moved)))
        assert replica.info("replication")["role"] == "master"
        assert replica.run("DBSIZE") > 0


def knows(node: RedisServer, other: str) -> bool:
    """Whether a node has been introduced to another one."""
    return other.encode() in node.raw("CLUSTER", "NODES")


async def test_a_cluster_that_is_down(nodes: RedisCluster) -> None:
    """One master stops: CLUSTERDOWN is tried within the stated time, then it is typed, with nothing changed; then all is well."""
    keys = [next(f"k{n}" for n in range(999) if nodes.holder(nodes.slot(f"tk:k{n}")) == node) for node in range(3)]
    async with await RedisStore.open(nodes.url("patience=0.5&timeout=0.5")) as store:
        positions = [await append(store, key, b"1") for key in keys]
        nodes.nodes[2].pause()
        try:
            wait_until(lambda: b"cluster_state:fail" in nodes.nodes[0].raw("CLUSTER", "INFO"), "the cluster is down")
            began = time.monotonic()
            with pytest.raises(errors.StoreUnavailable, match="CLUSTERDOWN") as raised:
                await append(store, keys[0], b"2", expected=positions[0])
            assert raised.value.applied is False
            assert 0.5 <= time.monotonic() - began < 5
            # The master that stands still may have got it, or not even have answered the handshake.
            with pytest.raises(errors.StoreUnavailable):
                await append(store, keys[2], b"2", expected=positions[2])
            async with await RedisStore.open(nodes.url("patience=20&timeout=0.5")) as patient:
                waiting = asyncio.ensure_future(append(patient, keys[1], b"2", expected=positions[1]))
                await asyncio.sleep(0.2)
                assert not waiting.done()
                nodes.nodes[2].resume()
                assert (await waiting).seq == 2
        finally:
            nodes.nodes[2].resume()
        await asyncio.to_thread(wait_until, nodes.agrees, "the cluster is up again")
        for key, position in zip(keys, positions, strict=True):
            tail = await store.read(key, after=position)
            assert bodies(tail) in ([], [b"2"])
            await append(store, key, b"3", expected=tail.position)


async def test_a_master_that_was_killed(nodes: RedisCluster) -> None:
    """A dead node refuses connections: its keys wait within the stated time, and the error says that nothing was changed."""
    key = next(f"k{n}" for n in range(999) if nodes.holder(nodes.slot(f"tk:k{n}")) == 1)
    async with await RedisStore.open(nodes.url("patience=0.3&timeout=1")) as store:
        position = await append(store, key, b"1")
        await asyncio.to_thread(nodes.nodes[1].kill)
        for _ in range(2):
            with pytest.raises(errors.StoreUnavailable) as raised:
                await store.append(key, [b"2"], expected=position, head=HEAD)
            assert raised.value.applied is False


async def test_nodes_that_are_not_named_in_the_url(nodes: RedisCluster) -> None:
    """One node that answers is enough to find the others; seeds that are gone are passed over."""
    with server() as gone:
        pass
    seeds = f"redis+cluster://127.0.0.1:{gone.port},127.0.0.1:{nodes.nodes[1].port}?timeout=2"
    async with await RedisStore.open(seeds) as store:
        outcomes = await asyncio.gather(
            *(store.append(f"k{number}", [b"x"], expected=NOWHERE, head=HEAD) for number in range(60))
        )
        assert all(isinstance(outcome, Appended) for outcome in outcomes)
        assert all(node.run("DBSIZE") > 0 for node in nodes.nodes)
        assert len(await listed(store)) == 60
