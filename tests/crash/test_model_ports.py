"""A turn whose model is a provider's real client, killed at every boundary: no effect twice, and no answer bought twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import pytest

from tests.crash.ledger import Ledger
from tests.crash.model_scenario import SCRIPT, TOOLS, Job
from tests.crash.nursery import Ended, Nursery
from turnkeeper.models.fake import FakeModel
from turnkeeper.turn.identity import invocation_id, operation_id, trace_hash

LANES: Final = 2
"""Turns that are killed at the same time."""
_ATTEMPTS: Final = 6
"""More than a turn here ever makes at one round."""
CAN_BE_ASKED: Final = ("background", "stored chat")
KINDS: Final = [(api, streaming) for api in (*CAN_BE_ASKED, "messages") for streaming in (True, False)]
EVERY_TIME: Final = (("background", True), ("messages", True))
"""Of both SDKs the kind with the most boundaries; the others are in `make soak`."""


class Turn:
    """A turn in a folder of its own, and the processes that are at it one behind the other."""

    def __init__(self, job: Job, nurseries: SimpleQueue[Nursery]) -> None:
        self._job = job
        self._nurseries = nurseries
        self.ledger = Ledger(Path(job.folder) / "ledger")

    def live(self, die_at: int = 0) -> Ended:
        """One life, to its end or its death at that boundary."""
        nursery = self._nurseries.get()
        try:
            return nursery.run(self._job._replace(die_at=die_at)._asdict(), "model_scenario")
        finally:
            self._nurseries.put(nursery)

    def bought(self, fake: FakeModel) -> Counter[int]:
        """How often each round's answer was billed for this turn."""
        trace = trace_hash(self._job.turn)
        mine = {
            invocation_id(trace, "primary", index, attempt): index
            for index in range(len(SCRIPT.rounds))
            for attempt in range(_ATTEMPTS)
        }
        return Counter(mine[one.invocation] for one in fake.bill if one.invocation in mine)


def check(turn: Turn, fake: FakeModel, end: dict[str, Any], api: str) -> None:
    """Nothing twice, nothing lost, and a person was asked only where the provider could not be."""
    trace = trace_hash(turn._job.turn)  # pyright: ignore[reportPrivateUsage]
    effects = [row["operation_id"] for row in turn.ledger.rows("effect")]
    assert sorted(effects) == sorted(operation_id(trace, "primary", 0, slot) for slot in range(len(TOOLS)))
    assert turn.bought(fake) == dict.fromkeys(range(len(SCRIPT.rounds)), 1)
    assert end["decisions"] == len(SCRIPT.rounds)
    assert (end["output"], end["said"]) == ("b", ["go", "a", "done", "done", "b"])
    for person in turn.ledger.rows("person"):
        if api in CAN_BE_ASKED and person["billed"]:
            # Only between the request and the journal's word of what the provider calls it.
            assert api == "background"
            assert not person["known"]


@pytest.fixture(scope="module")
def nurseries() -> Iterator[SimpleQueue[Nursery]]:
    """Where the processes come from, one for each lane."""
    free: SimpleQueue[Nursery] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(LANES):
            free.put(stack.enter_context(closing(Nursery("model_scenario"))))
        yield free


@pytest.mark.parametrize(
    ("api", "streaming"), [one if one in EVERY_TIME else pytest.param(*one, marks=pytest.mark.soak) for one in KINDS]
)
def test_killed_at_every_boundary(folder: Path, nurseries: SimpleQueue[Nursery], api: str, streaming: bool) -> None:
    """Issue F: the real clients, killed at every boundary of a turn including mid-stream."""
    with FakeModel(SCRIPT) as fake:

        def turn_of(name: str) -> Turn:
            own = folder / name
            own.mkdir()
            return Turn(Job(api, streaming, fake.url, str(own), name), nurseries)

        alone = turn_of("undisturbed")
        ended = alone.live()
        check(alone, fake, ended.answer, api)
        assert alone.ledger.rows("person") == []
        boundaries: list[str] = ended.answer["boundaries"]
        count = Counter(boundaries)
        print(f"{api}, {'streamed' if streaming else 'whole'}: {dict(count)}")
        assert count["before POST"] == len(SCRIPT.rounds)
        assert count["before an effect"] == len(TOOLS)
        assert (count["behind an event of the stream"] > 10) is streaming

        def die_at(boundary: int) -> int:
            turn = turn_of(str(boundary))
            assert turn.live(boundary).killed_by, f"boundary {boundary} was not reached"
            last = turn.live()
            assert not last.killed_by
            check(turn, fake, last.answer, api)
            return len(turn.ledger.rows("person"))

        with ThreadPoolExecutor(LANES) as lanes:
            asked = list(lanes.map(die_at, range(1, len(boundaries) + 1)))
    where = [boundaries[index] for index, times in enumerate(asked) if times]
    print(f"a person was asked behind {dict(Counter(where))}")
    if api in CAN_BE_ASKED:
        # What remains: the call was announced and nothing was sent, or the provider has not said yet what it calls the call.
        assert len(where) <= len(SCRIPT.rounds) * 5
        assert "behind an event of the stream" not in where
