"""The service that is killed: each message has an effect and an answer. Workers import it as `tests.service.app:service`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.service.ledger import Ledger
from turnkeeper.conversation.channel import Sent
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Content
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp
from turnkeeper.engine.tools import ToolContext, tool
from turnkeeper.service import Service

LEDGER: Final = "TEST_LEDGER"
LEASE: Final = 1.5


def _ledger() -> Ledger:
    return Ledger(Path(os.environ[LEDGER]))


class LedgerChannel:
    """A platform that drops the second message with a key, and is the ledger."""

    dedup_window: float = 3600.0
    max_length: int | None = None

    def __init__(self) -> None:
        self._ledger = _ledger()

    async def send(self, conversation_id: str, key: str, content: Content) -> Sent:
        """Write it down."""
        return Sent(self._ledger.send(key, conversation_id, content.text))


@asynccontextmanager
async def ledger_channel() -> AsyncGenerator[LedgerChannel]:
    """One for each process."""
    yield LedgerChannel()


async def _look_up(context: ToolContext) -> LookedUp:
    return Happened("counted") if _ledger().done(context.operation_id) else DidNotHappen()


@tool(reconcile=_look_up)
def count(conversation: str, number: int, context: ToolContext) -> str:
    """The effect."""
    _ledger().do(context.operation_id, conversation, number)
    return "counted"


def _flow() -> Flow:
    flow = Flow("counting")

    @flow.step
    async def answer(c: FlowContext) -> None:
        number = int(c.message.text)
        result = await c.do(count, conversation=c.conversation_id, number=number)
        await c.send(f"{number} {result}")

    return flow


service = Service(_flow(), {"chat": ledger_channel}, lease_seconds=LEASE, max_attempts=1000)
