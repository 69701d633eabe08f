"""A worker: takes what is to be done from a transport, brings conversations on, and hands over when it is told to stop.

The transport only says which conversation has something to do; what that is stands in the conversation's log. So a hint
that comes twice does nothing twice, and one that is lost is made up for by the next sweep.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from turnkeeper.conversation.conversations import Conversations
from turnkeeper.errors import (
    StoreBusy,
    StoreContention,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TurnkeeperError,
)
from turnkeeper.transport.protocol import MAX_COUNT, Delivery, Transport

log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 30.0
"""Seconds between two attempts at a store or a transport that is away; and at a conversation that cannot be gone on with here:
another process may know its flow, or somebody may look."""
_WAIT: Final = 5.0
"""Seconds for which the transport is asked to wait for something to do, and between two signs of life of who has no room."""
_LAST_WORDS: Final = 5.0
"""Seconds that handing over a conversation's hint may take."""
_OFTEN: Final = 64
"""Sweeps between two hints at the most, for a conversation that stays pending."""
_LONGEST_WAIT: Final = 30 * 86_400.0
"""Seconds for which a hint is put off at the most: queues have a limit, and timers have none."""
_ABOUT: Final = 0.05
_MOST_HINTS: Final = 4096
"""Hints that are remembered before those that are due are looked for and forgotten."""
_STORE_IS_AWAY: Final = (StoreUnavailable, StoreBusy, StoreFull, StoreReadOnly, StoreDenied)
"""Errors that the next conversation would meet too."""

State = Literal["starting", "ready", "waiting", "draining", "stopped"]


@dataclass
class Progress:
    """What a worker does, for its health endpoints and for the terminal.

    Attributes:
        state: `waiting` where the store or the transport is away.
        handled: messages handled.
        in_hand: conversations that are handled now.
        failures: times that a conversation, the store or the transport could not be gone on with.
        last_error: the last of them.
        beat: when the loop went round last, by `time.monotonic`: at least every few seconds, also where there is no room.
    """

    state: State = "starting"
    handled: int = 0
    in_hand: int = 0
    failures: int = 0
    last_error: str = ""
    beat: float = field(default_factory=time.monotonic)


class Worker:
    """One worker process's loop."""

    def __init__(
        self,
        bot: Conversations,
        transport: Transport,
        *,
        at_once: int = 16,
        messages_at_a_time: int = 8,
        lease_seconds: float = 30.0,
        sweep_seconds: float = 15.0,
        drain_seconds: float = 20.0,
        changed: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """
        Args:
            bot: is entered already.
            at_once: conversations that are handled at the same time.
            messages_at_a_time: of one conversation, before others have their turn.
            lease_seconds: how long a hint is this worker's without a sign of life.
            sweep_seconds: between two looks through the store for what no hint has told of.
            drain_seconds: how long what is under way may take once the worker is told to stop; then it is put back.
            changed: is called with every change of the progress.
        """
        self._bot = bot
        self._transport = transport
        self._at_once = at_once
        self._messages = messages_at_a_time
        self._lease = lease_seconds
        self._sweep_seconds = sweep_seconds
        self._drain_seconds = drain_seconds
        self._changed = changed
        self._stop = anyio.Event()
        self._in_hand: set[str] = set()
        self._room = anyio.Condition()
        self._once_more: set[str] = set()
        self._hinted: dict[str, tuple[float, str]] = {}
        """When a hint of ours comes for a conversation, by `time.monotonic`, and its entry."""
        self._most_hints = _MOST_HINTS
        self._missed: dict[str, int] = {}
        """Conversations that the last sweep found, and in how many sweeps, one behind the other."""
        self._away = 0.0
        """Seconds until the store is tried again; 0: it is there."""
        self._away_until = 0.0
        self._pauses: dict[str, float] = {}
        """Of conversations that the store has failed at, the last pause: a part of it may be away while the rest is there."""
        self._chance = random.Random()  # noqa: S311  # spreads the attempts of many workers
        self.progress = Progress()

    def drain(self) -> None:
        """Take nothing more, finish what is under way, and then stop. For SIGTERM."""
        self._stop.set()

    async def run(self) -> None:
        """Work until `drain` is called, or this is cancelled."""
        async with anyio.create_task_group() as tasks:
            taking = anyio.CancelScope()

            async def take() -> None:
                with taking:
                    async with anyio.create_task_group() as both:
                        both.start_soon(self._consume, tasks)
                        both.start_soon(self._sweep)

            tasks.start_soon(take)
            await self._stop.wait()
            self._now("draining")
            taking.cancel()
            await self._until(lambda: not self._in_hand, self._drain_seconds)
            tasks.cancel_scope.cancel()
        self._now("stopped")

    async def _until(self, true: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until something is true behind a conversation's end, `seconds` at the most, with signs of life."""
        with anyio.move_on_after(seconds):
            async with self._room:
                while not true():
                    with anyio.move_on_after(_WAIT):
                        await self._room.wait()
                    self._now()

    def _now(self, state: State | None = None, **changes: object) -> None:
        if state == "stopped" or (state is not None and self.progress.state != "draining"):
            self.progress.state = state
        self.progress.beat = time.monotonic()
        for name, value in changes.items():
            setattr(self.progress, name, value)
        self._changed(self.progress)

    def _failed(self, what: str, error: Exception) -> None:
        log.warning("%s: %s: %s", what, type(error).__name__, error)
        self._now(failures=self.progress.failures + 1, last_error=f"{what}: {type(error).__name__}: {error}")

    # --- taking ----------------------------------------------------------------------------------------------

    async def _consume(self, tasks: TaskGroup) -> None:
        pause = _FIRST_PAUSE
        while True:
            await self._until(lambda: len(self._in_hand) < self._at_once)
            if self._away:
                # One conversation finds out whether the store is back.
                self._now("waiting")
                await self._until(lambda: not self._away, self._about(self._away))
            free = 1 if self._away else min(self._at_once - len(self._in_hand), MAX_COUNT)
            try:
                taken = await self._transport.consume(
                    self._bot.name, count=free, wait_seconds=_WAIT, lease_seconds=self._lease
                )
            except StoreError as e:
                self._now("waiting")
                self._failed("the transport is away", e)
                await self._until(lambda: False, self._about(pause))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            self._now("waiting" if self._away else "ready")
            for delivery in taken:
                tasks.start_soon(self._handle, delivery)
            await anyio.lowlevel.checkpoint()  # so that they are in hand before room is counted

    async def _sweep(self) -> None:
        """Find what no hint tells of: a publish that failed, a timer, a conversation that somebody has settled."""
        while True:
            await anyio.sleep(self._sweep_seconds * self._chance.uniform(0.5, 1.0))
            try:
                found = [one for one in await self._bot.pending() if one not in self._in_hand]
                self._away = 0.0
                self._missed = {one: self._missed.get(one, 0) + 1 for one in found}
                for conversation_id in found:
                    if self._is_time(self._missed[conversation_id]) and not await self._quietly(
                        self._hint, conversation_id, 0.0
                    ):
                        self._missed[conversation_id] = 0
            except StoreError as e:
                self._failed("looking for what is pending", e)

    def _is_time(self, sweeps: int) -> bool:
        """Whether to hint at a conversation that so many sweeps have found: ever rarer, as its hint may just have to wait for its
        turn, and more of them would only make the queue longer."""
        return sweeps & (sweeps - 1) == 0 or sweeps % _OFTEN == 0

    # --- handling --------------------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        conversation_id = delivery.key
        if self._hinted.get(conversation_id, (0.0, ""))[1] == delivery.id:
            del self._hinted[conversation_id]  # it is here, whatever our clock says
        if conversation_id in self._in_hand:
            # Whoever has it in hand looks once more before it lets go.
            self._once_more.add(conversation_id)
            await self._quietly(self._transport.acknowledge, delivery)
            return
        self._in_hand.add(conversation_id)
        self._now(in_hand=len(self._in_hand))
        held = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._extend, delivery)
                wait = await self._bring_on(conversation_id)
                held = False
                await self._settle(delivery, wait)
                tasks.cancel_scope.cancel()
            while conversation_id in self._once_more:
                self._once_more.discard(conversation_id)
                wait = await self._bring_on(conversation_id)
                if wait is not None:
                    await self._quietly(self._hint, conversation_id, wait)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_LAST_WORDS, shield=True):
                # Its message was put back: another worker is to hear of it now, and not when a lease has ended.
                if held:
                    await self._quietly(self._transport.release, delivery)
                else:
                    await self._quietly(self._transport.publish, conversation_id)
            raise
        finally:
            self._in_hand.discard(conversation_id)
            self._now(in_hand=len(self._in_hand))
            with anyio.CancelScope(shield=True):
                async with self._room:
                    self._room.notify_all()

    async def _extend(self, delivery: Delivery) -> None:
        while True:
            await anyio.sleep(self._lease / 3)
            # Lost or not: the conversation's own lease and fence keep what is under way safe.
            await self._quietly(self._transport.extend, delivery, self._lease)

    async def _bring_on(self, conversation_id: str) -> float | None:
        """When there is something to do again, in seconds from now; None: no need to look."""
        try:
            processed = await self._bot.process(conversation_id, at_most=self._messages)
        except _STORE_IS_AWAY as e:
            self._failed(f"conversation {conversation_id}", e)
            return self._about(max(self._put_off(), self._pause_of(conversation_id)))
        except StoreContention as e:
            self._failed(f"conversation {conversation_id}", e)
            return self._about(self._pause_of(conversation_id))
        except Exception as e:
            if not isinstance(e, TurnkeeperError):
                log.exception("conversation %s", conversation_id)
            self._failed(f"conversation {conversation_id}", e)
            return self._about(_LONGEST_PAUSE)
        self._away = 0.0
        self._pauses.pop(conversation_id, None)
        self._now(handled=self.progress.handled + processed.handled)
        return None if processed.again_in is None else min(processed.again_in, _LONGEST_WAIT)

    def _put_off(self) -> float:
        """The store is away: the pause until the next attempt, which grows once for all who notice it at the same time."""
        now = time.monotonic()
        if now >= self._away_until or not self._away:
            self._away = min(max(2 * self._away, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._away_until = now + self._away / 2
        return self._away

    def _pause_of(self, conversation_id: str) -> float:
        """The pause until the next attempt at one conversation, which grows with every failure."""
        if len(self._pauses) >= _MOST_HINTS:
            self._pauses.clear()  # others may have handled them long ago
        pause = min(max(2 * self._pauses.get(conversation_id, 0.0), _FIRST_PAUSE), _LONGEST_PAUSE)
        self._pauses[conversation_id] = pause
        return pause

    def _about(self, seconds: float) -> float:
        """Nearly so many: many workers do not come all at once."""
        return seconds * self._chance.uniform(0.5, 1.5)

    async def _settle(self, delivery: Delivery, wait: float | None) -> None:
        if wait is None or self._comes_by(delivery.key, wait):
            await self._quietly(self._transport.acknowledge, delivery)
        elif not wait:
            # What is released comes first again, and others are to have their turn.
            if await self._quietly(self._transport.publish, delivery.key):
                await self._quietly(self._transport.acknowledge, delivery)
        else:
            # As not tried: what cannot be gone on with here is no fault of the hint, which says nothing else than another one.
            await self._quietly(partial(self._transport.release, delay=wait), delivery)
            self._hinted[delivery.key] = time.monotonic() + wait, delivery.id

    def _comes_by(self, conversation_id: str, wait: float) -> bool:
        """Whether a hint of ours comes by then anyway."""
        now = time.monotonic()
        if len(self._hinted) >= self._most_hints:
            self._hinted = {one: hint for one, hint in self._hinted.items() if hint[0] > now}
            self._most_hints = max(_MOST_HINTS, 2 * len(self._hinted))
        return now < self._hinted.get(conversation_id, (0.0, ""))[0] <= now + wait + _ABOUT

    async def _hint(self, conversation_id: str, delay: float) -> None:
        """Have a conversation come again."""
        if not self._comes_by(conversation_id, delay):
            entry = await self._transport.publish(conversation_id, delay=delay)
            self._hinted[conversation_id] = time.monotonic() + delay, entry

    async def _quietly(self, call: Callable[..., Awaitable[object]], *arguments: object) -> bool:
        """Whether a call of the transport came through. Where it is away, its leases end, and what was held comes again."""
        try:
            await call(*arguments)
        except StoreError as e:
            self._failed("the transport is away", e)
            return False
        return True
