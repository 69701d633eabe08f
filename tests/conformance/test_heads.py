"""Listing and retention, LOG-8 and LOG-9 of `turnkeeper.log.store.Store`, on every store."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.conformance.support import HEAD, ClockedStore, append, listed
from turnkeeper.log.record import NOWHERE, Behind, GuardFailed, Head, HeadQuery

pytestmark = pytest.mark.anyio

MINUTE = 60_000


async def test_a_head_tells_what_its_writer_gave(store: ClockedStore) -> None:
    """LOG-8: the writer's block as given with the last append, and the store's block counted by the store."""
    labels = {"turn": "t-1", "": "empty", "\u6f22": "\u5b57 \U0001f602", "quote'\"": "\x00\r\n"}
    given = Head(kind="turn", phase="STARTED", attention="ambiguous_tool", owner="w1", labels=labels, ttl_ms=MINUTE)
    position = await append(store, "k", b"12345", b"", head=given)
    (head,) = await listed(store)
    stamp = (await store.read("k")).records[0].at
    assert head == replace(given, key="k", tail=2, size=5, created=stamp, updated=stamp)

    await store.advance_clock(MINUTE)
    later = Head(kind="turn", phase="COMPLETED")
    await append(store, "k", b"678", expected=position, head=later)
    (head,) = await listed(store)
    at = (await store.read("k", after=position)).records[0].at
    assert head == replace(later, key="k", tail=3, size=8, created=stamp, updated=at)


async def test_a_head_never_leads(store: ClockedStore) -> None:
    """LOG-8: while a writer goes on, no listing shows a tail that a read behind it does not."""
    position = await append(store, "k", b"0")
    finished = asyncio.Event()

    async def write() -> None:
        nonlocal position
        for number in range(50):
            phase = Head(kind="test", phase=str(position.seq + 1))
            position = await append(store, "k", b"%d" % number, expected=position, head=phase)
        finished.set()

    writer = asyncio.ensure_future(write())
    seen = 0
    while not finished.is_set():
        (head,) = await listed(store)
        assert (await store.read("k")).position.seq >= head.tail >= seen
        assert head.phase in ("OPEN", str(head.tail))
        seen = head.tail
    await writer
    assert [head.tail for head in await listed(store)] == [51]


async def test_refused_appends_do_not_touch_the_head(store: ClockedStore) -> None:
    """LOG-8: the head is written by the append that is in, never by one that was refused."""
    await append(store, "k", b"1")
    before = await listed(store)
    refused = await store.append("k", [b"x"], expected=NOWHERE, head=Head(kind="other", phase="LATE"))
    assert isinstance(refused, Behind)
    assert await listed(store) == before


async def test_filters(store: ClockedStore) -> None:
    """LOG-8: every filter alone and together; keys in order."""
    heads = {
        "conv:1": Head(kind="conversation", phase="OPEN"),
        "turn:1": Head(kind="turn", phase="STARTED"),
        "turn:2": Head(kind="turn", phase="STARTED", attention="ambiguous_tool"),
        "turn:3": Head(kind="turn", phase="COMPLETED"),
        "turn%": Head(kind="odd", phase="STARTED", attention="x"),
        "turn_": Head(kind="odd", phase="STARTED"),
    }
    for key, head in heads.items():
        await append(store, key, b"x", head=head)
        await store.advance_clock(MINUTE)

    async def keys(query: HeadQuery) -> list[str]:
        return [head.key for head in await listed(store, query)]

    assert await keys(HeadQuery()) == sorted(heads)
    assert await keys(HeadQuery(kind="turn")) == ["turn:1", "turn:2", "turn:3"]
    assert await keys(HeadQuery(phase="STARTED")) == ["turn%", "turn:1", "turn:2", "turn_"]
    assert await keys(HeadQuery(attention=True)) == ["turn%", "turn:2"]
    assert await keys(HeadQuery(attention=False)) == ["conv:1", "turn:1", "turn:3", "turn_"]
    assert await keys(HeadQuery(prefix="turn:")) == ["turn:1", "turn:2", "turn:3"]
    assert await keys(HeadQuery(prefix="turn_")) == ["turn_"]
    assert await keys(HeadQuery(prefix="turn%")) == ["turn%"]
    assert await keys(HeadQuery(prefix="Turn")) == []
    second = next(head for head in await listed(store) if head.key == "turn:2")
    assert await keys(HeadQuery(updated_before=second.updated)) == ["conv:1", "turn:1"]
    assert await keys(HeadQuery("turn", "STARTED", attention=True, prefix="turn:")) == ["turn:2"]
    assert await keys(HeadQuery("turn", "STARTED", attention=True, prefix="conv:")) == []


async def test_a_long_listing_while_writes_go_on(store: ClockedStore) -> None:
    """LOG-8: a slow reader of 450 logs holds nobody up, and gets each log that was there once, whatever is written."""
    first = await asyncio.gather(*(append(store, f"k{number:03}", b"x") for number in range(450)))
    positions = {f"k{number:03}": position for number, position in enumerate(first)}
    seen: list[str] = []
    async for head in store.heads(HeadQuery(prefix="k")):
        seen.append(head.key)
        if len(seen) % 40 == 0:
            # Each of these returns while the listing stands between two rows: it holds no lock.
            key = f"k{(len(seen) * 7) % 450:03}"
            positions[key] = await append(store, key, b"y", expected=positions[key])
            await append(store, f"a{len(seen)}", b"not of the prefix")
            await append(store, f"k{len(seen):03}.5", b"new")
    assert seen == sorted(seen)
    assert len(seen) == len(set(seen))
    assert set(positions) <= set(seen)
    assert len(await listed(store)) == 450 + 2 * 11


async def test_exactly_one_page(store: ClockedStore) -> None:
    """LOG-8: as many logs as a page holds, one fewer and one more (whatever a store's page is near 200)."""
    count = 0
    for target in (199, 200, 201):
        await asyncio.gather(*(append(store, f"k{number:03}", b"x") for number in range(count, target)))
        count = target
        assert [head.key for head in await listed(store)] == [f"k{number:03}" for number in range(target)]


async def test_retention_comes_with_the_append(store: ClockedStore) -> None:
    """LOG-9: ttl and proof deadline are kept as given, extended by appends, and never by reads."""
    now = (await store.read("k")).now
    proof = now + 100 * MINUTE
    position = await append(store, "k", b"1", head=replace(HEAD, ttl_ms=10 * MINUTE, keep_until=proof))
    (head,) = await listed(store)
    assert (head.ttl_ms, head.keep_until) == (10 * MINUTE, proof)
    assert head.expires == proof

    await store.advance_clock(95 * MINUTE)
    await store.read("k")
    assert await listed(store) == [head]
    refused = await store.append("k", [b"x"], expected=NOWHERE, head=replace(HEAD, ttl_ms=1))
    assert isinstance(refused, Behind)
    assert await listed(store) == [head]

    await append(store, "k", b"2", expected=position, head=replace(HEAD, ttl_ms=10 * MINUTE, keep_until=proof))
    (head,) = await listed(store)
    assert head.expires == head.updated + 10 * MINUTE
    assert head.updated + 10 * MINUTE > proof


async def test_for_ever(store: ClockedStore) -> None:
    """LOG-9: without a ttl a log never expires, also behind its proof deadline; large numbers are kept."""
    await append(store, "k", b"1", head=replace(HEAD, keep_until=5))
    await append(store, "l", b"1", head=replace(HEAD, ttl_ms=2**52, keep_until=2**52))
    first, second = await listed(store)
    assert (first.ttl_ms, first.expires) == (0, None)
    assert second.expires == second.updated + 2**52


async def test_no_log_is_dropped_before_its_proof_deadline(store: ClockedStore) -> None:
    """LOG-9: whatever tidying does, a log before `keep_until` keeps every record."""
    now = (await store.read("k")).now
    await append(store, "k", b"1", b"2", head=replace(HEAD, ttl_ms=1, keep_until=now + 10 * MINUTE))
    await store.advance_clock(9 * MINUTE)
    await store.tidy()
    tail = await store.read("k")
    assert [record.body for record in tail.records] == [b"1", b"2"]
    outcome = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD)
    assert not isinstance(outcome, GuardFailed)
    assert isinstance(outcome, Behind)
