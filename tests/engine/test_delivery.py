"""The reply: sent once, under one key and with one text; looked up, or settled by somebody, where nobody can know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import pytest

from tests.conformance.support import ClockedStore
from tests.engine.support import Channel, records_of, state_of, until
from tests.engine.wrapped import WrappedStore
from turnkeeper import (
    Agent,
    DidNotHappen,
    EffectRefused,
    Happened,
    Keeper,
    NotSent,
    Reply,
    ReplyPort,
    ScriptedModel,
    StillUnknown,
    TurnResult,
)
from turnkeeper.errors import InvalidInput, TurnCheckpointConflict, TurnCheckpointError
from turnkeeper.log.store import Store
from turnkeeper.turn import records as r
from turnkeeper.turn.names import TurnPhase

pytestmark = pytest.mark.anyio

T = TypeVar("T")


async def run(keeper: Keeper, port: ReplyPort | None, *, text: str = "hello", wait: bool = True) -> TurnResult:
    """Run a turn that answers with `text`."""
    agent = Agent(ScriptedModel([text]), lease_seconds=30)
    return await keeper.run(agent, "hi", turn_id="t", reply=port, wait=wait)


async def dies_in_the_send(keeper: Keeper, channel: Channel) -> None:
    """A worker that gets no further than into its send."""

    async def send(reply: Reply) -> str:
        if channel.sent_all_the_same:
            channel.sent.append(reply)
        dead.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.CancelScope() as dead:
        await run(keeper, ReplyPort(send))
    assert (await state_of(keeper)).phase is TurnPhase.DELIVERY_RESERVED


async def test_a_reply_is_sent_once_and_its_id_is_kept(keeper: Keeper) -> None:
    channel = Channel()
    result = await run(keeper, ReplyPort(channel.send))
    assert (result.status, result.output, result.sent_message_id) == ("success", "hello", "m1")
    (reply,) = channel.tries
    assert (reply.text, reply.turn_id) == ("hello", "t")
    assert (await state_of(keeper)).delivery is not None


@pytest.mark.parametrize("error", [NotSent("offline"), ConnectionRefusedError()])
async def test_what_was_not_sent_is_sent_again_with_the_same_key(keeper: Keeper, error: Exception) -> None:
    channel = Channel(error, error)
    assert (await run(keeper, ReplyPort(channel.send))).status == "success"
    assert len(channel.tries) == 3
    assert len(set(channel.tries)) == 1
    assert len(channel.sent) == 1


async def test_what_can_never_be_sent_fails_the_run_and_the_next_one_tries_again(keeper: Keeper) -> None:
    channel = Channel(*[NotSent("offline")] * 3)
    result = await run(keeper, ReplyPort(channel.send))
    assert (result.status, result.error_kind, result.output) == ("failed", "reply_not_sent", "hello")
    assert len(channel.tries) == 3
    # At once, without waiting for a lease: nobody is sending it.
    assert (await run(keeper, ReplyPort(channel.send), wait=False)).status == "success"
    assert len(channel.sent) == 1
    assert len(set(channel.tries)) == 1


async def test_a_refused_reply_is_not_tried_again_by_itself(keeper: Keeper) -> None:
    channel = Channel(EffectRefused("the chat was deleted"))
    result = await run(keeper, ReplyPort(channel.send))
    assert (result.status, result.error_kind) == ("failed", "reply_refused")
    assert "deleted" in (result.message or "")
    assert len(channel.tries) == 1
    assert (await run(keeper, ReplyPort(channel.send), wait=False)).status == "success"


@pytest.mark.parametrize("sent", [True, False])
async def test_a_keyed_channel_gets_it_again(keeper: Keeper, *, sent: bool) -> None:
    """It drops the second message of a key by itself."""
    channel = Channel(TimeoutError(), TimeoutError(), sent_all_the_same=sent)
    assert (await run(keeper, ReplyPort(channel.send, keyed=True))).status == "success"
    assert len(channel.tries) == 3
    assert len({(reply.key, reply.text) for reply in channel.tries}) == 1


async def test_a_keyed_channel_that_never_answers_leaves_a_doubt(keeper: Keeper) -> None:
    channel = Channel(*[TimeoutError()] * 9)
    result = await run(keeper, ReplyPort(channel.send, keyed=True))
    assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
    assert len(channel.tries) == 3
    assert (await run(keeper, ReplyPort(channel.send, keyed=True))).status == "reconciliation_required"
    assert len(channel.tries) == 3


@pytest.mark.parametrize("sent", [True, False])
async def test_a_reply_that_can_be_found_is_looked_for_before_it_is_sent_again(keeper: Keeper, *, sent: bool) -> None:
    channel = Channel(TimeoutError(), sent_all_the_same=sent)

    async def find(reply: Reply) -> Happened | DidNotHappen:
        return Happened("m1") if reply in channel.sent else DidNotHappen()

    result = await run(keeper, ReplyPort(channel.send, find=find))
    assert (result.status, result.sent_message_id) == ("success", "m1")
    assert len(channel.sent) == 1
    assert len(channel.tries) == (1 if sent else 2)


async def test_a_reply_that_is_never_there_was_not_sent(keeper: Keeper) -> None:
    """The look-up said so each time, so it is not in doubt."""
    channel = Channel(*[TimeoutError()] * 3)

    async def find(reply: Reply) -> DidNotHappen:
        return DidNotHappen()

    result = await run(keeper, ReplyPort(channel.send, find=find))
    assert (result.status, result.error_kind) == ("failed", "reply_not_sent")
    assert (await run(keeper, ReplyPort(channel.send, find=find), wait=False)).status == "success"
    assert len(channel.sent) == 1


@pytest.mark.parametrize("answer", [StillUnknown(), ConnectionError("the look-up is down")])
@pytest.mark.parametrize("sent", [True, False])
async def test_a_look_up_that_cannot_tell_leaves_the_question_open(
    keeper: Keeper, answer: StillUnknown | Exception, *, sent: bool
) -> None:
    """It is asked again with the next run; nothing is sent before it has an answer."""
    channel = Channel(TimeoutError(), sent_all_the_same=sent)
    answers: list[Any] = [answer, answer]

    async def find(reply: Reply) -> Any:
        found = answers.pop() if answers else Happened("m1") if channel.sent else DidNotHappen()
        if isinstance(found, Exception):
            raise found
        return found

    port = ReplyPort(channel.send, find=find)
    for _ in range(2):
        result = await run(keeper, port)
        assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
        assert [head.attention async for head in keeper.turns(attention=True)] == ["unknown_delivery"]
    assert (await run(keeper, port)).sent_message_id == "m1"
    assert len(channel.sent) == 1
    assert len(channel.tries) == (1 if sent else 2)
    assert (await state_of(keeper)).attention is None


@pytest.mark.parametrize("sent", [True, False])
async def test_where_nobody_can_know_somebody_has_to_say(keeper: Keeper, *, sent: bool) -> None:
    channel = Channel(TimeoutError(), sent_all_the_same=sent)
    port = ReplyPort(channel.send)
    for _ in range(2):
        result = await run(keeper, port)
        assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
    assert len(channel.tries) == 1
    assert [head.attention async for head in keeper.turns(attention=True)] == ["unknown_delivery"]
    await keeper.resolve_delivery("t", "m1" if sent else None, who="ann", why="looked into the chat")
    result = await run(keeper, port, wait=False)
    assert (result.status, result.sent_message_id) == ("success", "m1")
    assert len(channel.sent) == 1
    assert (await state_of(keeper)).attention is None


async def test_evidence_about_a_send_is_none_about_the_next(keeper: Keeper) -> None:
    """Two operators looked at the same time. One said that it was not sent, so it was sent again: the other comes too late."""
    channel = Channel(TimeoutError(), TimeoutError(), sent_all_the_same=True)
    port = ReplyPort(channel.send)
    await run(keeper, port)
    first = (await state_of(keeper)).delivery
    assert first is not None
    await keeper.resolve_delivery("t", None, who="ann", why="looked", sender=first.owner)
    await run(keeper, port)
    with pytest.raises(TurnCheckpointConflict, match="sent again since"):
        await keeper.resolve_delivery("t", None, who="bob", why="looked", sender=first.owner)
    assert (await run(keeper, port)).status == "reconciliation_required"
    assert len(channel.sent) == 2


async def test_only_a_reply_in_doubt_can_be_settled(keeper: Keeper) -> None:
    channel = Channel()
    with pytest.raises(TurnCheckpointError):
        await keeper.resolve_delivery("t", None, who="ann", why="looked")
    await run(keeper, ReplyPort(channel.send))
    with pytest.raises(TurnCheckpointError):
        await keeper.resolve_delivery("t", None, who="ann", why="looked")
    with pytest.raises(InvalidInput):
        await keeper.resolve_delivery("t", "m1", who="ann", why=" ")


# --- a sender that died --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [True, False])
async def test_a_dead_senders_reply_is_looked_for(keeper: Keeper, store: ClockedStore, *, sent: bool) -> None:
    channel = Channel(sent_all_the_same=sent)
    await dies_in_the_send(keeper, channel)
    await store.advance_clock(30_000)

    async def find(reply: Reply) -> Happened | DidNotHappen:
        return Happened("m1") if channel.sent else DidNotHappen()

    result = await run(keeper, ReplyPort(channel.send, find=find), text="not what was reserved", wait=False)
    assert (result.status, result.output, result.sent_message_id) == ("success", "hello", "m1")
    assert [reply.text for reply in channel.sent] == ["hello"]


async def test_a_dead_senders_reply_goes_again_to_a_keyed_channel(keeper: Keeper, store: ClockedStore) -> None:
    channel = Channel(sent_all_the_same=True)
    await dies_in_the_send(keeper, channel)
    await store.advance_clock(30_000)
    result = await run(keeper, ReplyPort(channel.send, keyed=True), wait=False)
    assert result.status == "success"
    assert len({(reply.key, reply.text) for reply in channel.sent}) == 1


async def test_a_dead_senders_reply_is_in_doubt_where_nobody_can_know(keeper: Keeper, store: ClockedStore) -> None:
    channel = Channel(sent_all_the_same=True)
    await dies_in_the_send(keeper, channel)
    await store.advance_clock(30_000)
    result = await run(keeper, ReplyPort(channel.send), wait=False)
    assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
    assert len(channel.sent) == 1
    assert channel.tries == []


async def test_without_a_channel_a_reserved_reply_waits(keeper: Keeper) -> None:
    channel = Channel(*[NotSent("offline")] * 3)
    await run(keeper, ReplyPort(channel.send))
    result = await run(keeper, None)
    assert (result.status, result.error_kind) == ("failed", "no_reply_channel")
    assert (await run(keeper, ReplyPort(channel.send), wait=False)).status == "success"


# --- slow, and stale -----------------------------------------------------------------------------------------


async def test_a_slow_send_is_not_taken_for_a_dead_one(keeper: Keeper) -> None:
    """Its lease is renewed, so another worker waits and does not even look."""
    going, go_on = anyio.Event(), anyio.Event()
    channel = Channel()

    async def send(reply: Reply) -> str:
        going.set()
        await go_on.wait()
        return await channel.send(reply)

    async def find(reply: Reply) -> DidNotHappen:
        raise AssertionError("its sender lives")

    async def slow() -> None:
        results.append(await keeper.run(agent, "hi", turn_id="t", reply=ReplyPort(send, find=find)))

    async def other() -> None:
        results.append(await keeper.run(agent, "hi", turn_id="t", reply=ReplyPort(channel.send, find=find)))

    async def renewed() -> bool:
        return len(await records_of(keeper, r.DeliveryClaimed)) >= 4

    results: list[TurnResult] = []
    agent = Agent(ScriptedModel(["hello"]), lease_seconds=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slow)
        await going.wait()
        tasks.start_soon(other)
        await until(renewed)
        go_on.set()
    assert [result.sent_message_id for result in results] == ["m1", "m1"]
    assert len(channel.sent) == 1


async def test_a_look_up_that_is_out_of_date_lets_nobody_send(keeper: Keeper, store: ClockedStore) -> None:
    """Meanwhile another worker took the reply over and may have sent it: it has to be looked for once more."""
    looking, go_on = anyio.Event(), anyio.Event()
    channel = Channel()
    await dies_in_the_send(keeper, channel)
    await store.advance_clock(30_000)

    async def find(reply: Reply) -> Happened | DidNotHappen:
        if looking.is_set():
            return Happened("m1") if channel.sent else DidNotHappen()
        looking.set()
        await go_on.wait()
        return DidNotHappen()

    async def stalled() -> None:
        results.append(await run(keeper, ReplyPort(channel.send, find=find)))

    results: list[TurnResult] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stalled)
        await looking.wait()
        await store.advance_clock(30_000)
        channel.sent_all_the_same = True
        await dies_in_the_send_of_a_keyed_channel(keeper, channel)
        await store.advance_clock(30_000)
        go_on.set()
    assert [(result.status, result.sent_message_id) for result in results] == [("success", "m1")]
    assert len(channel.sent) == 1


async def dies_in_the_send_of_a_keyed_channel(keeper: Keeper, channel: Channel) -> None:
    """A second worker, which sends without looking, and dies behind it."""

    async def send(reply: Reply) -> str:
        await channel.send(reply)
        dead.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.CancelScope() as dead:
        await run(keeper, ReplyPort(send, keyed=True))
    assert len(channel.sent) == 1


class MeanwhileStore(WrappedStore):
    """Lets something else happen right before the second write: the first one only finds that the turn was started."""

    def __init__(self, inner: Store, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._meanwhile = meanwhile
        self.writes = 0

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the write, behind what happens meanwhile."""
        self.writes += 1
        if self.writes == 2:
            await self._meanwhile()
        return await write()


async def test_a_reply_given_back_is_taken_over_only_as_it_was_looked_at(keeper: Keeper, store: ClockedStore) -> None:
    """It surely was not sent when this worker looked. Before it claims, another one claims, sends, and dies."""
    channel = Channel(*[NotSent("offline")] * 3, sent_all_the_same=False)
    assert (await run(keeper, ReplyPort(channel.send))).error_kind == "reply_not_sent"
    channel.sent_all_the_same = True

    async def dies_behind_its_send() -> None:
        await dies_in_the_send(keeper, channel)
        await store.advance_clock(30_000)

    slow = MeanwhileStore(store, dies_behind_its_send)
    result = await run(Keeper(slow), ReplyPort(channel.send), wait=False)
    assert slow.writes >= 2
    assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
    assert len(channel.sent) == 1


async def test_two_message_ids_for_one_reply_are_both_kept(keeper: Keeper, store: ClockedStore) -> None:
    """A sender that was taken for dead comes back: evidence of a double send."""
    going, go_on = anyio.Event(), anyio.Event()

    async def slow_send(reply: Reply) -> str:
        going.set()
        await go_on.wait()
        return "m1"

    async def send(reply: Reply) -> str:
        return "m2"

    results: list[TurnResult] = []

    async def slow() -> None:
        results.append(await run(keeper, ReplyPort(slow_send)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slow)
        await going.wait()
        await store.advance_clock(30_000)
        assert (await run(keeper, ReplyPort(send, keyed=True))).sent_message_id == "m2"
        go_on.set()
    assert results[0].sent_message_id == "m2"
    state = await state_of(keeper)
    assert (state.sent_message_id, state.disputed_message_ids) == ("m2", ("m1",))
    assert [head.attention async for head in keeper.turns(attention=True)] == ["double_send"]
