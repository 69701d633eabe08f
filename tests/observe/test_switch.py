"""How telemetry is switched on, and that nobody else pays for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from tests.observe.watching import Watched, ids, parent, told
from turnkeeper import Agent, Flow, FlowContext, Keeper, ScriptedModel, Tool
from turnkeeper.conversation.channel import Unknown
from turnkeeper.conversation.message import Message
from turnkeeper.log.store import Store
from turnkeeper.observe import names
from turnkeeper.service import Service

pytestmark = pytest.mark.anyio


def flow() -> Flow:
    """A tool, an agent, a message."""
    flow = Flow("f")

    async def look() -> str:
        return "seen"

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.do(Tool(look))
        answer = await c.run(Agent(ScriptedModel(["hello"])), "q")
        await c.send(answer.text or "")

    return flow


async def test_a_conversation_is_a_tree(store: Store, watched: Watched) -> None:
    async with replica(store, flow(), Platform(), telemetry=watched.telemetry) as person:
        await person.says("hi")
    turn, call, run, send = (
        watched.only(name) for name in (names.CONVERSATION_TURN, names.CALL_TURN, names.TURN, names.SEND)
    )
    assert [parent(span) for span in (call, run, send)] == [ids(turn)] * 3
    assert parent(watched.only(names.EXECUTE_TOOL)) == ids(call)
    assert parent(watched.only(names.CHAT)) == ids(run)
    assert {told(span)[names.CONVERSATION_ID] for span in (turn, call, run, send)} == {"c"}
    assert told(turn)[names.MESSAGE_NUMBER] == 1
    assert told(send)[names.OUTCOME] == "success"
    assert watched.effects()["send", "begun"] == watched.effects()["send", "completed"] == 1
    assert watched.metric(names.APPEND_DURATION)["sqlite",] > 3


async def test_a_message_that_may_be_out(keeper: Keeper, watched: Watched) -> None:
    class Doubtful:
        dedup_window = 0.0
        max_length: int | None = None

        async def send(self, conversation_id: str, key: str, content: object) -> Unknown:
            return Unknown("504")

    async with keeper.conversations([flow()], Doubtful()) as bot:
        await bot.handle("c", Message(event_id="e", text="hi"))
    send = watched.only(names.SEND)
    assert (told(send)[names.OUTCOME], told(send)[names.ERROR_TYPE]) == ("ambiguous", "send_outcome_unknown")
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("send",): 1}
    conversation = await keeper.conversation("c")
    assert conversation is not None
    (key,) = (one.key for one in conversation.state.sends)
    await keeper.resolve_send("c", key, message_id="m", who="me", why="seen")
    assert watched.metric(names.AMBIGUOUS_OPEN) == {("send",): 0}


async def test_a_step_that_fails(store: Store, watched: Watched) -> None:
    broken = Flow("f")

    @broken.step
    async def only(c: FlowContext) -> None:
        raise RuntimeError("secret")

    async with replica(store, broken, Platform(), telemetry=watched.telemetry) as person:
        await person.says("hi")
    turn = watched.only(names.CONVERSATION_TURN)
    assert told(turn)[names.ERROR_TYPE] == turn.status.description == "RuntimeError"
    assert list(turn.events) == []


async def test_a_service(tmp_path: Path, watched: Watched) -> None:
    url = f"sqlite:///{tmp_path / 'service.db'}"
    service = Service(flow(), {"c": Platform()}, store=url, telemetry=watched.telemetry)
    async with service.open() as running:
        await running.bot.handle("c:1", Message(event_id="e", text="hi"))
    assert told(watched.only(names.CONVERSATION_TURN))[names.CONVERSATION_ID] == "c:1"
    assert told(watched.only(names.TURN))[names.CONVERSATION_ID] == "c:1"


def test_opentelemetry_is_imported_only_where_it_is_switched_on() -> None:
    program = """
import sys, asyncio, turnkeeper
from turnkeeper import Agent, Conversations, Keeper, ScriptedModel, Telemetry, TurnCheckpointSession

async def main():
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        print((await keeper.run(Agent(ScriptedModel(["a"])), "q", turn_id="t")).status)
asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "off"
Telemetry()
assert [name for name in sys.modules if name.startswith("opentelemetry")], "on"
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")], "the host's"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("success\n", "")


def test_without_the_extra_it_says_what_to_install() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from turnkeeper import Telemetry, TurnkeeperError
try:
    Telemetry()
except ImportError as e:
    assert isinstance(e, TurnkeeperError)
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'turnkeeper[otel]'" in done.stdout, done.stderr
