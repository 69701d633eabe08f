"""Lease renewal: one task for a run renews what the run holds, so that slow is not taken for dead (field case 19)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import anyio

from turnkeeper.errors import StoreError, TurnkeeperError
from turnkeeper.observe.logs import Fields, current, logger
from turnkeeper.observe.telemetry import Telemetry

log = logger(__name__)


class _Held:
    """One lease: how to renew it, whom to tell when it is lost, since when it runs, and what its log records are about."""

    __slots__ = ("about", "at", "lost", "renew", "since", "what")

    def __init__(
        self,
        what: str,
        renew: Callable[[], Awaitable[bool]],
        lost: Callable[[], None],
        at: Fields | None,
        since: float | None,
    ) -> None:
        self.about = current()  # it may be renewed by a task that is about something else
        self.at = at
        self.what = what
        self.renew = renew
        self.lost = lost
        self.since = time.monotonic() if since is None else since

    @property
    def fields(self) -> Fields:
        """Of log records."""
        return {**self.about, **(self.at or {})}


class LeaseKeeper:
    """Renews every lease that is held, at a third of its length.

    The renewals run in the event loop: a tool that is a plain function runs in a thread and cannot starve them. An async
    tool that blocks the loop can; its lease then runs out, which is told here, and nobody repeats its effect.
    """

    def __init__(self, lease_seconds: float, telemetry: Telemetry | None = None) -> None:
        self._lease = lease_seconds
        self._telemetry = telemetry
        self._held: set[_Held] = set()

    @contextmanager
    def holding(
        self,
        what: str,
        renew: Callable[[], Awaitable[bool]],
        lost: Callable[[], None],
        at: Fields | None = None,
        since: float | None = None,
    ) -> Generator[None]:
        """Renew the lease of `what` while the block runs.

        Args:
            renew: says whether it is still ours.
            lost: is told when it is not, or may not be.
            at: for log records.
            since: the time, by `time.monotonic`, before the write that took it; None: now.
        """
        held = _Held(what, renew, lost, at, since)
        self._held.add(held)
        try:
            yield
        finally:
            if held in self._held:
                self._held.discard(held)
                self._tell_if_late(held)  # whoever blocked the event loop until now kept the renewals from telling

    async def fresh(self, since: float, renew: Callable[[], Awaitable[bool]]) -> float | None:
        """Renew a lease that was asked for at `since`, if it is old: when it was asked for last. None: it is not ours."""
        if not self.is_old(since):
            return since
        sent = time.monotonic()
        return sent if await renew() else None

    def is_old(self, since: float) -> bool:
        """Whether a lease that was asked for then may be over before what begins now has begun: renew it first."""
        return time.monotonic() - since > self._lease / 2

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            # Monotonic: a wall clock that is set back must not stretch the interval (field case 20, row 7).
            await anyio.sleep(self._lease / 6)
            async with anyio.create_task_group() as renewals:  # one that hangs holds up no other
                for held in list(self._held):
                    if time.monotonic() - held.since >= self._lease / 3:
                        renewals.start_soon(self._renew, held)

    def _tell_if_late(self, held: _Held) -> None:
        waited = time.monotonic() - held.since
        if waited > self._lease / 2:
            late = waited - self._lease / 3
            told = (held.what, late, self._lease)
            log.warning("renewing the lease of %s is late by %.1f s (lease %.1f s)", *told, extra=held.fields)

    async def _renew(self, held: _Held) -> None:
        if held not in self._held:
            return
        self._tell_if_late(held)
        # Counted from before the write: the store stamps it later than this, so we never think that we own longer.
        sent = time.monotonic()
        ours = False
        try:
            # Where a store says nothing until the lease is over, somebody else may have it by then.
            with anyio.move_on_after(max(held.since + self._lease - sent, self._lease / 3)):
                ours = await held.renew()
        except StoreError as e:
            if time.monotonic() - held.since < self._lease:
                why = "the lease of %s could not be renewed, will try again: %s"
                log.warning(why, held.what, e, extra=held.fields)
                return
        except TurnkeeperError as e:  # a log that this version cannot read any more, say
            log.warning("the lease of %s cannot be renewed: %s", held.what, e, extra=held.fields)
        if held not in self._held:
            return
        if ours:
            held.since = sent
        else:
            self._held.discard(held)
            log.error("the lease of %s was lost", held.what, extra=held.fields)
            if self._telemetry is not None:
                self._telemetry.lease_lost()
            held.lost()
