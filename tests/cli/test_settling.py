"""Settling at a terminal: which call is meant, what is asked, and what programs get instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.command import turnkeeper
from tests.cli.operator_session import PROMPT, Terminal
from turnkeeper import Agent, HumanApproval, Keeper, Reply, ReplyPort, ScriptedModel, tool
from turnkeeper.models.scripted import calls


@tool
async def charge(cents: int) -> str:
    """Charge a card; the answer is lost on the way."""
    raise TimeoutError(f"no answer about {cents}")


@tool
async def greet(name: str) -> str:
    """Say hello."""
    return f"hello, {name}"


async def unanswered(reply: Reply) -> str:
    """The channel is silent."""
    raise TimeoutError


CALLS = calls(("charge", {"cents": 500}), ("charge", {"cents": 700}))
CALL = calls(("greet", {"name": "Ann"}))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with turns that need somebody."""

    async def main() -> None:
        async with await Keeper.open(f"sqlite:///{tmp_path}/t.db") as keeper:
            await keeper.run(Agent(ScriptedModel([CALLS]), [charge]), "pay", turn_id="doubtful")
            parking = Agent(ScriptedModel([CALL]), [greet], permission=HumanApproval(lambda _: True))
            for turn in ("parked", "also parked"):
                await keeper.run(parking, "hi", turn_id=turn)
            await keeper.run(Agent(ScriptedModel(["hi"])), "hi", turn_id="greeting", reply=ReplyPort(unanswered))

    anyio.run(main)
    return tmp_path


def run(home: Path, *arguments: str) -> Any:
    """Run a command on the store, with nobody at a terminal."""
    return turnkeeper(*arguments, cwd=home, environment={"TURNKEEPER_STORE": "sqlite:///t.db"})


BECAUSE = ("--who", "ann", "--why", "looked it up")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("resolve", "doubtful", *BECAUSE), "0 0 (charge), 0 1 (charge)"),
        (("resolve", "parked", *BECAUSE), "no such call is in doubt"),
        (("resolve", "missing", *BECAUSE), "no such call is in doubt"),
        (("resolve", "doubtful", "0", "0", *BECAUSE), "outcome: is needed"),
        (("resolve", "doubtful", "0", "0", "unknown", "--why", "x"), "--who: is needed"),
        (("resolve", "doubtful", "0", "0", "unknown", "--who", "ann"), "--why: is needed"),
        (("resolve-reply", "greeting", "--message-id", "m1", "--who", "ann"), "--why: is needed"),
        (("resolve-model", "doubtful", "did_not_happen", "--who", "ann"), "--why: is needed"),
        (("resolve-message", "chat", "1", "--who", "ann"), "--why: is needed"),
        (("resolve-send", "chat", "1.0.0", "--not-sent", "--why", "x"), "--who: is needed"),
        (("release", "doubtful", "--who", "ann"), "--why: is needed"),
        (("approve", "parked", "0", "0"), "--who: is needed"),
        (("deny", "parked", "0", "0"), "--who: is needed"),
    ],
)
def test_programs_are_told_what_is_missing(home: Path, arguments: tuple[str, ...], told: str) -> None:
    done = run(home, *arguments)
    assert (done.status, done.out, told in done.err) == (2, "", True), done.err


def test_people_are_asked(home: Path) -> None:
    """The call that is meant is shown first, and what is said of it is about that run; an empty answer is none."""
    with Terminal(home) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("export TURNKEEPER_STORE=sqlite:///t.db", PROMPT)
        terminal.type("turnkeeper resolve doubtful", PROMPT)
        assert "several calls are in doubt" in terminal.screen
        terminal.type("turnkeeper resolve doubtful 0 1", "unknown): ")
        assert '0.1 charge {"cents":700}' in terminal.screen.replace(": ", ":")
        assert "TimeoutError: no answer about 700" in terminal.screen
        terminal.type("perhaps", "unknown): ")
        terminal.type("did not", "the evidence: ")
        terminal.type("", "the evidence: ")
        terminal.type("not in the bank's list", "[ann]: ")
        terminal.type("bo", PROMPT)
        assert "settled: did_not_happen." in terminal.screen
    slots = run(home, "show", "doubtful", "--json").document["rounds"][0]["slots"]
    assert [slot["state"] for slot in slots] == ["AMBIGUOUS", "CLAIMED"]
    told = [
        one for one in run(home, "show", "doubtful", "--json").document["records"] if one["record"] == "tool_resolved"
    ]
    assert [(one["slot_index"], one["who"], one["why"]) for one in told] == [(1, "bo", "not in the bank's list")]


def test_nobody_answers(home: Path) -> None:
    """The end of the input (Ctrl-D) is no answer."""
    with Terminal(home) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("export TURNKEEPER_STORE=sqlite:///t.db", PROMPT)
        terminal.type("turnkeeper approve parked 0 0", "[ann]: ")
        terminal.end_of_input(f"--who: was not answered\n{PROMPT}")


def test_documents_for_programs(home: Path) -> None:
    because = {"who": "ann", "why": "looked it up"}
    sender = run(home, "show", "greeting", "--json").document["reply"]["sender"]
    for arguments, document in (
        (
            ("resolve", "doubtful", "0", "0", "unknown"),
            {"turn": "doubtful", "settled": "unknown", "round": 0, "slot": 0},
        ),
        (("approve", "parked", "0", "0"), {"turn": "parked", "settled": "approved", "round": 0, "slot": 0}),
        (("deny", "also parked", "0", "0"), {"turn": "also parked", "settled": "denied", "round": 0, "slot": 0}),
        (
            ("resolve-reply", "greeting", "--not-sent-by", sender),
            {"turn": "greeting", "settled": "not_sent", "message_id": None},
        ),
    ):
        done = run(home, *arguments, *BECAUSE, "--json")
        assert (done.status, done.document) == (0, {"scope": "primary", **document, **because})
