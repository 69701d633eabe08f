"""A worker: takes what is to be done from a transport, brings conversations on, and hands over when it is told to stop.

The transport only says which conversation has something to do; what that is stands in the conversation's log. So a hint
that comes twice does nothing twice, and one that is lost is made up for by the next sweep.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from turnkeeper.conversation.conversations import Conversations
from turnkeeper.errors import FlowUnknown, StoreError
from turnkeeper.transport.protocol import Delivery, Transport

log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 30.0
"""Seconds between two attempts at a store or a transport that is away."""
_UNKNOWN_FLOW_PAUSE: Final = 30.0
"""Seconds until another process may have been deployed that knows the flow."""
_WAIT: Final = 5.0
"""Seconds for which the transport is asked to wait for something to do."""

_ABOUT: Final = 0.05
_MOST_HINTS: Final = 4096

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
        beat: when the loop went round last, by `time.monotonic`.
    """

    state: State = "starting"
    handled: int = 0
    in_hand: int = 0
    failures: int = 0
    last_error: str = ""
    beat: float = field(default_factory=time.monotonic)


class _Next(NamedTuple):
    """When a conversation has something to do again, in seconds from now (None: no need to look); and what went wrong."""

    wait: float | None
    failure: str | None = None


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
        self._hinted: dict[str, float] = {}
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
            with anyio.move_on_after(self._drain_seconds):
                async with self._room:
                    while self._in_hand:
                        await self._room.wait()
            tasks.cancel_scope.cancel()
        self._now("stopped")

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
            async with self._room:
                while len(self._in_hand) >= self._at_once:
                    await self._room.wait()
            free = self._at_once - len(self._in_hand)
            try:
                taken = await self._transport.consume(
                    self._bot.name, count=free, wait_seconds=_WAIT, lease_seconds=self._lease
                )
            except StoreError as e:
                self._now("waiting")
                self._failed("the transport is away", e)
                await anyio.sleep(pause * self._chance.uniform(0.5, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            self._now("ready")
            for delivery in taken:
                tasks.start_soon(self._handle, delivery)
            await anyio.lowlevel.checkpoint()  # so that they are in hand before room is counted

    async def _sweep(self) -> None:
        """Find what no hint tells of: a publish that failed, a timer, a conversation that somebody has settled."""
        while True:
            await anyio.sleep(self._sweep_seconds * self._chance.uniform(0.5, 1.0))
            try:
                for conversation_id in await self._bot.pending():
                    if conversation_id not in self._in_hand:
                        await self._hint(conversation_id, 0.0)
            except StoreError as e:
                self._failed("looking for what is pending", e)

    # --- handling --------------------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        conversation_id = delivery.key
        if conversation_id in self._in_hand:
            # Whoever has it in hand looks once more before it lets go.
            self._once_more.add(conversation_id)
            await self._quietly(self._transport.acknowledge, delivery)
            return
        self._in_hand.add(conversation_id)
        self._now(in_hand=len(self._in_hand))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._extend, delivery)
                await self._settle(delivery, await self._bring_on(conversation_id, delivery.attempt))
                tasks.cancel_scope.cancel()
            while conversation_id in self._once_more:
                self._once_more.discard(conversation_id)
                after = await self._bring_on(conversation_id, delivery.attempt)
                if after.wait is not None:
                    await self._quietly(self._hint, conversation_id, after.wait)
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

    async def _bring_on(self, conversation_id: str, attempt: int) -> _Next:
        try:
            processed = await self._bot.process(conversation_id, at_most=self._messages)
        except FlowUnknown as e:
            self._failed(f"conversation {conversation_id}", e)
            return _Next(_UNKNOWN_FLOW_PAUSE)
        except StoreError as e:
            self._failed(f"conversation {conversation_id}", e)
            return _Next(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * self._chance.uniform(0.5, 1.5))
        except Exception as e:
            log.exception("conversation %s", conversation_id)
            self._failed(f"conversation {conversation_id}", e)
            return _Next(_LONGEST_PAUSE, f"{type(e).__name__}: {e}")
        self._now(handled=self.progress.handled + processed.handled)
        return _Next(processed.again_in)

    async def _settle(self, delivery: Delivery, after: _Next) -> None:
        if after.failure is not None:
            await self._quietly(
                partial(self._transport.retry_later, delay=after.wait or 0.0, reason=after.failure), delivery
            )
        elif after.wait is None or self._comes_by(delivery.key, after.wait):
            await self._quietly(self._transport.acknowledge, delivery)
        elif not after.wait:
            # What is released comes first again, and others are to have their turn.
            if await self._quietly(self._transport.publish, delivery.key):
                await self._quietly(self._transport.acknowledge, delivery)
        else:
            await self._quietly(partial(self._transport.release, delay=after.wait), delivery)
            self._hinted[delivery.key] = time.monotonic() + after.wait

    def _comes_by(self, conversation_id: str, wait: float) -> bool:
        """Whether a hint of ours comes by then anyway."""
        now = time.monotonic()
        if len(self._hinted) >= _MOST_HINTS:
            self._hinted = {one: due for one, due in self._hinted.items() if due > now}
        return now < self._hinted.get(conversation_id, 0.0) <= now + wait + _ABOUT

    async def _hint(self, conversation_id: str, delay: float) -> None:
        """Have a conversation come again."""
        if not self._comes_by(conversation_id, delay):
            await self._transport.publish(conversation_id, delay=delay)
            self._hinted[conversation_id] = time.monotonic() + delay

    async def _quietly(self, call: Callable[..., Awaitable[object]], *arguments: object) -> bool:
        """Whether a call of the transport came through. Where it is away, its leases end, and what was held comes again."""
        try:
            await call(*arguments)
        except StoreError as e:
            self._failed("the transport is away", e)
            return False
        return True
