"""The transcript of a session driven by hand: what is stored of it, and that it comes back as it was given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from turnkeeper.errors import InvalidInput
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.session import TurnCheckpointSession

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Where is my order?"}


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    """One is enough: stores know no transcripts."""
    async with await SqliteStore.open(":memory:") as opened:
        yield opened


async def started(store: SqliteStore, *messages: Any) -> TurnCheckpointSession:
    session = TurnCheckpointSession(store, "trace")
    await session.start([*(messages or (USER,))], [], {})
    return session


async def committed(session: TurnCheckpointSession, index: int, messages: Any) -> list[Any]:
    """Decide and commit a round; the transcript as a new session finds it."""
    await session.reserve_assistant(index, {"content": f"decision {index}"})
    await session.commit_round(index, messages, {})
    snapshot = await TurnCheckpointSession(session.redis, "trace").load()
    assert snapshot is not None
    return snapshot.messages


async def size(session: TurnCheckpointSession) -> int:
    """Bytes of the last record."""
    return len((await session.redis.read(session.key)).records[-1].body)


async def test_ints_of_any_size_are_committed(store: SqliteStore) -> None:
    """Also where they stand in a round's messages, twice over: in what is kept, and in what is new."""
    session = await started(store, {"role": "user", "n": 2**70})
    messages = [{"role": "user", "n": 2**70}, {"role": "tool", "n": -(2**99)}]
    assert await committed(session, 0, messages) == messages
    messages.append({"role": "tool", "n": 10**30})
    assert await committed(session, 1, messages) == messages


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0.0, -0.0), (False, 0), (None, 0), ("1", 1)])
async def test_a_change_of_kind_is_a_change(store: SqliteStore, before: Any, after: Any) -> None:
    """1, 1.0 and True are equal in Python; in an earlier message that changed from one to another, the new one is stored."""
    session = await started(store, {"role": "user", "flag": before}, USER)
    assert repr(await committed(session, 0, [{"role": "user", "flag": after}, USER])) == repr(
        [{"role": "user", "flag": after}, USER]
    )


async def test_what_comes_back_equal_is_not_stored_again(store: SqliteStore) -> None:
    """A tuple comes back as a list and half a surrogate pair as U+FFFD: for the store they are the same message."""
    odd = {"role": "user", "content": ("x" * 400, "half \ud800")}
    session = await started(store, odd)
    messages: list[Any] = [odd, {"role": "assistant", "content": "a"}]
    found = await committed(session, 0, messages)
    assert found == [{"role": "user", "content": ["x" * 400, "half \ufffd"]}, {"role": "assistant", "content": "a"}]
    assert await size(session) < 120
    assert await committed(session, 1, tuple(messages)) == found
    assert await size(session) < 80


async def test_the_loser_of_a_commit_does_not_take_its_messages_for_stored(store: SqliteStore) -> None:
    """Two workers commit one round with different messages; the first one's are stored, and the other goes on from those."""
    first = await started(store)
    await first.reserve_assistant(0, {"content": "decision"})
    second = TurnCheckpointSession(store, "trace")
    await second.load()
    theirs, own = [USER, {"role": "tool", "content": "first"}], [USER, {"role": "tool", "content": "second"}]
    await first.commit_round(0, theirs, {})
    assert (await second.commit_round(0, own, {})).messages == theirs
    own.append({"role": "tool", "content": "more"})
    assert await committed(second, 1, own) == own


async def test_later_changes_of_the_callers_messages_are_seen(store: SqliteStore) -> None:
    """The caller's own list is no memory of what was stored: a message changed in place is a changed message."""
    session = await started(store)
    messages: list[Any] = [dict(USER), {"role": "tool", "parts": [{"text": "one"}]}]
    await committed(session, 0, messages)
    messages[1]["parts"][0]["text"] = "two"
    messages.append({"role": "tool", "content": "next"})
    assert await committed(session, 1, messages) == messages
    del messages[0]
    assert await committed(session, 2, messages) == messages


class _Contrary:
    """Cannot be compared, as arrays of several libraries."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": _Contrary()}, {}], "messages[0].content"),
        ([USER, {"role": "tool", "content": [1, {2}]}], "messages[1].content[1]"),
        ([USER, USER, {"role": "tool", "content": float("nan")}], "messages[2].content"),
        ({"role": "user"}, "messages"),
        ("text", "messages"),
    ],
)
async def test_refusals_name_the_path(store: SqliteStore, messages: Any, field: str) -> None:
    """Also behind messages that are known and not looked at again; nothing is written."""
    session = await started(store)
    await session.reserve_assistant(0, {"content": "decision"})
    before = session.log.position
    with pytest.raises(InvalidInput) as refused:
        await session.commit_round(0, messages, {})
    assert refused.value.field == field
    assert (await session.load()) is not None
    assert session.log.position == before
