"""An operator finds a charge that may have happened, settles it at a terminal, and its turn finishes: as its page shows it."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command import turnkeeper
from tests.cli.operator_session import comparable, record, recorded, shown


def test_a_charge_is_found_settled_and_not_repeated(tmp_path: Path) -> None:
    """The process that charged was killed. Nobody charges again, who settled it is known, and the page shows what happens."""
    recording = shown(record(tmp_path))
    assert (tmp_path / "bank.txt").read_text() == "order 4711: charged 500 cents\n"
    document = turnkeeper("show", "order-4711", "--store", "sqlite:///turns.db", "--json", cwd=tmp_path).document
    assert (document["phase"], document["attention"]) == ("COMPLETED", None)
    settled = [one for one in document["records"] if one["record"] == "tool_resolved"]
    assert [(one["resolution"], one["who"], one["why"]) for one in settled] == [
        ("happened", "ann", "it is in the bank's list")
    ]
    assert document["rounds"][0]["slots"][0]["result"]["output"] == "charged 500 cents"
    written = "run `python -m tests.cli.operator_session` and look at what has changed on the page"
    assert comparable(recording) == comparable(recorded()), written
