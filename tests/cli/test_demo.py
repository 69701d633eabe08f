"""`turnkeeper demo`: its proof, its JSON, its exit status, and that the proof can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import turnkeeper
from tests.conftest import SHARED
from turnkeeper.cli.demo.conversations import load, turns
from turnkeeper.cli.demo.ledger import Ledger
from turnkeeper.cli.demo.proof import Verdict, prove
from turnkeeper.cli.demo.supervisor import Progress
from turnkeeper.keeper import Keeper

NAMED = {"turns", "model_calls", "effects", "duplicates", "lost", "kills", "ambiguous", "seconds"}


def test_own_conversations_survive_kills() -> None:
    done = turnkeeper("demo", "--kills", "12", "--seed", "7", "--json")
    assert done.status == 0, done.err
    verdict = done.document
    assert verdict.keys() >= NAMED
    assert (verdict["duplicates"], verdict["lost"]) == (0, 0)
    assert verdict["turns"] == 23
    assert verdict["effects"] == verdict["effects_done"] == 13
    assert verdict["replies"] == verdict["replies_sent"] == 21
    assert verdict["kills"] >= verdict["kills_in_a_turn"] == 12
    assert verdict["transcripts_wrong"] == verdict["decisions_made_twice"] == 0


def test_recorded_airline_conversations(tmp_path: Path) -> None:
    """A part of the real conversations; the whole file with 200 kills is a soak test."""
    source = SHARED / "data/airline/conversations.jsonl"
    if not source.exists():
        pytest.skip("the shared material is not beside the project")
    part = tmp_path / "part.jsonl"
    part.write_text("\n".join(source.read_text().splitlines()[::10]) + "\n")
    done = turnkeeper(
        "demo", "--conversations", part, "--kills", "15", "--store", f"sqlite:///{tmp_path}/t.db", "--json"
    )
    assert done.status == 0, done.err
    verdict = done.document
    assert (verdict["duplicates"], verdict["lost"], verdict["transcripts_wrong"]) == (0, 0, 0)
    assert verdict["kills"] >= verdict["kills_in_a_turn"] == 15
    listed = turnkeeper("list", "--store", f"sqlite:///{tmp_path}/t.db", "--json", "--limit", "0").document
    assert len(listed) == verdict["turns"]
    assert {turn["phase"] for turn in listed} == {"COMPLETED"}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_all_airline_conversations_with_200_kills() -> None:
    source = SHARED / "data/airline/conversations.jsonl"
    done = turnkeeper("demo", "--conversations", source, "--kills", "200", "--json", timeout=590)
    assert done.status == 0, done.err
    verdict = done.document
    assert (verdict["turns"], verdict["replies"], verdict["effects"]) == (1096, 946, 184)
    assert verdict["kills_in_a_turn"] == 200
    assert (verdict["duplicates"], verdict["lost"]) == (0, 0)


def test_file_is_cut_into_turns() -> None:
    source = SHARED / "data/airline/conversations.jsonl"
    if not source.exists():
        pytest.skip("the shared material is not beside the project")
    found = [turn for conversation in load(source) for turn in turns(conversation)]
    assert sum(turn.answer is not None for turn in found) == 946
    assert sum(turn.answer is None for turn in found) == 150
    assert sum(call.is_effect for turn in found for call in turn.calls) == 184


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["nothing was done", "an effect twice", "a reply twice", "an unwanted effect"])
async def test_proof_can_fail(tmp_path: Path, fault: str) -> None:
    """The verdict is computed from the ledger and the logs, so a fault in the ledger alone breaks it."""
    wanted = [turn for conversation in load(None)[:1] for turn in turns(conversation)]
    ledger = Ledger(tmp_path / "ledger.db")
    match fault:
        case "an effect twice" | "an unwanted effect":
            for _ in range(2):
                ledger.do("op_of_nobody", "t", "book_reservation", "{}", 1)
        case "a reply twice":
            answer = wanted[0].answer
            assert answer is not None
            for _ in range(2):
                ledger.send("k", f"p/{wanted[0].id}", answer)
        case _:
            pass
    async with await Keeper.open(f"sqlite:///{tmp_path}/t.db") as keeper:
        verdict: Verdict = await prove(keeper, ledger, wanted, "p/", Progress(len(wanted), 0), 0.0)
    ledger.close()
    assert not verdict.holds
    assert verdict.turns_unfinished == len(wanted)
    if fault == "nothing was done":
        assert verdict.lost == 2 + 3  # 2 effects and 3 replies
    else:
        assert verdict.duplicates > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no conversation"),
        ("{", "line 1"),
        ('{"id": "a"}', "line 1"),
        ('{"id": "a", "messages": [{"content": "x"}]}', "line 1"),
        ('{"id": "a", "messages": []}\n{"id": "a", "messages": []}', "the same id"),
    ],
)
def test_bad_conversations_file(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    done = turnkeeper("demo", "--conversations", file, "--json")
    assert done.status == 2
    assert reason in done.err
    assert done.out == ""


@pytest.mark.parametrize("arguments", [("--kills", "-1"), ("--workers", "0"), ("--conversations", "nowhere.jsonl")])
def test_bad_arguments(arguments: tuple[str, str], tmp_path: Path) -> None:
    done = turnkeeper("demo", *arguments, cwd=tmp_path)
    assert done.status == 2
    assert json.dumps(done.err).count("Traceback") == 0
