"""The webhook route: what is taken, what is refused, and when it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import httpx2
import pytest
from starlette.applications import Starlette

from tests.channels.gate import Gate, so
from tests.channels.peer import SECRET, said, say, signed
from tests.channels.serving import Site
from tests.conversation.driving import state_of
from tests.conversation.platform import Platform
from tests.engine.support import until
from turnkeeper.channels.signatures import Signatures
from turnkeeper.channels.webhook import Incoming, webhook_app, webhook_route
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import MAX_MESSAGE, Message
from turnkeeper.errors import InvalidInput
from turnkeeper.log.record import HeadQuery
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


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
        await c.send(f"{c.message.kind} {c.message.text}")

    assert only.__name__ == flow.first_step
    return flow


class Desk(NamedTuple):
    """A route that only journals, over the wire."""

    client: httpx2.AsyncClient
    url: str
    told: list[str]
    store: Store

    async def post(self, body: bytes | AsyncIterator[bytes], headers: dict[str, str]) -> httpx2.Response:
        """Deliver something."""
        return await self.client.post(self.url, content=body, headers=headers)

    async def is_empty(self) -> bool:
        """Nothing is in the journal, and nobody was told of anything."""
        return not self.told and [head async for head in self.store.heads(HeadQuery())] == []


@asynccontextmanager
async def desk(store: Store, **options: Any) -> AsyncGenerator[Desk]:
    """A desk on that store."""
    told: list[str] = []
    async with Conversations(store, [echo()], Platform()) as bot:
        app = webhook_app(bot, options.pop("secrets", SECRET), taken=told.append, **options)
        async with Site(app) as site, httpx2.AsyncClient() as client:
            yield Desk(client, f"{site.url}/webhook", told, store)


@asynccontextmanager
async def served_bot(bot: Conversations, **options: Any) -> AsyncGenerator[tuple[httpx2.AsyncClient, str]]:
    """A client, and where it reaches the bot, with the application's lifespan."""
    async with bot, Site(webhook_app(bot, SECRET, **options), lifespan=True) as site, httpx2.AsyncClient() as client:
        yield client, f"{site.url}/webhook"


# --- taking --------------------------------------------------------------------------------------------------


async def test_a_message_is_journaled_acknowledged_and_told_of(store: Store) -> None:
    async with desk(store) as here:
        body = said(text="hi", sender="ann", data={"n": 1.5}, kind="button", prompt="p", value="v")
        assert (await say(here.client, here.url, "m1", body)).status_code == 202
        answer = await say(here.client, here.url, "m1", body)
        assert (answer.status_code, answer.content) == (200, b"")
        assert here.told == ["webhook:default:c"] * 2
    state = await state_of(store, "webhook:default:c")
    assert state.received == 1
    assert state.inbound[0].kind == "button"


async def test_it_is_answered_in_this_process_by_default(store: Store) -> None:
    platform = Platform()
    bot = Conversations(store, [echo()], platform)
    await bot.receive("webhook:default:c", Message(event_id="m0", text="from an earlier process"))
    async with served_bot(bot) as (client, url):
        for number in range(3):
            await say(client, url, f"m{number + 1}", said(text=str(number)))
        await until(lambda: so(lambda: len(platform.seen) == 4))
    texts = platform.texts("webhook:default:c")
    assert texts == ["text from an earlier process", "text 0", "text 1", "text 2"]


async def test_the_answer_does_not_wait_for_the_handling(store: Store) -> None:
    """Nor does a repetition's, while the first is handled (field case 16)."""
    going, go_on = anyio.Event(), anyio.Event()
    flow = Flow("slow")

    @flow.step
    async def only(c: FlowContext) -> None:
        going.set()
        await go_on.wait()
        await c.send("done")

    platform = Platform()
    async with served_bot(Conversations(store, [flow], platform)) as (client, url):
        assert (await say(client, url, "m1")).status_code == 202
        with anyio.fail_after(10):
            await going.wait()
        # On the same connection, and on one of its own.
        assert (await say(client, url, "m1")).status_code == 200
        async with httpx2.AsyncClient() as other:
            assert (await say(other, url, "m1")).status_code == 200
        assert platform.seen == []
        go_on.set()
        await until(lambda: so(lambda: len(platform.seen) == 1))


async def test_a_route_in_an_application_of_ones_own(store: Store) -> None:
    """With two senders: none writes into the other's conversations, whatever it calls them."""
    told: list[str] = []

    async def tell(conversation: str) -> None:
        await anyio.lowlevel.checkpoint()
        told.append(conversation)

    other = "whsec_" + "b3RoZXIgb3RoZXIgb3RoZXIgb3RoZXIgb3RoZXI="
    async with Conversations(store, [echo()], Platform()) as bot:
        routes = [
            webhook_route(bot, SECRET, taken=tell, path="/a", account="a"),
            webhook_route(bot, Signatures(other), taken=tell, path="/b", account="b"),
        ]
        async with Site(Starlette(routes=routes)) as site, httpx2.AsyncClient() as client:
            assert (await say(client, f"{site.url}/a", "m1", said("b:c"))).status_code == 202
            body = said("a:c")
            assert (await client.post(f"{site.url}/b", content=body, headers=signed("m1", body))).status_code == 401
            headers = signed("m1", body, secret=other)
            assert (await client.post(f"{site.url}/b", content=body, headers=headers)).status_code == 202
        for account in ("a:b", "", "a\n"):
            with pytest.raises(InvalidInput):
                webhook_route(bot, SECRET, taken=tell, account=account)
    assert told == ["webhook:a:b:c", "webhook:b:a:c"]


async def test_bodies_of_another_form(store: Store) -> None:
    def read(event_id: str, body: bytes) -> Incoming | None:
        told: dict[str, Any] = json.loads(body)
        if told["action"] != "opened":
            return None
        return Incoming(
            str(told["issue"]), Message(event_id=event_id, text=told["title"], kind=told.get("kind", "text"))
        )

    async with desk(store, read=read) as here:
        for name, body, status in (
            ("m1", {"action": "opened", "issue": 7, "title": "It broke"}, 202),
            ("m2", {"action": "closed", "issue": 7}, 204),
            ("m3", {"action": "opened", "issue": 8, "title": "x", "kind": "timer"}, 400),
        ):
            answer = await say(here.client, here.url, name, json.dumps(body).encode())
            assert answer.status_code == status
        assert here.told == ["webhook:default:7"]
        assert len([head async for head in store.heads(HeadQuery())]) == 1


async def test_a_hook_that_fails_changes_nothing_for_the_sender(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def broken(conversation: str) -> None:
        raise LookupError("no queue")

    async with served_bot(Conversations(store, [echo()], Platform()), taken=broken) as (client, url):
        assert (await say(client, url, "m1")).status_code == 202
    assert "no queue" in caplog.text
    assert (await state_of(store, "webhook:default:c")).received == 1


# --- the store -----------------------------------------------------------------------------------------------


async def test_no_acknowledgement_before_the_journal_has_it(store: Store) -> None:
    """J1."""
    gate = Gate(store)
    answers: list[int] = []
    async with desk(gate) as here, anyio.create_task_group() as tasks:

        async def deliver() -> None:
            answers.append((await say(here.client, here.url, "m1")).status_code)

        tasks.start_soon(deliver)
        with anyio.fail_after(10):
            await gate.waiting.wait()
        with anyio.move_on_after(0.1):  # as long as it likes: the write has not been made
            await until(lambda: so(lambda: bool(answers)))
        assert answers == []
        assert here.told == []
        gate.open.set()
    assert answers == [202]


async def test_the_store_is_away(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The sender comes again; it is told nothing of the store. Then it is taken, once."""
    gate = Gate(store, is_open=True)
    gate.fails = True
    async with desk(gate) as here:
        answer = await say(here.client, here.url, "m1")
        assert (answer.status_code, answer.headers["retry-after"], answer.content) == (503, "5", b"")
        assert await here.is_empty()
        gate.fails = False
        assert [(await say(here.client, here.url, "m1")).status_code for _ in range(2)] == [202, 200]
    assert "10.1.2.3" in caplog.text
    assert (await state_of(store, "webhook:default:c")).received == 1


# --- refusing ------------------------------------------------------------------------------------------------


def changed(body: bytes, **headers: str | None) -> dict[str, str]:
    """Headers that are right but for these; None: it is missing."""
    made = signed("m1", body)
    for name, value in headers.items():
        made.pop(name.replace("_", "-"), None)
        if value is not None:
            made[name.replace("_", "-")] = value
    return made


BODY = said()


def hostile() -> dict[str, tuple[int, bytes, dict[str, str]]]:
    """By name: the status, the body and the headers. Signed when they are asked for: a signature is good for five minutes."""
    return {
        "not signed": (401, BODY, {"content-type": "application/json"}),
        "no id": (401, BODY, changed(BODY, webhook_id=None)),
        "another id": (401, BODY, changed(BODY, webhook_id="m2")),
        "no time": (401, BODY, changed(BODY, webhook_timestamp=None)),
        "a time that is none": (401, BODY, changed(BODY, webhook_timestamp="now")),
        "an old message": (401, BODY, signed("m1", BODY, at=1_700_000_000)),
        "no signature": (401, BODY, changed(BODY, webhook_signature=None)),
        "a wrong signature": (401, BODY, changed(BODY, webhook_signature="v1,AAAA")),
        "another body": (401, BODY + b" ", signed("m1", BODY)),
        "another secret": (401, BODY, signed("m1", BODY, secret="whsec_" + "A" * 40)),
        "no type": (415, BODY, changed(BODY, content_type=None)),
        "a form": (415, BODY, changed(BODY, content_type="application/x-www-form-urlencoded")),
        "compressed": (415, BODY, {**signed("m1", BODY), "content-encoding": "gzip"}),
        "no JSON": (400, b"{", signed("m1", b"{")),
        "not an object": (400, b"[]", signed("m1", b"[]")),
        "nested": (400, b"[" * 100_000, signed("m1", b"[" * 100_000)),
        "nested data": (
            400,
            (nested := b'{"type":"message","data":{"conversation":"c","data":{"x":' + b"[" * 900 + b"]" * 900 + b"}}}"),
            signed("m1", nested),
        ),
        "no conversation": (400, b'{"type":"message","data":{}}', signed("m1", b'{"type":"message","data":{}}')),
        "an empty one's control character": (400, (odd := said("c\n")), signed("m1", odd)),
        "a long name": (400, (long := said("c" * 600)), signed("m1", long)),
        "half a character": (400, (half := said(text="\ud800")), signed("m1", half)),
        "of another type": (400, (other := b'{"type":"x","data":{"conversation":"c"}}'), signed("m1", other)),
        "a timer": (400, (timer := said(kind="timer")), signed("m1", timer)),
        "a number as text": (400, (number := said(text=1)), signed("m1", number)),  # pyright: ignore[reportArgumentType]
        "over a message's size": (413, (large := said(text="x" * MAX_MESSAGE)), signed("m1", large)),
        "over the body's size": (413, (larger := said(text="x" * 600_000)), signed("m1", larger)),
    }


async def test_hostile_requests_are_refused_without_an_entry(store: Store) -> None:
    async with desk(store) as here:
        for name, (status, body, headers) in hostile().items():
            answer = await here.post(body, headers)
            assert (answer.status_code, answer.content) == (status, b""), name
            assert await here.is_empty(), name
        assert (await say(here.client, here.url, "m1")).status_code == 202  # and its id is not used up


async def test_other_methods(store: Store) -> None:
    async with desk(store) as here:
        assert (await here.client.get(here.url)).status_code == 405


async def test_headers_that_are_there_twice(store: Store) -> None:
    """A proxy may look at one of them, and this at the other."""
    async with desk(store) as here:
        twice = [*signed("m1", BODY).items(), ("webhook-id", "m2")]
        answer = await here.client.post(here.url, content=BODY, headers=twice)
        assert answer.status_code == 401
        assert await here.is_empty()


async def test_a_body_that_does_not_say_how_large_it_is(store: Store) -> None:
    async def parts() -> AsyncGenerator[bytes]:
        for _ in range(2):
            yield b"x" * 60_000

    async with desk(store, max_body=100_000) as here:
        assert (await here.post(parts(), signed("m1", BODY))).status_code == 413
        assert await here.is_empty()


async def test_a_body_without_end_is_not_read(store: Store) -> None:
    sent = 0

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 65536

    async with desk(store, max_body=100_000) as here:
        with anyio.fail_after(20):
            # It may be cut off in the middle of its saying.
            with contextlib.suppress(httpx2.WriteError, httpx2.RemoteProtocolError, httpx2.ReadError):
                assert (await here.post(endless(), signed("m1", BODY))).status_code == 413
        assert sent < 500  # what buffers on the way hold
        assert await here.is_empty()


async def test_a_body_that_does_not_come(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender is cut off, and another one is served meanwhile."""
    monkeypatch.setattr("turnkeeper.channels.receiving.BODY_SECONDS", 0.2)
    async with desk(store) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(here.url.split(":")[2].split("/")[0]))
        headers = {**signed("m1", BODY), "content-length": str(len(BODY)), "host": "x"}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(["POST /webhook HTTP/1.1", *lines, "", ""]).encode() + BODY[:-1])
        with anyio.fail_after(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        assert await here.is_empty()
        assert (await say(here.client, here.url, "m1")).status_code == 202


async def test_a_sender_that_goes_away_in_the_middle(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with desk(store) as here:
        _, writer = await asyncio.open_connection("127.0.0.1", int(here.url.split(":")[2].split("/")[0]))
        headers = {**signed("m1", BODY), "content-length": str(len(BODY)), "host": "x"}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        caplog.set_level(logging.INFO, logger="turnkeeper")
        writer.write("\r\n".join(["POST /webhook HTTP/1.1", *lines, "", ""]).encode() + BODY[:-1])
        writer.close()
        await until(lambda: so(lambda: "its sender has gone" in caplog.text))
        assert await here.is_empty()
