"""Where the crash tests keep their turns: on every store, in lanes whose clocks nobody else moves."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import psycopg

from tests.crash.ledger import Ledger
from tests.crash.nursery import Ended, Nursery
from tests.crash.sealed import address
from turnkeeper.engine.tools import Policy

STORES: Final = ("sqlite file", "postgres", "redis", "redis resp3", "redis cluster")
TRANSACTIONAL: Final = ("sqlite file", "postgres")
"""The stores whose transaction can hold a tool's effect."""
LANES: Final = 2
"""Turns that are killed at the same time."""


class Lane(NamedTuple):
    """A helper process, and what only the turn that is in the lane uses at the time."""

    number: int
    nursery: Nursery


class Lanes:
    """The lanes, and the threads of the test that wait for what happens in them."""

    def __init__(self, helpers: Sequence[Nursery]) -> None:
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for number, helper in enumerate(helpers):
            self._free.put(Lane(number, helper))
        self.threads = ThreadPoolExecutor(len(helpers))

    @contextmanager
    def taken(self) -> Generator[Lane]:
        """A lane, until the block is left."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)


class Place(NamedTuple):
    """A helper process, a store's URL, and a folder that nobody else has."""

    nursery: Nursery
    url: str
    folder: Path


class Case:
    """A turn of its own, and the processes that are at it one behind the other."""

    def __init__(self, nursery: Nursery, url: str, folder: Path, policy: Policy, *, parallel: bool) -> None:
        self._nursery = nursery
        self._url = url
        # Nobody else has the folder, so nobody else on the server has the turn.
        self.turn = str(folder)
        self.policy = policy
        ledger = folder / "ledger"
        self._job = {"url": url, "turn": self.turn, "ledger": str(ledger), "policy": policy, "parallel": parallel}
        self.ledger = Ledger(ledger)
        self.lives = 0

    def live(self, die_at: int = 0) -> Ended:
        """Let a process at the turn; it dies at that boundary."""
        ended = self._nursery.run({**self._job, "life": self.lives, "die_at": die_at})
        self.lives += 1
        return ended

    def effects(self, operations: Sequence[str]) -> list[str]:
        """The operation ids of the turn's effects that happened, as often as they did; `operations` are all that it has."""
        if self.policy is not Policy.TRANSACTIONAL:
            return [row["operation_id"] for row in self.ledger.rows("effect")]
        return effects_beside(self._url, operations)


def effects_beside(url: str, operations: Sequence[str]) -> list[str]:
    """The operation ids of these effects in the table beside a store's own, as often as they are there."""
    look = "SELECT operation_id FROM effects"
    url = address(url)
    rows: list[tuple[Any, ...]]
    if url.startswith("postgresql:"):
        # The table is the lane's, and has the effects of what was in it before.
        with psycopg.connect(url) as connection:
            rows = connection.execute(f"{look} WHERE operation_id = ANY(%s)", [list(operations)]).fetchall()
    else:
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            rows = connection.execute(look).fetchall()
    return [operation for (operation,) in rows]


class Stage:
    """One store, for the cases of one test."""

    def __init__(self, name: str, lanes: Lanes, folder: Path, url: Callable[[int, Path], str]) -> None:
        """
        Args:
            url: the store's, for a lane and a case's folder.
        """
        self.name = name
        self.lanes = lanes
        self._folder = folder
        self._url = url

    @contextmanager
    def lane(self) -> Generator[Callable[[str], Place]]:
        """A lane, and a function that gives places in it by name. Nobody else is in the lane: a later process moves the clock of
        PostgreSQL's database behind every lease, which what is at work beside it would not survive."""
        with self.lanes.taken() as lane:

            def place(name: str) -> Place:
                folder = self._folder / name
                folder.mkdir()
                return Place(lane.nursery, self._url(lane.number, folder), folder)

            yield place

    @contextmanager
    def place(self, name: str) -> Generator[Place]:
        """A place for one turn or conversation, alone in a lane from its first process to its last."""
        with self.lane() as place:
            yield place(name)

    @contextmanager
    def together(self, name: str) -> Generator[list[Place]]:
        """A place for processes that are at it at the same time, one in each lane."""
        folder = self._folder / name
        folder.mkdir()
        with ExitStack() as stack:
            lanes = [stack.enter_context(self.lanes.taken()) for _ in range(LANES)]
            url = self._url(0, folder)
            yield [Place(lane.nursery, url, folder) for lane in lanes]

    @contextmanager
    def case(self, name: str, policy: Policy, *, parallel: bool) -> Generator[Case]:
        """A turn in a place of its own."""
        with self.place(name) as place:
            yield Case(*place, policy, parallel=parallel)
