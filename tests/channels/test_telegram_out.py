"""The Telegram channel's messages: what goes out, and what Telegram's answer, or none, says of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.cases.charge_server import unused_port
from tests.channels.telegram_server import BOT_ID, TOKEN, Telegram
from tests.conversation.driving import state_of
from turnkeeper.channels.replies import reply_port
from turnkeeper.channels.telegram import TelegramChannel
from turnkeeper.channels.telegram_api import BotApi, TelegramError, TelegramLost, TelegramRefused, TelegramUnreachable
from turnkeeper.conversation.channel import FindingChannel, NotSent, Refused, SendOutcome, Sent, Unknown
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Button, Content, Message
from turnkeeper.conversation.state import SendState
from turnkeeper.errors import InvalidInput
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

C = f"telegram:{BOT_ID}:5"
KEY = "msg_" + "0" * 32


@pytest.fixture
async def telegram() -> AsyncIterator[Telegram]:
    """A Telegram with one open chat, 5."""
    async with Telegram() as telegram:
        telegram.open(5)
        yield telegram


@pytest.fixture
async def api(telegram: Telegram) -> AsyncIterator[BotApi]:
    """A bot there."""
    async with BotApi(TOKEN, base_url=telegram.url, timeout=httpx2.Timeout(10, read=0.5)) as api:
        yield api


async def send(api: BotApi, text: str = "hello", **more: object) -> SendOutcome:
    """Send a message."""
    return await TelegramChannel(api).send(C, KEY, Content(text=text, **more))  # type: ignore[arg-type]


async def test_what_is_sent(telegram: Telegram, api: BotApi) -> None:
    options = {"telegram": {"parse_mode": "HTML", "disable_notification": True}, "other": 1}
    assert await send(api, "Tea?", buttons=(Button("Yes", "y"), Button("No")), data=options) == Sent("11")
    (made,) = telegram.made("sendMessage")
    rows = made.pop("reply_markup")["inline_keyboard"]
    assert made == {"chat_id": 5, "text": "Tea?", "parse_mode": "HTML", "disable_notification": True}
    assert [one["text"] for (one,) in rows] == ["Yes", "No"]
    telegram.open(-100)
    assert await TelegramChannel(api).send(f"telegram:{BOT_ID}:-100:7", KEY, Content(text="x")) == Sent("12")
    assert telegram.made("sendMessage")[1] == {"chat_id": -100, "text": "x", "message_thread_id": 7}


@pytest.mark.parametrize(
    ("fault", "outcome", "visible"),
    [
        ("lose", Unknown, 1),
        ("cut", Unknown, 0),
        ("slow", Unknown, 1),
        ("500", Unknown, 0),
        ("500+", Unknown, 1),
        ("html", Unknown, 0),
        ("429:7", Refused, 0),
    ],
)
async def test_what_an_answer_proves(
    telegram: Telegram, api: BotApi, fault: str, outcome: type[SendOutcome], visible: int
) -> None:
    telegram.faults["sendMessage"] = [fault]
    got = await send(api)
    assert isinstance(got, outcome)
    assert not isinstance(got, Refused) or got.retry_after == 7
    assert len(telegram.texts()) == visible
    assert len(telegram.made("sendMessage")) == 1


async def test_what_is_refused_for_good(telegram: Telegram, api: BotApi) -> None:
    for text, words in (("x" * 4097, "message is too long"), (" ", "message text is empty")):
        assert await send(api, text) == Refused(f"400 Bad Request: {words}")
    telegram.blocked.add(5)
    assert await send(api) == Refused("403 Forbidden: bot was blocked by the user")
    assert await TelegramChannel(api).send(f"telegram:{BOT_ID}:6", KEY, Content(text="x")) == Refused(
        "400 Bad Request: chat not found"
    )
    calls = len(telegram.calls)
    for data in (
        {"telegram": 5},
        {"telegram": {"chat_id": 6}},
        {"telegram": {"edit": "x"}},
        {"telegram": {"parse_mode": object()}},
    ):
        assert isinstance(await send(api, data=data), Refused)
    assert isinstance(await send(api, buttons=(Button("Yes", "y" * 42),)), Refused)
    assert len(telegram.calls) == calls


async def test_what_never_left(telegram: Telegram, api: BotApi) -> None:
    channel = TelegramChannel(api)
    for name in ("telegram:1:5", "webhook:default:c"):
        assert isinstance(await channel.send(name, KEY, Content(text="x")), NotSent)
    for token in (f"{BOT_ID}:a_token_that_was_revoked", TOKEN):
        async with BotApi(token, base_url=telegram.url) as other:
            if token == TOKEN:
                await telegram.site.stop()
            assert isinstance(await send(other), NotSent)
    assert telegram.texts() == []


async def test_an_edit_whose_answer_was_lost_is_made_again(telegram: Telegram, api: BotApi) -> None:
    assert await send(api) == Sent("11")
    edit = {"telegram": {"edit": "11"}}
    for fault in ("ok", "lose", "cut", "500+"):
        telegram.faults["editMessageText"] = [fault]
        assert await send(api, f"with {fault}", data=edit) == Sent("11")
        assert telegram.texts() == [f"with {fault}"]
    telegram.faults["editMessageText"] = ["500"] * 3
    assert isinstance(await send(api, "x", data=edit), Unknown)
    assert isinstance(await send(api, "x", data={"telegram": {"edit": 99}}), Refused)


async def test_there_is_no_way_to_find_a_message(api: BotApi) -> None:
    """So it is said that there is none, and nothing is guessed."""
    channel = TelegramChannel(api)
    assert not isinstance(channel, FindingChannel)
    assert (channel.dedup_window, channel.max_length) == (0, 4096)
    port = reply_port(channel, C)
    assert not port.keyed
    assert port.find is None


# --- in a conversation ---------------------------------------------------------------------------------------


def says(*texts: str) -> Flow:
    """Says these."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        for text in texts:
            await c.send(text)

    assert only.__name__ == flow.first_step
    return flow


@pytest.mark.parametrize("fault", ["lose", "cut", "500", "500+", "slow"])
async def test_a_send_whose_answer_was_lost_is_not_repeated(telegram: Telegram, api: BotApi, fault: str) -> None:
    telegram.faults["sendMessage"] = [fault]
    async with await SqliteStore.open(":memory:") as store:
        async with Conversations(store, [says("one", "two")], TelegramChannel(api)) as bot:
            assert (await bot.handle(C, Message(event_id="1", text="hi"))).left is None
            assert (await bot.process(C)).left is None
        state = await state_of(store, C)
    assert telegram.texts() == (["two"] if fault in ("cut", "500") else ["one", "two"])
    assert len(telegram.made("sendMessage")) == 2
    assert state.attention == "unknown_send"
    assert [send.state for send in state.sends if send.state is not SendState.SENT] == [SendState.AMBIGUOUS]


async def test_a_flood_is_waited_for(telegram: Telegram, api: BotApi) -> None:
    telegram.faults["sendMessage"] = ["429:1", "ok"]
    async with await SqliteStore.open(":memory:") as store:
        async with Conversations(store, [says("one", "two")], TelegramChannel(api)) as bot:
            assert (await bot.handle(C, Message(event_id="1", text="hi"))).left is None
        assert (await state_of(store, C)).attention is None
    assert telegram.texts() == ["one", "two"]


async def test_long_messages_go_in_parts_and_go_on_with_the_first_unsent_one(telegram: Telegram, api: BotApi) -> None:
    """O4: characters count, not what they are encoded in. The buttons are under the last part."""
    flow = Flow("f")
    text = "\n".join(("😀" * 4000, "b" * 3000, "c" * 2000))

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.ask(Content(text=text, buttons=(Button("Yes", "y"),)))

    assert only.__name__ == flow.first_step
    telegram.faults["sendMessage"] = ["ok", "429:3600"]
    async with await SqliteStore.open(":memory:") as store:
        async with Conversations(store, [flow], TelegramChannel(api)) as bot:
            assert (await bot.handle(C, Message(event_id="1", text="hi"))).left == "later"
        assert telegram.texts() == ["😀" * 4000]
        await store.advance_clock(3_600_000)
        async with Conversations(store, [flow], TelegramChannel(api)) as bot:
            assert (await bot.process(C)).left is None
    assert telegram.texts() == text.split("\n")
    assert ["reply_markup" in one for one in telegram.messages[5]] == [False, False, True]


# --- secrets -------------------------------------------------------------------------------------------------


async def test_the_token_is_in_no_log_line_and_in_no_error(
    telegram: Telegram, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries log the addresses of their requests, and Telegram's hold the token."""
    caplog.set_level(0)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    told: list[str] = []
    telegram.faults = {
        "sendMessage": ["ok", "lose", "cut", "500", "html", "429:1", "slow"],
        "getMe": ["500", "lose", "html"],
    }
    async with BotApi(TOKEN, base_url=telegram.url, timeout=httpx2.Timeout(10, read=0.3)) as api:
        told += [repr(await send(api)) for _ in range(7)]
        for _ in range(3):
            with pytest.raises(TelegramLost) as lost:
                await api.call("getMe")
            told += traceback.format_exception(lost.value)
        with pytest.raises(TelegramRefused) as refused:
            await api.call("noSuchMethod")
        told += traceback.format_exception(refused.value)
        told.append(repr(api))
    for url in (f"http://127.0.0.1:{unused_port()}", "http://no-such-host.invalid", "ftp://x", "http://[x"):
        async with BotApi(TOKEN, base_url=url) as api:
            told.append(repr(await send(api)))
            with pytest.raises(TelegramError) as failed:
                await api.call("getMe")
            told += traceback.format_exception(failed.value)
            assert isinstance(failed.value, TelegramUnreachable)
    with pytest.raises(InvalidInput) as bad:
        BotApi(TOKEN + "\n")
    told += traceback.format_exception(bad.value)
    everything = "\n".join([*told, caplog.text, *capsys.readouterr()])
    assert TOKEN.partition(":")[2] not in everything
    assert "/bot/sendMessage" in caplog.text  # the library did log its requests
