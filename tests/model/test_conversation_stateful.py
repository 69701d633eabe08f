"""Random walks over every command of a conversation: on the pure rules, and through the real shell on every store.

In the stores two handles take turns, so that each is behind the other, also behind a compaction; a third reader follows the
log record by record and judges each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from tests.conformance.support import ClockedStore
from tests.conftest import STORES, opened
from tests.model.conversations_book import ENCODER, RULES, restored
from tests.model.conversations_walk import FLOOD, LEASE, LONG, WALKS, Walk
from turnkeeper.conversation import commands as c
from turnkeeper.conversation import records as r
from turnkeeper.conversation.decide import LOST, decide_all
from turnkeeper.conversation.evolve import evolve
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.state import ConversationState
from turnkeeper.errors import ConversationError, OwnershipLost
from turnkeeper.log import frames
from turnkeeper.log.decision import Decision
from turnkeeper.log.record import NOWHERE

T = TypeVar("T")
pytestmark = LONG

BEGINNING = 1_000_000_000


def bare(state: ConversationState) -> ConversationState:
    """The state without what counts for compaction only, and without events that retention may let go."""
    return replace(state, records=0, weight=0)


class Pure(Walk):
    """The rules alone. Every decision is also made on the state as a snapshot gives it back: it has to be the same."""

    def __init__(self) -> None:
        super().__init__()
        self._state = ConversationState()
        self._now = BEGINNING

    @property
    def state(self) -> ConversationState:
        """See `Walk.state`."""
        return self._state

    def now(self) -> int:
        """See `Walk.now`."""
        return self._now

    def pass_time(self, milliseconds: int) -> None:
        """See `Walk.pass_time`."""
        self._now += milliseconds

    def _decided(self, state: ConversationState, commands: Sequence[c.Command]) -> Decision[Any, Any] | str:
        try:
            return decide_all(state, commands, self._now)
        except ConversationError as e:
            return f"{type(e).__name__} {e}"

    def put(self, owner: str, *commands: c.Command) -> list[Any]:
        """See `Walk.put`."""
        decision = self._decided(self._state, commands)
        snapshot = restored(self._state)
        assert self._decided(snapshot, commands) == decision, "a snapshot decides as what it stands for"
        if isinstance(decision, str):
            raise ConversationError(decision)
        assert decision.guard is None or decision.guard.holds(self._now)
        after = self._state
        for record in decision.records:
            body = ENCODER.encode((b"", record))
            _, stored = RULES.decoder().decode(body)
            assert stored == record, "a record comes back as it was written"
            after = self.appended(after, stored, self._now)
            snapshot = evolve(snapshot, stored, self._now)
        assert bare(snapshot) == bare(after), "a snapshot goes on as what it stands for"
        self._state = after
        return decision.answer


TestPure = Pure.TestCase
TestPure.settings = WALKS


@pytest.mark.soak
def test_many_more_walks() -> None:
    """As `TestPure`."""
    run_state_machine_as_test(Pure, settings=settings(WALKS, max_examples=300))


class InStore(Walk):
    """Through `ConversationHandle`, two of them, in a store."""

    name = "c"

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.store = self.run(self.open())
        self.handles = {owner: ConversationHandle(self.store, self.name) for owner in self.fences}
        self.compactions = 0
        self._state = ConversationState()
        self._position = NOWHERE
        self._now = 0

    async def open(self) -> ClockedStore:
        """The store of this walk."""
        raise NotImplementedError

    def run(self, awaitable: Awaitable[T]) -> T:
        """Run on the machine's own loop."""

        async def waited() -> T:
            return await awaitable

        return self.runner.run(waited())

    def teardown(self) -> None:
        """A reader who knows nothing sees the same; then let go of everything."""
        try:
            assert bare(self.run(ConversationHandle(self.store, self.name).read())) == bare(self._state)
        finally:
            self.run(self.stack.aclose())
            self.runner.close()

    @property
    def state(self) -> ConversationState:
        """See `Walk.state`."""
        return self._state

    def now(self) -> int:
        """See `Walk.now`."""
        return self._now

    def pass_time(self, milliseconds: int) -> None:
        """See `Walk.pass_time`."""
        self.run(self.store.advance_clock(milliseconds))
        self._follow()

    def put(self, owner: str, *commands: c.Command) -> list[Any]:
        """See `Walk.put`."""
        handle = self.handles[owner]
        try:
            answers = self.run(handle.ask(*commands))
        except OwnershipLost:
            answers = [LOST]
        finally:
            self._follow()
        assert handle.log.position == self._position or not answers
        assert handle.state == self._state, "whoever asked sees the log as it is"
        return answers

    def _follow(self) -> None:
        """Read what was written, record by record."""
        tail = self.run(self.store.read(self.handles["a"].key, after=self._position))
        self._now = tail.now
        for seq, at, body in tail.records:
            if seq <= self._position.seq:
                continue
            _, record = RULES.decoder().decode(frames.decode(body))
            if isinstance(record, r.Snapshot):
                assert bare(record.state) == bare(self._state), "a snapshot stands for the records before it"
                self.compactions += 1
                self._state = evolve(self._state, record, at)
            else:
                self._state = self.appended(self._state, record, at)
        self._position = tail.position


@pytest.mark.parametrize("name", STORES)
def test_walks(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Invariants 3, 5, 6, 8, 10, 12, J1 to J5, O1 to O3, R1 to R3 through the shell, on every store, across compaction."""
    numbers = count()
    compactions: list[int] = []

    class There(InStore):
        """A conversation in a store that other walks have left theirs in."""

        async def open(self) -> ClockedStore:
            self.name = f"conversation {next(numbers)}"
            return cast("ClockedStore", await self.stack.enter_async_context(opened(name, request, tmp_path)))

        def teardown(self) -> None:
            compactions.append(self.compactions)
            super().teardown()

    run_state_machine_as_test(There, settings=settings(WALKS, max_examples=8, phases=[Phase.generate]))
    assert sum(compactions) >= 2, "logs were compacted in the middle of walks"


@pytest.mark.anyio
@pytest.mark.parametrize("name", STORES)
async def test_a_handle_behind_a_compaction(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """LOG-2, LOG-5, R3: what a handle knew was dropped meanwhile; it decides on what is there, and its old fence is none."""
    async with opened(name, request, tmp_path) as given:
        store = cast("ClockedStore", given)
        one, other = ConversationHandle(store, "c"), ConversationHandle(store, "c")
        for number in range(2):
            await one.receive(f"event {number}", "text", b"hello")
        (claimed,) = await one.ask(c.Claim("a", LEASE, 1, "start", c.Start("flow", 1, "s", b"")))
        row = one.state.row
        await store.advance_clock(LEASE)
        (mine,) = await other.ask(c.Claim("b", LEASE, 1, "start"))
        assert (mine.fence, mine.mode) == (claimed.fence + 1, "resume")
        for _ in range(3):
            await other.ask(*[c.Renew("b", mine.fence, LEASE)] * FLOOD)
        kept = (await store.read(one.key)).records
        assert len(kept) <= FLOOD + 1, "the log was compacted"
        assert one.state.records < FLOOD, "the first handle knows nothing of it"
        with pytest.raises(OwnershipLost):
            await one.ask(c.KeepValue("a", claimed.fence, "x", b"value"))
        assert one.state == other.state
        assert one.state.row == row
        assert (await one.receive("event 1", "text", b"hello")).duplicate
        assert (await one.receive("event 2", "text", b"hello")).number == 3
        await other.ask(c.Settle("b", mine.fence, 1, "handled"))
        assert other.state.received == 3
