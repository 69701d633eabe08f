"""What every route that takes messages over HTTP does: a bounded body, refusals that tell nothing, and the hand-over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from turnkeeper.channels.processing import InProcess, Taken, tell, who_is_told
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.message import Message
from turnkeeper.errors import InvalidInput, StoreError, ValueTooLarge
from turnkeeper.models.failures import MissingSdk
from turnkeeper.observe.logs import logger

try:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as e:
    raise MissingSdk("webhook", e) from e

log = logger(__name__)

MAX_BODY: Final = 512 * 1024
"""Bytes: twice what a message may have, for its envelope and its escapes."""
BODY_SECONDS = 10.0
"""How long a sender may take for its body."""
RETRY_AFTER: Final = 5
"""Seconds that a sender is asked to wait while the store is away."""


class Refusal(Exception):
    """A request is refused.

    Attributes:
        status: all that its sender is told.
        why: for the log.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


def require_json(request: Request) -> None:
    """Refuse what is not declared as plain JSON: a compressed body may be a thousand times as large as it looks.

    Raises:
        Refusal: with 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "not plain JSON")


async def bounded_body(request: Request, limit: int) -> bytes:
    """The body, read only as far as it may go.

    Raises:
        Refusal: it is too large, too slow, or its sender has gone.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 12 or int(declared) > limit:
        raise Refusal(413, "too large")
    body = bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise Refusal(413, "too large")
    except TimeoutError:
        raise Refusal(408, "too slow") from None
    except ClientDisconnect:
        raise Refusal(400, "its sender has gone") from None
    return bytes(body)


async def guarded(handle: Callable[[], Awaitable[Response]], where: str) -> Response:
    """The answer; a refusal or a failure as a bare status."""
    try:
        return await handle()
    except Refusal as e:
        log.info("%s: refused with %d: %s", where, e.status, e.why)
        # What is left of its body is not read: on an open connection it would go on coming.
        return Response(status_code=e.status, headers={"connection": "close"})
    except StoreError:
        log.exception("%s: the store takes no messages now", where)
        return Response(status_code=503, headers={"retry-after": str(RETRY_AFTER)})
    except Exception:
        log.exception("%s: failed", where)
        return Response(status_code=500)


async def journaled(bot: Conversations, conversation_id: str, message: Message) -> bool:
    """Take a message into the journal; whether it was new. Durable when this returns.

    Raises:
        Refusal: it cannot be kept. Nothing was written.
        StoreError: the store failed; the sender has to come again.
    """
    if message.kind == "timer":
        raise Refusal(400, "timers are not said by anybody")
    try:
        receipt = await bot.receive(conversation_id, message)
    except ValueTooLarge as e:
        raise Refusal(413, str(e)) from None
    except InvalidInput as e:
        raise Refusal(400, str(e)) from None
    return not receipt.duplicate


def afterwards(taken: Taken, conversation_id: str) -> BackgroundTask:
    """Tell of the conversation, once the answer is out."""
    return BackgroundTask(tell, taken, conversation_id)


def application(bot: Conversations, taken: Taken | None, route: Callable[[Taken], Route]) -> Starlette:
    """An application with one route. Without `taken`, workers handle what comes if the bot announces it; else it is handled
    here, for as long as the application's lifespan lasts."""
    taken = who_is_told(bot, taken)
    if taken is not None:
        return Starlette(routes=[route(taken)])
    here = InProcess(bot)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with here:
            yield

    return Starlette(routes=[route(here.soon)], lifespan=lifespan)
