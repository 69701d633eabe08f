"""Messages through receive → step → send → settle, beside as many bare appends; and opening a long conversation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Final

import msgspec

from bench.findings import Finding
from bench.measured import Floor, Measured, opened
from bench.recording import IN_MEMORY, RecordingStore
from turnkeeper.conversation import commands as c
from turnkeeper.conversation.channel import Sent
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.decide import decide_all
from turnkeeper.conversation.evolve import ConversationRules, Retention
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import conversation_key, event_digest
from turnkeeper.conversation.message import Content, Message, keep_content, keep_message
from turnkeeper.conversation.records import AnyRecord
from turnkeeper.conversation.state import SendKey
from turnkeeper.log import values
from turnkeeper.log.record import NOWHERE
from turnkeeper.log.store import Store

AT_ONCE: Final = {1: 120, 16: 16, 256: 4}
"""Conversations at once, and how many batches of a message in each are measured beside as many of the floor."""
_WARM_UP: Final = 1
_TEXT: Final = "Where is my order 4711? It was to be here on Tuesday, and nobody has told me anything since. " * 2
_LONG: Final = (100, 100_000)
_OPENINGS: Final = 100


class _Channel:
    """Takes everything at once."""

    dedup_window: float = 0.0
    max_length: int | None = None

    async def send(self, conversation_id: str, key: str, content: Content) -> Sent:
        """Take it."""
        return Sent(key)


def _echo() -> Flow:
    """One step that answers."""
    flow = Flow("echo")

    @flow.step
    async def answer(context: FlowContext) -> None:
        await context.send(context.message.text)

    return flow


async def measure(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """A message in each of many conversations, one behind the other in each."""
    found: list[Finding] = []
    bodies = await _written()
    for at_once, batches in AT_ONCE.items():
        progress(f"messages of {at_once} conversations")
        found.append(await _beside_floor(measured, at_once, batches, bodies))
    return found


async def _written() -> list[bytes]:
    """The durable writes of one message, in a conversation that had some before."""
    async with opened(IN_MEMORY) as store:
        recording = RecordingStore(store)
        async with Conversations(recording, [_echo()], _Channel()) as bot:
            events = count()
            for _ in range(3):
                recording.written.clear()
                await _say(bot, "c", events)
        (bodies,) = recording.written.values()
        return bodies


async def _say(bot: Conversations, conversation_id: str, events: count[int]) -> None:
    await bot.handle(conversation_id, Message(event_id=str(next(events)), text=_TEXT))


async def _beside_floor(measured: Measured, at_once: int, batches: int, bodies: list[bytes]) -> Finding:
    walls: list[float] = []
    floors: list[float] = []
    async with (
        measured.open() as store,
        measured.floor() as floor,
        Conversations(store, [_echo()], _Channel(), keep_alive=at_once) as bot,
    ):
        events = count()
        for batch in range(batches + _WARM_UP):
            start = time.perf_counter()
            await asyncio.gather(*(_say(bot, f"conversation-{one}", events) for one in range(at_once)))
            walls.append((time.perf_counter() - start) / at_once)
            start = time.perf_counter()
            await asyncio.gather(*(_bare(floor, batch * at_once + one, bodies) for one in range(at_once)))
            floors.append((time.perf_counter() - start) / at_once)
    ratios = [wall / bare for wall, bare in zip(walls[_WARM_UP:], floors[_WARM_UP:], strict=True)]
    low, ratio, high = statistics.quantiles(ratios)
    more = {
        "messages a second": 1 / statistics.median(walls[_WARM_UP:]),
        "floor": 1 / statistics.median(floors[_WARM_UP:]),
        "appends": float(len(bodies)),
        "quartiles": low,
        "and": high,
    }
    return Finding(f"messages, {at_once} conversations at once: time", ratio, "x floor", more)


async def _bare(floor: Floor, number: int, bodies: list[bytes]) -> None:
    await floor.turn(number, bodies)


async def opening(measured: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """Reading and folding a conversation by a process that knows nothing of it: a short one, and a long one."""
    medians: dict[int, float] = {}
    records: dict[int, float] = {}
    async with measured.open() as store:
        for length in _LONG:
            progress(f"a conversation of {length} messages")
            name = f"long-{length}"
            await _converse(store, name, length)
            times: list[float] = []
            for _ in range(_OPENINGS):
                handle = ConversationHandle(store, name)
                start = time.perf_counter()
                state = await handle.read()
                times.append(time.perf_counter() - start)
                assert state.settled >= length
            medians[length] = statistics.median(times)
            records[length] = float(len((await store.read(conversation_key(name))).records))
    short, long = _LONG
    more = {
        "ms": 1000 * medians[long],
        f"ms of {short}": 1000 * medians[short],
        "records": records[long],
        f"records of {short}": records[short],
    }
    what = f"opening a conversation of {long:,} messages"
    return [Finding(what, medians[long] / medians[short], f"x one of {short}", more)]


async def _converse(store: Store, conversation_id: str, length: int) -> None:
    """The log of a conversation of that length or a little more; only what compaction leaves of it is written."""
    rules = ConversationRules(Retention())
    state, now = rules.initial(), int(time.time() * 1000)
    text = keep_message(Message(event_id="e", text=_TEXT))
    content, fingerprint = keep_content(Content(text=_TEXT))
    start = c.Start("echo", 1, "answer", values.freeze({}))
    left: list[AnyRecord] = []
    for number in count(1):
        if number > length and rules.snapshot(state, now) is not None:
            break  # the worst place: all that there is between two snapshots
        now += 60_000
        key, mine = SendKey(number, 0), ("bench", number)
        for commands in (
            [c.Receive(conversation_id, bytes(16), event_digest(str(number)), "text", text)],
            [c.Claim("bench", 30_000, number, "start", start)],
            [c.BeginSend(*mine, key, content, fingerprint)],
            [
                c.SettleSend(*mine, key, "sent", "m"),
                c.EndFlow(*mine, number, "done"),
                c.Settle(*mine, number, "handled"),
            ],
        ):
            snapshot = rules.snapshot(state, now)
            if snapshot is not None:
                state = rules.evolve(state, snapshot, now)
                left = [snapshot]
            decided = decide_all(state, commands, now)
            for record in decided.records:
                state = rules.evolve(state, record, now)
            left += decided.records
    encode = msgspec.msgpack.Encoder().encode
    bodies = [b"\x01" + encode((bytes(8), record)) for record in left]
    await store.append(conversation_key(conversation_id), bodies, expected=NOWHERE, head=rules.head(state))
