"""Telegram's Bot API over HTTP: one call, and what its answer, or none, proves.

The token is a part of every address there. It is put in below the client, so that no request object, log line or error that
is made above has it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import anyio
import msgspec

from turnkeeper.channels import posting
from turnkeeper.channels.posting import LIMITS, TIMEOUT, judged, read_bounded
from turnkeeper.conversation.channel import NotSent, Refused, Unknown
from turnkeeper.errors import InvalidInput, TurnkeeperError
from turnkeeper.models.failures import MissingSdk

try:
    import httpx2
except ImportError as e:
    raise MissingSdk("telegram", e) from e

OFFICIAL: Final = "https://api.telegram.org"
UPDATES: Final = ("message", "edited_message", "callback_query")
"""Kinds of updates that this channel makes messages of, and asks for."""
_TOKEN: Final = re.compile(r"([0-9]{1,20}):[A-Za-z0-9_-]{4,128}", re.ASCII)
_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{16,256}", re.ASCII)
_LARGEST: Final = 64 * 1024 * 1024
"""Bytes of an answer: a hundred updates of the largest kind."""


class TelegramError(TurnkeeperError):
    """A call of the Bot API brought no result.

    Attributes:
        method: the call.
        reason: why, in Telegram's words where it has some. Never the token.
    """

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method = method
        self.reason = reason


class TelegramUnreachable(TelegramError):
    """Telegram was not reached: the call surely had no effect."""


class TelegramLost(TelegramError):
    """The answer was lost, or is none of Telegram's: the call may have had its effect."""


class TelegramRefused(TelegramError):
    """Telegram refuses the call; it had no effect.

    Attributes:
        code: its code, as an HTTP status.
        retry_after: seconds after which it may be made again, where Telegram says so.
        migrated_to: the chat that takes the place of the one that was meant.
    """

    def __init__(
        self, method: str, code: int, reason: str, retry_after: float | None = None, migrated_to: int | None = None
    ) -> None:
        super().__init__(method, f"{code} {reason}")
        self.code = code
        self.retry_after = retry_after
        self.migrated_to = migrated_to


class TelegramConflict(TelegramRefused):
    """Somebody else takes this bot's updates: another poller, or a webhook.

    Attributes:
        webhook: it is a webhook, so waiting does not help; `deleteWebhook` does.
    """

    @property
    def webhook(self) -> bool:
        return "webhook" in self.reason.lower()


class _Parameters(msgspec.Struct):
    retry_after: float | None = None
    migrate_to_chat_id: int | None = None


class _Answer(msgspec.Struct):
    ok: bool
    result: Any = None
    error_code: int | None = None
    description: str = ""
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


_answer: Final = msgspec.json.Decoder(_Answer).decode


class BotApi:
    """A bot's access to the Bot API. Use it as an async context manager, or close it.

    Attributes:
        bot_id: the bot's id.
    """

    def __init__(
        self, token: str, *, base_url: str = OFFICIAL, proxy: str | None = None, timeout: httpx2.Timeout = TIMEOUT
    ) -> None:
        """
        Args:
            token: the bot's, as BotFather gives it. It is kept out of logs and errors.
            base_url: of another Bot API server.
            proxy: the address of a proxy.

        Raises:
            InvalidInput: that is no token. What it is, is not told.
        """
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise InvalidInput("token", "must be a bot's id, a colon, and its secret")
        self.bot_id = int(match[1])
        self._token = token
        self._base = base_url.rstrip("/")
        inner = httpx2.AsyncHTTPTransport(limits=LIMITS, proxy=proxy)
        self._client = httpx2.AsyncClient(transport=_WithToken(inner, self._base, token), timeout=timeout)
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"BotApi(bot {self.bot_id})"

    async def __aenter__(self) -> BotApi:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def call(self, method: str, *, wait: float = 0.0, **parameters: Any) -> Any:
        """Make a call; its result.

        Args:
            wait: seconds for which Telegram may hold its answer back, in addition.
            parameters: of the method; those that are None are left away.

        Raises:
            InvalidInput: a parameter is not JSON.
            TelegramRefused, TelegramUnreachable: it had no effect.
            TelegramLost: it may have had its effect.
        """
        try:
            body = msgspec.json.encode({name: value for name, value in parameters.items() if value is not None})
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise InvalidInput(method, f"a parameter is not JSON: {e}") from None
        timeout = httpx2.Timeout(self._timeout)
        if wait and timeout.read is not None:
            timeout.read += wait
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        seconds = posting.EXCHANGE_SECONDS + wait
        outcome: NotSent | Refused | Unknown = Unknown(f"no answer in {seconds:.0f} s")
        try:
            with anyio.move_on_after(seconds):
                async with self._client.stream(
                    "POST", f"{self._base}/bot/{method}", content=body, headers=headers, timeout=timeout
                ) as response:
                    return self._said(method, response.status_code, await read_bounded(response, _LARGEST, seconds))
        except (httpx2.HTTPError, httpx2.InvalidURL) as e:
            outcome = judged(e)
        # The library's own error is not kept with it: what it holds ends up in reports.
        if isinstance(outcome, Unknown):
            raise TelegramLost(method, self._clean(outcome.reason))
        why = outcome.proof if isinstance(outcome, NotSent) else outcome.reason
        raise TelegramUnreachable(method, self._clean(why))

    def _said(self, method: str, status: int, body: bytes) -> Any:
        try:
            answer = _answer(body)
        except (ValueError, RecursionError):
            raise TelegramLost(method, f"HTTP {status}, with an answer that is not Telegram's") from None
        if answer.ok:
            return answer.result
        code = answer.error_code or status
        reason = self._clean(answer.description)
        if not 400 <= code < 500:
            raise TelegramLost(method, f"{code} {reason}")
        kind = TelegramConflict if code == 409 else TelegramRefused
        raise kind(method, code, reason, answer.parameters.retry_after, answer.parameters.migrate_to_chat_id)

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "[token]")[:600]

    # --- how updates come ------------------------------------------------------------------------------------

    async def set_webhook(
        self, url: str, secret: str, *, allowed_updates: Sequence[str] = UPDATES, max_connections: int = 40
    ) -> None:
        """Have updates sent to a `telegram_route`. What waits at Telegram is sent too: nothing is ever dropped.

        Raises:
            InvalidInput: the secret cannot be used.
            TelegramError: it could not be set.
        """
        await self.call(
            "setWebhook",
            url=url,
            secret_token=checked_secret(secret),
            allowed_updates=list(allowed_updates),
            max_connections=max_connections,
            drop_pending_updates=False,
        )

    async def delete_webhook(self) -> None:
        """Have updates kept for polling. None is dropped.

        Raises:
            TelegramError: it could not be deleted.
        """
        await self.call("deleteWebhook", drop_pending_updates=False)


def checked_secret(secret: str) -> str:
    """A secret for Telegram's webhook; `new_secret` makes one.

    Raises:
        InvalidInput: it is too short to be one, or Telegram does not take it. What it is, is not told.
    """
    if not _SECRET.fullmatch(secret):
        raise InvalidInput("secret", "must be 16 to 256 letters, digits, `_` and `-`")
    return secret


def new_secret() -> str:
    """A secret for Telegram's webhook."""
    return secrets.token_urlsafe(32)


class _WithToken(httpx2.AsyncBaseTransport):
    """Puts the token into the address at the last moment: the client logs the addresses of its requests."""

    def __init__(self, inner: httpx2.AsyncHTTPTransport, base: str, token: str) -> None:
        self._inner = inner
        self._base = base
        self._token = token

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it."""
        method = request.url.path.rpartition("/")[2]
        addressed = httpx2.Request(
            request.method,
            f"{self._base}/bot{self._token}/{method}",
            headers=request.headers,
            stream=request.stream,
            extensions=request.extensions,
        )
        return await self._inner.handle_async_request(addressed)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._inner.aclose()
