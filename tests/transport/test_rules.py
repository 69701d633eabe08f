"""The rules TR-1 to TR-13 of `turnkeeper.transport.protocol.Transport`, in every place that a queue can be in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import anyio
import pytest

from tests.transport.support import ClockedTransport, Place, drain, take, take_one, until, waiting
from turnkeeper import errors
from turnkeeper.transport.protocol import HISTORY, LEASE_ENDED, LIMIT_REACHED, MAX_BODY, MAX_NAME, Delivery, Depth

pytestmark = pytest.mark.anyio

EVERY_BYTE = bytes(range(256))
Settle = Callable[[ClockedTransport, Delivery], Awaitable[bool]]
SETTLINGS: dict[str, Settle] = {
    "extend": lambda queue, delivery: queue.extend(delivery, 60),
    "acknowledge": lambda queue, delivery: queue.acknowledge(delivery),
    "retry_later": lambda queue, delivery: queue.retry_later(delivery, delay=0, reason="no"),
    "release": lambda queue, delivery: queue.release(delivery),
    "dead_letter": lambda queue, delivery: queue.dead_letter(delivery, reason="no"),
}
every_settling = pytest.mark.parametrize("settle", SETTLINGS.values(), ids=SETTLINGS)


# --- publishing and consuming ----------------------------------------------------------------------------------


async def test_what_is_published_comes(place: Place) -> None:
    """TR-1, TR-9: an entry comes with its id, key and body, as they were, to a process that opens the queue later."""
    publisher = await place.open()
    entry = await publisher.publish("conversation \u2603", EVERY_BYTE)
    found = await take_one(await place.open(), "worker 1")
    assert (found.id, found.key, found.body) == (entry, "conversation \u2603", EVERY_BYTE)
    assert (found.attempt, found.consumer) == (1, "worker 1")
    assert abs(found.published / 1000 - time.time()) < 60


async def test_empty_and_large_bodies(queue: ClockedTransport) -> None:
    """TR-9: nothing, and as much as is allowed."""
    large = EVERY_BYTE * (MAX_BODY // 256)
    await queue.publish("k")
    await queue.publish("k", large)
    assert await drain(queue) == [b"", large]


async def test_what_cannot_be_is_refused(queue: ClockedTransport) -> None:
    """TR-1: refused input says which part is wrong, and leaves nothing behind."""
    with pytest.raises(errors.ValueTooLarge) as large:
        await queue.publish("k", bytes(MAX_BODY + 1))
    assert (large.value.field, large.value.size, large.value.limit) == ("body", MAX_BODY + 1, MAX_BODY)
    for key in ("", "a\0b", "\ud800", "k" * (MAX_NAME + 1)):
        with pytest.raises(errors.InvalidInput, match="key"):
            await queue.publish(key)
    for delay in (-1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(errors.InvalidInput, match="delay"):
            await queue.publish("k", delay=delay)
    assert await queue.depth() == Depth(0, 0, 0, 0)
    with pytest.raises(errors.InvalidInput, match="count"):
        await queue.consume("a", count=0)
    with pytest.raises(errors.InvalidInput, match="lease_seconds"):
        await queue.consume("a", lease_seconds=0)
    with pytest.raises(errors.InvalidInput, match="consumer"):
        await queue.consume("")
    with pytest.raises(errors.InvalidInput, match="wait_seconds"):
        await queue.consume("a", wait_seconds=-1)


async def test_queues_are_apart(place: Place) -> None:
    """TR-1: what is in one queue does not come from another."""
    orders, mails = await place.open("orders"), await place.open("mails")
    await orders.publish("k", b"order")
    assert await drain(mails) == []
    held = await take_one(orders)
    assert not await mails.acknowledge(held)
    assert await orders.depth() == Depth(0, 0, 1, 0)
    assert await orders.acknowledge(held)


async def test_names_of_queues(place: Place) -> None:
    """A queue's name is refused where it could not be a part of a server's key."""
    for name in ("", "a b", "a{b", "a:b", "q" * 65):
        with pytest.raises(errors.InvalidInput, match="queue"):
            await place.open(name)
    with pytest.raises(errors.InvalidInput, match="max_attempts"):
        await place.open(max_attempts=0)


async def test_many_at_once(queue: ClockedTransport) -> None:
    """TR-2: what is handed out in one call is held, and no call hands out more than was asked for."""
    for number in range(7):
        await queue.publish("k", b"%d" % number)
    first, second = await take(queue, "a", 5), await take(queue, "b", 5)
    assert [delivery.body for delivery in (*first, *second)] == [b"%d" % number for number in range(7)]
    assert len(first) == 5
    assert await take(queue, "c", 5) == []


# --- leases ----------------------------------------------------------------------------------------------------


async def test_held_until_the_lease_ends(queue: ClockedTransport) -> None:
    """TR-2, TR-3: nobody else gets it before, and then it comes with the next attempt and another fence."""
    await queue.publish("k", b"x")
    first = await take_one(queue, "a", lease=10)
    await queue.advance_clock(9_000)
    assert await take(queue, "b") == []
    await queue.advance_clock(1_100)
    second = await take_one(queue, "b", lease=10)
    assert (second.id, second.attempt, second.consumer) == (first.id, 2, "b")
    assert second.fence != first.fence
    assert await queue.acknowledge(second)


async def test_extended(queue: ClockedTransport) -> None:
    """TR-2: an extended lease runs from the extension on."""
    await queue.publish("k")
    held = await take_one(queue, "a", lease=10)
    await queue.advance_clock(9_000)
    assert await queue.extend(held, 10)
    await queue.advance_clock(9_000)
    assert await take(queue, "b") == []
    assert await queue.extend(held, 1)
    await queue.advance_clock(1_100)
    assert (await take_one(queue, "b")).attempt == 2


@every_settling
async def test_too_late(queue: ClockedTransport, settle: Settle) -> None:
    """TR-4: with the lease over, also where nobody else has it yet, the holder is refused, and the entry comes again."""
    await queue.publish("k", b"x")
    held = await take_one(queue, lease=10)
    await queue.advance_clock(10_100)
    assert not await settle(queue, held)
    assert await queue.depth() == Depth(1, 0, 0, 0)
    assert (await take_one(queue, "b")).attempt == 2


@every_settling
async def test_taken_over(queue: ClockedTransport, settle: Settle) -> None:
    """TR-4: the old holder is refused, also under the name of the new one, and takes nothing from the new one."""
    await queue.publish("k", b"x")
    old = await take_one(queue, "a", lease=10)
    await queue.advance_clock(10_100)
    new = await take_one(queue, "a", lease=10)
    assert not await settle(queue, old)
    await queue.advance_clock(9_000)
    assert await take(queue, "b") == []
    assert await queue.acknowledge(new)
    assert await queue.depth() == Depth(0, 0, 0, 0)


@every_settling
async def test_settled_already(queue: ClockedTransport, settle: Settle) -> None:
    """TR-4, TR-5: what was acknowledged is not there for anybody any more, however much time goes by."""
    await queue.publish("k", b"x")
    held = await take_one(queue)
    assert await queue.acknowledge(held)
    assert not await settle(queue, held)
    await queue.advance_clock(86_400_000)
    assert await take(queue, "b") == []
    assert await queue.depth() == Depth(0, 0, 0, 0)


@every_settling
async def test_given_back_already(queue: ClockedTransport, settle: Settle) -> None:
    """TR-4: who gave a delivery back does not hold it any more."""
    await queue.publish("k", b"x")
    held = await take_one(queue)
    assert await queue.retry_later(held, delay=0, reason="no")
    assert not await settle(queue, held)
    assert await queue.depth() == Depth(1, 0, 0, 0)
    (again,) = await take(queue, "a", 5)
    assert (again.attempt, again.body) == (2, b"x")


async def test_several_who_take_at_once(place: Place) -> None:
    """TR-2: of many consumers that take at the same time, each entry goes to one."""
    queues = [await place.open() for _ in range(4)]
    entries = {await queues[0].publish(f"k{number}") for number in range(40)}
    got: list[Delivery] = []

    async def work(queue: ClockedTransport, name: str) -> None:
        while found := await take(queue, name, 3):
            got.extend(found)

    async with anyio.create_task_group() as group:
        for number, queue in enumerate(queues):
            group.start_soon(work, queue, str(number))
    assert sorted(delivery.id for delivery in got) == sorted(entries)


# --- delays and order ------------------------------------------------------------------------------------------


async def test_delayed(queue: ClockedTransport) -> None:
    """TR-6: not before its time, and then without anybody's doing; others do not wait for it."""
    await queue.publish("k", b"later", delay=10)
    await queue.publish("k", b"now")
    assert await queue.depth() == Depth(1, 1, 0, 0)
    assert await drain(queue) == [b"now"]
    await queue.advance_clock(9_000)
    assert await drain(queue) == []
    await queue.advance_clock(1_100)
    assert await queue.depth() == Depth(1, 0, 0, 0)
    assert await drain(queue) == [b"later"]


async def test_delayed_in_the_order_of_their_time(queue: ClockedTransport) -> None:
    """TR-6: delays that are over come in the order in which they ended."""
    for delay in (3, 1, 2):
        await queue.publish("k", b"%d" % delay, delay=delay)
    await queue.advance_clock(3_100)
    assert await drain(queue) == [b"1", b"2", b"3"]


async def test_retried_later(queue: ClockedTransport) -> None:
    """TR-6, TR-3: a retry comes after its delay, with the next attempt, behind what was ready before."""
    await queue.publish("k", b"x")
    held = await take_one(queue)
    assert await queue.retry_later(held, delay=10, reason="busy")
    assert await queue.depth() == Depth(0, 1, 0, 0)
    await queue.publish("k", b"y")
    await queue.advance_clock(10_100)
    other, again = await take(queue, "b", 5)
    assert (other.body, again.id, again.body, again.attempt) == (b"y", held.id, b"x", 2)
    assert again.published == held.published


async def test_released(queue: ClockedTransport) -> None:
    """TR-7, TR-8: what is released comes as if it had not been handed out, before what was behind it."""
    for body in (b"1", b"2", b"3"):
        await queue.publish("k", body)
    first, second = await take(queue, "a", 2)
    assert await queue.release(second)
    assert await queue.release(first)
    again = await take(queue, "b", 5)
    assert [(delivery.body, delivery.attempt) for delivery in again] == [(b"1", 1), (b"2", 1), (b"3", 1)]
    assert again[0].fence != first.fence
    assert await queue.release(again[0], delay=10)
    assert await queue.depth() == Depth(0, 1, 2, 0)
    await queue.advance_clock(10_100)
    assert (await take_one(queue)).attempt == 1


async def test_order_of_a_key(place: Place) -> None:
    """TR-8: entries of a key come in the order of their publication, whoever published them."""
    publishers = [await place.open() for _ in range(3)]
    for number in range(30):
        await publishers[number % 3].publish(f"k{number % 2}", b"%d" % number)
    found: list[bytes] = []
    while some := await take(publishers[0], count=4):
        found += [delivery.body for delivery in some]
    for parity in range(2):
        assert [int(body) for body in found if int(body) % 2 == parity] == list(range(parity, 30, 2))


async def test_left_behind_come_one_by_one(queue: ClockedTransport) -> None:
    """TR-8: what was left comes behind what is ready, and one with a call, so that it holds up nobody, and takes nobody along."""
    for number in range(3):
        await queue.publish("k", b"left %d" % number)
    await take(queue, "dies", 3, lease=10)
    await queue.advance_clock(10_100)
    for number in range(3):
        await queue.publish("k", b"new %d" % number)
    came: list[list[tuple[bytes, int]]] = []
    while found := await take(queue, "b", 2):
        came.append([(delivery.body, delivery.attempt) for delivery in found])
    assert came[0] == [(b"new 0", 1), (b"new 1", 1)]
    assert sorted(one for call in came for one in call) == [
        *((b"left %d" % number, 2) for number in range(3)),
        *((b"new %d" % number, 1) for number in range(3)),
    ]
    assert all(sum(body.startswith(b"left") for body, _ in call) <= 1 for call in came)


# --- limits and dead letters -----------------------------------------------------------------------------------


async def test_retried_until_the_limit(place: Place) -> None:
    """TR-7: at the limit a failed entry is a dead letter, with its body, how often it was delivered, and every reason."""
    queue = await place.open(max_attempts=3)
    entry = await queue.publish("k", EVERY_BYTE)
    for number in range(3):
        held = await take_one(queue, f"worker {number}")
        assert await queue.retry_later(held, delay=0, reason=f"no {number}")
    assert await queue.depth() == Depth(0, 0, 0, 1)
    assert await take(queue) == []
    (dead,) = await queue.dead_letters()
    assert (dead.id, dead.key, dead.body, dead.attempts, dead.reason) == (entry, "k", EVERY_BYTE, 3, "no 2")
    told = [(failure.attempt, failure.consumer, failure.reason) for failure in dead.history]
    assert told == [(number + 1, f"worker {number}", f"no {number}") for number in range(3)]
    assert dead.published <= dead.history[0].at <= dead.history[2].at <= dead.died


async def test_left_behind_until_the_limit(place: Place) -> None:
    """TR-7: consumers that die raise the count as well; behind the last of them it is a dead letter."""
    queue = await place.open(max_attempts=2)
    entry = await queue.publish("k", b"x")
    for number in range(2):
        assert (await take_one(queue, f"worker {number}", lease=10)).attempt == number + 1
        await queue.advance_clock(10_100)
    assert await take(queue) == []
    (dead,) = await queue.dead_letters()
    assert (dead.id, dead.body, dead.attempts, dead.reason) == (entry, b"x", 2, LIMIT_REACHED)
    assert [(failure.consumer, failure.reason) for failure in dead.history] == [
        ("worker 0", LEASE_ENDED),
        ("worker 1", LEASE_ENDED),
    ]
    assert await queue.depth() == Depth(0, 0, 0, 1)


async def test_a_limit_that_was_lowered(place: Place) -> None:
    """TR-7: an entry that has had more attempts than are allowed now is not delivered once more."""
    queue = await place.open(max_attempts=5)
    await queue.publish("k", b"x")
    for _ in range(2):
        await queue.retry_later(await take_one(queue), delay=0, reason="no")
    strict = await place.open(max_attempts=2)
    assert await take(strict) == []
    (dead,) = await strict.dead_letters()
    assert (dead.attempts, dead.reason, len(dead.history)) == (2, LIMIT_REACHED, 2)


async def test_releases_do_not_count(place: Place) -> None:
    """TR-7: however often an entry was released, it is not dead for that."""
    queue = await place.open(max_attempts=1)
    await queue.publish("k", b"x")
    for _ in range(3):
        assert await queue.release(await take_one(queue))
    assert await drain(queue) == [b"x"]


async def test_the_history_is_bounded(place: Place) -> None:
    """TR-7: the last failures are remembered, and no more."""
    queue = await place.open(max_attempts=1000)
    await queue.publish("k")
    for number in range(HISTORY + 5):
        await queue.retry_later(await take_one(queue), delay=0, reason=f"{number}")
    await queue.dead_letter(await take_one(queue), reason="enough")
    (dead,) = await queue.dead_letters()
    assert dead.attempts == HISTORY + 6
    assert [failure.reason for failure in dead.history] == [*map(str, range(6, HISTORY + 5)), "enough"]


async def test_reasons_of_any_text(queue: ClockedTransport) -> None:
    """TR-7: a reason is evidence, and is kept whatever it is written with."""
    await queue.publish("k")
    reason = 'no \u2603 "{quoted}" \\ \n\t\0 \ud800 ' + "long" * 1000
    await queue.retry_later(await take_one(queue), delay=0, reason=reason)
    await queue.dead_letter(await take_one(queue), reason="")
    (dead,) = await queue.dead_letters()
    assert dead.reason == ""
    assert dead.history[0].reason.startswith('no \u2603 "{quoted}" \\ \n\t\ufffd ? long')
    assert len(dead.history[0].reason) == 1000


async def test_dead_letters_are_listed_in_pages(queue: ClockedTransport) -> None:
    """TR-12: oldest entries first, behind the id that the page before ended with."""
    ids = [await queue.publish(f"k{number}", b"%d" % number) for number in range(5)]
    for held in await take(queue, count=5):
        await queue.dead_letter(held, reason="no")
    first = await queue.dead_letters(limit=3)
    rest = await queue.dead_letters(after=first[-1].id, limit=3)
    assert sorted(dead.id for dead in (*first, *rest)) == sorted(ids)
    times = [dead.published for dead in (*first, *rest)]
    assert times == sorted(times)
    assert await queue.dead_letters(after=rest[-1].id) == []
    with pytest.raises(errors.InvalidInput, match="limit"):
        await queue.dead_letters(limit=0)


async def test_revived(place: Place) -> None:
    """TR-12: a revived entry has all its attempts before it, and its history behind it."""
    queue = await place.open(max_attempts=2)
    entry = await queue.publish("k", b"x")
    first = await take_one(queue)
    await queue.dead_letter(first, reason="no")
    assert await queue.revive(entry)
    assert not await queue.revive(entry)
    assert await queue.dead_letters() == []
    assert await queue.depth() == Depth(1, 0, 0, 0)
    held = await take_one(queue)
    assert (held.id, held.attempt, held.body) == (entry, 1, b"x")
    assert not await queue.acknowledge(first), "its fence is from before the revival"
    await queue.retry_later(held, delay=0, reason="no again")
    held = await take_one(queue)
    await queue.dead_letter(held, reason="still no")
    (dead,) = await queue.dead_letters()
    assert [failure.reason for failure in dead.history] == ["no", "no again", "still no"]


async def test_revived_by_several(place: Place) -> None:
    """TR-12: of several who revive one at once, one does."""
    queues = [await place.open() for _ in range(4)]
    entry = await queues[0].publish("k", b"x")
    await queues[0].dead_letter(await take_one(queues[0]), reason="no")
    assert sorted(await asyncio.gather(*(queue.revive(entry) for queue in queues))) == [False] * 3 + [True]
    assert await drain(queues[0]) == [b"x"]


async def test_discarded(queue: ClockedTransport) -> None:
    """TR-12: only what is dead is discarded, once."""
    entry = await queue.publish("k", b"x")
    assert not await queue.discard(entry)
    await queue.dead_letter(await take_one(queue), reason="no")
    assert await queue.discard(entry)
    assert not await queue.discard(entry)
    assert not await queue.revive(entry)
    for unknown in ("", "no such id", "9" * 30, "\u0661"):
        assert not await queue.revive(unknown)
        assert not await queue.discard(unknown)
    assert await queue.depth() == Depth(0, 0, 0, 0)


# --- waiting and ending ----------------------------------------------------------------------------------------


async def test_waits_for_nothing(queue: ClockedTransport) -> None:
    """TR-11: where nothing comes, it waits as long as it was told, and returns nothing."""
    began = time.monotonic()
    assert await queue.consume("a", wait_seconds=0.3) == []
    assert 0.3 <= time.monotonic() - began < 10


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can be told of a change does not look by itself meanwhile."""
    monkeypatch.setattr("turnkeeper.transport.redis_wakes._LONGEST", 60.0)
    monkeypatch.setattr("turnkeeper.stores.postgres.listener._POLL", 60.0)


@pytest.mark.usefixtures("told")
async def test_woken_by_a_publication(place: Place) -> None:
    """TR-11: who waits gets what is published meanwhile by another process, long before its wait is over."""
    waits, publishes = await place.open(), await place.open()
    task = await waiting(waits)
    await publishes.publish("k", b"x")
    (found,) = await asyncio.wait_for(task, 10)
    assert found.body == b"x"


async def test_woken_by_time(queue: ClockedTransport) -> None:
    """TR-6, TR-11: who waits gets what is delayed, and what somebody left, once its time has come."""
    await queue.publish("k", b"left")
    await take(queue, "dies", lease=0.3)
    await queue.publish("k", b"later", delay=0.2)
    bodies: set[bytes] = set()
    with anyio.fail_after(10):
        while len(bodies) < 2:
            bodies |= {delivery.body for delivery in await queue.consume("b", count=2, wait_seconds=10)}
    assert bodies == {b"left", b"later"}


GIVING_BACK: dict[str, Settle] = {
    "retry_later": lambda queue, delivery: queue.retry_later(delivery, delay=0, reason="no"),
    "retry_later with a delay": lambda queue, delivery: queue.retry_later(delivery, delay=0.1, reason="no"),
    "release": lambda queue, delivery: queue.release(delivery),
    "release with a delay": lambda queue, delivery: queue.release(delivery, delay=0.1),
    "revive": lambda queue, delivery: queue.revive(delivery.id),
}


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("give_back", GIVING_BACK.values(), ids=GIVING_BACK)
async def test_woken_by_what_is_given_back(place: Place, give_back: Settle) -> None:
    """TR-11: who waits gets what another gives back or revives meanwhile."""
    waits, works = await place.open(), await place.open()
    await works.publish("k", b"x")
    held = await take_one(works)
    if give_back is GIVING_BACK["revive"]:
        await works.dead_letter(held, reason="no")
    task = await waiting(waits)
    assert await give_back(works, held)
    (found,) = await asyncio.wait_for(task, 10)
    assert found.id == held.id


async def test_cancelled_while_it_waits(place: Place) -> None:
    """TR-11: a consumer that was cancelled while it waited gets nothing any more: what is published then goes to others."""
    waits, works = await place.open(), await place.open()
    task = await waiting(waits)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await works.publish("k", b"x")
    found = await works.consume("b", wait_seconds=5)
    assert [(delivery.body, delivery.attempt) for delivery in found] == [(b"x", 1)]


async def test_cancelled_while_it_is_handed_something(queue: ClockedTransport) -> None:
    """TR-11: whenever it is cancelled, what it was handed already is given back, and counts as not tried."""
    await queue.publish("k", b"x")
    for turns in range(12):
        task = asyncio.ensure_future(queue.consume("cancelled", lease_seconds=3600))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            for handed in task.result():  # none, where the one before is just given back
                assert await queue.release(handed)
            continue
        with pytest.raises(asyncio.CancelledError):
            await task
    with anyio.fail_after(10):
        (found,) = await queue.consume("b", wait_seconds=10)
    assert found.attempt == 1


async def test_closed(place: Place) -> None:
    """TR-13: closing lets who waits go; what was held stays held, and others go on."""
    closed, other = await place.open(), await place.open()
    await closed.publish("k", b"x")
    held = await take_one(closed, lease=10)
    task = await waiting(closed)
    await closed.close()
    assert await asyncio.wait_for(task, 10) == []
    for call in (closed.publish("k"), closed.consume("a")):
        with pytest.raises(errors.StoreClosed):
            await call
    assert await take(other, "b") == []
    assert await other.acknowledge(held), "a delivery is a value: who knows it can settle it"


async def test_depth(queue: ClockedTransport) -> None:
    """What is ready, delayed, in flight and dead; what has become due counts as ready."""
    for number in range(6):
        await queue.publish(f"k{number}", delay=10 if number == 5 else 0)
    held = await take(queue, count=3, lease=20)
    await queue.dead_letter(held[0], reason="no")
    await queue.retry_later(held[1], delay=30, reason="no")
    assert await queue.depth() == Depth(ready=2, delayed=2, in_flight=1, dead=1)
    await queue.advance_clock(10_100)
    assert await queue.depth() == Depth(ready=3, delayed=1, in_flight=1, dead=1)
    await queue.advance_clock(20_000)
    assert await queue.depth() == Depth(ready=5, delayed=0, in_flight=0, dead=1)


async def test_nothing_was_lost_in_all_this(place: Place) -> None:
    """TR-10: nothing is reported where nothing was lost, whatever consumers do."""
    queue = await place.open(max_attempts=2)
    for number in range(4):
        await queue.publish(f"k{number}")
    held = await take(queue, count=3, lease=10)
    await queue.acknowledge(held[0])
    await queue.acknowledge(held[0])
    await queue.retry_later(held[1], delay=0, reason="no")
    await queue.advance_clock(10_100)
    await drain(queue)
    await queue.acknowledge(held[2])
    await until(lambda: _is_empty(queue), "the queue is empty")
    assert place.lost == []


async def _is_empty(queue: ClockedTransport) -> bool:
    return await queue.depth() == Depth(0, 0, 0, 0)
