"""A front end as a process of its own that is killed right behind the commit of the first message, before it acknowledges it."""

from __future__ import annotations

import os
import signal
import socket
import sys

import anyio
import uvicorn

from tests.channels.peer import SECRET
from tests.conversation.platform import Platform
from turnkeeper.channels.webhook import webhook_app
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.decide import Receipt
from turnkeeper.conversation.flow import END, Flow
from turnkeeper.conversation.message import Message
from turnkeeper.conversation.state import TraceContext
from turnkeeper.stores.sqlite import SqliteStore


class _Mortal(Conversations):
    async def receive(self, conversation_id: str, message: Message, trace: TraceContext | None = None) -> Receipt:
        """Take it, and die."""
        receipt = await super().receive(conversation_id, message, trace)
        assert not receipt.duplicate
        os.kill(os.getpid(), signal.SIGKILL)
        return receipt


async def main(path: str, port: int) -> None:
    """Serve the store at that path."""
    flow = Flow("bot")

    @flow.step
    async def nothing(_: object) -> str:
        return END

    assert nothing.__name__ == flow.first_step
    async with await SqliteStore.open(path) as store, _Mortal(store, [flow], Platform()) as bot:
        listening = socket.create_server(("127.0.0.1", port))
        print(listening.getsockname()[1], flush=True)
        app = webhook_app(bot, SECRET)
        await uvicorn.Server(uvicorn.Config(app, log_config=None)).serve([listening])


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
