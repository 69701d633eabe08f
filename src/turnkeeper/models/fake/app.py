"""The fake provider's HTTP: its routes, and what a fault does to an answer on its way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import anyio
import anyio.lowlevel
import msgspec

from turnkeeper.models.failures import MissingSdk
from turnkeeper.models.fake import chat, messages, responses
from turnkeeper.models.fake.desk import MARK, Desk, Kept, Rejected, Work, invocation_of
from turnkeeper.models.fake.script import Fault

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError as e:
    raise MissingSdk("fake-model", e) from e


class Api(NamedTuple):
    """One of the providers' APIs."""

    name: str
    path: str
    round_of: Callable[[dict[str, Any], Desk], int]
    answer_id: Callable[[Work], str]
    whole: Callable[[Work], dict[str, Any]]
    events: Callable[[Work], list[dict[str, Any]]]


APIS: Final = (
    Api(chat.API, "/v1/chat/completions", chat.round_of, chat.answer_id, chat.whole, chat.events),
    Api(responses.API, "/v1/responses", responses.round_of, responses.answer_id, responses.whole, responses.events),
    Api(messages.API, "/v1/messages", messages.round_of, messages.answer_id, messages.whole, messages.events),
)
_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

Sever = Callable[[Request], None]


@dataclass
class Provider:
    """The application.

    Attributes:
        desk: what it knows.
        sever: loses the connection that a request came on.
    """

    desk: Desk
    sever: Sever

    def app(self) -> Starlette:
        """The routes."""
        routes = [Route(api.path, self._asking(api), methods=["POST"]) for api in APIS]
        return Starlette(
            routes=[
                *routes,
                Route("/v1/chat/completions", self._stored, methods=["GET"]),
                Route("/v1/responses/{answer}", self._retrieved, methods=["GET"]),
                Route("/v1/responses/{answer}/cancel", self._cancelled, methods=["POST"]),
                Route("/bill", self._bill, methods=["GET"]),
                Route("/requests", self._requests, methods=["GET"]),
            ]
        )

    def _asking(self, api: Api) -> Callable[[Request], Any]:
        async def ask(request: Request) -> Response:
            try:
                body: Any = await request.json()
                return await self._ask(api, request, cast("dict[str, Any]", body))
            except Rejected as e:
                return failure(e.status, str(e))
            except (ValueError, KeyError, TypeError) as e:
                return failure(400, f"{type(e).__name__}: {e}")

        return ask

    async def _ask(self, api: Api, request: Request, body: dict[str, Any]) -> Response:
        round_index = api.round_of(body, self.desk)
        fault = self.desk.ask(api.name, round_index, body, request.headers)
        if fault.status is not None and not fault.after_work:
            return self._refused(fault, request)
        work = self.desk.work(api.name, round_index, body)
        invocation = invocation_of(body, request.headers)
        self.desk.charge(api.name, work, api.answer_id(work), invocation)
        kept = Kept(work, invocation)
        if body.get("background") or (api.name == chat.API and body.get("store")):
            self.desk.kept[api.answer_id(work)] = kept
        if fault.slow:
            await anyio.sleep(fault.slow)
        if fault.status is not None:
            return self._refused(fault, request)
        if body.get("stream"):
            return Streamed(api, work, fault, lambda: self.sever(request), lambda: self._over(api, kept))
        if body.get("background"):
            return Whole(responses.whole(work, "queued"), fault, lambda: self.sever(request))
        self._over(api, kept)
        return Whole(api.whole(work), fault, lambda: self.sever(request))

    def _over(self, api: Api, kept: Kept) -> None:
        """An answer without a background is kept once its stream was read to its end."""
        if api.name == responses.API and kept.work.body.get("store") is not False:
            self.desk.kept[api.answer_id(kept.work)] = kept

    def _refused(self, fault: Fault, request: Request) -> Response:
        assert fault.status is not None
        told = f"the script says {fault.status}"
        if fault.status == 401:
            # As providers do, and worse: the key stands in the answer.
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "").rpartition(" ")[2]
            told = f"Incorrect API key provided: {given}"
        headers = {} if fault.retry_after is None else {"retry-after": str(fault.retry_after)}
        return failure(fault.status, told, headers)

    # --- what is kept -----------------------------------------------------------------------------------------

    async def _stored(self, request: Request) -> Response:
        """Stored chat completions, by their metadata."""
        wanted = request.query_params.get(f"metadata[{MARK}]")
        found = [
            kept
            for kept in self.desk.kept.values()
            if "messages" in kept.work.body and wanted in (None, kept.invocation)
        ]
        if found:
            fault = self.desk.look_up_fault(found[0].work.round_index)
            if fault.status is not None:
                return self._refused(fault, request)
        data = [chat.whole(kept.work) for kept in found]
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def _retrieved(self, request: Request) -> Response:
        kept = self.desk.kept.get(request.path_params["answer"])
        if kept is None:
            return failure(404, f"Response with id '{request.path_params['answer']}' not found.")
        fault = self.desk.look_up_fault(kept.work.round_index)
        if fault.status is not None:
            return self._refused(fault, request)
        return JSONResponse(self._now(kept))

    def _now(self, kept: Kept) -> dict[str, Any]:
        """A response as it stands: being asked for brings it on."""
        if kept.cancelled:
            return responses.whole(kept.work, "cancelled")
        if kept.polls < kept.work.round.polls:
            kept.polls += 1
            return responses.whole(kept.work, "in_progress")
        return responses.whole(kept.work)

    async def _cancelled(self, request: Request) -> Response:
        kept = self.desk.kept.get(request.path_params["answer"])
        if kept is None:
            return failure(404, f"Response with id '{request.path_params['answer']}' not found.")
        kept.cancelled = kept.polls < kept.work.round.polls
        return JSONResponse(self._now(kept))

    # --- what tests and people look at ------------------------------------------------------------------------

    async def _bill(self, request: Request) -> Response:
        return JSONResponse(msgspec.to_builtins(self.desk.bill))

    async def _requests(self, request: Request) -> Response:
        return JSONResponse(msgspec.to_builtins(self.desk.asked))


def failure(status: int, told: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in a form that the clients of all APIs read."""
    error = {"type": _KINDS.get(status, "api_error"), "message": told, "code": None, "param": None}
    return JSONResponse(
        {"type": "error", "error": error},
        status,
        headers={"x-request-id": "req_fake", "request-id": "req_fake", **(headers or {})},
    )


async def _gone(receive: Receive) -> None:
    """Wait until the client goes."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Whole(Response):
    """An answer in one piece, if it gets that far."""

    def __init__(self, answer: dict[str, Any], fault: Fault, sever: Callable[[], None]) -> None:
        super().__init__(b"<html>" if fault.garbage else json.dumps(answer).encode(), media_type="application/json")
        self._fault = fault
        self._sever = sever

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as far as the fault lets it."""
        fault = self._fault
        if fault.stall_after is not None:
            await _gone(receive)
        elif fault.reset:
            self._sever()
            await _gone(receive)
        elif fault.cut_after is not None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            half = bytes(self.body)[: len(self.body) // 2]
            await send({"type": "http.response.body", "body": half, "more_body": True})
            self._sever()
            await _gone(receive)
        else:
            await super().__call__(scope, receive, send)


class Streamed(Response):
    """An answer as events, if they get that far."""

    def __init__(self, api: Api, work: Work, fault: Fault, sever: Callable[[], None], over: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._api = api
        self._work = work
        self._fault = fault
        self._sever = sever
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, as far as the fault lets them."""
        fault = self._fault
        if fault.reset:
            self._sever()
            await _gone(receive)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        lines = self._garbage() if fault.garbage else self._lines()
        stops = (fault.cut_after, fault.end_after, fault.stall_after, fault.error_after)
        last = next((stop for stop in stops if stop is not None), None)
        async for number, line in _numbered(lines):
            if number == last:
                break
            await send({"type": "http.response.body", "body": line, "more_body": True})
        if fault.cut_after is not None:
            self._sever()
        if fault.cut_after is not None or fault.stall_after is not None:
            await _gone(receive)
            return
        if fault.error_after is not None:
            await send({"type": "http.response.body", "body": self._overloaded(), "more_body": True})
        elif fault.end_after is None:
            self._over()
        await send({"type": "http.response.body", "body": b""})

    def _lines(self) -> Iterator[bytes]:
        for event in self._api.events(self._work):
            yield self._line(event)
        if self._api.name == chat.API:
            yield b"data: [DONE]\n\n"

    def _line(self, event: dict[str, Any]) -> bytes:
        named = b"" if self._api.name == chat.API else f"event: {event['type']}\n".encode()
        return named + b"data: " + json.dumps(event).encode() + b"\n\n"

    def _garbage(self) -> Iterator[bytes]:
        yield b"event: message_start\ndata: <html>\n\n"

    def _overloaded(self) -> bytes:
        error: dict[str, Any] = {"type": "overloaded_error", "code": "server_error", "message": "Overloaded"}
        if self._api.name == responses.API:
            return self._line({**error, "type": "error", "param": None, "sequence_number": 0})
        return self._line({"type": "error", "error": error})


async def _numbered(lines: Iterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """The lines with their numbers; each in a step of its own, so that a client sees one before the next is sent."""
    for number, line in enumerate(lines):
        yield number, line
        await anyio.lowlevel.checkpoint()
