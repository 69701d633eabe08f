"""HTTP webhooks as a channel: signed messages come in at a route, and go out to an address (flows.md, Channels)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

import anyio
import msgspec

from turnkeeper.channels import posting
from turnkeeper.channels.posting import LIMITS, TIMEOUT, judged, read_bounded
from turnkeeper.channels.processing import Taken
from turnkeeper.channels.receiving import (
    MAX_BODY,
    Refusal,
    afterwards,
    application,
    bounded_body,
    guarded,
    journaled,
    require_json,
)
from turnkeeper.channels.signatures import Signatures, signed_headers
from turnkeeper.conversation.channel import NotSent, Refused, SendOutcome, Sent, Unknown
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.message import Content, Message
from turnkeeper.errors import InvalidInput
from turnkeeper.log import values
from turnkeeper.models.failures import MissingSdk, retry_after
from turnkeeper.observe.logs import logger

try:
    import httpx2
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as e:
    raise MissingSdk("webhook", e) from e

log = logger(__name__)

DAY: Final = 86_400.0
_MAY_HAVE_TAKEN_IT: Final = frozenset({408, 409})
"""Of the 4xx, those that do not say that nothing was taken: an attempt with this key is still being handled, perhaps."""
_LATER: Final = frozenset({425, 429})
_WAIT: Final = 1.0
"""Seconds to wait where the peer does not say how long."""

Secrets = str | bytes | Sequence[str | bytes]


class Incoming(NamedTuple):
    """A message, and the name of its conversation at the sender."""

    conversation: str
    message: Message


Read = Callable[[str, bytes], Incoming | None]
"""Makes a message of a verified body, with its `webhook-id` as event id; None: it is of no concern. `ValueError`: it is none."""


class _Data(msgspec.Struct, frozen=True):
    conversation: str
    text: str = ""
    kind: Literal["text", "button", "edit"] = "text"
    sender: str = ""
    prompt: str = ""
    value: str = ""
    edits: str = ""
    data: dict[str, Any] = {}


class _Envelope(msgspec.Struct, frozen=True):
    type: Literal["message"]
    data: _Data


_decode: Final = msgspec.json.Decoder(_Envelope).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def read_message(event_id: str, body: bytes) -> Incoming:
    """Our own form: `{"type": "message", "data": {"conversation": …, "text": …}}`, see docs/channels.md.

    Raises:
        ValueError: it is another one.
    """
    data = _decode(body).data
    message = Message(
        event_id=event_id,
        text=data.text,
        kind=data.kind,
        sender=data.sender,
        prompt=data.prompt,
        value=data.value,
        edits=data.edits,
        data=data.data,
    )
    return Incoming(data.conversation, message)


def conversation_id(account: str, conversation: str) -> str:
    """Our name of a sender's conversation: no sender can write into another one's."""
    return f"webhook:{account}:{conversation}"


def _checked_account(account: str) -> str:
    if ":" in values.identifier(account, "account"):
        raise InvalidInput("account", "must not hold a colon")
    return account


def webhook_route(
    bot: Conversations,
    secrets: Secrets | Signatures,
    *,
    taken: Taken,
    path: str = "/webhook",
    account: str = "default",
    read: Read = read_message,
    max_body: int = MAX_BODY,
) -> Route:
    """A route for a Starlette application of your own; its messages are handled by whoever `taken` tells.

    A message is acknowledged when it is in the journal: 202, and 200 for one that was there. Refused, without an entry:
    401 (the signature), 413, 415, 408 (a body that does not come), 400. 503 with `Retry-After` while the store is away.

    Args:
        secrets: of the sender, `whsec_…`; several while one replaces another.
        taken: told the conversation's id behind the acknowledgement; may be async. `InProcess.soon` handles it here.
        account: names the sender in our conversations' ids; its own, where there are several.
        read: makes a message of a body.
        max_body: bytes of a body that are read.

    Raises:
        InvalidInput: a secret, or the account, cannot be used.
    """
    signatures = secrets if isinstance(secrets, Signatures) else Signatures(secrets)
    _checked_account(account)

    async def take(request: Request) -> Response:
        require_json(request)
        signed = signed_headers(request.headers, lambda name: len(request.headers.getlist(name)))
        early = signatures.refuse_early(signed)
        if early != "good" or signed is None:
            raise Refusal(401, early)
        body = await bounded_body(request, max_body)
        verdict = signatures.verify(signed, body)
        if verdict != "good":
            raise Refusal(401, verdict)
        try:
            incoming = read(signed.id, body)
        except (ValueError, RecursionError) as e:
            raise Refusal(400, f"{type(e).__name__} in its body") from None
        if incoming is None:
            return Response(status_code=204)
        ours = conversation_id(account, incoming.conversation)
        new = await journaled(bot, ours, incoming.message)
        # Of a repetition too: that its first delivery is in the journal does not mean that anybody has heard of it.
        return Response(status_code=202 if new else 200, background=afterwards(taken, ours))

    async def endpoint(request: Request) -> Response:
        return await guarded(lambda: take(request), f"webhook {account}")

    return Route(path, endpoint, methods=["POST"])


def webhook_app(
    bot: Conversations,
    secrets: Secrets | Signatures,
    *,
    taken: Taken | None = None,
    path: str = "/webhook",
    account: str = "default",
    read: Read = read_message,
    max_body: int = MAX_BODY,
) -> Starlette:
    """An application that takes messages at one address. The bot has to be entered before it, and left behind it.

    Args:
        taken: told the conversation's id behind the acknowledgement. None: workers are, if the bot announces what it takes;
            else it is handled in this process, for as long as the application's lifespan lasts, and so is what an earlier
            process has left.

    See `webhook_route` for the others.
    """
    return application(
        bot,
        taken,
        lambda tell: webhook_route(bot, secrets, taken=tell, path=path, account=account, read=read, max_body=max_body),
    )


class WebhookChannel:
    """Posts messages to their peer, signed, under the outbox key: the same bytes and the same key on every attempt.

    Use it as an async context manager, or close it.
    """

    def __init__(
        self,
        url: str | Callable[[str], str],
        secrets: Secrets | Signatures,
        *,
        account: str = "default",
        dedup_window: float = DAY,
        max_length: int | None = None,
        client: httpx2.AsyncClient | None = None,
    ) -> None:
        """
        Args:
            url: the peer's address; or, by its own name of the conversation, a function that gives it. Never make an address of
                what a message says.
            secrets: sign; with several, the peer may verify with any of them.
            account: whose conversations these are, as in `webhook_app`.
            dedup_window: seconds for which the peer knows a key again and takes a message once. 0: it does not, and a send
                whose answer was lost is never repeated by itself.
            max_length: characters of one message; longer ones go in parts. None: any.
            client: one of yours, which you close; it must not follow redirects by itself, nor try again.

        Raises:
            InvalidInput: a secret, or the account, cannot be used.
        """
        self.dedup_window = dedup_window
        self.max_length = max_length
        self._url = url
        self._signatures = secrets if isinstance(secrets, Signatures) else Signatures(secrets)
        self._prefix = conversation_id(_checked_account(account), "")
        self._given = client
        self._made: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> WebhookChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        made, self._made = self._made, None
        if made is not None:
            await made.aclose()

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """See `Channel.send`."""
        if not conversation_id.startswith(self._prefix):
            return NotSent(f"the channel is of the conversations {self._prefix}…")
        theirs = conversation_id.removeprefix(self._prefix)
        body = self._body(theirs, content)
        if isinstance(body, Refused):
            return body
        try:
            url = self._url if isinstance(self._url, str) else self._url(theirs)
        except Exception as e:  # nothing has left; by itself it would count as a doubt
            return NotSent(f"the peer's address cannot be told: {type(e).__name__}: {e}")
        try:
            signed = self._signatures.sign(key, body).headers
        except InvalidInput as e:
            return Refused(f"the key cannot be a webhook's id: {e}")
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "idempotency-key": key,
            **signed,
        }
        outcome: SendOutcome = Unknown(f"no answer in {posting.EXCHANGE_SECONDS:.0f} s")
        try:
            with anyio.move_on_after(posting.EXCHANGE_SECONDS):
                async with self._client().stream(
                    "POST", url, content=body, headers=headers, follow_redirects=False
                ) as response:
                    outcome = await self._said(response, key)
        except (httpx2.HTTPError, httpx2.InvalidURL) as e:
            outcome = judged(e)
        if isinstance(outcome, Unknown):
            log.warning("conversation %s: message %s may be out: %s", conversation_id, key, outcome.reason)
        return outcome

    def _body(self, conversation: str, content: Content) -> bytes | Refused:
        # Nothing that differs from attempt to attempt: a peer may take another body under the same key for an error.
        data = {
            "conversation": conversation,
            "text": content.text,
            "buttons": [{"label": one.label, "value": one.value or one.label} for one in content.buttons],
            "data": content.data,
        }
        try:
            return _encode({"type": "message", "data": data})
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            return Refused(f"content.data is not JSON: {e}")

    async def _said(self, response: httpx2.Response, key: str) -> SendOutcome:
        status = response.status_code
        if 200 <= status < 300:
            return Sent(await _id_in(response) or key)  # taken, whatever becomes of the rest of the answer
        told = f"HTTP {status}"
        if status in _LATER:
            seconds = retry_after(response.headers)
            return Refused(told, _WAIT if seconds is None else seconds)
        if status >= 500 or status in _MAY_HAVE_TAKEN_IT or status < 200:
            return Unknown(told)
        return Refused(told)

    def _client(self) -> httpx2.AsyncClient:
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = httpx2.AsyncClient(timeout=TIMEOUT, limits=LIMITS)
        return self._made


class _Named(msgspec.Struct):
    id: str | int = ""


_named: Final = msgspec.json.Decoder(_Named).decode


async def _id_in(response: httpx2.Response) -> str:
    """What the peer calls the message, if its answer is an object that says so under `id`."""
    try:
        named = str(_named(await read_bounded(response, 64 * 1024, posting.ANSWER_SECONDS)).id)
        return values.identifier(named, "id", empty=True)
    except (httpx2.HTTPError, ValueError, RecursionError):
        return ""
