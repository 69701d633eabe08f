"""A flow that is killed, from its first process to its last, and what has to be true of it in the end (flows.md)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tests.crash.flow_platform import visible
from tests.crash.flow_scenario import Effects, Hurry, Job, left_at
from tests.crash.ledger import Ledger
from tests.crash.nursery import Ended
from tests.crash.places import Place, effects_beside
from turnkeeper.conversation.flow import Resume

_LETTERS: Final = {"Welcome.": "W", "Name?": "N", "Hello,": "H", "Size?": "S", "Done:": "D"}
_SPELLED: Final = {"all-answers": "WNHSD", "first-wait": "(WNHS)+D"}
"""What people see, by mode: in the seed's mode a step whose later wait was lost is gone through again."""


class Course(NamedTuple):
    """How a flow is run: its mode, its channel, when the person answers, and what effects it has."""

    mode: Resume
    channel: str
    hurry: Hurry = "between"
    effects: Effects = "none"

    def __str__(self) -> str:
        return ", ".join(part for part in self if part not in ("between", "none"))


class Outcome(NamedTuple):
    """What may be different from an undisturbed run, counted: questions asked again, and sends in doubt."""

    asked_again: int
    doubts: int


@dataclass(frozen=True)
class FlowCase:
    """A conversation of its own, and the processes that are at it one behind the other."""

    place: Place
    course: Course
    conversation: str
    lives: int = 0

    @property
    def ledger(self) -> Ledger:
        """The world outside the store."""
        return Ledger(self.place.folder / "ledger")

    def job(self, die_at: int = 0, *, leaves: bool = False) -> Job:
        """What its next process does."""
        return Job(
            url=self.place.url,
            conversation=self.conversation,
            ledger=str(self.place.folder / "ledger"),
            mode=self.course.mode,
            channel=self.course.channel,
            hurry=self.course.hurry,
            effects=self.course.effects,
            life=self.lives,
            die_at=die_at,
            leaves=leaves,
        )

    def live(self, die_at: int = 0) -> tuple[Ended, FlowCase]:
        """Let a process at the conversation, which dies at that boundary; and how it goes on from there."""
        ended = self.place.nursery.run({"jobs": [self.job(die_at)]}, "flow_scenario")
        return ended, FlowCase(self.place, self.course, self.conversation, self.lives + 1)

    def left_at_each(self) -> list[FlowCase]:
        """How it goes on from each boundary of the next process, as if that were killed there; on a store that is a file."""
        (told,) = self.place.nursery.run({"jobs": [self.job(leaves=True)]}, "flow_scenario").answer["told"]
        folder = self.place.folder
        folders = [left_at(folder, number) for number in range(1, len(told["boundaries"]) + 1)]
        places = [
            Place(self.place.nursery, self.place.url.replace(str(folder), str(other)), other) for other in folders
        ]
        assert all(place.url != self.place.url for place in places)
        return [FlowCase(place, self.course, self.conversation, self.lives + 1) for place in places]

    def finish(self) -> Outcome:
        """Let a last process at it, and look at what has become of it."""
        (outcome,) = finish([self])
        return outcome


def finish(cases: Sequence[FlowCase]) -> list[Outcome]:
    """Bring conversations that nobody is at to their ends, one process for all, and look at what has become of them."""
    if not cases:
        return []
    ended = cases[0].place.nursery.run({"jobs": [case.job() for case in cases]}, "flow_scenario")
    assert ended.killed_by is None
    return [check(case, told["end"]) for case, told in zip(cases, ended.answer["told"], strict=True)]


def check(case: FlowCase, end: dict[str, Any]) -> Outcome:
    """Nothing twice, nothing lost, every answer at its own question, and nobody is left holding anything."""
    found = case.ledger.rows("found")
    assert len(found) == case.lives + 1
    for name in ("fence", "revisions"):  # invariants 5 and 6
        counts = [life[name] for life in found] + [end[name]]
        assert counts == sorted(counts), (name, counts)
    said = case.ledger.rows("said")
    assert [row["number"] for row in said] == list(range(1, len(said) + 1))  # J1, J2
    assert (end["ended"], end["received"], end["settled"]) == ("done", len(said), len(said)), end  # invariant 3
    assert end["owner"] == "", end  # invariant 11
    assert set(end["sends"]) <= {"SENT"}, end
    # Invariant 1: a key goes to the platform again only where that drops the second, and a process has died on the first.
    calls = Counter(row["key"] for row in case.ledger.rows("send"))
    again = sum(calls.values()) - len(calls)
    assert again <= (sum(life["sending"] for life in found) if case.course.channel == "keyed" else 0), calls
    _check_effects(case)
    return Outcome(_check_seen(case), len({row["key"] for row in case.ledger.rows("doubt")}))


def _check_seen(case: FlowCase) -> int:
    """That people have seen everything once, in order, each answer with its question; how many questions more than two."""
    seen = visible(case.ledger, case.conversation)
    spelled = "".join(_LETTERS[row["text"].split(" ")[0]] for row in seen)
    texts = [row["text"] for row in seen]
    if any(row["by"] == "operator" for row in seen):
        # What was sent by hand came later than the bot would have sent it.
        assert case.course.channel == "neither"
        spelled = "WNHS" * spelled.count("S") + "D"
        assert Counter(spelled) == Counter(_LETTERS[text.split(" ")[0]] for text in texts), texts
    assert re.fullmatch(_SPELLED[case.course.mode], spelled), texts
    keys = {text: [row["key"] for row in seen if row["text"] == text] for text in ("Name?", "Size?")}
    # Invariant 9. Answers name the message of the question that they were given to; that is the one asked last.
    assert f"Done: Name? {keys['Name?'][-1]} | Size? {keys['Size?'][-1]}" in texts, texts
    greeted = [text for text in texts if text.startswith("Hello")]
    assert sorted(greeted) == sorted(f"Hello, Name? {key}." for key in keys["Name?"]), texts
    return len(keys["Name?"]) + len(keys["Size?"]) - 2


def _check_effects(case: FlowCase) -> None:
    """Invariant 2: each effect once, also where a step is gone through again."""
    kind = case.course.effects
    if kind == "none":
        return
    rows = case.ledger.rows("effect" if kind == "reconcile" else "tried")
    operations = {row["operation_id"]: row["n"] for row in rows}
    assert sorted(operations.values()) == [1, 2, 3], operations
    outside = [row["operation_id"] for row in rows]
    happened = outside if kind == "reconcile" else effects_beside(case.place.url, list(operations))
    assert Counter(happened) == Counter(operations.keys())
