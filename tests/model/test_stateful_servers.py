"""The random walks of `test_stateful.py` on the stores whose clocks run: a file, PostgreSQL, Redis and its cluster."""

from __future__ import annotations

from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Final, cast

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conformance.support import ClockedStore
from tests.conftest import STORES, opened
from tests.model.test_stateful import TICK, WALKS, Turn

# As in `test_stateful.py`: alone, none of them takes more than twenty seconds.
pytestmark = pytest.mark.timeout(600)

RUNNING: Final = [name for name in STORES if name != "sqlite memory"]


@pytest.mark.parametrize("name", RUNNING)
def test_walks(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """T1, T2, T3, LOG-2 to LOG-5, invariants 2, 5, 6, 8, 10 and 12: the same as in memory, whatever the turn is kept in."""
    numbers = count()

    class TurnThere(Turn):
        """A turn in a store that other walks have left theirs in."""

        past_the_last_tick = TICK // 2

        async def open(self) -> ClockedStore:
            """See `Turn.open`. A new turn in every walk: PostgreSQL's tables and the file are not emptied between them."""
            self.trace = f"trace {next(numbers)}"
            self.stack = AsyncExitStack()
            store = await self.stack.enter_async_context(opened(name, request, tmp_path))
            return cast("ClockedStore", store)

        async def close(self) -> None:
            """See `Turn.close`."""
            await self.stack.aclose()

    run_state_machine_as_test(TurnThere, settings=settings(WALKS, max_examples=8))
