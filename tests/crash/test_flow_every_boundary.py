"""A flow killed at every boundary, and at every pair of them, comes to the end that it would have had undisturbed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from tests.crash.flow_places import Course, FlowCase, Outcome, finish
from tests.crash.flow_platform import CHANNELS
from tests.crash.places import Place, Stage

SERVERS: Final = ("postgres", "redis", "redis cluster")
COURSES: Final = tuple(Course(mode, channel) for mode in ("all-answers", "first-wait") for channel in CHANNELS)
AT_ONCE: Final = tuple(course._replace(hurry="at once") for course in COURSES)
INSISTING: Final = tuple(course._replace(hurry="insisting") for course in COURSES)
ALL: Final = (*COURSES, *AT_ONCE, *INSISTING)
SINGLY: Final = (*COURSES, INSISTING[3])
"""The courses that are killed at every boundary every time, on files; all of them are in `make soak`."""
ON_SERVERS: Final = (COURSES[2], COURSES[3])
"""Those that are on servers: what is different there is the store, and that knows no courses."""
EVERY_TIME: Final = {"postgres": ON_SERVERS, "redis": ON_SERVERS[:1], "redis cluster": ON_SERVERS[1:]}
"""Of these, those that are not left to `make soak`."""
IN_PAIRS: Final = (COURSES[0],)
"""Those of which every pair of boundaries is run every time, on files."""
PARTLY: Final = (COURSES[1], COURSES[2], COURSES[5], AT_ONCE[3], INSISTING[3])
"""Those of which a part of the pairs is, in `make soak`."""
RECONCILED: Final = tuple(Course(mode, "searched", effects="reconcile") for mode in ("all-answers", "first-wait"))
IN_A_TRANSACTION: Final = tuple(
    Course(mode, "keyed", effects="transactional") for mode in ("all-answers", "first-wait")
)
SAMPLE: Final = 10
"""Pairs that are killed every time."""
BATCH: Final = 10
"""Conversations that one process brings to their ends."""


def courses(*every_time: tuple[str, Sequence[Course]], soak: Sequence[tuple[str, Sequence[Course]]] = ()) -> Any:
    """Parameters `stage` and `course`."""
    listed = [(store, course) for store, some in every_time for course in some]
    later = [pair for store, some in soak for course in some if (pair := (store, course)) not in listed]
    return pytest.mark.parametrize(
        ("stage", "course"),
        [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in listed]
        + [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=pytest.mark.soak) for pair in later],
        indirect=["stage"],
    )


def case_at(place: Place, course: Course) -> FlowCase:
    """A conversation that nobody else on the server has, as nobody else has the folder."""
    return FlowCase(place, course, str(place.folder))


def undisturbed(stage: Stage, course: Course) -> list[str]:
    """The boundaries of a process that was there alone, and did not die."""
    with stage.place("undisturbed") as place:
        case = case_at(place, course)
        (told,) = case.live()[0].answer["told"]
        assert len(told["boundaries"]) > 30
        return told["boundaries"]


def report(stage: Stage, course: Course, kind: str, outcomes: Sequence[Outcome]) -> None:
    """Print what was counted, and hold it against the page's table."""
    runs = sum(one.asked_again > 0 for one in outcomes), sum(one.doubts > 0 for one in outcomes)
    print(
        f"{stage.name}, {course}, {kind}: {len(outcomes)} runs, none with a duplicate, a wrong pairing or stuck; "
        f"{runs[0]} ask again, {runs[1]} leave a send in doubt"
    )
    assert bool(runs[0]) == (course.mode == "first-wait")
    assert bool(runs[1]) == (course.channel == "neither")


def killed(place: Place, course: Course, *boundaries: int) -> FlowCase | None:
    """A conversation whose processes were killed, each at its boundary; None where the last one has come to the end."""
    case = case_at(place, course)
    for number, boundary in enumerate(boundaries, 1):
        ended, case = case.live(boundary)
        if not ended.killed_by:
            assert number == len(boundaries) > 1, f"boundary {boundary} was not reached"
            return None
    return case


def in_batches(stage: Stage, course: Course, deaths: Sequence[tuple[int, ...]]) -> list[Outcome]:
    """Kill at these boundaries, each in a conversation of its own; many are brought to their ends by one process."""

    def die(batch: Sequence[tuple[int, ...]]) -> list[Outcome]:
        with stage.lane() as place:
            cases = [killed(place("-".join(map(str, boundaries))), course, *boundaries) for boundaries in batch]
            return finish([case for case in cases if case is not None])

    batches = [deaths[start : start + BATCH] for start in range(0, len(deaths), BATCH)]
    return [one for some in stage.lanes.threads.map(die, batches) for one in some]


def singles(stage: Stage, course: Course) -> list[Outcome]:
    """Kill at each boundary."""
    boundaries = len(undisturbed(stage, course))
    outcomes = in_batches(stage, course, [(boundary,) for boundary in range(1, boundaries + 1)])
    assert len(outcomes) == boundaries
    return outcomes


@courses(
    ("sqlite file", SINGLY),
    *EVERY_TIME.items(),
    soak=[(store, ALL) for store in ("sqlite file", *SERVERS)],
)
def test_killed_at_every_boundary(stage: Stage, course: Course) -> None:
    """C1 to C9, O1 to O3, invariants 1, 3, 5, 6, 9, 11: whatever a process did last, the one behind it gets the flow to its end.

    Nothing is seen twice, every answer is taken for the question that it was given to, and with all answers kept nothing is
    asked again.
    """
    report(stage, course, "every boundary", singles(stage, course))


def every_pair(stage: Stage, course: Course, firsts: Callable[[int], Sequence[int]]) -> list[Outcome]:
    """Kill at these first boundaries; the next process gets no farther than any of its own: a third one goes on from what was in
    the files by then."""

    def die_at(first: int) -> list[Outcome]:
        with stage.place(str(first)) as place:
            ended, case = case_at(place, course).live(first)
            assert ended.killed_by
            left = case.left_at_each()
            outcomes = finish(left)
            for one in left:
                shutil.rmtree(one.place.folder)
            return outcomes

    boundaries = firsts(len(undisturbed(stage, course)))
    return [one for some in stage.lanes.threads.map(die_at, boundaries) for one in some]


@courses(("sqlite file", IN_PAIRS), soak=[("sqlite file", ALL)])
def test_every_pair_of_boundaries(stage: Stage, course: Course) -> None:
    """The same as `test_killed_at_every_boundary`, stopped again in the next life, at each boundary of that one: all of them."""
    outcomes = every_pair(stage, course, lambda boundaries: range(1, boundaries + 1))
    assert len(outcomes) > 500
    report(stage, course, "every pair of boundaries", outcomes)


@courses(soak=[("sqlite file", PARTLY)])
def test_every_sixth_boundary_and_each_behind_it(stage: Stage, course: Course) -> None:
    """The same, a part of the pairs."""
    outcomes = every_pair(stage, course, lambda boundaries: range(2, boundaries, 6))
    assert len(outcomes) > 80
    report(stage, course, "a part of the pairs of boundaries", outcomes)


@courses(("sqlite file", ON_SERVERS[1:]), *EVERY_TIME.items(), soak=[(server, ON_SERVERS) for server in SERVERS])
def test_killed_at_some_pairs_of_boundaries(stage: Stage, course: Course) -> None:
    """The same as `test_killed_at_every_boundary`, killed again in the next life; a seeded sample."""
    boundaries = len(undisturbed(stage, course))
    pairs = [(first, second) for first in range(1, boundaries) for second in range(1, boundaries - first)]
    outcomes = in_batches(stage, course, random.Random(5).sample(pairs, SAMPLE))
    assert len(outcomes) > SAMPLE // 2
    report(stage, course, "some pairs of boundaries", outcomes)


@pytest.mark.timeout(1800)
@courses(soak=[("sqlite file", COURSES), *((server, ON_SERVERS) for server in SERVERS)])
def test_killed_at_every_pair_of_boundaries(stage: Stage, course: Course) -> None:
    """The same, killed again in the next life, at each boundary of that one: all of them."""

    def die_at(first: int) -> list[Outcome]:
        found: list[FlowCase] = []
        with stage.lane() as place:
            while (case := killed(place(f"{first}-{len(found) + 1}"), course, first, len(found) + 1)) is not None:
                found.append(case)
            return finish(found)

    firsts = range(1, len(undisturbed(stage, course)) + 1)
    outcomes = [one for some in stage.lanes.threads.map(die_at, firsts) for one in some]
    assert len(outcomes) > 500
    report(stage, course, "every pair of boundaries", outcomes)


@courses(
    ("sqlite file", (RECONCILED[0], IN_A_TRANSACTION[1])),
    ("postgres", IN_A_TRANSACTION[:1]),
    ("redis", RECONCILED[1:]),
    soak=[
        *((store, (*RECONCILED, *IN_A_TRANSACTION)) for store in ("sqlite file", "postgres")),
        *((store, RECONCILED) for store in ("redis", "redis cluster")),
    ],
)
def test_effects_of_a_flow_killed_at_every_boundary(stage: Stage, course: Course) -> None:
    """C10, invariant 2: an effect happens once, also before the first wait of a step that runs again and again."""
    report(stage, course, "every boundary", singles(stage, course))
