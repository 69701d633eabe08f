"""The shell that every log shares (`log/shell.py`), with the smallest rules, on every store; lost answers: LOG-6."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.conformance.support import HEAD, ClockedStore, append, listed, whole
from tests.conformance.tally import Added, Closed, Entry, Tally, TallyLog, adding, tally_log
from tests.conftest import also_encrypted
from tests.faulty import Fault, FaultyStore, When, cancelled, unavailable
from turnkeeper.errors import SchemaConflict, StoreBusy, StoreContention, StoreUnavailable, TurnkeeperError
from turnkeeper.log import frames
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import NOWHERE, Guard

pytestmark = [pytest.mark.anyio, also_encrypted("sqlite memory")]

WHENS: tuple[When, When] = ("before", "after")


async def fails(log: TallyLog, amount: int, by: str) -> type[BaseException]:
    """Ask in a task of its own (so that it may be cancelled); the type of what it raises."""
    answer = (await asyncio.gather(asyncio.ensure_future(log.ask(adding(amount, by))), return_exceptions=True))[0]
    assert isinstance(answer, BaseException)
    return type(answer)


# --- deciding --------------------------------------------------------------------------------------------------


async def test_an_answer_is_given_once_its_records_are_in(store: ClockedStore) -> None:
    """LOG-1: asked, decided, appended; another process reads the same state, stamps included."""
    log = tally_log(store)
    assert await log.ask(adding(3, "a")) == "added"
    assert await log.ask(lambda _state, _now: Decision("two", (Added(1, "b"), Added(2, "c")))) == "two"
    assert (log.cached.total, log.cached.by, log.position.seq, log.appends) == (6, ("a", "b", "c"), 3, 2)
    other = tally_log(store)
    assert await other.read() == log.cached
    assert other.position == log.position
    assert [head.phase for head in await listed(store)] == ["6"]
    assert log.cached.stamps == tuple(record.at for record in (await store.read("tally")).records)


async def test_behind_is_caught_up_and_decided_again(store: ClockedStore) -> None:
    """LOG-2: a stale process decides again on what it missed, within the one append call that told it."""
    faulty = FaultyStore(store)
    stale, other = tally_log(faulty), tally_log(store)
    await stale.ask(adding(1, "a"))
    await other.ask(adding(10, "b"))
    await other.ask(adding(100, "c"))
    faulty.plan()
    seen: list[int] = []
    assert await stale.ask(adding(1000, "d", seen=seen)) == "added"
    assert seen == [1, 111]
    assert faulty.calls == ["append", "append"]
    assert stale.cached.total == 1111
    assert len(await whole(store, "tally")) == 4


async def test_what_was_missed_may_change_the_answer(store: ClockedStore) -> None:
    """LOG-2: the second decision counts: what another process did meanwhile is not done again."""
    stale, other = tally_log(store), tally_log(store)
    await stale.read()
    await other.ask(adding(5, "job"))
    assert await stale.ask(adding(5, "job")) == "known"
    assert stale.cached.total == 5
    assert stale.appends == 0


async def test_a_failed_guard_is_decided_again_with_the_stores_time(store: ClockedStore) -> None:
    """LOG-4: the decider is asked again, and `now` is the time that the store has just told."""
    log = tally_log(store)
    await log.ask(adding(1, "a"))
    end = log.cached.stamps[0] + 1000
    await store.advance_clock(60_000)
    nows: list[int] = []

    def decide(_state: Tally, now: int) -> Decision[Entry, str]:
        nows.append(now)
        return Decision("late") if now > end else Decision("in time", (Added(1, "b"),), Guard(not_after=end))

    assert await log.ask(decide) == "late"
    assert len(nows) == 2
    assert nows[0] <= end < nows[1]
    assert nows[1] >= end + 59_000
    assert log.cached.by == ("a",)


async def test_an_answer_without_records_needs_a_fresh_state(store: ClockedStore) -> None:
    """An answer that could have changed is given only on a state read behind the question; a final one from the cache."""
    faulty = FaultyStore(store)
    log, other = tally_log(faulty), tally_log(store)
    await log.ask(adding(1, "a"))
    await other.ask(adding(2, "b"))
    faulty.plan()
    assert await log.ask(lambda state, _now: Decision(str(state.total), final=True)) == "1"
    assert faulty.calls == []
    assert await log.ask(lambda state, _now: Decision(str(state.total))) == "3"
    assert faulty.calls == ["read"]


async def test_a_refusal_on_a_stale_state_is_checked(store: ClockedStore) -> None:
    """What `decide` raises counts only on a state read behind the question, and leaves nothing in the log."""

    class Refused(TurnkeeperError):
        pass

    def needs_ten(state: Tally, _now: int) -> Decision[Entry, str]:
        if state.total < 10:
            raise Refused(f"only {state.total}")
        return Decision("enough", (Closed(),))

    log, other = tally_log(store), tally_log(store)
    await log.ask(adding(1, "a"))
    with pytest.raises(Refused, match="only 1"):
        await log.ask(needs_ten)
    assert len(await whole(store, "tally")) == 1
    await other.ask(adding(9, "b"))
    assert await log.ask(needs_ten) == "enough"
    assert log.cached.closed


async def test_contention_is_said_in_the_end(store: ClockedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that others overtake again and again gives up with a typed error, with nothing of its own in the log."""
    monkeypatch.setattr("turnkeeper.log.shell._TRIES", 5)
    log = tally_log(store)
    position = await append(store, "tally", frames.encode(msgspec.msgpack.encode((b"", Added(1, "other")))))

    async def overtaken(*args: object, **kwargs: object) -> object:
        nonlocal position
        body = frames.encode(msgspec.msgpack.encode((b"", Added(1, "other"))))
        position = await append(store, "tally", body, expected=position)
        return await store.append(*args, **kwargs)  # pyright: ignore[reportArgumentType]  # handed through

    faulty = FaultyStore(store)
    monkeypatch.setattr(faulty, "append", overtaken)
    log = tally_log(faulty)
    with pytest.raises(StoreContention) as raised:
        await log.ask(adding(1, "mine"))
    assert raised.value.applied is False
    assert "mine" not in (await tally_log(store).read()).by


# --- lost answers (LOG-6) --------------------------------------------------------------------------------------


async def test_a_store_that_answers_no_append_is_not_asked_for_ever(store: ClockedStore) -> None:
    """LOG-6: it can be read and loses every append: the caller is told after a few, and may ask again later."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    faulty.plan(*[fault for _ in range(50) for fault in (unavailable("before"), None)])
    with pytest.raises(StoreUnavailable):
        await log.ask(adding(1, "mine"))
    assert faulty.calls.count("append") == 5
    faulty.plan()
    assert await log.ask(adding(1, "mine")) == "added"
    assert len(await whole(store, "tally")) == 1


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("first", [True, False])
async def test_an_unavailable_store_is_asked_what_became_of_it(store: ClockedStore, when: When, first: bool) -> None:
    """LOG-6: the answer to an append is lost: its id tells whether it is in; it is answered as success, and is in once."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    if not first:
        await log.ask(adding(1, "a"))
    faulty.plan(unavailable(when))
    seen: list[int] = []
    # No name: a decider that cannot tell a repeat, so only the append's id keeps it from being in twice.
    assert await log.ask(adding(10, seen=seen)) == "added"
    assert faulty.calls == (["append", "read"] if when == "after" else ["append", "read", "append"])
    before = 0 if first else 1
    assert seen == ([before] if when == "after" else [before, before])
    assert log.cached.total == before + 10
    assert log.appends == before + 1
    assert (await tally_log(store).read()).total == before + 10


async def test_a_lost_append_is_told_from_another_writers(store: ClockedStore) -> None:
    """LOG-6: a record of somebody else in the place of ours is not taken for ours."""
    faulty = FaultyStore(store)
    log, other = tally_log(faulty), tally_log(store)
    await log.ask(adding(1, "a"))
    await other.ask(adding(2, "b"))
    faulty.plan(unavailable("before"))
    seen: list[int] = []
    assert await log.ask(adding(4, seen=seen)) == "added"
    assert seen == [1, 3]
    assert (await other.read()).total == 7
    assert len(await whole(store, "tally")) == 3


async def test_a_lost_append_is_found_although_others_went_on(store: ClockedStore) -> None:
    """LOG-6: ours is found also where others have appended behind it before we could look."""
    faulty = FaultyStore(store)
    log, other = tally_log(faulty), tally_log(store)
    await log.ask(adding(1, "a"))
    real_read = faulty.read

    async def read_late(key: str, *, after: object = NOWHERE) -> object:
        await other.ask(adding(100))
        return await real_read(key, after=after)  # pyright: ignore[reportArgumentType]  # handed through

    faulty.read = read_late  # pyright: ignore[reportAttributeAccessIssue]  # another writer, just before we look
    faulty.plan(unavailable("after"))
    assert await log.ask(adding(10)) == "added"
    assert log.cached.total == 111
    assert len(await whole(store, "tally")) == 3


@pytest.mark.parametrize("when", WHENS)
async def test_a_store_that_stays_away(store: ClockedStore, when: When) -> None:
    """LOG-6: if not even the look succeeds, the error says that nothing is known; asked again, it is in once."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    await log.ask(adding(1, "a"))
    faulty.plan(unavailable(when), unavailable("before"))
    with pytest.raises(StoreUnavailable) as raised:
        await log.ask(adding(10, "b"))
    assert raised.value.applied is None
    faulty.plan(unavailable("before"))
    with pytest.raises(StoreUnavailable):
        await log.ask(adding(10, "b"))
    faulty.plan()
    assert await log.ask(adding(10, "b")) == ("known" if when == "after" else "added")
    assert faulty.calls[0] == "read"
    assert log.cached.total == 11
    assert log.cached == await tally_log(store).read()


@pytest.mark.parametrize("when", WHENS)
async def test_behind_a_cancelled_append_the_log_is_read(store: ClockedStore, when: When) -> None:
    """LOG-6: a cancelled question may have been put in: the next one reads before it decides."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    await log.ask(adding(1, "a"))
    faulty.plan(cancelled(when))
    assert await fails(log, 10, "b") is asyncio.CancelledError
    faulty.plan()
    seen: list[int] = []
    assert await log.ask(adding(10, "b", seen=seen)) == ("known" if when == "after" else "added")
    assert seen == [11 if when == "after" else 1]
    assert faulty.calls == (["read"] if when == "after" else ["read", "append"])
    assert log.cached.by == ("a", "b")


@pytest.mark.parametrize("when", WHENS)
async def test_a_cancelled_look_behind_a_lost_append(store: ClockedStore, when: When) -> None:
    """LOG-6: also cancelled while it was finding out, it is not forgotten that something may be in."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    faulty.plan(unavailable("after"), cancelled(when))
    assert await fails(log, 10, "b") is asyncio.CancelledError
    faulty.plan()
    assert await log.ask(adding(10, "b")) == "known"
    assert faulty.calls == ["read"]


async def test_an_error_that_changed_nothing_needs_no_look(store: ClockedStore) -> None:
    """LOG-6: where the store knows that nothing was changed, the next question goes on from the cache."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    await log.ask(adding(1, "a"))
    faulty.plan(Fault("before", StoreBusy("faulty", "held")))
    with pytest.raises(StoreBusy):
        await log.ask(adding(10, "b"))
    faulty.plan()
    assert await log.ask(adding(10, "b")) == "added"
    assert faulty.calls == ["append"]


# --- several tasks ---------------------------------------------------------------------------------------------


async def test_tasks_may_share_a_log(store: ClockedStore) -> None:
    """LOG-2: many tasks ask one object at once: each answer is decided on the state that it was appended to."""
    log = tally_log(store)
    totals: list[int] = []

    async def work(name: str) -> None:
        for number in range(5):
            assert await log.ask(adding(1, f"{name}{number}")) == "added"
            totals.append((await log.read()).total)

    await asyncio.gather(*(work(name) for name in "abcdef"))
    assert log.cached.total == 30
    assert log.cached == await tally_log(store).read()
    assert [seq for seq, _ in await whole(store, "tally")] == list(range(1, 31))
    assert max(totals) == 30


@pytest.mark.parametrize("when", WHENS)
async def test_a_cancelled_task_does_not_mislead_its_neighbour(store: ClockedStore, when: When) -> None:
    """LOG-6: two tasks share a log, one is cancelled in its append; the other still decides on the truth."""
    faulty = FaultyStore(store)
    log = tally_log(faulty)
    await log.ask(adding(1, "a"))
    faulty.plan(cancelled(when))
    first = asyncio.ensure_future(log.ask(adding(10, "b")))
    second = asyncio.ensure_future(log.ask(adding(100, "c")))
    answers = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1] == "added"
    assert log.cached.total == (111 if when == "after" else 101)
    assert log.cached == await tally_log(store).read()


async def test_a_read_that_was_under_way(store: ClockedStore) -> None:
    """LOG-2: a read that was asked for before the log's own append brings that append again: it is folded once."""
    faulty = FaultyStore(store)
    log, other = tally_log(faulty), tally_log(store)
    await log.ask(adding(1, "a"))
    go_on, real_read = asyncio.Event(), faulty.read

    async def read_late(key: str, *, after: object = NOWHERE) -> object:
        await go_on.wait()
        return await real_read(key, after=after)  # pyright: ignore[reportArgumentType]  # handed through

    faulty.read = read_late  # pyright: ignore[reportAttributeAccessIssue]  # the store is slow to answer
    reading = asyncio.ensure_future(log.read())
    await asyncio.sleep(0)
    assert await log.ask(adding(10, "b")) == "added"
    await other.ask(adding(100, "c"))
    go_on.set()
    assert (await reading).total == 111
    assert log.cached == await other.read()


async def test_processes_and_tasks_together(store: ClockedStore) -> None:
    """LOG-2, LOG-5: several logs on one key, each shared by tasks: nothing is lost, nothing twice."""
    logs = [tally_log(store) for _ in range(3)]

    async def work(log: TallyLog, name: str) -> None:
        for number in range(4):
            await log.ask(adding(1, f"{name}{number}"))

    await asyncio.gather(*(work(log, f"{i}{name}") for i, log in enumerate(logs) for name in "ab"))
    state = await tally_log(store).read()
    assert state.total == len(set(state.by)) == 24


async def test_an_erased_log_is_a_new_one(store: ClockedStore) -> None:
    """LOG-5: a process that knew the erased log starts from the empty state, also where the new one is as long."""
    log, other = tally_log(store), tally_log(store)
    await log.ask(adding(1, "a"))
    await store.erase("tally")
    await other.ask(adding(5, "b"))
    assert await log.ask(adding(10, "c")) == "added"
    assert log.cached == await other.read()
    assert log.cached.by == ("b", "c")
    await store.erase("tally")
    assert await log.read() == Tally()
    assert log.position == NOWHERE


# --- what this version does not know ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x7fwhat is this",
        b"\x01\xc1",
        b"\x02\x00\x00\x00\x05hello",
        b"1:5:!!!!",
        frames.encode(msgspec.msgpack.encode((b"", ("subtracted", 5)))),
        frames.encode(msgspec.msgpack.encode((b"", ("added", "five")))),
        frames.encode(msgspec.msgpack.encode({"kind": "added"})),
        frames.encode(b"\x92\xc4\x00\x92\xa5added\xa1\xff"),
    ],
    ids=["empty", "codec", "msgpack", "zstd", "seed", "tag", "field", "shape", "utf-8"],
)
async def test_unknown_records_are_refused_and_left_alone(store: ClockedStore, body: bytes) -> None:
    """LOG-7 and flows.md 24: a frame or record of a newer version raises SchemaConflict, and the log stays as it is."""
    stale = tally_log(store)
    await stale.ask(adding(1, "a"))
    known = stale.cached
    await append(store, "tally", body, expected=stale.position, head=HEAD)
    before = await whole(store, "tally"), await listed(store)
    fresh = tally_log(store)
    for log, calls in ((stale, stale.read), (fresh, fresh.read)):
        with pytest.raises(SchemaConflict, match="tally record 2"):
            await log.ask(adding(10, "b"))
        with pytest.raises(SchemaConflict, match="left untouched"):
            await calls()
    assert (await whole(store, "tally"), await listed(store)) == before
    assert stale.cached == known
    assert fresh.cached == Tally()


async def test_records_in_any_known_frame_are_read(store: ClockedStore) -> None:
    """LOG-7: whoever wrote it, and in whichever codec."""
    codecs: tuple[frames.Codec, ...] = ("plain", "zstd", "seed")
    position = NOWHERE
    for codec in codecs:
        payload = msgspec.msgpack.encode((b"", Added(1, codec * 300)))
        position = await append(store, "tally", frames.encode(payload, codec), expected=position)
    assert (await tally_log(store).read()).by == tuple(codec * 300 for codec in codecs)
