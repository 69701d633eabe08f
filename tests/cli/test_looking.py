"""`list`, `show`, `resolve`, `prune` and `doctor`, as an operator uses them on a doubtful turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import turnkeeper
from turnkeeper import Agent, Keeper, Reply, ReplyPort, ScriptedModel, tool

CHARGE = {"role": "assistant", "tool_calls": [{"id": "c", "name": "charge", "arguments": '{"cents": 500}'}]}


@tool
async def charge(cents: int) -> str:
    """Charge a card; the answer is lost on the way."""
    raise TimeoutError(f"no answer about {cents}")


AGENT = Agent(ScriptedModel([CHARGE, "It is paid."]), [charge])


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A store with one doubtful and one completed turn."""
    where = f"sqlite:///{tmp_path}/t.db"
    async with await Keeper.open(where) as keeper:
        assert (await keeper.run(AGENT, "pay", turn_id="doubtful")).status == "reconciliation_required"
        assert (await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="done")).status == "success"
    return where


@pytest.mark.anyio
async def test_operator_settles_a_doubtful_charge(url: str) -> None:
    listed = turnkeeper("list", "--store", url)
    assert listed.out.index("doubtful") < listed.out.index("done")
    assert "ambiguous_tool" in listed.out
    assert "2 of 2 turns; 1 need attention" in listed.out
    shown = turnkeeper("show", "doubtful", "--store", url)
    assert "needs attention: ambiguous_tool" in shown.out
    assert "TimeoutError: no answer about 500" in shown.out

    refused = turnkeeper("resolve", "doubtful", "0", "0", "happened", "--who", "ann", "--why", "seen", "--store", url)
    assert (refused.status, "--result" in refused.err) == (2, True)
    evidence = ("--who", "ann", "--why", "in the bank's list", "--result", "charged 500")
    assert turnkeeper("resolve", "doubtful", "0", "0", "happened", *evidence, "--store", url).status == 0
    blind = turnkeeper("resolve", "doubtful", "0", "0", "did_not_happen", "--who", "bo", "--why", "x", "--store", url)
    assert (blind.status, "--fence" in blind.err) == (2, True)
    sure = ("--who", "bo", "--why", "x", "--fence", "1", "--store", url)
    again = turnkeeper("resolve", "doubtful", "0", "0", "did_not_happen", *sure)
    assert again.status == 2
    assert "not AMBIGUOUS" in again.err

    async with await Keeper.open(url) as keeper:
        result = await keeper.run(AGENT, "pay", turn_id="doubtful")
    assert (result.status, result.output) == ("success", "It is paid.")
    document = turnkeeper("show", "doubtful", "--store", url, "--json").document
    assert document["phase"] == "COMPLETED"
    assert document["rounds"][0]["slots"][0]["resolution"] == "happened"
    settled = [record for record in document["records"] if record["record"] == "tool_resolved"]
    assert (settled[0]["who"], settled[0]["why"]) == ("ann", "in the bank's list")
    assert [record["seq"] for record in document["records"]] == list(range(1, document["tail"] + 1))


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [True, False])
async def test_operator_settles_a_doubtful_reply(url: str, *, sent: bool) -> None:
    async def unanswered(reply: Reply) -> str:
        raise TimeoutError

    async def answered(reply: Reply) -> str:
        return "m2"

    agent = Agent(ScriptedModel(["hello"]))
    async with await Keeper.open(url) as keeper:
        result = await keeper.run(agent, "hi", turn_id="greeting", reply=ReplyPort(unanswered))
    assert result.status == "reconciliation_required"
    assert "unknown_delivery" in turnkeeper("list", "--attention", "--store", url).out
    assert "reply: may have been sent" in turnkeeper("show", "greeting", "--store", url).out
    sender = turnkeeper("show", "greeting", "--store", url, "--json").document["reply"]["sender"]
    known = ("--who", "ann", "--why", "looked", "--store", url)
    assert turnkeeper("resolve-reply", "greeting", *known).status == 2
    assert turnkeeper("resolve-reply", "greeting", *known, "--not-sent-by", "another").status == 2
    found = ("--message-id", "m1") if sent else ("--not-sent-by", sender)
    assert turnkeeper("resolve-reply", "greeting", *known, *found).status == 0
    async with await Keeper.open(url) as keeper:
        result = await keeper.run(agent, "hi", turn_id="greeting", reply=ReplyPort(answered))
    assert (result.status, result.sent_message_id) == ("success", "m1" if sent else "m2")


@pytest.mark.anyio
async def test_show_as_it_was(url: str) -> None:
    whole = turnkeeper("show", "done", "--store", url, "--json").document
    assert whole["phase"] == "COMPLETED"
    phases = [
        turnkeeper("show", "done", "--store", url, "--json", "--at", str(seq)).document["phase"] for seq in (1, 3)
    ]
    assert phases == ["STARTED", "ASSISTANT_RESERVED"]
    assert f"as it was at 2 of {whole['tail']}" in turnkeeper("show", "done", "--store", url, "--at", "2").out


@pytest.mark.anyio
async def test_list_filters(url: str) -> None:
    assert [t["turn"] for t in turnkeeper("list", "--store", url, "--attention", "--json").document] == ["doubtful"]
    assert [t["turn"] for t in turnkeeper("list", "--store", url, "--phase", "completed", "--json").document] == [
        "done"
    ]
    assert [t["turn"] for t in turnkeeper("list", "--store", url, "--unfinished", "--json").document] == ["doubtful"]
    assert turnkeeper("list", "--store", url, "--phase", "nonsense").status == 2


@pytest.mark.anyio
async def test_prune_and_doctor(url: str) -> None:
    assert turnkeeper("prune", "--older-than", "1x", "--store", url).status == 2
    kept = turnkeeper("prune", "--older-than", "1h", "--store", url, "--json").document
    assert (kept["removed"], kept["kept"]) == (0, 2)
    counted = turnkeeper("prune", "--older-than", "0s", "--dry-run", "--store", url, "--json").document
    assert (counted["removed"], counted["kept"]) == (1, 1)
    done = turnkeeper("prune", "--older-than", "0s", "--store", url, "--json").document
    assert (done["removed"], done["kept"]) == (1, 1)
    assert [t["turn"] for t in turnkeeper("list", "--store", url, "--json").document] == ["doubtful"]
    examined = turnkeeper("doctor", url)
    assert examined.status == 0
    assert "fsynced" in examined.out


@pytest.mark.parametrize("command", [("list",), ("show", "x"), ("prune", "--older-than", "1d")])
def test_looking_makes_no_store(command: tuple[str, ...], tmp_path: Path) -> None:
    done = turnkeeper(*command, "--store", "sqlite:///missing.db", cwd=tmp_path)
    assert done.status == 2
    assert "there is no such file" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["mysql://x", "sqlite://", "sqlite:///a.db?nonsense=1", "sqlite:///a.db?journal=off"])
def test_unknown_urls(url: str, tmp_path: Path) -> None:
    done = turnkeeper("list", "--store", url, cwd=tmp_path)
    assert done.status == 2
    assert "known" in done.err or "names no file" in done.err or "wal or delete" in done.err
    assert "Traceback" not in done.err
