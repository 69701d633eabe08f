"""The flow of the crash tests: send, ask, send, ask, and the next step sends; with boundaries to die at around all of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast

from tests.conformance.support import ClockedStore
from tests.crash.flow_platform import Person, platform, settle_doubts
from tests.crash.ledger import Ledger
from tests.crash.scenario import LEASE, Boundaries, MortalStore
from tests.crash.sealed import open_marked
from turnkeeper import DidNotHappen, Happened, ToolContext, tool
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow, Resume
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.state import ConversationState, SendState
from turnkeeper.engine.tools import Tool

Hurry = Literal["between", "at once", "insisting"]
"""When the person answers: when the bot is quiet or down; the moment that she sees a question; or the former, and twice each."""
ORDER: Final = "I want to order"
Effects = Literal["none", "reconcile", "transactional"]


def order_flow(mode: Resume, effects: list[Tool], *, only_after: bool) -> Flow:
    """The flow of the page; with effects, one before the first wait, one behind it and one in the step behind."""
    flow = Flow("order", resume=mode, starts=lambda message: message.text == ORDER)

    async def do(c: FlowContext, n: int) -> None:
        for effect in effects:
            assert await c.do(effect, n=n) == f"{effect.name} {n} is done"

    @flow.step
    async def ordering(c: FlowContext) -> None:
        await c.send("Welcome.")
        await do(c, 1)
        name = await c.ask("Name?", only_after=only_after)
        await c.send(f"Hello, {name}.")
        await do(c, 2)
        size = await c.ask("Size?", only_after=only_after)
        c.state |= {"name": name, "size": size}

    @flow.step
    async def confirming(c: FlowContext) -> None:
        await do(c, 3)
        await c.send(f"Done: {c.state['name']} | {c.state['size']}")

    assert ordering is not confirming
    return flow


class Effect:
    """An effect outside the store, or in a table beside the store's."""

    def __init__(self, ledger: Ledger, boundaries: Boundaries, placeholder: str) -> None:
        self._ledger = ledger
        self._reach = boundaries.reach
        self._insert = f"INSERT INTO effects VALUES ({placeholder}, {placeholder})"

    def tools(self, kind: Effects) -> list[Tool]:
        """The tools of that kind."""
        if kind == "none":
            return []
        made = tool(transactional=True) if kind == "transactional" else tool(reconcile=self._look_up)

        @made
        def pay(n: int, context: ToolContext) -> str:
            return self._pay(n, context)

        return [pay]

    def _pay(self, n: int, context: ToolContext) -> str:
        result = f"pay {n} is done"
        self._reach("before an effect")
        if context.transaction is None:
            self._ledger.write("effect", operation_id=context.operation_id, n=n, result=result)
        else:
            context.transaction.execute("CREATE TABLE IF NOT EXISTS effects (operation_id TEXT, result TEXT)")
            context.transaction.execute(self._insert, (context.operation_id, result))
            self._ledger.write("tried", operation_id=context.operation_id, n=n)
        self._reach("behind an effect")
        return result

    async def _look_up(self, context: ToolContext) -> Happened | DidNotHappen:
        self._reach("before a look-up")
        rows = self._ledger.rows("effect", operation_id=context.operation_id)
        self._reach("behind a look-up")
        return Happened(rows[0]["result"]) if rows else DidNotHappen()


class Job(TypedDict):
    """One process at one conversation.

    `life` is how many processes were at it before; `die_at` the boundary to die at, counted from 1; 0 for none. `leaves` makes
    it copy its files at each boundary: what it would leave if it were killed there.
    """

    url: str
    conversation: str
    ledger: str
    mode: Resume
    channel: str
    hurry: Hurry
    effects: Effects
    life: int
    die_at: int
    leaves: bool


class Leaving(Boundaries):
    """Copies a folder at each boundary, to one of that name and the boundary's number. Nothing is being written then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self._folder = folder

    def reach(self, name: str) -> None:
        """See `Boundaries`."""
        super().reach(name)
        shutil.copytree(self._folder, left_at(self._folder, len(self.passed)))


def left_at(folder: Path, boundary: int) -> Path:
    """Where the copy of that boundary is."""
    return folder.with_name(f"{folder.name}-{boundary}")


async def warm_up(path: str) -> None:
    """A job in a file of its own."""
    job = Job(
        url=f"sqlite:///{path}.db",
        conversation="a conversation",
        ledger=f"{path}.ledger",
        mode="all-answers",
        channel="keyed",
        hurry="between",
        effects="reconcile",
        life=0,
        die_at=0,
        leaves=False,
    )
    await perform(jobs=[job])


async def perform(*, jobs: list[Job]) -> dict[str, Any]:
    """What several processes would do at conversations of their own; the first that dies ends them all."""
    return {"told": [await _live(job) for job in jobs]}


async def _live(job: Job) -> dict[str, Any]:
    """While no bot is there the person speaks; then the bot comes, behind every lease, and dies at its boundary."""
    url, conversation, life = job["url"], job["conversation"], job["life"]
    boundaries = Leaving(Path(job["ledger"]).parent) if job["leaves"] else Boundaries(job["die_at"])
    store = await open_marked(url)
    clock = cast("ClockedStore", store)
    # The test clock of a file or a database stands where the process before has left it; that of Redis is this object's alone.
    if url.startswith("redis"):
        await clock.advance_clock(round(life * LEASE * 1000))
    ledger = Ledger(Path(job["ledger"]))
    channel = platform(job["channel"], ledger, boundaries, life)
    effect = Effect(ledger, boundaries, "%s" if url.startswith("postgresql:") else "?")
    insists = job["hurry"] == "insisting"
    flow = order_flow(job["mode"], effect.tools(job["effects"]), only_after=insists)
    person = Person(Conversations(store, [flow], channel, name="front-end"), conversation, ledger, insists=insists)
    if not life:
        await person.says("hello", ORDER)
    await person.repeats()
    await person.answers()
    if job["hurry"] == "at once":
        channel.told = person.answers
    await clock.advance_clock(round(LEASE * 1000))
    handle = ConversationHandle(store, conversation)
    found = await handle.read()
    sending = sum(send.state is SendState.SENDING for send in found.sends)
    ledger.write("found", life=life, fence=found.fence, revisions=found.revisions, sending=sending)
    mortal = MortalStore(store, boundaries)
    async with Conversations(mortal, [flow], channel, name=f"bot {life}", lease_seconds=LEASE) as bot:
        state = await _to_the_end(bot, handle, person, ledger)
    await store.close()
    row = state.row
    end = {
        "ended": None if row is None else row.ended,
        "received": state.received,
        "settled": state.settled,
        "owner": state.owner,
        "sends": [send.state.value for send in state.sends],
        "fence": state.fence,
        "revisions": state.revisions,
    }
    return {"boundaries": boundaries.passed, "end": end}


async def _to_the_end(
    bot: Conversations, handle: ConversationHandle, person: Person, ledger: Ledger
) -> ConversationState:
    """Process what there is, while the person answers, until there is nothing left to do for anybody."""
    for _ in range(60):
        done = await bot.process(handle.conversation_id)
        assert done.left is None, f"nobody else is there, and still: {done}"
        settled = await settle_doubts(handle, ledger)
        if not await person.answers() and not settled:
            return await handle.read()
    raise AssertionError("the conversation does not come to its end")
