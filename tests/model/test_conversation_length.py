"""A conversation opens as fast when it is long as when it is short: its log is compacted while it is written (issue D, 1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faulty import FaultyStore
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import decide_all
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import EVENT_BYTES
from turnkeeper.conversation.state import ConversationState
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import NOWHERE, Position, Tail
from turnkeeper.stores.sqlite import SqliteStore

MESSAGES = 100_000
AT_ONCE = 100
SINGLE = 500
MOST = 1_000
"""Records that opening may fold: they weigh as much as a snapshot with the digests of all events that are known."""


class Counting(FaultyStore):
    """Counts the records that reads bring."""

    read_records = 0

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`."""
        tail = await super().read(key, after=after)
        self.read_records += len(tail.records)
        return tail


def event(number: int) -> bytes:
    """The digest of a message's event."""
    return number.to_bytes(EVENT_BYTES, "big")


def one_more(state: ConversationState, now: int) -> Decision[r.AnyRecord, None]:
    """As `taken_and_done`, one message in an append."""
    number = state.received + 1
    return Decision(None, (r.Received(event(number), "text", b"message %d" % number), r.Done(number, "handled")))


def taken_and_done(state: ConversationState, now: int) -> Decision[r.AnyRecord, None]:
    """The records of many messages that come and are settled: by the shell's own way to write, but in few appends."""
    records: list[r.AnyRecord] = []
    if not state.conversation_id:
        records.append(r.Opened("c", b"seed"))
    for number in range(state.received + 1, state.received + AT_ONCE + 1):
        records += (r.Received(event(number), "text", b"message %d" % number), r.Done(number, "handled"))
    return Decision(None, tuple(records))


async def records_to_fold(store: SqliteStore, messages: int, name: str) -> int:
    """How many records a reader folds, at the worst, who opens a conversation after so many messages."""
    handle = ConversationHandle(store, name)
    for _ in range((messages - SINGLE) // AT_ONCE):
        await handle.log.ask(taken_and_done)
    worst = 0
    for _ in range(SINGLE):
        await handle.log.ask(one_more)
        worst = max(worst, handle.state.records)
    await handle.receive("one more", "text", b"still open")
    assert handle.state.received == messages + 1

    counting = Counting(store)
    other = ConversationHandle(counting, name)
    state = await other.read()
    assert (state.received, state.settled, len(state.inbound)) == (messages + 1, messages, 1)
    again = c.Receive("c", b"", event(messages - 1), "text", b"again")
    assert not decide_all(state, [again], 0).records, "what came lately is still known"
    assert counting.read_records == handle.state.records
    return worst


@pytest.mark.anyio
async def test_opening_folds_a_bounded_number_of_records(tmp_path: Path) -> None:
    """Issue D, 1: a hundred thousand messages, or a thousand: about as many records are folded."""
    store = await SqliteStore.open(tmp_path / "long.db")
    try:
        short = await records_to_fold(store, 1_000, "short")
        long = await records_to_fold(store, MESSAGES, "long")
    finally:
        await store.close()
    print(f"{short} records of 1,000 messages, {long} of {MESSAGES:,}")
    assert long <= MOST
    assert short <= MOST
