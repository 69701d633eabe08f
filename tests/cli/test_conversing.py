"""`conversations`, `conversation`, `resolve-send`, `resolve-message` and `erase --conversation`, as an operator types them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import anyio
import pytest

from tests.cli.command import turnkeeper
from tests.conversation.driving import replica
from tests.conversation.platform import Platform
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.engine.tools import tool
from turnkeeper.keeper import Keeper
from turnkeeper.stores.sqlite import SqliteStore


@tool
def charge(amount: int) -> str:
    """An effect, for a turn of its own."""
    return f"paid {amount}"


def flow() -> Flow:
    """Charges, sends, asks, and fails at the answer `bad`."""
    made = Flow("order")

    @made.step
    async def only(c: FlowContext) -> None:
        await c.do(charge, amount=3)
        await c.send("Hello.")
        if await c.ask("Name?") == "bad":
            raise LookupError("no such name")
        await c.send("Done.")

    return made


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with one conversation: a send in doubt, and a message that was set aside."""
    url = f"sqlite:///{tmp_path}/t.db"

    async def make() -> None:
        async with await Keeper.open(url) as keeper:
            async with replica(keeper.store, flow(), Platform(lose={"Hello."}), max_attempts=1) as person:
                await person.says("hi")
                await person.says("bad")
            async with replica(keeper.store, flow(), Platform()) as person:
                person.conversation_id = "other"
                await person.says("hi")

    anyio.run(make)
    return url


def on_with(url: str) -> Platform:
    """What a replica does with the conversation now."""
    platform = Platform()

    async def go_on() -> None:
        async with await Keeper.open(url) as keeper, replica(keeper.store, flow(), platform, max_attempts=1) as person:
            await cast("SqliteStore", keeper.store).advance_clock(60_000)  # the pause behind a failure is over
            await person.bot.process("c")

    anyio.run(go_on)
    return platform


def talk(url: str, text: str) -> Platform:
    """What a replica answers to a message."""
    platform = Platform()

    async def say() -> None:
        async with await Keeper.open(url) as keeper, replica(keeper.store, flow(), platform) as person:
            await person.says(text)

    anyio.run(say)
    return platform


def test_operators_day(url: str) -> None:
    on_with(url)
    listed = turnkeeper("conversations", "--store", url, "--json").document
    assert [one["conversation"] for one in listed] == ["c", "other"]
    assert (listed[0]["attention"], listed[0]["phase"]) == ("quarantined", "HELD")
    assert (listed[1]["attention"], listed[1]["phase"], listed[1]["step"]) == (None, "PARKED", "only")
    assert len(turnkeeper("conversations", "--store", url, "--json", "--attention").document) == 1
    table = turnkeeper("conversations", "--store", url)
    assert "2 of 2 conversations; 1 need attention" in table.out

    shown = turnkeeper("conversation", "c", "--store", url, "--json").document
    (doubt,) = [send for send in shown["outbox"] if send["state"] == "AMBIGUOUS"]
    assert (doubt["text"], doubt["key"]) == ("Hello.", [1, 0, 0])
    assert "LookupError: no such name" in shown["pending"][0]["quarantined"]
    text = turnkeeper("conversation", "c", "--store", url)
    assert "send 1.0.0: AMBIGUOUS" in text.out

    said = ("--who", "ann", "--why", "it is in the chat")
    settled = turnkeeper("resolve-send", "c", "1.0.0", "--message-id", "m1", *said, "--store", url)
    assert (settled.status, settled.out.strip()) == (0, "settled: sent as m1.")
    again = turnkeeper("resolve-send", "c", "1.0.0", "--not-sent", *said, "--store", url)
    assert again.status == 2
    assert "nothing to resolve" in again.err

    dropped = turnkeeper("resolve-message", "c", "2", "--drop", *said, "--store", url)
    assert dropped.status == 0
    assert on_with(url).texts() == []
    assert talk(url, "Ann").texts() == ["Done."]  # the wait is as it was before the message that was dropped
    assert turnkeeper("conversations", "--store", url, "--json", "--attention").document == []


def test_erase(url: str) -> None:
    receipt = turnkeeper("erase", "c", "--conversation", "--store", url, "--json").document
    assert receipt["conversation"] == "c"
    assert len(receipt["erased"]) == 2  # the conversation, and the turn of its charge
    assert receipt["left"] == 0
    assert [one["conversation"] for one in turnkeeper("conversations", "--store", url, "--json").document] == ["other"]
    assert len(turnkeeper("list", "--store", url, "--json").document) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("conversation", "nobody"), "no conversation 'nobody'"),
        (("resolve-send", "c", "1.0.0"), "--message-id"),
        (("resolve-send", "c", "x", "--not-sent"), "not of the form"),
        (("resolve-message", "c", "7"), "not quarantined"),
    ],
)
def test_bad_arguments(url: str, arguments: tuple[str, ...], told: str) -> None:
    evidence = () if arguments[0] == "conversation" else ("--who", "ann", "--why", "so")
    done = turnkeeper(*arguments, *evidence, "--store", url)
    assert done.status == 2
    assert told in done.err


def test_evidence_is_needed(url: str) -> None:
    done = turnkeeper("resolve-send", "c", "1.0.0", "--not-sent", "--who", "ann", "--why", " ", "--store", url)
    assert done.status == 2
    assert "evidence" in done.err
