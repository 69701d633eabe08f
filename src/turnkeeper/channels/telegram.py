"""Telegram as a channel: updates by long polling or by webhook, and messages that nobody can send twice to be safe.

`sendMessage` takes no key and sent messages cannot be looked up, so a send whose answer was lost stays in doubt until
somebody has looked (flows.md, Channels).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NoReturn, cast

import anyio
import msgspec
from anyio.abc import TaskGroup

from turnkeeper.channels.processing import InProcess, Taken, tell, who_is_told
from turnkeeper.channels.receiving import Refusal, application, bounded_body, guarded, journaled, require_json
from turnkeeper.channels.telegram_api import (
    UPDATES,
    BotApi,
    TelegramConflict,
    TelegramError,
    TelegramLost,
    TelegramRefused,
    TelegramUnreachable,
    checked_secret,
)
from turnkeeper.channels.telegram_updates import (
    ButtonTooLong,
    Ignored,
    Place,
    Update,
    button_data,
    place_of,
    read_update,
    update_id,
)
from turnkeeper.conversation.channel import NotSent, Refused, SendOutcome, Sent, Unknown
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.message import Content
from turnkeeper.errors import InvalidInput
from turnkeeper.models.failures import MissingSdk
from turnkeeper.observe.logs import logger

try:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as e:
    raise MissingSdk("telegram", e) from e

log = logger(__name__)

MAX_LENGTH: Final = 4096
"""Characters of a message: code points, as Telegram counts them."""
MAX_UPDATE: Final = 1024 * 1024
"""Bytes of an update that are read."""
_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_WAIT: Final = 1.0
"""Seconds to wait where Telegram does not say how long."""
_EDIT_TRIES: Final = 3
_ABOUT_THE_BOT: Final = frozenset({401, 404})
"""Said of a token that is wrong or was revoked: no fault of the message, which waits until the bot has another one."""
_OPTIONS: Final = frozenset(
    {"disable_notification", "link_preview_options", "parse_mode", "protect_content", "reply_parameters"}
)
"""Parameters of `sendMessage` that a content's `data["telegram"]` may bring."""


class TelegramChannel:
    """Sends messages of a bot, in parts of at most 4096 characters, with its buttons under the last one."""

    def __init__(self, api: BotApi, *, dedup_window: float = 0.0) -> None:
        """
        Args:
            dedup_window: seconds for which a send whose answer was lost is made again. Telegram drops no second message, so
                anything but 0 may say things twice; never the default.
        """
        self.dedup_window = dedup_window
        self.max_length: int | None = MAX_LENGTH
        self._api = api

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """See `Channel.send`. With `content.data["telegram"]["edit"]`, a message id, that message is changed instead."""
        place = place_of(conversation_id)
        if place is None or place.bot_id != self._api.bot_id:
            return NotSent(f"this is the channel of the bot {self._api.bot_id}")
        try:
            edits, parameters = _parameters(place, key, content)
        except (ButtonTooLong, InvalidInput) as e:
            return Refused(str(e))
        if edits is None:
            outcome = await self._call("sendMessage", parameters)
        else:
            outcome = await self._edit({**parameters, "message_id": edits})
        if isinstance(outcome, Unknown):
            log.warning("conversation %s: message %s may be out: %s", conversation_id, key, outcome.reason)
        return outcome

    async def _call(self, method: str, parameters: dict[str, Any]) -> SendOutcome:
        try:
            result: Any = await self._api.call(method, **parameters)
        except InvalidInput as e:
            return Refused(str(e))
        except TelegramUnreachable as e:
            return NotSent(e.reason)
        except TelegramLost as e:
            return Unknown(e.reason)
        except TelegramRefused as e:
            if e.code == 429:
                return Refused(e.reason, _WAIT if e.retry_after is None else e.retry_after)
            return NotSent(e.reason) if e.code in _ABOUT_THE_BOT else Refused(e.reason)
        number = cast("dict[str, Any]", result).get("message_id") if isinstance(result, dict) else None
        return Unknown("Telegram did not say the message's id") if number is None else Sent(str(number))

    async def _edit(self, parameters: dict[str, Any]) -> SendOutcome:
        """Changing a message twice changes it once, so a doubt is settled by doing it again."""
        outcome: SendOutcome = Unknown("not tried")
        for _ in range(_EDIT_TRIES):
            outcome = await self._call("editMessageText", parameters)
            if isinstance(outcome, Refused) and "message is not modified" in outcome.reason:
                return Sent(str(parameters["message_id"]))
            if not isinstance(outcome, Unknown):
                break
        return outcome


def _parameters(place: Place, key: str, content: Content) -> tuple[int | None, dict[str, Any]]:
    """The message to be changed, or None for a new one; and the parameters.

    Raises:
        ButtonTooLong: of a button.
        InvalidInput: the content's data asks for what this channel does not know.
    """
    given: Any = content.data.get("telegram", {})
    if not isinstance(given, dict):
        raise InvalidInput("content.data['telegram']", "must be an object")
    options = dict(cast("dict[str, Any]", given))
    edits: Any = options.pop("edit", None)
    if options.keys() - _OPTIONS:
        raise InvalidInput("content.data['telegram']", f"may hold {', '.join(sorted(_OPTIONS))} and edit")
    if edits is not None and not str(edits).isdecimal():
        raise InvalidInput("content.data['telegram']['edit']", "must be a message's id")
    parameters: dict[str, Any] = {**options, "chat_id": place.chat_id, "text": content.text}
    if edits is None and place.thread_id is not None:
        parameters["message_thread_id"] = place.thread_id
    if content.buttons:
        rows = [
            [{"text": one.label, "callback_data": button_data(key, number, one)}]
            for number, one in enumerate(content.buttons)
        ]
        parameters["reply_markup"] = {"inline_keyboard": rows}
    return (None if edits is None else int(edits)), parameters


# --- what comes in -------------------------------------------------------------------------------------------


class _Inbox:
    """Takes updates into the journal."""

    def __init__(self, bot: Conversations, api: BotApi) -> None:
        self._bot = bot
        self._api = api

    def read(self, raw: dict[str, Any]) -> Update | Ignored:
        """An update as a message; told of, if it is none."""
        update = read_update(self._api.bot_id, raw)
        if isinstance(update, Ignored):
            log.info("update %s of bot %d is ignored: %s", raw["update_id"], self._api.bot_id, update.why)
        return update

    async def take(self, update: Update | Ignored) -> str:
        """Take an update into the journal; the conversation that has something to do.

        What cannot be kept is told of and left: sent again, it would hold up everything behind it.

        Raises:
            StoreError: the store failed; the update has to come again.
        """
        if isinstance(update, Ignored):
            return ""
        try:
            await journaled(self._bot, update.conversation_id, update.message)
        except Refusal as e:
            event = update.message.event_id
            log.error("update %s of bot %d cannot be kept, and is left: %s", event, self._api.bot_id, e.why)
            return ""
        return update.conversation_id

    async def answer(self, callback: str) -> None:
        """Let the pressed button stop waiting. Said twice, or too late, it changes nothing."""
        try:
            await self._api.call("answerCallbackQuery", callback_query_id=callback)
        except TelegramError as e:
            log.info("bot %d: a pressed button goes on waiting: %s", self._api.bot_id, e)


async def poll_telegram(
    bot: Conversations,
    api: BotApi,
    *,
    taken: Taken | None = None,
    wait_seconds: float = 50.0,
    allowed_updates: Sequence[str] = UPDATES,
    conflict_seconds: float | None = None,
) -> NoReturn:
    """Take a bot's updates by long polling, for as long as this is not cancelled.

    Telegram is told that updates were taken only when they are in the journal, so none is lost; those that come again are
    known. One process polls for a bot: where another one does, this one says so, and steps in when that is gone.

    Args:
        bot: is entered already.
        taken: told a conversation's id when it has a new message. None: workers are, if the bot announces; else it is handled in
            this process.
        wait_seconds: for which Telegram holds its answer back where there is nothing.
        allowed_updates: kinds that are asked for. Kinds that no message is made of are ignored.
        conflict_seconds: how long another poller is put up with; None: for good.

    Raises:
        TelegramConflict: a webhook is set; or another one polled for `conflict_seconds`.
        TelegramRefused: Telegram does not let this bot in.
    """
    async with AsyncExitStack() as stack:
        taken = who_is_told(bot, taken)
        if taken is None:
            taken = (await stack.enter_async_context(InProcess(bot))).soon
        failure: TelegramRefused | None = None
        async with anyio.create_task_group() as tasks:
            poller = _Poller(bot, api, tasks, taken, wait_seconds, allowed_updates, conflict_seconds)
            try:
                await poller.run()
            except TelegramRefused as e:  # told as itself, and not as a group
                failure = e
            tasks.cancel_scope.cancel()
        assert failure is not None
        raise failure


class _NotTaken(Exception):
    """An update is not in the journal, and has to come again."""


class _Poller:
    def __init__(
        self,
        bot: Conversations,
        api: BotApi,
        tasks: TaskGroup,
        taken: Taken,
        wait: float,
        allowed: Sequence[str],
        patience: float | None,
    ) -> None:
        self._inbox = _Inbox(bot, api)
        self._api = api
        self._tasks = tasks
        self._taken = taken
        self._wait = round(wait)
        self._allowed = list(allowed)
        self._patience = patience
        self._conflicts: tuple[float, float] | None = None
        """When the first and the last of those that belong together were."""

    async def run(self) -> NoReturn:
        offset: int | None = None
        pause = _PAUSE
        while True:
            try:
                result: Any = await self._api.call(
                    "getUpdates", wait=self._wait, offset=offset, timeout=self._wait, allowed_updates=self._allowed
                )
                updates = [raw for raw in result if update_id(raw) is not None]
                # Told once, what is before it is gone there. It is not kept: after a week without updates their ids begin
                # anew anywhere, also below it.
                offset = None
                if updates:
                    offset = await self._take(updates)
                if not self._in_conflict():  # else the other one has the floor for as long as it was
                    pause = _PAUSE
                continue
            except TelegramConflict as e:
                self._conflict(e)
            except TelegramRefused as e:
                if e.code != 429:
                    raise
                pause = max(pause, _WAIT if e.retry_after is None else e.retry_after)
            except TelegramError as e:
                log.warning("bot %d gets no updates now: %s", self._api.bot_id, e)
            except _NotTaken as e:
                log.error(
                    "bot %d: an update cannot be taken now; Telegram keeps it", self._api.bot_id, exc_info=e.__cause__
                )
            await anyio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _take(self, updates: list[dict[str, Any]]) -> int:
        """Take updates into the journal, those of a chat in their order; what to tell Telegram then.

        Raises:
            _NotTaken: one of them is not in the journal. All of them come again.
        """
        chats: dict[str, list[Update | Ignored]] = {}
        for raw in updates:
            update = self._inbox.read(raw)
            chats.setdefault("" if isinstance(update, Ignored) else update.conversation_id, []).append(update)
        failures: list[Exception] = []

        async def take_all(of_a_chat: list[Update | Ignored]) -> None:
            try:
                for update in of_a_chat:
                    await self._take_one(update)
            except Exception as e:  # whatever it is, it is one chat's: the others are taken, and nothing is given up
                failures.append(e)

        async with anyio.create_task_group() as tasks:  # side by side: the store writes them in one go
            for of_a_chat in chats.values():
                tasks.start_soon(take_all, of_a_chat)
        if failures:
            raise _NotTaken from failures[0]
        return max(raw["update_id"] for raw in updates) + 1

    async def _take_one(self, update: Update | Ignored) -> None:
        conversation = await self._inbox.take(update)
        if update.callback:
            self._tasks.start_soon(self._inbox.answer, update.callback)
        if conversation:
            await tell(self._taken, conversation)

    def _conflict(self, conflict: TelegramConflict) -> None:
        if conflict.webhook:
            raise conflict
        now = anyio.current_time()
        if not self._in_conflict():
            self._conflicts = (now, now)
            log.error("bot %d: another process polls for it too, and one is enough: %s", self._api.bot_id, conflict)
        assert self._conflicts is not None
        first, _ = self._conflicts
        self._conflicts = (first, now)
        if self._patience is not None and now - first >= self._patience:
            raise conflict

    def _in_conflict(self) -> bool:
        """Whether there was one not long ago: each poller takes the floor from the other, again and again."""
        if self._conflicts is None:
            return False
        return anyio.current_time() - self._conflicts[1] < 2 * (_LONGEST_PAUSE + self._wait)


def telegram_route(
    bot: Conversations, api: BotApi, secret: str, *, taken: Taken, path: str = "/telegram", max_body: int = MAX_UPDATE
) -> Route:
    """A route that Telegram sends updates to, for a Starlette application of your own; see `BotApi.set_webhook`.

    An update is acknowledged when it is in the journal. Refused, without an entry: 401 (the secret), 413, 415, 408, 400.
    503 while the store is away: Telegram comes again.

    Args:
        secret: what Telegram was told in `set_webhook`.
        taken: told a conversation's id behind the acknowledgement. `InProcess.soon` handles it here.

    Raises:
        InvalidInput: the secret cannot be used.
    """
    expected = checked_secret(secret).encode()
    inbox = _Inbox(bot, api)

    async def take(request: Request) -> Response:
        told = request.headers.getlist("x-telegram-bot-api-secret-token")
        if len(told) != 1 or not hmac.compare_digest(told[0].encode(), expected):
            raise Refusal(401, "not Telegram's secret")
        require_json(request)
        body = await bounded_body(request, max_body)
        try:
            raw: Any = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            raise Refusal(400, "no JSON") from None
        if update_id(raw) is None:
            raise Refusal(400, "no update")
        update = inbox.read(raw)
        conversation = await inbox.take(update)

        async def afterwards() -> None:
            if update.callback:
                await inbox.answer(update.callback)
            if conversation:
                await tell(taken, conversation)

        return Response(background=BackgroundTask(afterwards))

    async def endpoint(request: Request) -> Response:
        return await guarded(lambda: take(request), f"telegram bot {api.bot_id}")

    return Route(path, endpoint, methods=["POST"])


def telegram_app(
    bot: Conversations,
    api: BotApi,
    secret: str,
    *,
    taken: Taken | None = None,
    path: str = "/telegram",
    max_body: int = MAX_UPDATE,
) -> Starlette:
    """An application that Telegram sends updates to. The bot has to be entered before it, and left behind it.

    Args:
        taken: as in `telegram_route`. None: updates are handled in this process, for as long as the application's lifespan
            lasts, and so is what an earlier process has left.
    """
    made: Callable[[Taken], Route] = lambda tell: telegram_route(  # noqa: E731
        bot, api, secret, taken=tell, path=path, max_body=max_body
    )
    return application(bot, taken, made)
