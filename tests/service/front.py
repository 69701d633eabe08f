"""A front end as a process of its own: takes one message a line, and tells of each once it is in the journal."""

from __future__ import annotations

import json
import sys

import anyio
import anyio.to_thread

from tests.service.app import service
from turnkeeper.conversation.message import Message
from turnkeeper.errors import StoreError


async def main() -> None:
    """`[conversation, event, text]` a line in, the event a line out; or a line that begins with `!` where it failed."""
    async with service.open(replicas=True, wait_seconds=60) as running, anyio.create_task_group() as tasks:

        async def take(line: bytes) -> None:
            conversation, event, text = json.loads(line)
            try:
                await running.bot.receive(conversation, Message(event_id=event, text=text))
            except StoreError:
                event = f"!{event}"
            sys.stdout.write(f"{event}\n")
            sys.stdout.flush()

        while line := await anyio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
            tasks.start_soon(take, line)


if __name__ == "__main__":
    anyio.run(main)
