"""The task that renews a run's leases: what it does when a renewal fails, and whom it tells."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from turnkeeper.engine.leases import LeaseKeeper
from turnkeeper.errors import StoreBusy, TurnSchemaConflict

pytestmark = pytest.mark.anyio


class Held:
    """A lease that is held in a test: who asked to renew it, and whether its holder was told of its loss."""

    def __init__(self, renew: Callable[[], Awaitable[bool]]) -> None:
        self._renew = renew
        self.renewals = 0
        self.renewed, self.lost = anyio.Event(), anyio.Event()

    async def renew(self) -> bool:
        """Renew it as the test says."""
        self.renewals += 1
        ours = await self._renew()
        self.renewed.set()
        return ours


@asynccontextmanager
async def holding(lease: float, renew: Callable[[], Awaitable[bool]]) -> AsyncGenerator[Held]:
    """A lease that is held, in a run that renews."""
    held, keeper = Held(renew), LeaseKeeper(lease)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keeper.run)
        with anyio.fail_after(30), keeper.holding("it", held.renew, held.lost.set):
            yield held
        tasks.cancel_scope.cancel()


async def test_a_lease_that_is_somebody_elses_is_told_once() -> None:
    async def renew() -> bool:
        return False

    async with holding(0.1, renew) as held:
        await held.lost.wait()
    assert held.renewals == 1


async def test_a_store_that_fails_for_a_moment_is_asked_again() -> None:
    answers = [StoreBusy("store", "busy"), StoreBusy("store", "busy")]

    async def renew() -> bool:
        if answers:
            raise answers.pop()
        return True

    async with holding(3, renew) as held:
        await held.renewed.wait()
        assert held.renewals == 3
        assert not held.lost.is_set()


async def test_a_store_that_fails_for_a_whole_lease_has_lost_it() -> None:
    began = time.monotonic()

    async def renew() -> bool:
        raise StoreBusy("store", "busy")

    async with holding(0.2, renew) as held:
        await held.lost.wait()
        assert held.renewals > 1
        assert time.monotonic() - began >= 0.2


async def test_a_log_that_cannot_be_read_any_more_is_lost_at_once() -> None:
    async def renew() -> bool:
        raise TurnSchemaConflict("turn", "unknown record")

    async with holding(0.1, renew) as held:
        await held.lost.wait()
        assert held.renewals == 1


async def test_a_store_that_says_nothing_has_lost_it_at_its_end_and_holds_up_no_other() -> None:
    async def hangs() -> bool:
        await anyio.sleep_forever()
        raise AssertionError

    async def renew() -> bool:
        return True

    keeper = LeaseKeeper(0.3)
    lost = anyio.Event()
    other = Held(renew)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keeper.run)
        with (
            anyio.fail_after(30),
            keeper.holding("one", hangs, lost.set),
            keeper.holding("other", other.renew, other.lost.set),
        ):
            await other.renewed.wait()
            assert not lost.is_set()
            await lost.wait()
            assert not other.lost.is_set()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("blocked", [True, False])
async def test_whoever_blocks_the_loop_is_told_that_the_renewal_is_late(
    caplog: pytest.LogCaptureFixture, *, blocked: bool
) -> None:
    """Also where the lease is let go in the same breath, so that no renewal comes to tell."""
    caplog.set_level(logging.WARNING, "turnkeeper")

    async def renew() -> bool:
        return True

    async with holding(0.3 if blocked else 300, renew):
        time.sleep(0.2)  # noqa: ASYNC251  # that is what is looked at
    assert ("late by" in caplog.text) is blocked
