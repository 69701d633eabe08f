"""`export`, `import`, `approve` and `resolve-model`: turns that leave for another store, and people who decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import turnkeeper
from turnkeeper import Agent, Keeper, ModelInvocationResponse, ModelRequest, OutcomeUnknown, ScriptedModel, tool
from turnkeeper.engine.permissions import HumanApproval
from turnkeeper.models.scripted import calls

PAID: list[int] = []


@tool
def pay(cents: int) -> str:
    """Pay."""
    PAID.append(cents)
    return f"paid {cents}"


def agent(**options: object) -> Agent:
    """An agent that pays once."""
    script = [calls(("pay", {"cents": 5})), "It is paid."]
    return Agent(ScriptedModel(script), [pay], **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A store with one finished turn."""
    PAID.clear()
    where = f"sqlite:///{tmp_path}/t.db"
    async with await Keeper.open(where) as keeper:
        assert (await keeper.run(agent(), "pay", turn_id="done")).status == "success"
    return where


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_a_turn_moves_as_a_checkpoint(url: str, tmp_path: Path, form: str) -> None:
    file, other = tmp_path / f"turn.{form}", f"sqlite:///{tmp_path}/other.db"
    assert turnkeeper("export", "done", "--at", "3", "--output", file, "--store", url).status == 0
    assert turnkeeper("import", file, "--store", other, "--json").document == {
        "turn": "done",
        "scope": "primary",
        "ignored": [],
    }
    assert turnkeeper("import", file, "--store", other).status == 0
    async with await Keeper.open(other) as keeper:
        result = await keeper.resume(agent(), turn_id="done")
    assert (result.status, result.output, PAID) == ("success", "It is paid.", [5, 5])
    assert turnkeeper("import", file, "--store", url).status == 2


@pytest.mark.anyio
async def test_what_is_exported(url: str, tmp_path: Path) -> None:
    document = turnkeeper("export", "done", "--store", url).document
    assert (document["turnId"], document["finalOutputReady"]) == ("done", True)
    events = [json.loads(line) for line in turnkeeper("export", "done", "--events", "--store", url).out.splitlines()]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["kind"] == "turn_committed"
    assert turnkeeper("export", "nowhere", "--store", url).status == 2


@pytest.mark.anyio
async def test_a_bad_checkpoint_is_refused(url: str, tmp_path: Path) -> None:
    document = turnkeeper("export", "done", "--at", "3", "--store", url).document
    file, other = tmp_path / "turn.json", f"sqlite:///{tmp_path}/other.db"
    file.write_text(json.dumps({**document, "fromTheFuture": 1}))
    assert "fromTheFuture" in turnkeeper("import", file, "--store", other).out
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "wizard", "parts": []}]}, "messages[0].role"),
        ({"lastSequence": -1}, "lastSequence"),
        ({"contextState": None}, "contextState"),
    ]
    for change, told in wrong:
        file.write_text(json.dumps({**document, "turnId": "bad", **change}))
        refused = turnkeeper("import", file, "--store", other)
        assert (refused.status, told in refused.err) == (2, True), refused.err
    file.write_text("{")
    assert turnkeeper("import", file, "--store", other).status == 2
    assert turnkeeper("import", tmp_path / "nowhere.json", "--store", other).status == 2
    assert [turn["turn"] for turn in turnkeeper("list", "--store", other, "--json").document] == ["done"]


@pytest.mark.anyio
@pytest.mark.parametrize("deny", [True, False])
async def test_somebody_approves_a_parked_call(url: str, *, deny: bool) -> None:
    PAID.clear()
    async with await Keeper.open(url) as keeper:
        parked = await keeper.run(agent(permission=HumanApproval()), "pay", turn_id="parked")
    assert (parked.status, PAID) == ("parked", [])
    assert "approval" in turnkeeper("list", "--attention", "--store", url).out
    decision = ("deny", ("--why", "too much")) if deny else ("approve", ("--valid", "15m"))
    assert turnkeeper("approve", "parked", "0", "0", "--who", "ann", "--valid", "soon", "--store", url).status == 2
    word, options = decision
    assert turnkeeper(word, "parked", "0", "0", "--who", "ann", *options, "--store", url).status == 0
    late = turnkeeper("approve", "parked", "0", "0", "--who", "bob", "--store", url)
    assert (late.status, "ann has" in late.err) == (2, True)
    async with await Keeper.open(url) as keeper:
        assert (await keeper.run(agent(permission=HumanApproval()), "pay", turn_id="parked")).status == "success"
    assert ([] if deny else [5]) == PAID


@pytest.mark.anyio
async def test_somebody_knows_what_the_model_answered(url: str, tmp_path: Path) -> None:
    class Cut:
        async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
            raise OutcomeUnknown("cut")

    unsure = Agent(Cut(), unknown_model="reconcile")
    async with await Keeper.open(url) as keeper:
        assert (await keeper.run(unsure, "hi", turn_id="cut")).status == "reconciliation_required"
    answer = tmp_path / "answer.json"
    answer.write_text('{"output": "hello"}')
    known = ("--who", "ann", "--why", "in the provider's log", "--store", url)
    assert turnkeeper("resolve-model", "cut", "happened", *known).status == 2
    assert turnkeeper("resolve-model", "cut", "happened", "--response", answer, *known).status == 0
    async with await Keeper.open(url) as keeper:
        assert (await keeper.run(unsure, "hi", turn_id="cut")).output == "hello"
