"""Driving conversations in tests: a replica, a person who types, and a clock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.conversation.platform import Platform
from turnkeeper.conversation.conversations import Conversations, Processed
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.message import Message
from turnkeeper.conversation.state import ConversationState
from turnkeeper.log.store import Store


class Person:
    """Types into one conversation."""

    def __init__(self, bot: Conversations, conversation_id: str = "c") -> None:
        self.bot = bot
        self.conversation_id = conversation_id
        self._said = 0

    async def says(self, text: str = "", **more: Any) -> Processed:
        """Say something, and wait until the bot has done what it can."""
        self._said += 1
        event = more.pop("event_id", f"{self.bot.name}-{self._said}")
        return await self.bot.handle(self.conversation_id, Message(event_id=event, text=text, **more))

    async def writes(self, text: str = "", **more: Any) -> None:
        """Say something that only gets into the journal."""
        self._said += 1
        event = more.pop("event_id", f"{self.bot.name}-{self._said}")
        await self.bot.receive(self.conversation_id, Message(event_id=event, text=text, **more))


@asynccontextmanager
async def replica(
    store: Store, flows: Flow | Sequence[Flow], platform: Platform, **options: Any
) -> AsyncGenerator[Person]:
    """One replica, and a person who talks to it."""
    flows = [flows] if isinstance(flows, Flow) else flows
    async with Conversations(store, flows, platform, **options) as bot:
        yield Person(bot)


async def state_of(store: Store, conversation_id: str = "c") -> ConversationState:
    """The conversation as a stranger reads it."""
    return await ConversationHandle(store, conversation_id).read()
