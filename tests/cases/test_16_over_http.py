"""Field case 16 at the doors: the data file's deliveries as real requests, to two replicas, with real answers to the senders."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from starlette.applications import Starlette

from tests.channels.gate import so
from tests.channels.peer import SECRET, Peer, said, say
from tests.channels.serving import Site
from tests.channels.telegram_server import BOT_ID, TOKEN, Telegram
from tests.conftest import shared_json
from tests.conversation.driving import state_of
from tests.engine.support import until
from turnkeeper.channels.processing import InProcess
from turnkeeper.channels.telegram import TelegramChannel, telegram_route
from turnkeeper.channels.telegram_api import BotApi, new_secret
from turnkeeper.channels.webhook import WebhookChannel, webhook_route
from turnkeeper.conversation.channel import Channel
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

CASE: dict[str, Any] = shared_json("cases/16-same-webhook-twice.json")
DELIVERIES: list[dict[str, Any]] = CASE["deliveries"]
SECRET_OF_TELEGRAM = new_secret()
AT_ONCE = 0.2
"""Seconds in which a repeat has to be answered."""
PROJECT = Path(__file__).resolve().parents[2]


class World:
    """The platforms on one side, the store on the other, and replicas between them."""

    def __init__(self, store: SqliteStore, peer: Peer, telegram: Telegram) -> None:
        self.store = store
        self.peer = peer
        self.telegram = telegram
        self.turns = 0
        self.going = anyio.Event()
        self.may_go_on = anyio.Event()
        self.flow = Flow("bot")
        self.statuses: list[int] = []

        @self.flow.step
        async def answer(c: FlowContext) -> None:
            self.turns += 1
            self.going.set()
            await self.may_go_on.wait()
            await c.send(f"You said: {c.message.text}")

        assert answer.__name__ == self.flow.first_step

    @asynccontextmanager
    async def replica(self, *, handles: bool = True) -> AsyncGenerator[str]:
        """A process of the bot, with both routes; its address."""
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(BotApi(TOKEN, base_url=self.telegram.url))
            webhook = await stack.enter_async_context(WebhookChannel(self.peer.url, SECRET))
            channels: dict[str, Channel] = {"webhook": webhook, "telegram": TelegramChannel(api)}
            bot = Conversations(self.store, [self.flow], lambda name: channels[name.partition(":")[0]])
            await stack.enter_async_context(bot)
            taken = nobody if not handles else (await stack.enter_async_context(InProcess(bot))).soon
            routes = [
                webhook_route(bot, SECRET, taken=taken),
                telegram_route(bot, api, SECRET_OF_TELEGRAM, taken=taken),
            ]
            yield (await stack.enter_async_context(Site(Starlette(routes=routes)))).url

    async def deliver(self, url: str, delivery: dict[str, Any]) -> int:
        """Deliver, as the platform does; the status that it gets."""
        async with httpx2.AsyncClient() as client:
            if delivery["platform"] == "slack-like":
                body = said(f"{delivery['team']}:{delivery['channel']}", delivery["text"])
                answer = await say(client, f"{url}/webhook", delivery["event_id"], body)
            else:
                message = {
                    "message_id": delivery["message_id"],
                    "chat": {"id": delivery["chat"], "type": "private"},
                    "from": {"id": 77, "is_bot": False, "first_name": "Ann"},
                    "date": 1,
                    "text": delivery["text"],
                }
                update = {"update_id": delivery["update_id"], "message": message}
                headers = {"X-Telegram-Bot-Api-Secret-Token": SECRET_OF_TELEGRAM}
                answer = await client.post(f"{url}/telegram", json=update, headers=headers)
        self.statuses.append(answer.status_code)
        return answer.status_code

    @property
    def replies(self) -> int:
        """What people see."""
        return len(self.peer.messages) + sum(len(chat) for chat in self.telegram.messages.values())


def nobody(conversation_id: str) -> None:
    """Is told, and does nothing."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A world in which nothing has happened."""
    async with await SqliteStore.open(tmp_path / "turns.db") as store, Peer() as peer, Telegram() as telegram:
        for chat in (5, 6):
            telegram.open(chat)
        yield World(store, peer, telegram)


async def test_the_deliveries_of_the_data_file(world: World) -> None:
    first, second, while_it_runs, *later = DELIVERIES
    async with world.replica() as one, world.replica() as other:
        async with anyio.create_task_group() as platform:
            platform.start_soon(world.deliver, one, first)
            platform.start_soon(world.deliver, other, second)
        with anyio.fail_after(10):
            await world.going.wait()
        # While its turn runs, and on another replica too: each is answered, though nothing has been said yet.
        took: list[float] = []
        for url in (one, other, one, other):
            began = time.monotonic()
            assert await world.deliver(url, while_it_runs) == 200
            took.append(time.monotonic() - began)
        assert min(took) < AT_ONCE
        assert world.replies == 0
        world.may_go_on.set()
        await until(lambda: so(lambda: world.replies == 1))
    at = while_it_runs["t"]
    expected = 1
    for delivery in later:
        await world.store.advance_clock(round((delivery["t"] - at) * 1000))
        at = delivery["t"]
        async with world.replica() as restarted:
            known = delivery in later[:1] or delivery is later[-1]
            expected += not known
            assert 200 <= await world.deliver(restarted, delivery) < 300
            await until(lambda: so(lambda: world.replies == expected))  # noqa: B023  # awaited at once
    names = ["webhook:default:T1:C1", f"telegram:{BOT_ID}:5", f"telegram:{BOT_ID}:6"]
    states = [await state_of(world.store, name) for name in names]
    want = CASE["expected"]
    assert world.turns == want["turns"]
    assert world.replies == want["replies"]
    assert sum(state.received for state in states) == want["inbound_rows"]
    assert all(state.settled == state.received for state in states)
    assert all(200 <= status < 300 for status in world.statuses)


async def test_a_storm_of_repeats(world: World) -> None:
    """Of many deliveries at the same instant, to both replicas, one is the first: at either door."""
    world.may_go_on.set()
    async with world.replica() as one, world.replica() as other:
        for delivery in (DELIVERIES[0], DELIVERIES[5]):
            async with anyio.create_task_group() as platform:
                for url in (one, other) * 8:
                    platform.start_soon(world.deliver, url, delivery)
        await until(lambda: so(lambda: world.replies == 2))
    assert world.turns == 2
    assert world.statuses.count(202) == 1
    assert world.statuses.count(200) == 31


@pytest.mark.parametrize("by_itself", [True, False], ids=["recovered by itself", "delivered again"])
async def test_the_trap(world: World, tmp_path: Path, *, by_itself: bool) -> None:
    """The process is killed with the row committed and the sender not answered."""
    command = [sys.executable, "-W", "error", "-m", "tests.cases.mortal_front", str(tmp_path / "turns.db"), "0"]
    async with await anyio.open_process(command, cwd=PROJECT, stderr=None) as front:
        assert front.stdout is not None
        port = int(await front.stdout.receive())
        with pytest.raises(httpx2.RemoteProtocolError):
            await world.deliver(f"http://127.0.0.1:{port}", DELIVERIES[0])
        assert await front.wait() == -signal.SIGKILL
    state = await state_of(world.store, "webhook:default:T1:C1")
    assert (state.received, state.settled) == (1, 0)
    world.may_go_on.set()
    async with world.replica() as restarted:
        if not by_itself:
            assert await world.deliver(restarted, DELIVERIES[0]) == 200
        await until(lambda: so(lambda: world.replies == 1))
        assert await world.deliver(restarted, DELIVERIES[0]) == 200
    assert world.turns == CASE["trap"]["expected_turns"] == 1
    state = await state_of(world.store, "webhook:default:T1:C1")
    assert (state.received, state.settled) == (1, 1)


async def test_the_trap_with_a_worker_elsewhere(world: World) -> None:
    """The front end only takes messages; it is the worker that has to find them."""
    world.may_go_on.set()
    async with world.replica(handles=False) as front:
        assert await world.deliver(front, DELIVERIES[0]) == 202
    assert world.turns == 0
    async with world.replica():
        await until(lambda: so(lambda: world.replies == 1))
    assert world.turns == 1
