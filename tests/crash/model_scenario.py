"""The turn of the crash tests of model ports: two tool calls in one answer, and a last word, through a provider's real client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import httpx2
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.conformance.support import ClockedStore
from tests.crash.ledger import Ledger
from tests.crash.scenario import Boundaries, MortalStore
from tests.models.clients import KEY, NoPause, asking
from turnkeeper import Agent, DidNotHappen, Happened, Host, Keeper, ToolContext, tool
from turnkeeper.engine.tools import Tool
from turnkeeper.engine.transcript import check_pairs
from turnkeeper.models.anthropic import AnthropicMessages
from turnkeeper.models.fake import Script, ScriptedCall, ScriptedRound
from turnkeeper.models.fake.desk import Work
from turnkeeper.models.fake.messages import events as message_events
from turnkeeper.models.fake.responses import events as response_events
from turnkeeper.models.openai import OpenAIChat, OpenAIResponses
from turnkeeper.models.scripted import calls, text
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r

LEASE: Final = 60.0
"""Longer than any life, so that no renewal adds a boundary by chance."""
TOOLS: Final = ("pay", "book")
SCRIPT: Final = Script(
    rounds=[
        ScriptedRound(text="a", calls=[ScriptedCall(name=name, arguments="{}") for name in TOOLS], polls=1),
        ScriptedRound(text="b", polls=1),
    ]
)
"""Short, since every event of it is a boundary."""


class Job(NamedTuple):
    """One life of a turn.

    Attributes:
        api, streaming: the port.
        server: the fake provider's address.
        folder: where store and ledger are.
        turn: the turn's id.
        die_at: the boundary to die at, counted from 1; 0 for none.
    """

    api: str
    streaming: bool
    server: str
    folder: str
    turn: str
    die_at: int = 0


class Watching:
    """A host's stream port: whatever comes of an answer may be the last thing that the process sees."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._reach = boundaries.reach

    async def emit(self, chunk: Any) -> None:
        """See `ModelStreamPort`."""
        self._reach("behind an event of the stream")


@asynccontextmanager
async def _port(job: Job, boundaries: Boundaries | None, transport: Any = None) -> AsyncGenerator[Any]:
    """The port, over a client whose process may die before each request and behind the head of each answer."""

    async def before(request: httpx2.Request) -> None:
        if boundaries is not None:
            boundaries.reach(f"before {request.method}")

    async def behind(response: httpx2.Response) -> None:
        if boundaries is not None:
            boundaries.reach(f"behind the head of {response.request.method}")

    hooks: dict[str, list[Callable[..., Any]]] = {"request": [before], "response": [behind]}
    http = httpx2.AsyncClient(event_hooks=hooks, verify=False, transport=transport)
    if job.api == "messages":
        async with AsyncAnthropic(base_url=job.server, api_key=KEY, http_client=http) as anthropic:
            yield AnthropicMessages(anthropic, "m", streaming=job.streaming)
        return
    async with AsyncOpenAI(base_url=f"{job.server}/v1", api_key=KEY, http_client=http) as openai:
        if job.api == "stored chat":
            yield OpenAIChat(openai, "m", streaming=job.streaming, store=True)
        else:
            yield OpenAIResponses(openai, "m", streaming=job.streaming, poll_seconds=0.001)


def _tools(ledger: Ledger, boundaries: Boundaries) -> list[Tool]:
    """Two effects, and who looks for them in the ledger."""

    async def look_up(context: ToolContext) -> Happened | DidNotHappen:
        return Happened("done") if ledger.rows("effect", operation_id=context.operation_id) else DidNotHappen()

    def effect(context: ToolContext) -> str:
        boundaries.reach("before an effect")
        ledger.write("effect", operation_id=context.operation_id)
        boundaries.reach("behind an effect")
        return "done"

    return [tool(name=name, reconcile=look_up)(effect) for name in TOOLS]


async def perform(**fields: Any) -> dict[str, Any]:
    """One life: opens the store behind every lease of the one before, and brings the turn to its end.

    Where the turn stops because nobody can know whether the provider answered, a person looks at what it billed. Each time is in
    the ledger, with what the log knew of the call.

    Args:
        fields: a `Job`'s.
    """
    job = Job(**fields)
    boundaries = Boundaries(job.die_at)
    folder = Path(job.folder)
    ledger = Ledger(folder / "ledger")
    store = await SqliteStore.open(folder / "turns.db")
    await cast("ClockedStore", store).advance_clock(round(LEASE * 1000))
    async with Keeper(MortalStore(store, boundaries)) as keeper, _port(job, boundaries) as port:
        agent = Agent(
            port,
            _tools(ledger, boundaries),
            # One behind the other, so that the boundaries are the same in every run.
            parallel_tools=False,
            unknown_model="reconcile",
            reconcile_model=getattr(port, "reconcile", None),
            host=Host(retry=NoPause(), stream=Watching(boundaries)),
            lease_seconds=LEASE,
        )
        for _ in range(5):
            result = await keeper.run(agent, "go", turn_id=job.turn, wait=False)
            if result.status == "success":
                break
            assert result.error_kind == "model_outcome_unknown", result
            await _settle(keeper, job, ledger)
        else:
            raise AssertionError("the turn does not come to its end")
        checkpoint = await keeper.checkpoint(job.turn)
        assert checkpoint is not None
        check_pairs(checkpoint.messages)
        history = await keeper.history(job.turn)
        assert history is not None
        return {
            "boundaries": boundaries.passed,
            "output": result.output,
            "said": [message.text for message in checkpoint.messages],
            "decisions": sum(isinstance(entry.record, r.AssistantReserved) for entry in history.entries),
        }


async def _settle(keeper: Keeper, job: Job, ledger: Ledger) -> None:
    """A person at the provider's dashboard: was this call billed, and with what answer?"""
    history = await keeper.history(job.turn)
    assert history is not None
    model = history.state.model
    assert model is not None
    async with httpx2.AsyncClient() as client:
        bill: list[dict[str, Any]] = (await client.get(f"{job.server}/bill")).json()
    billed = any(one["invocation"] == model.invocation_id for one in bill)
    ledger.write("person", billed=billed, known=model.reference is not None)
    if not billed:
        await keeper.resolve_model(job.turn, "did_not_happen", who="ann", why="not on the bill")
        return
    answer = calls(*((name, "{}") for name in TOOLS), spoken="a") if model.round_index == 0 else text("b")
    await keeper.resolve_model(job.turn, "happened", response=answer, who="ann", why="on the bill")


async def warm_up(_path: str) -> None:
    """Build what the clients build at their first stream, without a server."""
    work = Work(1, 0, SCRIPT.rounds[0], {"background": True})
    streams = {"background": response_events(work), "messages": message_events(work)}
    for api, events in streams.items():
        body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        head = {"content-type": "text/event-stream"}
        transport = httpx2.MockTransport(lambda _, body=body, head=head: httpx2.Response(200, text=body, headers=head))
        async with _port(Job(api, True, "http://nobody.test", "", ""), None, transport) as port:
            await port.invoke(asking())
