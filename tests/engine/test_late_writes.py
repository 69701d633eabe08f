"""A write that is told so late that another worker has gone on meanwhile: what it was to begin is not begun (field case 19).

A lease counts from before the write that takes it, as others' patience counts from within the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from tests.conversation.driving import replica
from tests.conversation.platform import SearchablePlatform
from tests.engine.support import asks_once
from tests.engine.wrapped import WrappedStore
from turnkeeper import (
    Agent,
    DidNotHappen,
    Keeper,
    ModelInvocationResponse,
    ModelRequest,
    Reply,
    ReplyPort,
    ScriptedModel,
    ToolContext,
    tool,
)
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.models.scripted import text
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.names import ToolCallState
from turnkeeper.turn.state import TurnState, find_slot

pytestmark = pytest.mark.anyio

T = TypeVar("T")
LEASE = 0.5


class LateStore(WrappedStore):
    """Tells of one write late: first somebody else goes on from it, which he may when its lease is over."""

    def __init__(
        self, inner: SqliteStore, it: Callable[[], Awaitable[bool]], go_on: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(inner)
        self._it = it
        self._go_on = go_on
        self.told = False

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """See `WrappedStore`."""
        written = await write()
        if not self.told and await self._it():
            self.told = True
            await self._go_on()
        return written


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """What is looked at lies above the stores."""
    async with await SqliteStore.open(tmp_path / "t.db") as store:
        yield store


async def run_late(
    store: SqliteStore, agent: Agent, it: Callable[[TurnState], bool], reply: ReplyPort | None = None
) -> None:
    """Run a turn whose write, at the end of which `it` is so, is told late; both workers come to its end."""

    async def now() -> bool:
        return it(await TurnHandle(store, "t").read())

    late = LateStore(store, now, lambda: Keeper(store).run(agent, "go", turn_id="t", reply=reply))
    result = await Keeper(late).run(agent, "go", turn_id="t", reply=reply)
    assert late.told
    assert result.status == "success"


async def test_an_effect(store: SqliteStore) -> None:
    """T3, invariant 2."""
    effects: list[str] = []

    async def look_up(context: ToolContext) -> DidNotHappen:
        return DidNotHappen()

    @tool(reconcile=look_up)
    async def act(context: ToolContext) -> str:
        effects.append(context.operation_id)
        return "acted"

    def begun(state: TurnState) -> bool:
        slot = find_slot(state, 0, 0)
        return slot is not None and slot.state is ToolCallState.EXECUTING

    await run_late(store, Agent(asks_once(("act", "")), [act], lease_seconds=LEASE), begun)
    assert len(effects) == 1


async def test_a_model_call(store: SqliteStore) -> None:
    """Invariant 1: an answer is not bought by two."""
    asked: list[str] = []

    class Model:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            asked.append(request.invocation_id)
            return text("done")

    await run_late(store, Agent(Model(), lease_seconds=LEASE), lambda state: state.model is not None)
    assert len(asked) == 1


async def test_a_reply(store: SqliteStore) -> None:
    """Adapter contract: a channel without keys gets one message."""
    sent: list[str] = []

    async def send(reply: Reply) -> str:
        sent.append(reply.text)
        return f"id {len(sent)}"

    async def find(reply: Reply) -> DidNotHappen:
        return DidNotHappen()

    agent = Agent(ScriptedModel(["done", "done"]), lease_seconds=LEASE)
    await run_late(store, agent, lambda state: state.delivery is not None, ReplyPort(send, find=find))
    assert sent == ["done"]


async def test_a_message_of_a_conversation(store: SqliteStore) -> None:
    """R1, O2: whose lease has ended has lost the conversation, and sends nothing any more."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.send("hello")

    platform = SearchablePlatform()

    async def begun() -> bool:
        return bool((await ConversationHandle(store, "c").read()).sends)

    async def go_on() -> None:
        async with Conversations(store, [flow], platform, lease_seconds=LEASE) as other:
            while (await other.process("c")).left == "busy":  # noqa: ASYNC110  # its lease is over by every clock
                await anyio.sleep(0.02)

    late = LateStore(store, begun, go_on)
    async with replica(late, flow, platform, lease_seconds=LEASE) as person:
        await person.says("hi")
    assert late.told
    assert platform.calls == ["hello"]
