"""The tests' Telegram is one: aiogram, which knows the real one, gets along with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from aiogram import Bot, Dispatcher
from aiogram.client.session.aiohttp import AiohttpSession
from aiogram.client.telegram import TelegramAPIServer
from aiogram.exceptions import (
    TelegramBadRequest,
    TelegramConflictError,
    TelegramForbiddenError,
    TelegramNetworkError,
    TelegramRetryAfter,
    TelegramServerError,
    TelegramUnauthorizedError,
)
from aiogram.types import CallbackQuery, InlineKeyboardButton, InlineKeyboardMarkup, Message
from aiogram.webhook.aiohttp_server import SimpleRequestHandler
from aiohttp import web

from tests.channels.telegram_server import BOT_ID, TOKEN, Telegram
from tests.engine.support import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def telegram() -> AsyncIterator[Telegram]:
    """A Telegram with one open chat, 5."""
    async with Telegram() as telegram:
        telegram.open(5)
        yield telegram


@asynccontextmanager
async def aiogram(telegram: Telegram, token: str = TOKEN) -> AsyncGenerator[Bot]:
    """aiogram's client."""
    async with Bot(token, AiohttpSession(api=TelegramAPIServer.from_base(telegram.url))) as bot:
        yield bot


@asynccontextmanager
async def listening(app: web.Application) -> AsyncGenerator[str]:
    """aiohttp's server; where its webhook is."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    finally:
        await runner.cleanup()


async def test_messages(telegram: Telegram) -> None:
    async with aiogram(telegram) as bot:
        me = await bot.get_me()
        assert (me.id, me.is_bot, me.username) == (BOT_ID, True, "the_bot")
        markup = InlineKeyboardMarkup(inline_keyboard=[[InlineKeyboardButton(text="Yes", callback_data="y")]])
        sent = await bot.send_message(5, " hello ", reply_markup=markup)
        assert (sent.text, sent.chat.id, sent.chat.type) == ("hello", 5, "private")
        assert sent.reply_markup is not None
        assert sent.reply_markup.model_dump() == markup.model_dump()
        changed = await bot.edit_message_text(chat_id=5, message_id=sent.message_id, text="bye")
        assert isinstance(changed, Message)
        assert (changed.text, changed.reply_markup) == ("bye", None)
        with pytest.raises(TelegramBadRequest, match="message is not modified"):
            await bot.edit_message_text(chat_id=5, message_id=sent.message_id, text="bye")
        for chat, text, words in ((6, "x", "chat not found"), (5, " ", "text is empty"), (5, "x" * 4097, "too long")):
            with pytest.raises(TelegramBadRequest, match=words):
                await bot.send_message(chat, text)
        markup.inline_keyboard[0][0] = InlineKeyboardButton(text="Yes", callback_data="y" * 65)
        with pytest.raises(TelegramBadRequest, match="BUTTON_DATA_INVALID"):
            await bot.send_message(5, "x", reply_markup=markup)
        telegram.blocked.add(5)
        with pytest.raises(TelegramForbiddenError):
            await bot.send_message(5, "x")
    assert telegram.texts() == ["bye"]
    async with aiogram(telegram, "4711:another") as bot:
        with pytest.raises(TelegramUnauthorizedError):
            await bot.get_me()


async def test_faults(telegram: Telegram) -> None:
    telegram.faults["sendMessage"] = ["429:3", "500", "500+", "lose", "cut", "html"]
    async with aiogram(telegram) as bot:
        with pytest.raises(TelegramRetryAfter) as caught:
            await bot.send_message(5, "429")
        assert caught.value.retry_after == 3
        for text in ("500", "500+"):
            with pytest.raises(TelegramServerError):
                await bot.send_message(5, text)
        for text in ("lose", "cut"):
            with pytest.raises(TelegramNetworkError):
                await bot.send_message(5, text)
        with pytest.raises(Exception, match="decode"):
            await bot.send_message(5, "html")
        assert telegram.texts() == ["500+", "lose"]
        telegram.say()
        await telegram.restart()
        assert [update.update_id for update in await bot.get_updates()] == [900]
        await telegram.site.stop()
        with pytest.raises(TelegramNetworkError):
            await bot.send_message(5, "away")


async def test_updates_and_their_offset(telegram: Telegram) -> None:
    said = [telegram.say(text) for text in ("a", "b", "c")]
    async with aiogram(telegram) as bot:
        for _ in range(2):  # they come until they are confirmed
            assert [update.update_id for update in await bot.get_updates()] == [900, 901, 902]
        assert [update.update_id for update in await bot.get_updates(limit=1)] == [900]
        (only,) = await bot.get_updates(offset=902)
        assert only.message is not None
        assert (only.message.text, only.message.message_id) == ("c", said[2]["message"]["message_id"])
        assert [update.update_id for update in await bot.get_updates(offset=1)] == [902]
        assert await bot.get_updates(offset=903) == []
        assert await bot.get_updates() == []

        telegram.change(said[0], "A")
        (edited,) = await bot.get_updates(allowed_updates=["message"])
        assert edited.edited_message is not None
        assert edited.edited_message.text == "A"
        telegram.change(said[0], "B")  # not asked for any more
        assert await bot.get_updates(offset=904) == []

        got: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                got.extend(update.update_id for update in await bot.get_updates(timeout=30))

            tasks.start_soon(wait)
            await until(lambda: asyncio.sleep(0, telegram.calls[-1].parameters.get("timeout") == "30"))
            telegram.say("d")
        assert got == [905]


async def test_two_pollers(telegram: Telegram) -> None:
    """The one that came first is told to go."""
    async with aiogram(telegram) as bot, aiogram(telegram) as other, anyio.create_task_group() as tasks:

        async def first() -> None:
            with pytest.raises(TelegramConflictError, match="other getUpdates"):
                await bot.get_updates(timeout=30)
            telegram.say()

        tasks.start_soon(first)
        await until(lambda: asyncio.sleep(0, bool(telegram.calls)))
        assert len(await other.get_updates(timeout=30)) == 1


async def test_a_bot_that_polls(telegram: Telegram) -> None:
    """With buttons, in aiogram's own loop."""
    dispatcher = Dispatcher()

    @dispatcher.message()
    async def answer(message: Message) -> None:
        button = InlineKeyboardButton(text="More", callback_data=f"more {message.text}")
        await message.answer(f"> {message.text}", reply_markup=InlineKeyboardMarkup(inline_keyboard=[[button]]))

    @dispatcher.callback_query()
    async def press(query: CallbackQuery) -> None:
        assert isinstance(query.message, Message)
        await query.answer()
        await query.message.answer(f"{query.data} for {query.from_user.id}")

    telegram.say("a")
    async with aiogram(telegram) as bot:
        polling = asyncio.create_task(dispatcher.start_polling(bot, handle_signals=False, polling_timeout=1))  # pyright: ignore[reportUnknownMemberType]
        await until(lambda: asyncio.sleep(0, telegram.texts() == ["> a"]))
        pressed = telegram.press("More")
        await until(lambda: asyncio.sleep(0, telegram.texts() == ["> a", "more a for 77"]))
        await dispatcher.stop_polling()
        await polling
        assert telegram.answered == [pressed]
        with pytest.raises(TelegramBadRequest, match="query is too old"):
            await bot.answer_callback_query("999")
    assert (answer.__name__, press.__name__) == ("answer", "press")


async def test_a_bot_with_a_webhook(telegram: Telegram) -> None:
    dispatcher = Dispatcher()
    refuse = [True]

    @dispatcher.message()
    async def answer(message: Message) -> None:
        await message.answer(f"> {message.text}")

    @web.middleware
    async def stubborn(request: web.Request, handler: object) -> web.StreamResponse:
        if refuse:
            refuse.clear()
            return web.Response(status=500)
        return await handler(request)  # type: ignore[operator]

    telegram.say("a")
    async with aiogram(telegram) as bot:
        app = web.Application(middlewares=[stubborn])
        SimpleRequestHandler(dispatcher, bot, handle_in_background=False, secret_token="s3cret").register(app, "/hook")
        async with listening(app) as url:
            assert await bot.set_webhook(url, secret_token="s3cret")
            info = await bot.get_webhook_info()
            assert (info.url, info.pending_update_count) == (url, 1)
            with pytest.raises(TelegramConflictError, match="webhook is active"):
                await bot.get_updates()
            telegram.say("b")
            await until(lambda: asyncio.sleep(0, len(telegram.deliveries) == 3))
            assert telegram.deliveries == [(900, 500), (900, 200), (901, 200)]
            assert telegram.texts() == ["> a", "> b"]
            await bot.set_webhook(url, secret_token="another")
            telegram.say("c")
            await until(lambda: asyncio.sleep(0, telegram.deliveries[-1] == (902, 401)))
            await bot.delete_webhook()
            assert [update.update_id for update in await bot.get_updates()] == [902]
            assert await bot.delete_webhook(drop_pending_updates=True)
            assert await bot.get_updates() == []
    assert answer.__name__ == "answer"
