"""Telegram's updates: taken by polling and by webhook, each once, and acknowledged when they are in the journal."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest

from tests.channels.gate import Gate, so
from tests.channels.serving import Site
from tests.channels.telegram_server import BOT_ID, TOKEN, Telegram
from tests.conversation.driving import state_of
from tests.engine.support import until
from turnkeeper.channels import telegram as channel
from turnkeeper.channels.telegram import TelegramChannel, poll_telegram, telegram_app
from turnkeeper.channels.telegram_api import BotApi, TelegramConflict, TelegramRefused, checked_secret, new_secret
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Button, Content
from turnkeeper.errors import InvalidInput, SchemaConflict
from turnkeeper.log.record import HeadQuery
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

C = f"telegram:{BOT_ID}:5"
SECRET = new_secret()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts."""
    monkeypatch.setattr(channel, "_PAUSE", 0.02)
    monkeypatch.setattr(channel, "_LONGEST_PAUSE", 0.1)


@pytest.fixture
async def telegram() -> AsyncIterator[Telegram]:
    """A Telegram with one open chat, 5."""
    async with Telegram() as telegram:
        telegram.open(5)
        yield telegram


@pytest.fixture
async def api(telegram: Telegram) -> AsyncIterator[BotApi]:
    """A bot there."""
    async with BotApi(TOKEN, base_url=telegram.url) as api:
        yield api


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """Rules are the same on all stores: the conformance, crash and model suites show that."""
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


def echo() -> Flow:
    """Says everything again."""
    flow = Flow("echo")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send(f"> {c.message.text}")

    assert only.__name__ == flow.first_step
    return flow


@asynccontextmanager
async def polling(store: Store, api: BotApi, flow: Flow | None = None, **options: Any) -> AsyncGenerator[Conversations]:
    """A bot that polls."""
    async with Conversations(store, [flow or echo()], TelegramChannel(api)) as bot, anyio.create_task_group() as tasks:

        async def poll() -> None:
            await poll_telegram(bot, api, **options)

        tasks.start_soon(poll)
        yield bot
        tasks.cancel_scope.cancel()


def nobody(conversation_id: str) -> None:
    """Is told, and does nothing."""


async def journaled(store: Store) -> int:
    """Conversations in the store."""
    return len([head async for head in store.heads(HeadQuery())])


# --- polling -------------------------------------------------------------------------------------------------


async def test_a_bot_answers(telegram: Telegram, api: BotApi, store: Store) -> None:
    telegram.say("before it polled")
    async with polling(store, api):
        await until(lambda: so(lambda: telegram.texts() == ["> before it polled"]))
        for text in ("a", "b", "c"):
            telegram.say(text)
        telegram.say("x", chat=6)
        await until(lambda: so(lambda: len(telegram.texts()) == 4 and telegram.texts(6) == ["> x"]))
    assert telegram.texts() == ["> before it polled", "> a", "> b", "> c"]
    polls = telegram.made("getUpdates")
    assert all(poll["allowed_updates"] == ["message", "edited_message", "callback_query"] for poll in polls)
    assert "offset" not in polls[0]


async def test_telegram_is_told_when_the_journal_has_it(telegram: Telegram, api: BotApi, store: Store) -> None:
    """J1: an update is gone at Telegram with the next offset."""
    gate = Gate(store)
    telegram.say("a")
    telegram.say("b", chat=6)
    async with polling(gate, api, taken=nobody):
        with anyio.fail_after(10):
            await gate.waiting.wait()
        with anyio.move_on_after(0.1):  # as long as it likes: the writes have not been made
            await until(lambda: so(lambda: len(telegram.calls) > 1))
        assert len(telegram.calls) == 1
        gate.open.set()
        await until(lambda: so(lambda: telegram.pending == []))
    assert telegram.made("getUpdates")[1]["offset"] == 902
    assert await journaled(store) == 2


async def test_a_store_that_is_away(telegram: Telegram, api: BotApi, store: Store) -> None:
    """Telegram keeps what is not in the journal; what is there already is known."""
    gate = Gate(store, is_open=True)
    gate.fails = True
    told: list[str] = []
    async with polling(gate, api, taken=told.append):
        telegram.say("a")
        await until(lambda: so(lambda: gate.failed >= 3))
        assert [update["update_id"] for update in telegram.pending] == [900]
        telegram.say("b")
        gate.fails = False
        await until(lambda: so(lambda: telegram.pending == []))
    assert (await state_of(store, C)).received == 2
    assert set(told) == {C}


async def test_a_poller_that_comes_after_a_crash(telegram: Telegram, api: BotApi, store: Store) -> None:
    """It died with the updates in the journal, and Telegram not told: they come again, and are known."""
    for text in ("a", "b"):
        telegram.say(text)
    for _ in range(2):
        before = len(telegram.calls)
        telegram.faults["getUpdates"] = ["ok", *["500"] * 1000]
        async with polling(store, api, taken=nobody):
            await until(lambda: so(lambda: len(telegram.calls) > before + 1))  # noqa: B023  # awaited at once
        assert len(telegram.pending) == 2
    telegram.faults = {}
    async with polling(store, api):
        await until(lambda: so(lambda: len(telegram.texts()) == 2 and not telegram.pending))
    assert telegram.texts() == ["> a", "> b"]
    assert (await state_of(store, C)).received == 2


async def test_ids_that_begin_anew_below(telegram: Telegram, api: BotApi, store: Store) -> None:
    """After a week without updates Telegram chooses the next id at random."""
    async with polling(store, api, wait_seconds=1):
        telegram.say("a")
        await until(lambda: so(lambda: not telegram.pending and "offset" not in telegram.made("getUpdates")[-1]))
        telegram.next_update = 7
        telegram.say("b")
        await until(lambda: so(lambda: telegram.texts() == ["> a", "> b"]))


@pytest.mark.parametrize("fault", ["lose", "cut", "500", "html", "429:0"])
async def test_faults_of_the_way(telegram: Telegram, api: BotApi, store: Store, fault: str) -> None:
    telegram.faults["getUpdates"] = [fault, "ok", fault, fault]
    async with polling(store, api, wait_seconds=1):
        for text in ("a", "b"):
            telegram.say(text)
        await until(lambda: so(lambda: telegram.texts() == ["> a", "> b"] and not telegram.pending))


async def test_a_telegram_that_is_restarted(telegram: Telegram, api: BotApi, store: Store) -> None:
    async with polling(store, api):
        await until(lambda: so(lambda: bool(telegram.calls)))
        await telegram.restart()
        telegram.say("a")
        await until(lambda: so(lambda: telegram.texts() == ["> a"]))


async def test_two_pollers(telegram: Telegram, api: BotApi, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Each takes the floor from the other: both say so, no update is lost, none is answered twice."""
    async with BotApi(TOKEN, base_url=telegram.url) as second, polling(store, api, wait_seconds=1):
        await until(lambda: so(lambda: bool(telegram.calls)))
        async with polling(store, second, wait_seconds=1):
            for number in range(10):
                telegram.say(str(number))
                await until(lambda: so(lambda: len(telegram.texts()) == number + 1))  # noqa: B023  # awaited at once
        telegram.say("alone")
        await until(lambda: so(lambda: len(telegram.texts()) == 11))
    assert telegram.texts() == [*(f"> {number}" for number in range(10)), "> alone"]
    told = [record for record in caplog.records if "another process polls" in record.getMessage()]
    assert told
    assert all(record.levelno == logging.ERROR for record in told)
    assert len(told) <= 4  # not at each attempt


async def test_a_conflict_that_lasts(telegram: Telegram, api: BotApi, store: Store) -> None:
    async with Conversations(store, [echo()], TelegramChannel(api)) as bot:
        async with BotApi(TOKEN, base_url=telegram.url) as other, anyio.create_task_group() as tasks:

            async def rude() -> None:
                while True:
                    await anyio.sleep(0.01)
                    try:
                        await other.call("getUpdates", timeout=1)
                    except TelegramConflict:
                        continue

            tasks.start_soon(rude)
            with anyio.fail_after(20), pytest.raises(TelegramConflict, match="other getUpdates"):
                await poll_telegram(bot, api, conflict_seconds=0.2, wait_seconds=1)
            tasks.cancel_scope.cancel()
        assert await api.call("setWebhook", url="http://127.0.0.1:9/") is True
        with pytest.raises(TelegramConflict, match="webhook is active"):
            await poll_telegram(bot, api)
        telegram.say()
        await api.delete_webhook()
        assert len(telegram.pending) == 1


async def test_a_bot_that_is_not_let_in(telegram: Telegram, store: Store) -> None:
    api = BotApi(f"{BOT_ID}:revoked", base_url=telegram.url)
    async with api, Conversations(store, [echo()], TelegramChannel(api)) as bot:
        with pytest.raises(TelegramRefused, match="401 Unauthorized"):
            await poll_telegram(bot, api)


async def test_what_cannot_be_kept_holds_nothing_up(
    telegram: Telegram, api: BotApi, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    telegram.say("a")
    telegram.say(None, photo=["x" * 300_000])
    telegram.say(None, new_chat_members=[])
    telegram.update("message", "?")
    telegram.say("b")
    async with polling(store, api):
        await until(lambda: so(lambda: telegram.texts() == ["> a", "> b"] and not telegram.pending))
    assert "update 901 of bot 4711 cannot be kept" in caplog.text
    assert (await state_of(store, C)).received == 2


async def test_a_conversation_that_cannot_be_read_holds_up_no_other(
    telegram: Telegram, api: BotApi, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version wrote its log, say. Its update is kept by Telegram, and taken once it can be."""
    receive = Conversations.receive
    broken = True

    async def unreadable(bot: Conversations, conversation_id: str, *arguments: Any) -> Any:
        if broken and conversation_id != C:
            raise SchemaConflict("its log", "was written by a newer version")
        return await receive(bot, conversation_id, *arguments)

    monkeypatch.setattr(Conversations, "receive", unreadable)
    telegram.open(6)
    telegram.say("a", chat=6)
    async with polling(store, api):
        for number in range(2):
            telegram.say(str(number))
            await until(lambda: so(lambda: len(telegram.texts()) == number + 1))  # noqa: B023  # awaited at once
        assert telegram.pending[0]["update_id"] == 900
        broken = False
        await until(lambda: so(lambda: not telegram.pending and telegram.texts(6) == ["> a"]))
    assert telegram.texts() == ["> 0", "> 1"]


def question() -> Flow:
    """Asks with buttons, and tells of what is no answer."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        answer = await c.ask(Content(text="Tea?", buttons=(Button("Yes, please", "yes"), Button("No"))))
        await c.send(f"{c.message.kind} {answer}")
        await c.ask("And then?")

    @flow.on_unasked
    async def unasked(c: FlowContext) -> None:
        await c.send(f"{c.why}: {c.message.text}")

    assert (only.__name__, unasked.__name__) == (flow.first_step, "unasked")
    return flow


async def test_buttons_and_edits(telegram: Telegram, api: BotApi, store: Store) -> None:
    async with polling(store, api, question()):
        first = telegram.say("hi")
        await until(lambda: so(lambda: telegram.texts() == ["Tea?"]))
        telegram.change(first, "hello")
        await until(lambda: so(lambda: telegram.texts()[1:] == ["edit: hello"]))
        telegram.query("another program's", telegram.messages[5][-1])
        await until(lambda: so(lambda: telegram.texts()[2:] == ["stale_button: another program's"]))
        presses = [telegram.press("Yes, please")]
        await until(lambda: so(lambda: telegram.texts()[3:] == ["button yes", "And then?"]))
        presses.append(telegram.press("No"))  # pressed again, when it is over
        await until(lambda: so(lambda: telegram.texts()[5:] == ["stale_button: No"]))
        await until(lambda: so(lambda: len(telegram.answered) == 3))
    assert set(presses) < set(telegram.answered)


async def test_a_button_stops_waiting_whatever_its_answer_comes_to(
    telegram: Telegram, api: BotApi, store: Store
) -> None:
    """Also where its update comes again, and where Telegram says that it is too late: neither is a failure."""
    telegram.faults["answerCallbackQuery"] = ["500+", "lose", "ok"]
    telegram.query("x", {"message_id": 1, "chat": {"id": 5, "type": "private"}, "date": 0})
    telegram.update("callback_query", {"id": "999", "from": {"id": 1}, "inline_message_id": "x", "data": "y"})
    for times in (1, 2):
        telegram.faults["getUpdates"] = ["ok", *["500"] * 1000]  # it is never told that they were taken
        async with polling(store, api, taken=nobody):
            await until(lambda: so(lambda: len(telegram.made("answerCallbackQuery")) == 2 * times))  # noqa: B023  # awaited at once
    assert len(telegram.pending) == 2
    assert (await state_of(store, C)).received == 1


# --- by webhook ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def hooked(
    store: Store, api: BotApi, flow: Flow | None = None, **options: Any
) -> AsyncGenerator[tuple[Conversations, str]]:
    """A bot with a webhook, which Telegram has not been told of yet."""
    bot = Conversations(store, [flow or echo()], TelegramChannel(api))
    async with bot, Site(telegram_app(bot, api, SECRET, **options), lifespan=True) as site:
        yield bot, f"{site.url}/telegram"


async def test_a_bot_with_a_webhook(telegram: Telegram, api: BotApi, store: Store) -> None:
    telegram.say("hi")
    async with hooked(store, api, question()) as (_, url):
        await api.set_webhook(url, SECRET)
        await until(lambda: so(lambda: telegram.texts() == ["Tea?"]))
        press = telegram.press("Yes, please")
        await until(lambda: so(lambda: telegram.texts()[1:] == ["button yes", "And then?"]))
        await until(lambda: so(lambda: telegram.answered == [press]))
        await api.delete_webhook()
    assert [status for _, status in telegram.deliveries] == [200, 200]
    for method in ("setWebhook", "deleteWebhook"):
        assert [made["drop_pending_updates"] for made in telegram.made(method)] == [False]


async def test_an_update_that_comes_twice_at_the_same_time(telegram: Telegram, api: BotApi, store: Store) -> None:
    telegram.deliver_twice = {900, 901}
    async with hooked(store, api) as (_, url):
        await api.set_webhook(url, SECRET)
        for text in ("a", "b"):
            telegram.say(text)
        await until(lambda: so(lambda: len(telegram.texts()) == 2 and len(telegram.deliveries) == 4))
    assert telegram.texts() == ["> a", "> b"]
    assert {status for _, status in telegram.deliveries} == {200}


async def test_telegram_comes_again_when_the_store_was_away(telegram: Telegram, api: BotApi, store: Store) -> None:
    gate = Gate(store, is_open=True)
    gate.fails = True
    async with hooked(gate, api) as (_, url):
        await api.set_webhook(url, SECRET)
        telegram.say("a")
        await until(lambda: so(lambda: len(telegram.deliveries) >= 2))
        assert {status for _, status in telegram.deliveries} == {503}
        gate.fails = False
        await until(lambda: so(lambda: telegram.texts() == ["> a"]))


async def test_no_acknowledgement_before_the_journal_has_it(telegram: Telegram, api: BotApi, store: Store) -> None:
    gate = Gate(store)
    async with hooked(gate, api, taken=nobody) as (_, url):
        await api.set_webhook(url, SECRET)
        telegram.say("a")
        with anyio.fail_after(10):
            await gate.waiting.wait()
        with anyio.move_on_after(0.1):
            await until(lambda: so(lambda: bool(telegram.deliveries)))
        assert telegram.deliveries == []
        gate.open.set()
        await until(lambda: so(lambda: telegram.deliveries == [(900, 200)]))


async def test_hostile_requests_are_refused_without_an_entry(telegram: Telegram, api: BotApi, store: Store) -> None:
    update = json.dumps(telegram.say("hi")).encode()
    name = "x-telegram-bot-api-secret-token"
    right = [(name, SECRET), ("content-type", "application/json")]
    hostile: list[tuple[int, bytes, list[tuple[str, str]]]] = [
        (401, update, [("content-type", "application/json")]),
        (401, update, [(name, ""), *right[1:]]),
        (401, update, [(name, SECRET[:-1]), *right[1:]]),
        (401, update, [(name, SECRET + "x"), *right[1:]]),
        (401, update, [*right, (name, SECRET)]),
        (401, b"x" * 2_000_000, right[1:]),
        (415, update, right[:1]),
        (415, update, [*right, ("content-encoding", "gzip")]),
        (413, b" " * 2_000_000, right),
        (400, b"{", right),
        (400, b"[" * 100_000, right),
        (400, b"[]", right),
        (400, b"{}", right),
        (400, b'{"update_id": "900"}', right),
        (200, b'{"update_id": 1, "message": {"text": []}}', right),  # Telegram's, perhaps: it must not come again
        (400, update.replace(b'"hi"', b'"\\ud800"'), right),
    ]
    told: list[str] = []
    async with hooked(store, api, taken=told.append) as (_, url), httpx2.AsyncClient() as client:
        for number, (status, body, headers) in enumerate(hostile):
            try:
                answer = await client.post(url, content=body, headers=headers)
            except (httpx2.WriteError, httpx2.ReadError, httpx2.RemoteProtocolError):
                assert len(body) > 1_000_000  # cut off in the middle of its saying
                continue
            assert (answer.status_code, answer.content) == (status, b""), number
        assert (await client.get(url)).status_code == 405
        assert await journaled(store) == 0
        assert told == []
        assert (await client.post(url, content=update, headers=right)).status_code == 200
    assert told == [C]


@pytest.mark.parametrize("secret", ["", "short", "x" * 257, "with a space in it", "with a colon: no", "\u00e9" * 20])
def test_secrets_that_are_none(secret: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_secret(secret)
    assert not secret or secret not in str(caught.value)
