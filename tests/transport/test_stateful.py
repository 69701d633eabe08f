"""Random walks against the smallest model of a queue: in whatever order things are done, TR-2 to TR-8 and TR-12 hold."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.transport.support import PLACES, ClockedTransport, place_named
from turnkeeper.transport.protocol import LEASE_ENDED, LIMIT_REACHED, Delivery, Depth

LIMIT: Final = 3
SHORT: Final = 100.0
LONG: Final = 300.0
"""Seconds of leases and delays: so long that the real time of a walk does not matter beside them."""
TICK: Final = 120_000
WALKS: Final = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,  # the same walks in every run: a failure here is one everywhere
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass
class Entry:
    """What the model knows of an entry that is not acknowledged."""

    key: str
    body: bytes
    state: str = "ready"
    due: float = 0.0
    attempt: int = 0
    fence: int | None = None
    calm: bool = True
    """Whether nothing happened to it: it was neither delayed, nor retried, nor left."""
    left: bool = False
    """Whether its last consumer left it, and nobody has had it since."""
    order: int = 0
    reasons: list[str] = field(default_factory=list[str])


class Queue(RuleBasedStateMachine):
    """A queue and its model. The model's clock goes by ticks only."""

    request: pytest.FixtureRequest
    name: str
    folder: Path
    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        type(self).number += 1
        self.queue = self.run(self._open())
        self.now = 0.0
        self.entries: dict[str, Entry] = {}
        self.hands: list[Delivery] = []
        self.published = 0

    async def _open(self) -> ClockedTransport:
        place = await self.stack.enter_async_context(place_named(self.name, self.request, self.folder))
        # One that no other walk has used: not every place is emptied in between.
        return await place.open(f"walk-{self.number}", max_attempts=LIMIT)

    def run(self, what: Any) -> Any:
        """Run it in the walk's event loop."""
        return self.loop.run_until_complete(what)

    def teardown(self) -> None:
        """Close what was opened."""
        self.run(self.stack.aclose())
        self.loop.close()

    # --- what can be done ----------------------------------------------------------------------------------------

    @rule(key=st.sampled_from("ab"), delay=st.sampled_from([0.0, 0.0, SHORT, LONG]))
    def publish(self, key: str, delay: float) -> None:
        """One more entry."""
        self.published += 1
        body = b"%d" % self.published
        entry = self.run(self.queue.publish(key, body, delay=delay))
        assert entry not in self.entries
        state = "delayed" if delay else "ready"
        self.entries[entry] = Entry(key, body, state, self.now + delay, calm=not delay, order=self.published)

    @rule(count=st.integers(1, 3), lease=st.sampled_from([SHORT, LONG]))
    def consume(self, count: int, lease: float) -> None:
        """Take some."""
        left = self._settle_time()
        found: list[Delivery] = self.run(self.queue.consume("c", count=count, lease_seconds=lease))
        free = {name for name, entry in self.entries.items() if entry.state == "ready"}
        assert {delivery.id for delivery in found} <= free, "only what is free is handed out"
        assert len({delivery.id for delivery in found}) == len(found) <= count
        assert sum(delivery.id in left for delivery in found) <= 1
        if len(found) == count and getattr(self.queue, "shards", 1) > 1:
            self._unsettle_what_was_not_looked_at()
        assert bool(found) == bool(free), "something is handed out where there is something"
        if len(found) < count:
            assert free - left <= {delivery.id for delivery in found}, "what nobody left is not kept back"
        for delivery in found:
            entry = self.entries[delivery.id]
            assert (delivery.key, delivery.body, delivery.attempt) == (entry.key, entry.body, entry.attempt + 1)
            if entry.calm:
                earlier = [e for e in self.entries.values() if e.key == entry.key and e.calm and e.order < entry.order]
                assert all(e.state == "held" for e in earlier), "entries of a key come in order"
            entry.state, entry.due, entry.attempt = "held", self.now + lease, delivery.attempt
            entry.fence = delivery.fence
            entry.left = False
            self.hands.append(delivery)

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), delay=st.sampled_from([0.0, SHORT]))
    def settle(self, data: st.DataObject, delay: float) -> None:
        """Settle a delivery in one of the ways, be it held still or not."""
        delivery = data.draw(st.sampled_from(self.hands))
        what = data.draw(st.sampled_from(["acknowledge", "extend", "retry", "release", "kill"]))
        queue = self.queue
        done = self.run(
            {
                "acknowledge": lambda: queue.acknowledge(delivery),
                "extend": lambda: queue.extend(delivery, LONG),
                "retry": lambda: queue.retry_later(delivery, delay=delay, reason="no"),
                "release": lambda: queue.release(delivery, delay=delay),
                "kill": lambda: queue.dead_letter(delivery, reason="enough"),
            }[what]()
        )
        entry = self.entries.get(delivery.id)
        held = entry is not None and entry.state == "held" and entry.due > self.now and entry.fence == delivery.fence
        assert done == held, "only who holds a delivery settles it"
        if not held:
            return
        assert entry is not None
        later = "delayed" if delay else "ready"
        if what == "acknowledge":
            del self.entries[delivery.id]
        elif what == "extend":
            entry.due = self.now + LONG
        elif what == "release":
            entry.attempt -= 1
            entry.state, entry.due = later, self.now + delay
            entry.calm = entry.calm and not delay
        elif what == "kill" or entry.attempt >= LIMIT:
            entry.state, entry.calm = "dead", False
            entry.reasons.append("enough" if what == "kill" else "no")
        else:
            entry.state, entry.due, entry.calm = later, self.now + delay, False
            entry.reasons.append("no")

    @rule()
    def tick(self) -> None:
        """Time goes by."""
        self.run(self.queue.advance_clock(TICK))
        self.now += TICK / 1000

    @precondition(lambda self: any(entry.state == "dead" for entry in self.entries.values()))
    @rule(data=st.data(), revives=st.booleans())
    def exhume(self, data: st.DataObject, revives: bool) -> None:
        """Revive an entry, or discard it; only a dead one can be."""
        name = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries[name]
        done = self.run(self.queue.revive(name) if revives else self.queue.discard(name))
        assert done == (entry.state == "dead")
        if done and revives:
            entry.state, entry.attempt, entry.left = "ready", 0, False
        elif done:
            del self.entries[name]

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def counted(self) -> None:
        """Every entry is somewhere, and counted there."""
        states = [entry.state for entry in self.entries.values()]
        due = [entry.due <= self.now for entry in self.entries.values()]
        ready = sum(s == "ready" or (s in ("delayed", "held") and d) for s, d in zip(states, due, strict=True))
        delayed = sum(s == "delayed" and not d for s, d in zip(states, due, strict=True))
        held = sum(s == "held" and not d for s, d in zip(states, due, strict=True))
        assert self.run(self.queue.depth()) == Depth(ready, delayed, held, states.count("dead"))

    @invariant()
    def buried(self) -> None:
        """The dead are those, with all that is known of them."""
        found = {letter.id: letter for letter in self.run(self.queue.dead_letters())}
        expected = {name: entry for name, entry in self.entries.items() if entry.state == "dead"}
        assert found.keys() == expected.keys()
        for name, entry in expected.items():
            letter = found[name]
            assert (letter.key, letter.body, letter.attempts) == (entry.key, entry.body, entry.attempt)
            assert [failure.reason for failure in letter.history] == entry.reasons
            assert letter.reason in (entry.reasons[-1], LIMIT_REACHED)

    def _unsettle_what_was_not_looked_at(self) -> None:
        """A call that is full leaves a queue's other shards alone: what is dead there is so with the next one that comes by."""
        known = {letter.id for letter in self.run(self.queue.dead_letters())}
        for name, entry in self.entries.items():
            if entry.state == "dead" and name not in known:
                assert entry.reasons.pop() == LEASE_ENDED
                entry.state = "held"

    def _settle_time(self) -> set[str]:
        """What the next call makes of leases and delays that are over; the entries that were left by their consumer."""
        for entry in self.entries.values():
            if entry.state == "delayed" and entry.due <= self.now:
                entry.state = "ready"
            elif entry.state == "held" and entry.due <= self.now:
                entry.reasons.append(LEASE_ENDED)
                entry.calm = False
                entry.left = True
                entry.state = "dead" if entry.attempt >= LIMIT else "ready"
        return {name for name, entry in self.entries.items() if entry.state == "ready" and entry.left}


@pytest.mark.parametrize("name", ["sqlite memory", *PLACES])
def test_walks(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """TR-2 to TR-8, TR-12: in every place the same as in the model."""

    class Walk(Queue):
        """In that place."""

    Walk.request, Walk.name, Walk.folder = request, name, tmp_path
    examples = 40 if name == "sqlite memory" else 8
    run_state_machine_as_test(Walk, settings=settings(WALKS, max_examples=examples))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PLACES)
def test_many_more_walks(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """As `test_walks`, others in each run."""

    class Walk(Queue):
        """In that place."""

    Walk.request, Walk.name, Walk.folder = request, name, tmp_path
    run_state_machine_as_test(Walk, settings=settings(WALKS, max_examples=150, derandomize=False))
