"""The rules of a log, LOG-1 to LOG-7 of `turnkeeper.log.store.Store`, on every store (LOG-8 and LOG-9: test_heads.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from tests.conformance.support import HEAD, ClockedStore, append, bodies, listed, whole
from tests.conftest import also_encrypted
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Position, Record

pytestmark = [pytest.mark.anyio, also_encrypted("sqlite memory")]

MINUTE = 60_000


# --- LOG-1: all or nothing -------------------------------------------------------------------------------------


async def test_an_append_is_there_when_it_returns(store: ClockedStore) -> None:
    """LOG-1: what was answered Appended is read at once, whole and in order."""
    position = await append(store, "k", b"one", b"two", b"three")
    tail = await store.read("k")
    assert tail.position == position
    assert bodies(tail) == [b"one", b"two", b"three"]


async def test_a_refused_append_leaves_nothing(store: ClockedStore) -> None:
    """LOG-1: neither a record nor a changed head of an append that was refused, whatever refused it."""
    position = await append(store, "k", b"one")
    before = (await store.read("k")).records, await listed(store)
    loud = [b"x" * 100] * 3
    behind = await store.append("k", loud, expected=NOWHERE, head=HEAD)
    late = await store.append("k", loud, expected=position, head=HEAD, guard=Guard(not_after=1))
    nowhere = await store.append("other", loud, expected=NOWHERE, head=HEAD, guard=Guard(not_after=1))
    assert isinstance(behind, Behind)
    assert isinstance(late, GuardFailed)
    assert isinstance(nowhere, GuardFailed)
    assert ((await store.read("k")).records, await listed(store)) == before
    assert (await store.read("other")).position == NOWHERE


# --- LOG-2: compare and set ------------------------------------------------------------------------------------


async def test_one_of_many_writers_at_one_tail_wins(store: ClockedStore) -> None:
    """LOG-2: of fifty appends at the same tail one is in, and the others are told what it wrote."""
    start = await append(store, "k", b"start")
    outcomes = await asyncio.gather(
        *(store.append("k", [b"%d" % writer], expected=start, head=HEAD) for writer in range(50))
    )
    won = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Appended)]
    assert len(won) == 1
    for index, outcome in enumerate(outcomes):
        if index not in won:
            assert isinstance(outcome, Behind)
            assert bodies(outcome.tail) == [b"%d" % won[0]]
    assert await whole(store, "k") == [(1, b"start"), (2, b"%d" % won[0])]


async def test_one_of_many_creators_wins(store: ClockedStore) -> None:
    """LOG-2, LOG-5: a log is created once, and those who came second know its life from the answer."""
    outcomes = await asyncio.gather(
        *(store.append("k", [b"%d" % writer], expected=NOWHERE, head=HEAD) for writer in range(20))
    )
    created = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
    assert len(created) == 1
    assert {o.tail.position for o in outcomes if isinstance(o, Behind)} == {created[0].position}


async def test_behind_brings_what_was_missed(store: ClockedStore) -> None:
    """LOG-2: one answer brings every record behind `expected`, of several appends, and the tail to go on from."""
    known = await append(store, "k", b"1", b"2")
    position = await append(store, "k", b"3", expected=known)
    position = await append(store, "k", b"4", b"5", expected=position)
    outcome = await store.append("k", [b"mine"], expected=known, head=HEAD)
    assert isinstance(outcome, Behind)
    assert [(r.seq, r.body) for r in outcome.tail.records] == [(3, b"3"), (4, b"4"), (5, b"5")]
    assert outcome.tail.position == position
    assert not outcome.tail.restart
    assert outcome.tail == (await store.read("k", after=known))._replace(now=outcome.tail.now)
    await append(store, "k", b"mine", expected=outcome.tail.position)


async def test_who_knew_nothing_is_told_everything(store: ClockedStore) -> None:
    """LOG-2: the answer to an append at NOWHERE is the whole log, to be folded from the empty state."""
    await append(store, "k", b"1", b"2")
    outcome = await store.append("k", [b"mine"], expected=NOWHERE, head=HEAD)
    assert isinstance(outcome, Behind)
    assert bodies(outcome.tail) == [b"1", b"2"]
    assert outcome.tail.restart


async def test_logs_do_not_meet(store: ClockedStore) -> None:
    """LOG-2, LOG-5: a position of one log is nothing in another, and keys that differ in little are different logs."""
    keys = ["k", "K", "k ", "k:", "{k}", "k\u00e9", "ke\u0301", "k%", "k_"]
    positions = [await append(store, key, key.encode()) for key in keys]
    assert len({position.incarnation for position in positions}) == len(keys)
    for key in keys:
        assert await whole(store, key) == [(1, key.encode())]
    assert isinstance(await store.append("k", [b"x"], expected=positions[1], head=HEAD), Behind)


# --- reading ---------------------------------------------------------------------------------------------------


async def test_reading_behind_a_position(store: ClockedStore) -> None:
    """LOG-2, LOG-5: a reader gets what follows its position, and `restart` tells whether it continues what it knows."""
    first = await append(store, "k", b"1")
    second = await append(store, "k", b"2", b"3", expected=first)
    fresh = await store.read("k")
    assert (bodies(fresh), fresh.restart) == ([b"1", b"2", b"3"], True)
    behind = await store.read("k", after=first)
    assert (bodies(behind), behind.restart) == ([b"2", b"3"], False)
    level = await store.read("k", after=second)
    assert (bodies(level), level.restart, level.position) == ([], False, second)


async def test_reading_what_is_not_there(store: ClockedStore) -> None:
    """LOG-5: a key without a log has the tail NOWHERE; who knew one starts from the empty state."""
    tail = await store.read("nothing")
    assert (tail.position, tail.records, tail.restart) == (NOWHERE, [], False)
    tail = await store.read("nothing", after=Position(b"12345678", 4))
    assert (tail.position, tail.records, tail.restart) == (NOWHERE, [], True)


# --- LOG-3: the store's time -----------------------------------------------------------------------------------


async def test_records_are_stamped_with_the_stores_time(store: ClockedStore) -> None:
    """LOG-3: the stamp is the store's time inside the append, the same on its records, and moves with that clock."""
    before = (await store.read("k")).now
    first = await store.append("k", [b"1", b"2"], expected=NOWHERE, head=HEAD)
    assert isinstance(first, Appended)
    await store.advance_clock(7 * MINUTE)
    second = await store.append("k", [b"3"], expected=first.position, head=HEAD)
    assert isinstance(second, Appended)
    tail = await store.read("k")
    assert [record.at for record in tail.records] == [first.at, first.at, second.at]
    assert before <= first.at < before + MINUTE
    assert first.at + 7 * MINUTE <= second.at < first.at + 8 * MINUTE
    assert tail.now >= second.at


async def test_answers_bring_the_stores_time(store: ClockedStore) -> None:
    """LOG-3, LOG-4: every answer tells the store's time, so that a caller can judge a lease without a clock of its own."""
    position = await append(store, "k", b"1")
    await store.advance_clock(5 * MINUTE)
    stamp = (await store.read("k")).records[0].at
    behind = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD)
    failed = await store.append("k", [b"x"], expected=position, head=HEAD, guard=Guard(not_after=stamp))
    assert isinstance(behind, Behind)
    assert isinstance(failed, GuardFailed)
    for now in (behind.tail.now, failed.now, (await store.read("k")).now, (await store.read("none")).now):
        assert stamp + 5 * MINUTE <= now < stamp + 6 * MINUTE


async def test_stamps_never_go_back(store: ClockedStore) -> None:
    """LOG-3: stamps of one log grow with its sequences, also under concurrent writers."""
    position = await append(store, "k", b"start")

    async def writer(position: Position) -> None:
        for _ in range(10):
            while True:
                outcome = await store.append("k", [b"x"], expected=position, head=HEAD)
                position = outcome.position if isinstance(outcome, Appended) else _tail_of(outcome)
                if isinstance(outcome, Appended):
                    break

    await asyncio.gather(*(writer(position) for _ in range(4)))
    stamps = [record.at for record in (await store.read("k")).records]
    assert len(stamps) == 41
    assert stamps == sorted(stamps)


def _tail_of(outcome: Behind | GuardFailed) -> Position:
    assert isinstance(outcome, Behind)
    return outcome.tail.position


# --- LOG-4: guards ---------------------------------------------------------------------------------------------


async def test_not_before(store: ClockedStore) -> None:
    """LOG-4: an append under `not_before` waits for the store's clock, and for no other."""
    position = await append(store, "k", b"lease")
    end = (await store.read("k")).records[0].at + 10 * MINUTE
    early = await store.append("k", [b"x"], expected=position, head=HEAD, guard=Guard(not_before=end))
    assert isinstance(early, GuardFailed)
    assert early.now < end
    await store.advance_clock(10 * MINUTE)
    outcome = await store.append("k", [b"x"], expected=position, head=HEAD, guard=Guard(not_before=end))
    assert isinstance(outcome, Appended)
    assert outcome.at >= end


async def test_not_after(store: ClockedStore) -> None:
    """LOG-4: an append under `not_after` is in only while that instant has not passed on the store's clock."""
    position = await append(store, "k", b"lease")
    end = (await store.read("k")).records[0].at + 10 * MINUTE
    outcome = await store.append("k", [b"x"], expected=position, head=HEAD, guard=Guard(not_after=end))
    assert isinstance(outcome, Appended)
    assert outcome.at <= end
    await store.advance_clock(10 * MINUTE + 1)
    late = await store.append("k", [b"y"], expected=outcome.position, head=HEAD, guard=Guard(not_after=end))
    assert isinstance(late, GuardFailed)
    assert late.now > end
    assert bodies(await store.read("k")) == [b"lease", b"x"]


async def test_both_ends_of_a_guard(store: ClockedStore) -> None:
    """LOG-4: between both instants, and not outside of either."""
    position = await append(store, "k", b"start")
    start = (await store.read("k")).records[0].at
    window = Guard(not_before=start + 10 * MINUTE, not_after=start + 20 * MINUTE)
    assert isinstance(await store.append("k", [b"x"], expected=position, head=HEAD, guard=window), GuardFailed)
    await store.advance_clock(15 * MINUTE)
    inside = await store.append("k", [b"x"], expected=position, head=HEAD, guard=window)
    assert isinstance(inside, Appended)
    await store.advance_clock(15 * MINUTE)
    assert isinstance(await store.append("k", [b"x"], expected=inside.position, head=HEAD, guard=window), GuardFailed)


async def test_a_guard_on_creation(store: ClockedStore) -> None:
    """LOG-4: a log is not created outside of the guard (the proof deadline stands on this)."""
    now = (await store.read("k")).now
    late = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD, guard=Guard(not_after=now - 1))
    assert isinstance(late, GuardFailed)
    assert (await store.read("k")).position == NOWHERE
    outcome = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD, guard=Guard(not_after=now + MINUTE))
    assert isinstance(outcome, Appended)


@pytest.mark.parametrize("guard", [Guard(not_after=1), Guard(not_before=2**60), Guard(2**60, 1)])
async def test_behind_is_said_before_a_failed_guard(store: ClockedStore, guard: Guard) -> None:
    """LOG-4: whoever does not know the tail learns it; that its guard fails as well is not the news."""
    known = await append(store, "k", b"1")
    await append(store, "k", b"2", expected=known)
    for expected in (known, NOWHERE, Position(b"otherlog", 1)):
        outcome = await store.append("k", [b"x"], expected=expected, head=HEAD, guard=guard)
        assert isinstance(outcome, Behind)
        assert bodies(outcome.tail)[-1] == b"2"
    unborn = await store.append("new", [b"x"], expected=Position(b"otherlog", 1), head=HEAD, guard=guard)
    assert isinstance(unborn, Behind)
    assert unborn.tail.position == NOWHERE


# --- LOG-5: sequences and lives --------------------------------------------------------------------------------


async def test_sequences_are_dense(store: ClockedStore) -> None:
    """LOG-5: 1, 2, 3, … whatever the appends' sizes, and the position is the last of them."""
    position = NOWHERE
    written: list[bytes] = []
    for size in (1, 3, 1, 200, 2):
        batch = [os.urandom(5) for _ in range(size)]
        position = await append(store, "k", *batch, expected=position)
        written += batch
        assert position.seq == len(written)
    assert await whole(store, "k") == list(enumerate(written, 1))


async def test_compaction(store: ClockedStore) -> None:
    """LOG-5: the records up to n go in the append that replaces them; sequences go on."""
    position = await append(store, "k", b"1", b"2", b"3")
    position = await append(store, "k", b"snapshot", b"4", expected=position, compact_through=3)
    assert position.seq == 5
    assert await whole(store, "k") == [(4, b"snapshot"), (5, b"4")]
    position = await append(store, "k", b"5", expected=position)
    assert await whole(store, "k") == [(4, b"snapshot"), (5, b"4"), (6, b"5")]


async def test_readers_across_a_compaction(store: ClockedStore) -> None:
    """LOG-5: whoever missed a part that is gone starts again from the snapshot; whoever did not, goes on."""
    known = [await append(store, "k", b"1")]
    for number in range(2, 6):
        known.append(await append(store, "k", b"%d" % number, expected=known[-1]))
    tail_position = await append(store, "k", b"snapshot", expected=known[-1], compact_through=4)
    for position in (NOWHERE, *known[:3]):
        tail = await store.read("k", after=position)
        assert (bodies(tail), tail.restart) == ([b"5", b"snapshot"], True), position
        outcome = await store.append("k", [b"x"], expected=position, head=HEAD)
        assert isinstance(outcome, Behind)
        assert outcome.tail.restart
        assert outcome.tail.records == tail.records
    for position, rest in ((known[3], [b"5", b"snapshot"]), (known[4], [b"snapshot"]), (tail_position, [])):
        tail = await store.read("k", after=position)
        assert (bodies(tail), tail.restart) == (rest, False), position


async def test_compacting_less_than_before(store: ClockedStore) -> None:
    """LOG-5: what is gone stays known as gone, so that no reader is given a log with a gap for a whole one."""
    known = [await append(store, "k", b"1")]
    for number in range(2, 6):
        known.append(await append(store, "k", b"%d" % number, expected=known[-1]))
    position = await append(store, "k", b"snapshot", expected=known[-1], compact_through=5)
    await append(store, "k", b"7", expected=position, compact_through=2)
    tail = await store.read("k", after=known[2])
    assert (bodies(tail), tail.restart) == ([b"snapshot", b"7"], True)


async def test_a_younger_log_never_matches(store: ClockedStore) -> None:
    """LOG-5: a writer who knew the key before it was erased cannot append to the log of the same length that followed."""
    old = await append(store, "k", b"1", b"2")
    assert await store.erase("k")
    gone = await store.append("k", [b"x"], expected=old, head=HEAD)
    assert isinstance(gone, Behind)
    assert (gone.tail.position, gone.tail.records, gone.tail.restart) == (NOWHERE, [], True)
    young = await append(store, "k", b"a", b"b")
    assert young.seq == old.seq
    assert young.incarnation != old.incarnation
    outcome = await store.append("k", [b"x"], expected=old, head=HEAD)
    assert isinstance(outcome, Behind)
    assert (bodies(outcome.tail), outcome.tail.restart) == ([b"a", b"b"], True)
    tail = await store.read("k", after=old)
    assert (bodies(tail), tail.restart) == ([b"a", b"b"], True)


async def test_lives_of_a_key_are_told_apart(store: ClockedStore) -> None:
    """LOG-5: incarnations are random: twenty lives of one key, and none was there before."""
    lives: set[bytes] = set()
    for _ in range(20):
        lives.add((await append(store, "k", b"x")).incarnation)
        await store.erase("k")
    assert len(lives) == 20


async def test_erasing(store: ClockedStore) -> None:
    """LOG-5: `unchanged_since` erases only the log that the caller has seen; the answer tells whether one was dropped."""
    await append(store, "k", b"1", b"2")
    await append(store, "neighbour", b"1")
    assert not await store.erase("k", unchanged_since=1)
    assert not await store.erase("k", unchanged_since=3)
    assert await whole(store, "k") == [(1, b"1"), (2, b"2")]
    assert await store.erase("k", unchanged_since=2)
    assert not await store.erase("k")
    assert not await store.erase("k", unchanged_since=0)
    assert await whole(store, "k") == []
    assert [head.key for head in await listed(store)] == ["neighbour"]
    assert await whole(store, "neighbour") == [(1, b"1")]
    await store.tidy()
    assert await whole(store, "neighbour") == [(1, b"1")]


# --- LOG-6: lost answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancelled_append_is_whole_or_not_at_all(store: ClockedStore, steps: int) -> None:
    """LOG-6: cancelled after any number of turns of the loop: all records or none, and the next call works at once."""
    start = await append(store, "k", b"start")
    task = asyncio.ensure_future(store.append("k", [b"a", b"b"], expected=start, head=HEAD))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    answer = (await asyncio.gather(task, return_exceptions=True))[0]
    assert isinstance(answer, asyncio.CancelledError | Appended)
    # The next write at the same tail settles it: over a network, what a read did not find yet may still be on its way.
    outcome = await store.append("k", [b"next"], expected=start, head=HEAD)
    if isinstance(outcome, Behind):
        assert bodies(outcome.tail) == [b"a", b"b"]
        await append(store, "k", b"next", expected=outcome.tail.position)
        assert await whole(store, "k") == [(1, b"start"), (2, b"a"), (3, b"b"), (4, b"next")]
    else:
        assert isinstance(answer, asyncio.CancelledError)
        assert await whole(store, "k") == [(1, b"start"), (2, b"next")]


async def test_cancelled_neighbours(store: ClockedStore) -> None:
    """LOG-6: of many appends under way half are cancelled: the others are in, and nothing is half."""
    tasks = [
        asyncio.ensure_future(store.append(f"k{number}", [b"a", b"b"], expected=NOWHERE, head=HEAD))
        for number in range(40)
    ]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for number, answer in enumerate(answers):
        records = await whole(store, f"k{number}")
        if isinstance(answer, Appended):
            assert records == [(1, b"a"), (2, b"b")]
        else:
            assert number % 2 == 0
            assert isinstance(answer, asyncio.CancelledError)
            assert records in ([], [(1, b"a"), (2, b"b")])


async def test_cancelled_reads_listings_and_erasures(store: ClockedStore) -> None:
    """LOG-6: no other call, cancelled, holds anything up either."""
    position = await append(store, "k", b"1")
    for steps in range(4):
        for call in (store.read("k"), listed(store), store.erase("absent"), store.tidy(), store.promises()):
            task = asyncio.ensure_future(call)
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            position = await append(store, "k", b"x", expected=position)
    assert (await store.read("k")).position == position


# --- LOG-7: opaque bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        [b""],
        [b"", b"", b"x", b""],
        [bytes(range(256))],
        [bytes([value]) for value in range(256)],
        [b"\x00", b"\x00\x00", b"a\x00b", b"'\"\\;--", b"\xff\xfe\xed\xa0\x80", b"42", b"4.0", b"null"],
        [os.urandom(5_000_000)],
    ],
    ids=["empty", "several empty", "all byte values", "each byte value", "not text", "5 MB"],
)
async def test_bodies_come_back_byte_for_byte(store: ClockedStore, batch: Sequence[bytes]) -> None:
    """LOG-7: what goes in comes out, of the same type, in reads and in Behind alike."""
    await append(store, "k", *batch)
    records = (await store.read("k")).records
    assert [record.body for record in records] == list(batch)
    assert all(type(record.body) is bytes for record in records)
    assert all(isinstance(record, Record) for record in records)
    behind = await store.append("k", [b"x"], expected=NOWHERE, head=HEAD)
    assert isinstance(behind, Behind)
    assert behind.tail.records == records


async def test_what_a_store_promises(store: ClockedStore) -> None:
    """LOG-1: a store tells an operator what it promises as it is set up, first of all what durable means."""
    promises = await store.promises()
    assert "durable" in [promise.name for promise in promises]
    assert all(promise.found for promise in promises)
