"""Field case 24: the reply was sent, and the answer was lost. Over real HTTP; a turn's reply, and a conversation's message."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cases.charge_server import unused_port
from tests.cases.chats import KINDS, Chat, Kind, channel_to, chat_server, saying
from tests.channels.peer import SECRET, Peer
from tests.cli.command import turnkeeper
from tests.conftest import shared_json
from tests.conversation.driving import state_of
from turnkeeper import Agent, Keeper, ScriptedModel, TurnResult
from turnkeeper.channels.replies import reply_port
from turnkeeper.channels.telegram import TelegramChannel
from turnkeeper.channels.telegram_api import BotApi
from turnkeeper.channels.webhook import WebhookChannel
from turnkeeper.conversation import records as r
from turnkeeper.conversation.channel import Channel
from turnkeeper.conversation.conversations import Conversations, Processed
from turnkeeper.conversation.message import Message
from turnkeeper.conversation.oversight import read_conversation, resolve_send
from turnkeeper.conversation.state import SendState
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.names import TurnPhase
from turnkeeper.turn.state import TurnState

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/24-reply-send-timeout.json")
TEXT: str = CASE["reply"]["text"]
CHANGED = "What the code that renders it would say today."
PROJECT = Path(__file__).resolve().parents[2]


def expected(kind: str, fault: str) -> dict[str, Any]:
    """What the data file wants."""
    (row,) = (one for one in CASE["chat_servers"] if one["kind"] == kind and one["fault"] == fault)
    return row["expect"]


LOST: dict[Kind, dict[str, Any]] = {
    "dedupes by key": expected("dedupes by key", "stores the message then drops the socket"),
    "can look up by key": expected("can look up by key", "stores then drops"),
    "neither": expected("neither", "stores then drops"),
}
LOST["telegram"] = LOST["neither"]
REFUSED = expected("any", "connection refused")
TOO_LONG = expected("any", "HTTP 400 text too long")
assert expected("any", "SIGKILL after HTTP 200, before mark_delivered") == "as the first three rows by kind"


@asynccontextmanager
async def keeping(folder: Path) -> AsyncGenerator[Keeper]:
    """A keeper on a file."""
    async with await Keeper.open(f"sqlite:///{folder / 'turns.db'}") as keeper:
        yield keeper


async def run(keeper: Keeper, channel: Channel, chat: Chat, text: str = TEXT) -> TurnResult:
    """Run the turn; its model says that text, if it is asked."""
    agent = Agent(ScriptedModel([text]), lease_seconds=30)
    return await keeper.run(agent, "hi", turn_id="turn-1", reply=reply_port(channel, chat.conversation))


async def turn_of(keeper: Keeper) -> TurnState:
    """The turn as it stands."""
    history = await keeper.history("turn-1")
    assert history is not None
    return history.state


async def killed_behind_the_ok(what: str, chat: Chat, folder: Path) -> None:
    """A worker begins it, and is killed when the server has said OK and nothing of that is written."""
    job = {
        "what": what,
        "kind": chat.kind,
        "url": chat.url,
        "conversation": chat.conversation,
        "store_url": f"sqlite:///{folder / 'turns.db'}",
        "text": TEXT,
    }
    command = [sys.executable, "-W", "error", "-m", "tests.cases.chats", json.dumps(job)]
    with anyio.fail_after(60):
        done = await anyio.run_process(command, cwd=PROJECT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert list(chat.visible.values()) == [TEXT]


# --- a turn's reply ------------------------------------------------------------------------------------------


async def check_turn(keeper: Keeper, chat: Chat, result: TurnResult, folder: Path) -> None:
    """What the data file expects of a reply whose answer was lost."""
    want = LOST[chat.kind]
    state = await turn_of(keeper)
    assert len(chat.visible) == want["visible"] == 1
    assert list(chat.visible.values()) == [TEXT]  # the restart trap: never the text of today
    assert len(chat.keys) <= 1
    if want["phase"] == "DELIVERED":
        assert (result.status, result.output) == ("success", TEXT)
        assert state.phase is TurnPhase.COMPLETED  # on behind DELIVERED
        assert state.sent_message_id == next(iter(chat.visible))
    else:
        assert state.phase is TurnPhase.DELIVERY_RESERVED
        assert (result.status, result.error_kind) == ("reconciliation_required", "reply_outcome_unknown")
        assert [head.attention async for head in keeper.turns(attention=True)] == ["unknown_delivery"]
        listed = await anyio.to_thread.run_sync(
            lambda: turnkeeper("list", "--attention", "--store", f"sqlite:///{folder / 'turns.db'}")
        )
        assert "unknown_delivery" in listed.out.replace(" ", "_")
        # Run again, by itself or by somebody who did not look: it is not sent.
        async with channel_to(chat.kind, chat.url) as channel:
            again = await run(keeper, channel, chat, CHANGED)
        assert again.status == "reconciliation_required"
        assert chat.sends == 1
        await keeper.resolve_delivery("turn-1", next(iter(chat.visible)), who="ann", why="it is in the chat")
        assert (await turn_of(keeper)).sent_message_id == next(iter(chat.visible))
    if chat.kind == "can look up by key":
        assert chat.lookups == want["lookups_before_any_resend"] == 1
        assert chat.sends == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_to_a_reply_is_lost(tmp_path: Path, kind: Kind) -> None:
    async with chat_server(kind) as chat, keeping(tmp_path) as keeper, channel_to(kind, chat.url) as channel:
        chat.fault("lose")
        result = await run(keeper, channel, chat)
        await check_turn(keeper, chat, result, tmp_path)
        assert chat.sends == (2 if kind == "dedupes by key" else 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_worker_is_killed_behind_the_ok_to_a_reply(tmp_path: Path, kind: Kind) -> None:
    async with chat_server(kind) as chat:
        await killed_behind_the_ok("turn", chat, tmp_path)
        async with keeping(tmp_path) as keeper, channel_to(kind, chat.url) as channel:
            await keeper.store.advance_clock(30_000)  # type: ignore[attr-defined]  # SQLite's
            result = await run(keeper, channel, chat, CHANGED)
            await check_turn(keeper, chat, result, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reply_to_a_server_that_is_not_there_at_first(tmp_path: Path, kind: Kind) -> None:
    async with chat_server(kind) as chat, keeping(tmp_path) as keeper, channel_to(kind, chat.url) as channel:
        await chat.server.site.stop()
        result = await run(keeper, channel, chat)
        assert (result.status, result.error_kind) == ("failed", "reply_not_sent")
        assert chat.sends == 0
        chat.server.site.start()
        result = await run(keeper, channel, chat, CHANGED)
        state = await turn_of(keeper)
        assert result.status == "success"
        assert list(chat.visible.values()) == [TEXT]
        assert len(chat.visible) == chat.sends == REFUSED["visible"] == 1
        assert state.sent_message_id == next(iter(chat.visible))
        assert state.delivery is not None
        assert chat.keys <= {state.delivery.key}
    assert REFUSED["resent_with_same_key"]
    assert REFUSED["phase"] == "DELIVERED"


async def test_a_refused_connection_is_tried_again_with_the_same_key_at_once(tmp_path: Path) -> None:
    async with Peer() as peer, keeping(tmp_path) as keeper:
        urls = [f"http://127.0.0.1:{unused_port()}/in", peer.url]
        async with WebhookChannel(lambda _: urls.pop(0), SECRET, dedup_window=0) as channel:
            assert (await run(keeper, channel, Chat("neither", peer))).status == "success"
        assert [attempt.key for attempt in peer.attempts] == [(await turn_of(keeper)).delivery.key]  # type: ignore[union-attr]
        assert urls == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reply_that_is_too_long(tmp_path: Path, kind: Kind) -> None:
    """Refused by the server with HTTP 400. Nothing goes round and round; who runs it is told."""
    long = "x" * 4097
    async with chat_server(kind) as chat, keeping(tmp_path) as keeper, channel_to(kind, chat.url) as channel:
        channel.max_length = None  # it does not know better
        result = await run(keeper, channel, chat, long)
        state = await turn_of(keeper)
        assert len(chat.visible) == TOO_LONG["visible"] == 0
        assert state.phase is TurnPhase(TOO_LONG["phase"])
        assert (result.status, result.error_kind) == ("failed", "reply_refused")
        assert "400" in (result.message or "")
        assert chat.sends == 1
    assert TOO_LONG["error_surfaced"]
    assert not TOO_LONG["retry_loop"]


# --- a conversation's message --------------------------------------------------------------------------------


async def talk(store: SqliteStore, channel: Channel, chat: Chat, text: str = TEXT) -> Processed:
    """Bring the conversation on, with code that renders that text."""
    async with Conversations(store, [saying(text)], channel) as bot:
        return await bot.handle(chat.conversation, Message(event_id="1", text="hi"))


async def sent_ids(store: SqliteStore, chat: Chat) -> list[str]:
    """Ids of the messages that are recorded as sent: what is settled stands in the log alone."""
    history = await read_conversation(store, chat.conversation)
    assert history is not None
    return [entry.record.message_id for entry in history.entries if isinstance(entry.record, r.Sent)]


async def check_send(store: SqliteStore, chat: Chat) -> None:
    """What the data file expects of a message whose answer was lost."""
    want = LOST[chat.kind]
    state = await state_of(store, chat.conversation)
    assert list(chat.visible.values()) == [TEXT]
    assert len(chat.keys) <= 1
    if want["phase"] == "DELIVERED":
        assert await sent_ids(store, chat) == list(chat.visible)
        assert state.attention is None
        assert state.head is None
    else:
        (send,) = state.sends
        assert send.state is SendState.AMBIGUOUS
        assert state.attention == "unknown_send"
        assert chat.sends == 1
        message_id = next(iter(chat.visible))
        await resolve_send(
            store, chat.conversation, send.key, message_id=message_id, who="ann", why="it is in the chat"
        )
        assert (await state_of(store, chat.conversation)).attention is None
    if chat.kind == "can look up by key":
        assert (chat.lookups, chat.sends) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_to_a_message_is_lost(tmp_path: Path, kind: Kind) -> None:
    async with (
        chat_server(kind) as chat,
        await SqliteStore.open(tmp_path / "turns.db") as store,
        channel_to(kind, chat.url) as channel,
    ):
        chat.fault("lose")
        assert (await talk(store, channel, chat)).left is None
        await check_send(store, chat)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_worker_is_killed_behind_the_ok_to_a_message(tmp_path: Path, kind: Kind) -> None:
    """The restart trap: a step that renders another text under the same key is stopped (O2), and what was begun stays as it
    was; with the code that began it, it is found out what became of it."""
    async with chat_server(kind) as chat:
        await killed_behind_the_ok("conversation", chat, tmp_path)
        async with await SqliteStore.open(tmp_path / "turns.db") as store, channel_to(kind, chat.url) as channel:
            await store.advance_clock(30_000)
            assert (await talk(store, channel, chat, CHANGED)).left == "later"
            state = await state_of(store, chat.conversation)
            assert "OutboxConflict" in state.inbound[0].reason
            assert (chat.sends, list(chat.visible.values())) == (1, [TEXT])
            await store.advance_clock(60_000)
            assert (await talk(store, channel, chat)).left is None
            await check_send(store, chat)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_to_a_server_that_is_not_there_at_first(tmp_path: Path, kind: Kind) -> None:
    async with (
        chat_server(kind) as chat,
        await SqliteStore.open(tmp_path / "turns.db") as store,
        channel_to(kind, chat.url) as channel,
    ):
        await chat.server.site.stop()
        assert (await talk(store, channel, chat)).left == "later"
        assert chat.sends == 0
        chat.server.site.start()
        await store.advance_clock(60_000)
        assert (await talk(store, channel, chat)).left is None
        assert await sent_ids(store, chat) == list(chat.visible)
        assert (chat.sends, list(chat.visible.values())) == (1, [TEXT])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_that_is_too_long(tmp_path: Path, kind: Kind) -> None:
    long = "x" * 4097
    async with (
        chat_server(kind) as chat,
        await SqliteStore.open(tmp_path / "turns.db") as store,
        channel_to(kind, chat.url) as channel,
    ):
        channel.max_length = None  # it does not know better
        for _ in range(3):  # the step is tried again; the message is not
            assert (await talk(store, channel, chat, long)).left == "later"
            await store.advance_clock(60_000)
        state = await state_of(store, chat.conversation)
        assert [send.state for send in state.sends] == [SendState.DEAD]
        assert "MessageRefused" in state.inbound[0].reason
        assert "400" in state.inbound[0].reason
        assert (chat.sends, chat.visible) == (1, {})


async def test_telegram_is_of_the_kind_that_offers_nothing(tmp_path: Path) -> None:
    """Otherwise its rows above would say nothing."""
    async with BotApi("1:abcd") as api:
        assert TelegramChannel(api).dedup_window == 0
        assert reply_port(TelegramChannel(api), "telegram:1:2").find is None
