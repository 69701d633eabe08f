"""A Telegram for tests: the Bot API's server, its chats, and the people in them.

It says what the real one says, in its words. `test_telegram_server.py` drives it with aiogram, which is not ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl

import anyio
import anyio.abc
import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.channels.serving import Site

TOKEN: Final = "4711:AAE-the_secret_of_the_bot_4711_xyz"
BOT_ID: Final = 4711
_DEFAULT: Final = ["message", "edited_message", "callback_query", "channel_post", "my_chat_member", "inline_query"]
_TOO_OLD: Final = "query is too old and response timeout expired or query ID is invalid"
_SAME: Final = (
    "message is not modified: specified new message content and reply markup are exactly the same as a current content"
    " and reply markup of the message"
)


class Refusal(Exception):
    """The API refuses: a code, its words, and parameters."""

    def __init__(self, code: int, description: str, **parameters: Any) -> None:
        super().__init__(description)
        self.code = code
        self.description = description
        self.parameters = parameters


class Call(NamedTuple):
    """One call that came."""

    method: str
    parameters: dict[str, Any]


class Telegram:
    """The server. Use it as an async context manager.

    Attributes:
        calls: every call that came, also those that a fault ate.
        faults: by method, what happens to its next calls, in order: `ok`; `lose` (does it, and loses its answer), `cut` (loses
            the connection before), `slow` (does it, and answers when `patience` is set), `429:n`, `500` (says so before it does
            it), `500+` (does it, and says so), `html` (a proxy's page, before it does it).
        messages: by chat, what a person sees: the messages as the API tells of them.
        pending: updates that were not taken.
        answered: presses of buttons that were answered.
        deliveries: to the webhook: (update id, status), 0 where there was no answer.
        deliver_twice: ids of updates that the webhook gets twice, at the same time.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.faults: dict[str, list[str]] = {}
        self.messages: dict[int, list[dict[str, Any]]] = {}
        self.blocked: set[int] = set()
        self.pending: list[dict[str, Any]] = []
        self.answered: list[str] = []
        self.deliveries: list[tuple[int, int]] = []
        self.deliver_twice: set[int] = set()
        self.patience = anyio.Event()
        self.next_update = 900
        self._presses: set[str] = set()
        self._numbers = count(11)
        self._queries = count(1)
        self._allowed = _DEFAULT
        self._webhook: dict[str, Any] = {}
        self._news = anyio.Event()
        self._poll: anyio.Event | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self.site = Site(Starlette(routes=[Route("/bot{token}/{method}", self._called, methods=["GET", "POST"])]))

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        await self.site.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._tasks is not None
        self.patience.set()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        await self.site.__aexit__()

    @property
    def url(self) -> str:
        """Its base address."""
        return self.site.url

    async def restart(self) -> None:
        """Away, and back: it has lost nothing."""
        await self.site.stop()
        self._poll = None
        self.site.start()

    def texts(self, chat: int = 5) -> list[str]:
        """What a person sees of the bot."""
        return [one["text"] for one in self.messages.get(chat, []) if one["from"]["is_bot"]]

    def made(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the calls of a method."""
        return [call.parameters for call in self.calls if call.method == method]

    # --- people ----------------------------------------------------------------------------------------------

    def open(self, chat: int) -> None:
        """A chat that the bot may write to."""
        self.messages.setdefault(chat, [])

    def say(self, text: str | None = "hi", chat: int = 5, *, user: int = 77, **more: Any) -> dict[str, Any]:
        """Somebody says something: the update."""
        said = self._message(chat, {"id": user, "is_bot": False, "first_name": "Ann"}, **more)
        if text is not None:
            said["text"] = text
        self.messages.setdefault(chat, []).append(said)
        return self.update("message", said)

    def change(self, said: dict[str, Any], text: str) -> dict[str, Any]:
        """Somebody changes what he has said: the update."""
        return self.update("edited_message", {**said["message"], "text": text, "edit_date": 1_700_000_001})

    def press(self, label: str, chat: int = 5, *, user: int = 77, message: dict[str, Any] | None = None) -> str:
        """Somebody presses a button of the last message that has it, or of that one: the id of the press."""
        for shown in [message] if message else reversed(self.messages[chat]):
            for row in shown.get("reply_markup", {}).get("inline_keyboard", []):
                for button in row:
                    if button["text"] == label:
                        return self.query(button["callback_data"], shown, user)
        raise AssertionError(f"there is no button {label!r}")

    def query(self, data: str, message: dict[str, Any] | None, user: int = 77) -> str:
        """A press of a button that carries that."""
        press = str(next(self._queries))
        self._presses.add(press)
        sender = {"id": user, "is_bot": False, "first_name": "Ann"}
        told = {"id": press, "from": sender, "chat_instance": "1", "data": data}
        self.update("callback_query", told if message is None else {**told, "message": message})
        return press

    def update(self, kind: str, content: Any) -> dict[str, Any]:
        """Something happens."""
        update = {"update_id": self.next_update, kind: content}
        self.next_update += 1
        if kind in self._allowed:
            self.pending.append(update)
            self._wake()
            if self._webhook and self._tasks is not None:
                self._tasks.start_soon(self._deliver_all)
        return update

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def _message(self, chat: int, sender: dict[str, Any], **more: Any) -> dict[str, Any]:
        kind = "private" if chat > 0 else "supergroup"
        told = {"id": chat, "type": kind, **({"first_name": "Ann"} if chat > 0 else {"title": "All"})}
        return {"message_id": next(self._numbers), "from": sender, "chat": told, "date": 1_700_000_000, **more}

    # --- the API ---------------------------------------------------------------------------------------------

    async def _called(self, request: Request) -> Response:
        method = request.path_params["method"].lower()
        parameters = await _parameters(request)
        if request.path_params["token"] != TOKEN:
            return _refused(Refusal(401, "Unauthorized"))
        name = next((one for one in _METHODS if one.lower() == method), None)
        if name is None:
            return _refused(Refusal(404, "Not Found: method not found"))
        self.calls.append(Call(name, parameters))
        faults = self.faults.get(name, [])
        fault = faults.pop(0) if faults else "ok"
        if fault == "cut":
            self.site.sever(request)
            return Response()
        if fault == "html":
            return Response("<html>Bad Gateway</html>", 502)
        if fault.startswith("429"):
            seconds = int(fault.partition(":")[2])
            return _refused(Refusal(429, f"Too Many Requests: retry after {seconds}", retry_after=seconds))
        if fault == "500":
            return _refused(Refusal(500, "Internal Server Error"))
        try:
            result = await _METHODS[name](self, parameters)
        except Refusal as e:
            return _refused(e)
        if fault == "lose":
            self.site.sever(request)
        if fault == "slow":
            await self.patience.wait()
        if fault == "500+":
            return _refused(Refusal(500, "Internal Server Error"))
        return JSONResponse({"ok": True, "result": result})

    async def _get_me(self, _: dict[str, Any]) -> Any:
        return {"id": BOT_ID, "is_bot": True, "first_name": "Bot", "username": "the_bot"}

    async def _get_updates(self, parameters: dict[str, Any]) -> Any:
        if self._webhook:
            words = "can't use getUpdates method while webhook is active; use deleteWebhook to delete the webhook first"
            raise Refusal(409, f"Conflict: {words}")
        if self._poll is not None:
            self._poll.set()  # the one before is told to go
        mine = self._poll = anyio.Event()
        try:
            if parameters.get("allowed_updates") is not None:
                self._allowed = parameters["allowed_updates"] or _DEFAULT
            offset, limit = int(parameters.get("offset", 0)), int(parameters.get("limit", 100))
            if offset < 0:
                self.pending = self.pending[offset:]
            else:
                self.pending = [one for one in self.pending if one["update_id"] >= offset]
            with anyio.move_on_after(float(parameters.get("timeout", 0))):
                while not self.pending and not mine.is_set():
                    await self._news_or(mine)
            if mine.is_set():
                words = "terminated by other getUpdates request; make sure that only one bot instance is running"
                raise Refusal(409, f"Conflict: {words}")
            return self.pending[:limit]
        finally:
            if self._poll is mine:
                self._poll = None

    async def _news_or(self, other: anyio.Event) -> None:
        async with anyio.create_task_group() as tasks:

            async def wait(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait, self._news)
            tasks.start_soon(wait, other)

    async def _set_webhook(self, parameters: dict[str, Any]) -> Any:
        if not parameters.get("url"):
            return await self._delete_webhook(parameters)
        if parameters.get("secret_token") and not re.fullmatch(r"[A-Za-z0-9_-]{1,256}", parameters["secret_token"]):
            raise Refusal(400, "Bad Request: secret token contains unallowed characters")
        self._webhook = parameters
        self._allowed = parameters.get("allowed_updates") or self._allowed
        self._drop_if(parameters)
        assert self._tasks is not None
        self._tasks.start_soon(self._deliver_all)
        return True

    async def _delete_webhook(self, parameters: dict[str, Any]) -> Any:
        self._webhook = {}
        self._drop_if(parameters)
        return True

    def _drop_if(self, parameters: dict[str, Any]) -> None:
        if parameters.get("drop_pending_updates"):
            self.pending.clear()

    async def _get_webhook_info(self, _: dict[str, Any]) -> Any:
        return {
            "url": self._webhook.get("url", ""),
            "has_custom_certificate": False,
            "pending_update_count": len(self.pending),
            "allowed_updates": self._allowed,
        }

    async def _send_message(self, parameters: dict[str, Any]) -> Any:
        chat = self._chat(parameters)
        text = _checked_text(parameters)
        more = _checked_markup(parameters)
        if "message_thread_id" in parameters:
            more |= {"message_thread_id": int(parameters["message_thread_id"]), "is_topic_message": True}
        sent = self._message(chat, await self._get_me({}), text=text, **more)
        self.messages[chat].append(sent)
        return sent

    async def _edit_message_text(self, parameters: dict[str, Any]) -> Any:
        chat = self._chat(parameters)
        number = int(parameters.get("message_id", 0))
        shown = next((one for one in self.messages[chat] if one["message_id"] == number), None)
        if shown is None:
            raise Refusal(400, "Bad Request: message to edit not found")
        if not shown["from"]["is_bot"]:
            raise Refusal(400, "Bad Request: message can't be edited")
        changed = {"text": _checked_text(parameters), **_checked_markup(parameters)}
        if changed == {name: shown[name] for name in ("text", "reply_markup") if name in shown}:
            raise Refusal(400, f"Bad Request: {_SAME}")
        shown.pop("reply_markup", None)
        shown.update(changed, edit_date=1_700_000_002)
        return shown

    async def _answer_callback_query(self, parameters: dict[str, Any]) -> Any:
        press = str(parameters.get("callback_query_id"))
        if press not in self._presses:
            raise Refusal(400, f"Bad Request: {_TOO_OLD}")
        self.answered.append(press)
        return True

    def _chat(self, parameters: dict[str, Any]) -> int:
        chat = int(parameters.get("chat_id", 0))
        if chat not in self.messages:
            raise Refusal(400, "Bad Request: chat not found")
        if chat in self.blocked:
            raise Refusal(403, "Forbidden: bot was blocked by the user")
        return chat

    # --- the webhook -----------------------------------------------------------------------------------------

    async def _deliver_all(self) -> None:
        """Deliver what is pending, an update again and again until it is taken."""
        if self._webhook.get("busy"):
            return
        hook = self._webhook
        hook["busy"] = True
        async with httpx2.AsyncClient(timeout=10) as client:
            while self._webhook is hook and self.pending:
                update = self.pending[0]
                times = 2 if update["update_id"] in self.deliver_twice else 1
                statuses: list[int] = []
                async with anyio.create_task_group() as tasks:
                    for _ in range(times):
                        tasks.start_soon(self._deliver, client, hook, update, statuses)
                if any(200 <= status < 300 for status in statuses):
                    self.pending.remove(update)
                else:
                    await anyio.sleep(0.05)
        hook["busy"] = False

    async def _deliver(
        self, client: httpx2.AsyncClient, hook: dict[str, Any], update: dict[str, Any], statuses: list[int]
    ) -> None:
        headers = {"X-Telegram-Bot-Api-Secret-Token": hook["secret_token"]} if hook.get("secret_token") else {}
        try:
            status = (await client.post(hook["url"], json=update, headers=headers)).status_code
        except httpx2.HTTPError:
            status = 0
        statuses.append(status)
        self.deliveries.append((update["update_id"], status))


_METHODS: Final[dict[str, Callable[[Telegram, dict[str, Any]], Any]]] = {
    "getMe": Telegram._get_me,  # pyright: ignore[reportPrivateUsage]
    "getUpdates": Telegram._get_updates,  # pyright: ignore[reportPrivateUsage]
    "setWebhook": Telegram._set_webhook,  # pyright: ignore[reportPrivateUsage]
    "deleteWebhook": Telegram._delete_webhook,  # pyright: ignore[reportPrivateUsage]
    "getWebhookInfo": Telegram._get_webhook_info,  # pyright: ignore[reportPrivateUsage]
    "sendMessage": Telegram._send_message,  # pyright: ignore[reportPrivateUsage]
    "editMessageText": Telegram._edit_message_text,  # pyright: ignore[reportPrivateUsage]
    "answerCallbackQuery": Telegram._answer_callback_query,  # pyright: ignore[reportPrivateUsage]
}


def _refused(refusal: Refusal) -> Response:
    told: dict[str, Any] = {"ok": False, "error_code": refusal.code, "description": refusal.description}
    if refusal.parameters:
        told["parameters"] = refusal.parameters
    return JSONResponse(told, refusal.code)


async def _parameters(request: Request) -> dict[str, Any]:
    """JSON, a form, or the address: what is not a string is JSON in the latter two."""
    body = await request.body()
    if request.headers.get("content-type", "").startswith("application/json"):
        return json.loads(body) if body else {}
    told: dict[str, Any] = dict(parse_qsl(body.decode())) | dict(request.query_params)
    for name in ("allowed_updates", "reply_markup", "drop_pending_updates"):
        if name in told:
            told[name] = json.loads(told[name].lower() if name.startswith("drop") else told[name])
    return told


def _checked_text(parameters: dict[str, Any]) -> str:
    text = str(parameters.get("text", "")).strip()
    if not text:
        raise Refusal(400, "Bad Request: message text is empty")
    if len(text) > 4096:
        raise Refusal(400, "Bad Request: message is too long")
    return text


def _checked_markup(parameters: dict[str, Any]) -> dict[str, Any]:
    markup = parameters.get("reply_markup")
    if markup is None:
        return {}
    for row in markup["inline_keyboard"]:
        for button in row:
            if not 1 <= len(button.get("callback_data", "x").encode()) <= 64:
                raise Refusal(400, "Bad Request: BUTTON_DATA_INVALID")
    return {"reply_markup": {"inline_keyboard": markup["inline_keyboard"]}}
