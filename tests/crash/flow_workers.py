"""A worker of the race: one of several processes that handle the conversations of one store."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import anyio

from tests.crash.flow_platform import platform
from tests.crash.ledger import Ledger
from tests.crash.scenario import Boundaries, MortalStore
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.stores.opening import open_store

LEASE: Final = 0.5
ENOUGH: Final = 1000
"""Attempts at a message: here its workers die, and it is none of its faults."""


def counting_flow() -> Flow:
    """Answers each message with its text, and how many there were."""
    flow = Flow("counting")

    @flow.step
    async def count(c: FlowContext) -> str:
        number = c.state["number"] = c.state.get("number", 0) + 1
        await c.send(f"{number}: {c.message.text}")
        await c.ask()
        return "count"

    assert count.__name__ == flow.first_step
    return flow


async def warm_up(path: str) -> None:
    """A job in a file of its own, with nothing to do."""
    await anyio.Path(f"{path}.stop").touch()
    files = {"url": f"sqlite:///{path}.db", "ledger": f"{path}.ledger", "stop": f"{path}.stop"}
    await perform(**files, channel="keyed", name="a worker", die_at=0)


async def perform(*, url: str, ledger: str, stop: str, channel: str, name: str, die_at: int) -> dict[str, Any]:
    """Work until there is a file `stop`, or the boundary to die at is reached; 0 for none."""
    boundaries = Boundaries(die_at)
    store = await open_store(url)
    to = platform(channel, Ledger(Path(ledger)), boundaries)
    bot = Conversations(
        MortalStore(store, boundaries),
        [counting_flow()],
        to,
        name=name,
        lease_seconds=LEASE,
        max_attempts=ENOUGH,
    )

    async with bot, anyio.create_task_group() as tasks:

        async def work() -> None:
            await bot.work(poll_seconds=0.05)

        tasks.start_soon(work)
        while not Path(stop).exists():  # noqa: ASYNC110, ASYNC240  # another process makes it
            await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    await store.close()
    return {"passed": len(boundaries.passed)}
