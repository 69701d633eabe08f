"""A turn whose model is a provider's real client, killed at every boundary: no effect twice, and no answer bought twice."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.crash.ledger import Ledger
from turnkeeper.models.fake import FakeModel
from turnkeeper.models.fake.script import Script, ScriptedCall, ScriptedRound
from turnkeeper.turn.identity import invocation_id, operation_id, trace_hash

TOOLS: Final = 2
ROUNDS: Final = 2
LANES: Final = 2
"""Turns that are killed at the same time."""
_ATTEMPTS: Final = 6
"""More than a turn here ever makes at one round."""
CAN_BE_ASKED: Final = ("background", "stored chat")
KINDS: Final = [
    ("background", True),
    ("background", False),
    ("stored chat", True),
    ("stored chat", False),
    ("messages", True),
]
# As in `model_scenario`, which only its own processes load: what it does when it is loaded takes seconds.
SCRIPT: Final = Script(
    rounds=[
        ScriptedRound(text="a", calls=[ScriptedCall(name=name, arguments="{}") for name in ("pay", "book")], polls=1),
        ScriptedRound(text="b", polls=1),
    ]
)


class Ended(NamedTuple):
    """How a life ended: killed, or with something to say."""

    killed: bool
    answer: dict[str, Any]


class Lives:
    """Processes that are forked from one that has everything loaded."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.crash.model_scenario"])

    def live(self, **job: Any) -> Ended:
        """One life of a turn, to its end or its death."""
        from tests.crash import model_lives

        hears, tells = self._context.Pipe(duplex=False)
        process = self._context.Process(target=model_lives.live, args=(job, tells))
        process.start()
        tells.close()
        with hears:
            try:
                answer = hears.recv() if hears.poll(60) else {"error": "it hangs"}
            except EOFError:
                answer = {}
        process.join(10)
        killed = process.exitcode == -signal.SIGKILL
        assert "error" not in answer, answer["error"]
        assert killed or (process.exitcode == 0 and answer), (job, process.exitcode)
        return Ended(killed, answer)


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    """What makes processes, and ends the one that they come from."""
    yield Lives()
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]
