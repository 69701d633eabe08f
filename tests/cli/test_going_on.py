"""`retry` and `release`, as an operator uses them on turns that nobody goes on with, and on conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.command import turnkeeper
from turnkeeper import Agent, Keeper, Reply, ReplyPort, ScriptedModel
from turnkeeper.conversation import commands as c
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.message import Message, keep_message
from turnkeeper.turn import commands as tc
from turnkeeper.turn.handle import TurnHandle

APP = """
from turnkeeper import Agent, Keeper, Reply, ReplyPort, ScriptedModel, tool
from turnkeeper.models.scripted import calls

agent = Agent(ScriptedModel(["It is paid."]))


@tool
async def look_up(name: str) -> str:
    # Looks a customer up.
    return f"{name} has the card 4000-1234"


async def open_keeper() -> Keeper:
    return await Keeper.open("sqlite:///t.db", redact=lambda place, text: text.replace("4000-1234", "[card]"))


nosy = Agent(ScriptedModel([calls(("look_up", {"name": "Ann"})), "Found."]), [look_up])


def made():
    return agent


async def send(reply: Reply) -> str:
    with open("sent.txt", "a") as sent:
        sent.write(reply.text + "\\n")
    return "m1"


reply = ReplyPort(send)
nothing = 5
"""
BECAUSE = ("--who", "ann", "--why", "its machine is gone")
DEAD = "host-7:1:dead"
LEASE_MS = 3_600_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the app and its store are."""
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def run(home: Path, *arguments: str) -> Any:
    """Run a command there, on its store."""
    return turnkeeper(*arguments, cwd=home, environment={"TURNKEEPER_STORE": "sqlite:///t.db"})


def kept(home: Path, do: Callable[[Keeper], Awaitable[Any]]) -> Any:
    """Do something with the store, in this process."""

    async def main() -> Any:
        async with await Keeper.open(f"sqlite:///{home}/t.db") as keeper:
            return await do(keeper)

    return anyio.run(main)


async def died(keeper: Keeper) -> None:
    """A run that is asking the model, and is not heard of any more."""
    await keeper.session("order").start([{"role": "user", "content": "pay"}])
    await TurnHandle(keeper.store, "order").ask(tc.StartModel(0, DEAD, LEASE_MS))


async def chat(keeper: Keeper) -> None:
    """A conversation whose owner has a message in hand."""
    handle = ConversationHandle(keeper.store, "chat")
    await handle.receive("1", "text", keep_message(Message(event_id="1", text="hi")))
    await handle.ask(c.Claim(DEAD, LEASE_MS, 1, "start", c.Start("order", 1, "first", b"")))


def test_a_dead_owner_is_not_waited_for(home: Path) -> None:
    kept(home, died)
    busy = run(home, "retry", "order", "app:agent", "--no-reply")
    assert (busy.status, DEAD in busy.err) == (3, True)
    held = run(home, "show", "order", "--json").document["leases"]
    assert [(one["what"], one["slot"], one["owner"], one["ms"]) for one in held] == [
        ("model call", None, DEAD, LEASE_MS)
    ]
    assert "model call: held by host-7:1 until" in run(home, "show", "order").out
    assert "held by" not in run(home, "show", "order", "--at", "1").out
    alive = run(home, "release", "order", *BECAUSE)
    assert (alive.status, "may be alive" in alive.err) == (3, True)
    wrong = run(home, "release", "order", *BECAUSE, "--owner", "another", "--force")
    assert (wrong.status, "holds no lease" in wrong.err) == (2, True)
    done = run(home, "release", "order", *BECAUSE, "--owner", DEAD, "--force")
    assert (done.status, done.out.splitlines()) == (
        0,
        [
            "released from host-7:1: model call; it may have happened, its policy decides",
            "Run the turn order again.",
        ],
    )
    shown = run(home, "show", "order")
    assert "leases_released" in shown.out
    assert "host-7:1 is dead, says ann: its machine is gone" in shown.out
    assert "held by" not in shown.out
    result = run(home, "retry", "order", "app:agent", "--no-reply")
    assert (result.status, result.out) == (0, "success: It is paid.\n")
    again = run(home, "retry", "order", "app:made", "--no-reply", "--json")
    assert (again.status, again.document["status"], again.document["model_calls"]) == (0, "success", 2)


def test_what_was_released_as_json(home: Path) -> None:
    kept(home, died)
    document = run(home, "release", "order", *BECAUSE, "--force", "--json").document
    assert document == {
        "turn": "order",
        "released": [{"scope": "primary", "owner": DEAD, "what": "model call", "slot": None, "lease_ms": LEASE_MS}],
        "who": "ann",
        "why": "its machine is gone",
    }


def test_a_reply_is_not_forgotten(home: Path) -> None:
    """A turn without its channel would be closed, so somebody has to say that there is none."""

    async def unsent(keeper: Keeper) -> None:
        async def down(reply: Reply) -> str:
            raise ConnectionRefusedError

        result = await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="greeting", reply=ReplyPort(down))
        assert result.error_kind == "reply_not_sent"

    kept(home, unsent)
    for neither_or_both in ((), ("--no-reply", "--reply", "app:reply")):
        refused = run(home, "retry", "greeting", "app:agent", *neither_or_both)
        assert (refused.status, "--no-reply is needed" in refused.err) == (2, True)
    unfinished = run(home, "retry", "greeting", "app:agent", "--no-reply")
    assert (unfinished.status, unfinished.out.startswith("failed: a reply is reserved")) == (1, True)
    done = run(home, "retry", "greeting", "app:agent", "--reply", "app:reply")
    assert (done.status, (home / "sent.txt").read_text()) == (0, "hello\n")


def test_with_a_keeper_of_ones_own(home: Path) -> None:
    """What the program redacts is redacted here, too."""
    kept(home, died)
    run(home, "release", "order", *BECAUSE, "--force")
    arguments = ("retry", "order", "app:nosy", "--no-reply", "--keeper")
    wrong = run(home, *arguments, "app:made")
    assert (wrong.status, "no turnkeeper.Keeper" in wrong.err) == (2, True)
    assert run(home, *arguments, "app:open_keeper").status == 0
    slot = run(home, "show", "order", "--json").document["rounds"][0]["slots"][0]
    assert slot["result"]["output"] == "Ann has the card [card]"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("missing", "app:agent", "--no-reply"), "never started"),
        (("order", "app", "--no-reply"), "module:attribute"),
        (("order", "app:nothing", "--no-reply"), "no turnkeeper.Agent"),
        (("order", "app:agent", "--reply", "app:agent"), "no turnkeeper.ReplyPort"),
        (("chat/1", "app:agent", "--no-reply"), "whose workers run it"),
    ],
    ids=["missing turn", "no attribute", "no agent", "no reply port", "of a conversation"],
)
def test_what_is_not_run(home: Path, arguments: tuple[str, ...], told: str) -> None:
    async def turns(keeper: Keeper) -> None:
        await died(keeper)
        failing = Agent(ScriptedModel([]), max_model_attempts=1)
        await keeper.run(failing, "hi", turn_id="chat/1", labels={"conversation": "chat"})

    kept(home, turns)
    refused = run(home, "retry", *arguments)
    assert (refused.status, refused.out, told in refused.err) == (2, "", True), refused.err


def test_a_conversation_is_taken_from_a_dead_owner(home: Path) -> None:
    kept(home, chat)
    assert run(home, "release", "chat", "--conversation", *BECAUSE).status == 3
    done = run(home, "release", "chat", "--conversation", "--force", *BECAUSE)
    assert (done.status, done.out.startswith(f"released from {DEAD}")) == (0, True)
    shown = run(home, "conversation", "chat", "--json").document
    assert shown["owner"] is None
    assert shown["records"][-1]["detail"] == {"owner": DEAD, "who": "ann", "why": "its machine is gone"}
    assert run(home, "release", "chat", "--conversation", "--force", *BECAUSE).status == 2


def test_a_message_that_waits_is_tried_at_once(home: Path) -> None:
    async def put_back(keeper: Keeper) -> None:
        await chat(keeper)
        await ConversationHandle(keeper.store, "chat").ask(c.ReturnMessage(DEAD, 1, 1, "ValueError", LEASE_MS))

    kept(home, put_back)
    assert run(home, "resolve-message", "chat", "1", "--drop", *BECAUSE).status == 2
    document = run(home, "resolve-message", "chat", "1", *BECAUSE, "--json").document
    assert (document["message"], document["settled"], document["who"]) == (1, "tried_again", "ann")

    async def claimed(keeper: Keeper) -> Any:
        claim = c.Claim("next", LEASE_MS, 1, "start", c.Start("order", 1, "first", b""))
        return (await ConversationHandle(keeper.store, "chat").ask(claim))[0].what

    assert kept(home, claimed) == "work"
