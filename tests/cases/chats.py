"""The chat servers of field case 24, over real HTTP, with a channel to each. Run as a program, it is the worker that is killed
right behind the server's OK."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import anyio
import httpx2

from tests.channels.peer import SECRET, Peer
from tests.channels.telegram_server import BOT_ID, TOKEN, Telegram
from turnkeeper import Agent, Keeper, ScriptedModel
from turnkeeper.channels.replies import reply_port
from turnkeeper.channels.telegram import TelegramChannel
from turnkeeper.channels.telegram_api import BotApi
from turnkeeper.channels.webhook import WebhookChannel
from turnkeeper.conversation.channel import Channel, SendOutcome, Sent
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Content, Message
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp, StillUnknown

Kind = Literal["dedupes by key", "can look up by key", "neither", "telegram"]
KINDS: Final[tuple[Kind, ...]] = ("dedupes by key", "can look up by key", "neither", "telegram")
"""The data file's, and Telegram, which is of the third."""


class LookUpChannel(WebhookChannel):
    """To a peer whose messages can be looked up by their key, and which drops no second one."""

    def __init__(self, url: str) -> None:
        super().__init__(url, SECRET, dedup_window=0)
        self._find_url = url.replace("/in", "/find")

    async def find(self, conversation_id: str, key: str) -> LookedUp:
        """See `FindingChannel.find`."""
        async with httpx2.AsyncClient() as client:
            answer = await client.get(self._find_url, params={"key": key})
        match answer.status_code:
            case 200:
                return Happened(answer.json()["id"])
            case 404:
                return DidNotHappen()
            case _:
                return StillUnknown()


@asynccontextmanager
async def channel_to(kind: Kind, url: str) -> AsyncGenerator[Channel]:
    """A channel to a server of that kind."""
    match kind:
        case "telegram":
            async with BotApi(TOKEN, base_url=url) as api:
                yield TelegramChannel(api)
        case "can look up by key":
            async with LookUpChannel(url) as channel:
                yield channel
        case _:
            async with WebhookChannel(url, SECRET, dedup_window=3600 if kind == "dedupes by key" else 0) as channel:
                yield channel


class Chat:
    """A chat server: its faults, and its log."""

    def __init__(self, kind: Kind, server: Peer | Telegram) -> None:
        self.kind: Kind = kind
        self.server = server

    @property
    def conversation(self) -> str:
        """The conversation with a person there."""
        return f"telegram:{BOT_ID}:5" if isinstance(self.server, Telegram) else "webhook:default:c"

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url

    def fault(self, name: str) -> None:
        """What happens to the next send."""
        if isinstance(self.server, Telegram):
            self.server.faults["sendMessage"] = [name]
        else:
            self.server.faults = [name]

    @property
    def visible(self) -> dict[str, str]:
        """Texts that a person sees, by message id."""
        if isinstance(self.server, Telegram):
            return {str(one["message_id"]): one["text"] for one in self.server.messages[5]}
        return {f"id-{key}": data["text"] for key, data in self.server.messages}

    @property
    def sends(self) -> int:
        """Attempts at a send."""
        if isinstance(self.server, Telegram):
            return len(self.server.made("sendMessage"))
        return len(self.server.attempts)

    @property
    def keys(self) -> set[str]:
        """Their keys; Telegram takes none."""
        return set() if isinstance(self.server, Telegram) else {one.key for one in self.server.attempts}

    @property
    def lookups(self) -> int:
        """How often a key was looked up."""
        return 0 if isinstance(self.server, Telegram) else self.server.lookups


@asynccontextmanager
async def chat_server(kind: Kind) -> AsyncGenerator[Chat]:
    """A server of that kind, with one open conversation."""
    async with Telegram() if kind == "telegram" else Peer(keyed=kind == "dedupes by key", longest=4096) as server:
        if isinstance(server, Telegram):
            server.open(5)
        yield Chat(kind, server)


def saying(text: str) -> Flow:
    """A flow whose code renders that text."""
    flow = Flow("saying")

    @flow.step
    async def say(c: FlowContext) -> None:
        await c.send(text)

    assert say.__name__ == flow.first_step
    return flow


# --- the worker that is killed -------------------------------------------------------------------------------


class _Deadly:
    """A channel behind whose OK the process dies, before anything of it is written."""

    def __init__(self, channel: Channel) -> None:
        self.dedup_window = channel.dedup_window
        self.max_length = channel.max_length
        self._channel = channel

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """Send, and die."""
        outcome = await self._channel.send(conversation_id, key, content)
        assert isinstance(outcome, Sent)
        os.kill(os.getpid(), signal.SIGKILL)
        return outcome


async def work(what: str, kind: Kind, url: str, conversation: str, store_url: str, text: str) -> None:
    """Begin a turn, or a conversation, and send what is to be said."""
    async with channel_to(kind, url) as channel, await Keeper.open(store_url) as keeper:
        deadly = _Deadly(channel)
        if what == "turn":
            agent = Agent(ScriptedModel([text]))
            await keeper.run(agent, "hi", turn_id="turn-1", reply=reply_port(deadly, conversation))
        else:
            async with Conversations(keeper.store, [saying(text)], deadly) as bot:
                await bot.handle(conversation, Message(event_id="1", text="hi"))


if __name__ == "__main__":
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    anyio.run(lambda: work(**arguments))
