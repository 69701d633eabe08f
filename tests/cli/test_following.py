"""`tail`, `diff` and `list`'s filters, as an operator types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.command import turnkeeper
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.tools import tool
from turnkeeper.keeper import Keeper
from turnkeeper.models.scripted import ScriptedModel, calls, text
from turnkeeper.stores.sqlite import SqliteStore


@tool
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def run(url: str, turn_id: str, **labels: str) -> None:
    """A turn of two rounds."""
    agent = Agent(ScriptedModel([calls(("pay", {"amount": 3})), text("Paid.")]), [pay])
    async with await Keeper.open(url) as keeper:
        await keeper.run(agent, "pay", turn_id=turn_id, labels=labels)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with one finished turn."""
    url = f"sqlite:///{tmp_path}/t.db"
    anyio.run(run, url, "done")
    return url


def test_tail_of_a_finished_turn(url: str) -> None:
    told = turnkeeper("tail", "done", "--store", url, "--json")
    assert told.status == 0
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert (lines[0]["record"], lines[-1]["record"]) == ("started", "completed")
    assert "tool_begun" in turnkeeper("tail", "done", "--store", url).out
    assert turnkeeper("tail", "nobody", "--store", url).status == 2


def test_tail_follows(url: str) -> None:
    """It prints what comes while it watches, and ends with the turn."""
    main = "from turnkeeper.cli.app import main; main()"
    command = [sys.executable, "-c", main, "tail", "later", "--wait", "--json", "--store", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        anyio.run(run, url, "later")
        out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert [json.loads(line)["record"] for line in out.splitlines()][-1] == "completed"


def test_diff(url: str) -> None:
    records = [json.loads(line) for line in turnkeeper("tail", "done", "--store", url, "--json").out.splitlines()]
    begun = next(line["seq"] for line in records if line["record"] == "tool_begun")
    done = next(line["seq"] for line in records if line["record"] == "tool_completed")
    found = turnkeeper("diff", "done", str(begun), str(done), "--store", url, "--json")
    assert found.status == 1
    assert found.document["changed"]["slots"] == [{"0.0 pay": "EXECUTING, fence 1"}, {"0.0 pay": "COMPLETED, fence 1"}]
    assert [line["record"] for line in found.document["records"]] == ["tool_completed"]
    text = turnkeeper("diff", "done", "0", "--store", url).out
    assert "+phase COMPLETED" in text
    assert "paid 3" in text
    same = turnkeeper("diff", "done", str(len(records)), "--store", url, "--json")
    assert (same.status, same.document["changed"], same.document["records"]) == (0, {}, [])
    assert turnkeeper("diff", "nobody", "1", "--store", url).status == 2
    assert turnkeeper("diff", "done", "-1", "--store", url).status == 2


def test_filters_of_list(url: str) -> None:
    async def more() -> None:
        await run(url, "ann's", customer="ann", kind="order")
        async with await SqliteStore.open(url.removeprefix("sqlite:///")) as store:
            await store.advance_clock(3_600_000)
        await run(url, "bob's", customer="bob")

    anyio.run(more)

    def listed(*filters: str) -> list[str]:
        found = turnkeeper("list", "--store", url, "--json", *filters).document
        return sorted(one["turn"] for one in found)

    assert listed() == ["ann's", "bob's", "done"]
    assert listed("--label", "customer=ann") == ["ann's"]
    assert listed("--label", "customer=ann", "--label", "kind=return") == []
    assert listed("--older-than", "30m") == ["ann's", "done"]
    assert listed("--older-than", "2h") == []
    assert turnkeeper("list", "--store", url, "--label", "customer").status == 2
    assert turnkeeper("list", "--store", url, "--older-than", "soon").status == 2
