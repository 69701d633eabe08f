"""The webhook channel: what is posted, and what its peer's answer, or none, says of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from standardwebhooks import Webhook

from tests.cases.charge_server import unused_port
from tests.channels.peer import SECRET, Peer
from tests.conversation.driving import state_of
from turnkeeper.channels import posting
from turnkeeper.channels.replies import reply_port
from turnkeeper.channels.webhook import DAY, WebhookChannel, conversation_id
from turnkeeper.conversation.channel import NotSent, Refused, SendOutcome, Sent, Unknown, send_on
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Button, Content, Message
from turnkeeper.conversation.state import SendState
from turnkeeper.engine import outcomes
from turnkeeper.engine.outcomes import EffectRefused, OutcomeUnknown
from turnkeeper.engine.ports import Reply
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

C = conversation_id("default", "c")
KEY = "msg_1"
PATIENT = httpx2.Timeout(20.0)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    """A peer that drops what it knows."""
    async with Peer() as peer:
        yield peer


@asynccontextmanager
async def to(peer: Peer, **options: Any) -> AsyncGenerator[WebhookChannel]:
    """A channel to it."""
    async with WebhookChannel(options.pop("url", peer.url), options.pop("secrets", SECRET), **options) as channel:
        yield channel


async def sent(peer: Peer, fault: str = "ok", **options: Any) -> SendOutcome:
    """What comes of one message."""
    peer.faults.append(fault)
    async with to(peer, **options) as channel:
        return await channel.send(C, KEY, Content(text="hello"))


async def test_what_is_posted(peer: Peer) -> None:
    content = Content(text="Tea?", buttons=(Button("Yes", "y"), Button("No")), data={"n": 1})
    async with to(peer) as channel:
        assert await channel.send(C, KEY, content) == Sent("id-msg_1")
        assert (channel.dedup_window, channel.max_length) == (DAY, None)
    ((key, data),) = peer.messages
    assert key == KEY
    assert data == {
        "conversation": "c",
        "text": "Tea?",
        "buttons": [{"label": "Yes", "value": "y"}, {"label": "No", "value": "No"}],
        "data": {"n": 1},
    }


async def test_every_attempt_has_the_same_key_and_the_same_bytes(peer: Peer) -> None:
    peer.faults = ["lose", "500+", "ok"]
    async with to(peer) as channel:
        content = Content(text="hello", data={"b": 1, "a": 2})
        for outcome in (Unknown, Unknown, Sent):
            assert isinstance(await channel.send(C, KEY, content), outcome)
            content = Content(text="hello", data={"a": 2, "b": 1})  # as it comes back from the store, perhaps
    assert len(set(peer.attempts)) == 1
    assert peer.attempts[0][:2] == (KEY, KEY)
    assert peer.texts() == ["hello"]


@pytest.mark.parametrize(
    ("fault", "outcome", "visible"),
    [
        ("lose", Unknown, 1),
        ("cut", Unknown, 0),
        ("slow", Unknown, 1),
        ("500", Unknown, 0),
        ("500+", Unknown, 1),
        ("503", Unknown, 0),
        ("504+", Unknown, 1),
        ("408", Unknown, 0),
        ("409", Unknown, 0),
        ("endless", Sent, 1),
        ("202+", Sent, 1),
        ("400", Refused, 0),
        ("401", Refused, 0),
        ("404", Refused, 0),
        ("410", Refused, 0),
        ("422", Refused, 0),
        ("301", Refused, 0),
        ("307", Refused, 0),
    ],
)
async def test_what_an_answer_proves(peer: Peer, fault: str, outcome: type[SendOutcome], visible: int) -> None:
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(20.0, read=0.3), follow_redirects=True) as client:
        got = await sent(peer, fault, client=client)
    assert isinstance(got, outcome)
    assert not isinstance(got, Refused) or got.retry_after is None
    assert not isinstance(got, Sent) or got.message_id == KEY  # where the peer does not say what it calls it
    assert len(peer.messages) == visible


@pytest.mark.parametrize(("told", "seconds"), [(None, 1.0), ("7", 7.0), ("soon", 1.0), ("-5", 0.0)])
async def test_a_peer_that_asks_to_wait(peer: Peer, told: str | None, seconds: float) -> None:
    peer.retry_after = told
    for status in ("429", "425"):
        assert await sent(peer, status) == Refused(f"HTTP {status}", seconds)
    assert peer.messages == []


async def test_an_answer_that_drips(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No single read takes long. What was taken is known by then, and holds up nobody."""
    monkeypatch.setattr(posting, "ANSWER_SECONDS", 0.3)
    with anyio.fail_after(20):
        assert await sent(peer, "dripping") == Sent(KEY)


async def test_an_exchange_has_an_end(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "EXCHANGE_SECONDS", 0.3)
    with anyio.fail_after(20):
        assert isinstance(await sent(peer, "slow"), Unknown)
    assert len(peer.messages) == 1


@pytest.mark.parametrize(("told", "seconds"), [("inf", 1.0), ("nan", 1.0), ("1e300", DAY)])
async def test_a_wait_that_cannot_be_reckoned_with(peer: Peer, told: str, seconds: float) -> None:
    """A peer may say anything: its message waits, and no attempt at it counts as one that failed here."""
    peer.retry_after = told
    peer.faults = ["429", "429"]
    async with to(peer) as channel, await SqliteStore.open(":memory:") as store:
        assert await send_on(channel, C, KEY, Content(text="hello")) == Refused("HTTP 429", seconds)
        with anyio.fail_after(20):
            async with Conversations(store, [two_words()], channel) as bot:
                done = await bot.handle(C, Message(event_id="1", text="hello"))
        state = await state_of(store, C)
    assert done.left == ("later" if seconds == DAY else None)
    assert [one.attempts for one in state.inbound] == [0] * (seconds == DAY)


async def test_what_never_left(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    got = await sent(peer, url=f"http://127.0.0.1:{unused_port()}/in")
    assert isinstance(got, NotSent)
    assert "Connect" in got.proof
    assert isinstance(await sent(peer, url="http://no-such-host.invalid/in"), NotSent)
    assert isinstance(await sent(peer, url="https" + peer.url.removeprefix("http")), NotSent)  # it speaks no TLS
    for url in ("ftp://x/", "nothing"):
        assert isinstance(await sent(peer, url=url), Refused), url
    assert isinstance(await sent(peer, url=dict[str, str]().__getitem__), NotSent)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{unused_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert isinstance(await sent(peer), NotSent)
    assert peer.attempts == []


async def test_other_conversations_and_contents_that_cannot_be_said(peer: Peer) -> None:
    async with to(peer) as channel:
        assert isinstance(await channel.send("webhook:other:c", KEY, Content(text="x")), NotSent)
        assert isinstance(await channel.send("telegram:1:2", KEY, Content(text="x")), NotSent)
        for data in ({"x": object()}, {"x": "\ud800"}):
            assert isinstance(await channel.send(C, KEY, Content(text="x", data=data)), Refused)
        assert isinstance(await channel.send(C, "a.b", Content(text="x")), Refused)
    assert peer.attempts == []


async def test_each_conversation_may_have_its_own_peer(peer: Peer) -> None:
    async with Peer() as other, to(peer, url={"a": peer.url, "b": other.url}.__getitem__) as channel:
        for name in ("a", "b"):
            assert await channel.send(conversation_id("default", name), KEY, Content(text=name)) == Sent("id-msg_1")
        assert (peer.texts("a"), other.texts("b")) == (["a"], ["b"])


async def test_a_peer_that_knows_one_of_two_secrets(peer: Peer) -> None:
    """While one replaces another, its signature may stand at any place."""
    new = "whsec_" + "bmV3IG5ldyBuZXcgbmV3IG5ldyBuZXcgbmV3"
    for secrets in ([SECRET, new], [new, SECRET]):
        assert isinstance(await sent(peer, secrets=secrets), Sent)
    assert len(peer.attempts) == 2
    assert Webhook(new).sign  # it is a secret for the package too


async def test_as_a_port_for_replies(peer: Peer) -> None:
    reply = Reply("reply_1", "hello", "t")
    async with to(peer, max_length=5) as channel:
        port = reply_port(channel, C)
        assert port.keyed
        assert port.find is None
        assert await port.send(reply) == "id-reply_1"
        for fault, error in (("500", OutcomeUnknown), ("400", EffectRefused), ("429", outcomes.NotSent)):
            peer.faults.append(fault)
            with pytest.raises(error):
                await port.send(reply)
        with pytest.raises(EffectRefused, match="6 characters"):
            await port.send(Reply("reply_2", "hello!", "t"))
    async with WebhookChannel(f"http://127.0.0.1:{unused_port()}", SECRET, dedup_window=0) as channel:
        port = reply_port(channel, C)
        assert not port.keyed
        with pytest.raises(outcomes.NotSent):
            await port.send(reply)


# --- in a conversation ---------------------------------------------------------------------------------------


def two_words() -> Flow:
    """Says two things."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send("one")
        await c.send("two")

    assert only.__name__ == flow.first_step
    return flow


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("fault", ["lose", "cut", "500", "500+"])
async def test_a_conversations_send_whose_answer_was_lost(peer: Peer, fault: str, *, keyed: bool) -> None:
    """Sent again under its key where the peer knows keys; else left in doubt and reported, and the next one is sent."""
    peer.keyed = keyed
    peer.faults = [fault]
    async with await SqliteStore.open(":memory:") as store, to(peer, dedup_window=DAY if keyed else 0.0) as channel:
        async with Conversations(store, [two_words()], channel) as bot:
            assert (await bot.handle(C, Message(event_id="1", text="hi"))).left is None
        state = await state_of(store, C)
    first_is_out = keyed or fault in ("lose", "500+")
    assert peer.texts() == (["one", "two"] if first_is_out else ["two"])
    assert len({attempt.key for attempt in peer.attempts}) == 2
    assert len(peer.attempts) == (3 if keyed else 2)
    assert state.attention == (None if keyed else "unknown_send")
    assert [send.state for send in state.sends if send.state is SendState.AMBIGUOUS] == (
        [] if keyed else [SendState.AMBIGUOUS]
    )


async def test_beyond_the_window_nothing_is_sent_again(peer: Peer) -> None:
    """A peer that has forgotten the key would take it a second time."""
    async with await SqliteStore.open(":memory:") as store:
        peer.faults = ["lose", *["500"] * 20]
        async with to(peer) as channel, Conversations(store, [two_words()], channel) as bot:
            assert (await bot.handle(C, Message(event_id="1", text="hi"))).left == "later"
        assert len({attempt.key for attempt in peer.attempts}) == 1
        peer.faults = []
        peer.messages.clear()  # it has forgotten
        await store.advance_clock(round(DAY * 1000) + 1)
        async with to(peer) as channel, Conversations(store, [two_words()], channel) as bot:
            assert (await bot.process(C)).left is None
        assert peer.texts() == ["two"]
        assert (await state_of(store, C)).attention == "unknown_send"
