"""The other side of the webhook channel: takes messages as a real peer does, with faults, and says things itself.

It signs and verifies with the `standardwebhooks` package, which is not ours.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

import anyio
import httpx2
from standardwebhooks import Webhook
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.channels.serving import Site

SECRET = "whsec_" + "c2VjcmV0IG9mIHRoZSB3ZWJob29rIGNoYW5uZWw="


class Attempt(NamedTuple):
    """One request to the peer."""

    key: str
    webhook_id: str
    body: bytes


class Peer:
    """Takes messages at `/in`, and finds them by key at `/find`.

    Attributes:
        keyed: it drops a second message with the same `Idempotency-Key`.
        faults: what happens to the next requests, in order: `ok`; `lose` (takes it, and loses its answer), `cut` (loses the
            connection before it takes it), `slow` (takes it, and answers when `patience` is set), a status, or a status with
            `+` (takes it, and says that nevertheless); `endless` (takes it, and its answer never ends);
            `dripping` (so too, byte by byte).
        attempts: every request that came.
        messages: what a person sees, as (key, data).
        lookups: how often it was asked for a key.
    """

    def __init__(self, *, keyed: bool = True, longest: int | None = None) -> None:
        self.keyed = keyed
        self.longest = longest
        self.faults: list[str] = []
        self.attempts: list[Attempt] = []
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.lookups = 0
        self.patience = anyio.Event()
        self.retry_after: str | None = None
        routes = [
            Route("/in", self._take, methods=["POST"]),
            Route("/find", self._find),
            Route("/elsewhere", self._elsewhere, methods=["POST", "GET"]),
        ]
        self.site = Site(Starlette(routes=routes))

    async def __aenter__(self) -> Self:
        await self.site.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.patience.set()
        await self.site.__aexit__()

    @property
    def url(self) -> str:
        """Where it takes messages."""
        return f"{self.site.url}/in"

    def texts(self, conversation: str = "c") -> list[str]:
        """What a person sees in a conversation."""
        return [data["text"] for _, data in self.messages if data["conversation"] == conversation]

    async def _take(self, request: Request) -> Response:
        body = await request.body()
        Webhook(SECRET).verify(body, dict(request.headers))
        key = request.headers["idempotency-key"]
        self.attempts.append(Attempt(key, request.headers["webhook-id"], body))
        fault = self.faults.pop(0) if self.faults else "ok"
        if fault == "cut":
            self.site.sever(request)
        elif fault.isdecimal():
            headers = {} if self.retry_after is None else {"retry-after": self.retry_after}
            return Response("no", int(fault), headers={**headers, "location": f"{self.site.url}/elsewhere"})
        else:
            data = json.loads(body)["data"]
            if self.longest is not None and len(data["text"]) > self.longest:
                return Response("too long", 400)
            if not self.keyed or not any(key == known for known, _ in self.messages):
                self.messages.append((key, data))
            if fault == "lose":
                self.site.sever(request)
            elif fault == "slow":
                await self.patience.wait()
            elif fault == "endless":
                return StreamingResponse(self._endless(b" " * 65536, 0.0))
            elif fault == "dripping":
                return StreamingResponse(self._endless(b" ", 0.05))
            elif fault.endswith("+"):
                return Response("hm", int(fault[:-1]))
        return JSONResponse({"id": f"id-{key}"})

    async def _endless(self, chunk: bytes, pause: float) -> AsyncGenerator[bytes]:
        while not self.patience.is_set():
            yield chunk
            await anyio.sleep(pause)

    async def _find(self, request: Request) -> Response:
        self.lookups += 1
        found = [key for key, _ in self.messages if key == request.query_params["key"]]
        return JSONResponse({"id": f"id-{found[0]}"} if found else {}, 200 if found else 404)

    async def _elsewhere(self, _: Request) -> Response:
        raise AssertionError("a redirect was followed")


def said(conversation: str = "c", text: str = "hi", **more: Any) -> bytes:
    """A message's body."""
    return json.dumps({"type": "message", "data": {"conversation": conversation, "text": text, **more}}).encode()


def signed(message_id: str, body: bytes, *, secret: str = SECRET, at: float | None = None) -> dict[str, str]:
    """The headers of a message, signed by `standardwebhooks`."""
    when = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(when.timestamp())),
        "webhook-signature": Webhook(secret).sign(message_id, when, body.decode()),
    }


async def say(client: httpx2.AsyncClient, url: str, message_id: str, body: bytes | None = None) -> httpx2.Response:
    """Deliver a message."""
    body = said() if body is None else body
    return await client.post(url, content=body, headers=signed(message_id, body))
