"""What every transport does alike: it checks what it is given, waits, gives back what nobody waits for, and reports losses."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any, Final, NamedTuple

from turnkeeper.errors import InvalidInput, StoreClosed, StoreError, StoreUnavailable, ValueTooLarge
from turnkeeper.transport.protocol import (
    MAX_ATTEMPTS,
    MAX_BODY,
    MAX_COUNT,
    MAX_NAME,
    DeadLetter,
    Delivery,
    Depth,
    Lost,
    OnLost,
)

log = logging.getLogger(__name__)

_QUEUE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST: Final = 10 * 365 * 86_400.0
"""Seconds of a delay or lease at the most, so that every time fits every server's numbers."""
_PAUSES: Final = (0.05, 1.0)
"""Seconds until a consumer that waits asks again where an answer was lost: at first, and at the most."""
_REASON: Final = 1000
"""Characters of a reason that are kept."""


class Settled(IntEnum):
    """What became of an attempt to settle a delivery."""

    GONE = -1
    """There is no such entry any more."""
    REFUSED = 0
    DONE = 1


class Taken(NamedTuple):
    """What a look into the queue gave.

    Attributes:
        deliveries: what was handed out.
        due_in: milliseconds until the next entry is due, if one is known of.
        seen: the reasons to look that there were before, for who waits for another one.
    """

    deliveries: list[Delivery]
    due_in: int | None
    seen: tuple[bytes, ...] = ()


class BaseTransport(ABC):
    """A transport but for its server. See `turnkeeper.transport.protocol.Transport` for what it promises."""

    def __init__(self, queue: str, where: str, max_attempts: int = MAX_ATTEMPTS, on_lost: OnLost | None = None) -> None:
        """
        Args:
            queue: its name: 1 to 64 letters, digits, - and _.
            where: the store, for people.
            max_attempts: deliveries of an entry before it is a dead letter.
            on_lost: told of what was lost; it is logged in any case.

        Raises:
            InvalidInput: the name or the limit cannot be.
        """
        if not _QUEUE.fullmatch(queue):
            raise InvalidInput("queue", "must be 1 to 64 letters, digits, - and _")
        if max_attempts < 1:
            raise InvalidInput("max_attempts", "must be 1 or more")
        self.queue = queue
        self.where = where
        self.max_attempts = max_attempts
        self._on_lost = on_lost
        self._held: dict[tuple[str, int], float] = {}
        """Deliveries that were handed out here, and until when they are surely held, on this process's monotonic clock."""
        self._returning: set[asyncio.Task[None]] = set()
        """Deliveries on their way back, as whoever asked for them was cancelled."""
        self._closed = False

    # --- what a server does ------------------------------------------------------------------------------------

    @abstractmethod
    async def _publish(self, key: str, body: bytes, delay_ms: int) -> str: ...

    @abstractmethod
    async def _take(self, consumer: str, count: int, lease_ms: int) -> Taken: ...

    @abstractmethod
    async def _wait(self, seconds: float, seen: tuple[bytes, ...]) -> None:
        """Wait until there may be something to take that was not there when `seen` was true, `seconds` at the most."""

    @abstractmethod
    async def _extend(self, delivery: Delivery, lease_ms: int) -> Settled: ...

    @abstractmethod
    async def _acknowledge(self, delivery: Delivery) -> Settled: ...

    @abstractmethod
    async def _retry(self, delivery: Delivery, delay_ms: int, reason: str) -> Settled: ...

    @abstractmethod
    async def _release(self, delivery: Delivery, delay_ms: int) -> Settled: ...

    @abstractmethod
    async def _kill(self, delivery: Delivery, reason: str) -> Settled: ...

    @abstractmethod
    async def _letters(self, after: str, limit: int) -> list[DeadLetter]: ...

    @abstractmethod
    async def revive(self, entry: str) -> bool:
        """See `Transport.revive`."""

    @abstractmethod
    async def discard(self, entry: str) -> bool:
        """See `Transport.discard`."""

    @abstractmethod
    async def depth(self) -> Depth:
        """See `Transport.depth`."""

    @abstractmethod
    async def _close(self) -> None: ...

    # --- the protocol ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> BaseTransport:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def publish(self, key: str, body: bytes = b"", *, delay: float = 0.0) -> str:
        """See `Transport.publish`."""
        self._check_open()
        if len(body) > MAX_BODY:
            raise ValueTooLarge("body", len(body), MAX_BODY)
        return await self._publish(_name("key", key), bytes(body), _ms("delay", delay))

    async def consume(
        self, consumer: str, *, count: int = 1, wait_seconds: float = 0.0, lease_seconds: float = 30.0
    ) -> list[Delivery]:
        """See `Transport.consume`."""
        self._check_open()
        if not 1 <= count <= MAX_COUNT:
            raise InvalidInput("count", f"must be 1 to {MAX_COUNT}")
        consumer, lease_ms = _name("consumer", consumer), _ms("lease_seconds", lease_seconds)
        if lease_ms < 1:
            raise InvalidInput("lease_seconds", "must be a millisecond or more")
        deadline = time.monotonic() + _ms("wait_seconds", wait_seconds) / 1000
        pause = _PAUSES[0]
        while True:
            asked = time.monotonic()
            try:
                taken = await self._handed(self._take(consumer, count, lease_ms))
            except StoreUnavailable as e:
                # Only the answer was lost: what it may have handed out comes again, and who has time left asks again.
                if e.applied is not None or time.monotonic() + pause > deadline:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
                continue
            if taken.deliveries:
                self._remember(taken.deliveries, asked + lease_ms / 1000)
                return taken.deliveries
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return []
            await self._wait(left if taken.due_in is None else min(left, max(taken.due_in, 1) / 1000), taken.seen)
            if self._closed:
                return []

    async def extend(self, delivery: Delivery, lease_seconds: float) -> bool:
        """See `Transport.extend`."""
        lease_ms = _ms("lease_seconds", lease_seconds)
        if lease_ms < 1:
            raise InvalidInput("lease_seconds", "must be a millisecond or more")
        asked = time.monotonic()
        done = self._told(delivery, await self._extend(delivery, lease_ms))
        if done:
            self._held[delivery.id, delivery.fence] = asked + lease_ms / 1000
        return done

    async def acknowledge(self, delivery: Delivery) -> bool:
        """See `Transport.acknowledge`."""
        return self._told(delivery, await self._acknowledge(delivery))

    async def retry_later(self, delivery: Delivery, *, delay: float, reason: str) -> bool:
        """See `Transport.retry_later`."""
        return self._told(delivery, await self._retry(delivery, _ms("delay", delay), _reason(reason)))

    async def release(self, delivery: Delivery, *, delay: float = 0.0) -> bool:
        """See `Transport.release`."""
        return self._told(delivery, await self._release(delivery, _ms("delay", delay)))

    async def dead_letter(self, delivery: Delivery, *, reason: str) -> bool:
        """See `Transport.dead_letter`."""
        return self._told(delivery, await self._kill(delivery, _reason(reason)))

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> list[DeadLetter]:
        """See `Transport.dead_letters`."""
        if not 1 <= limit <= MAX_COUNT:
            raise InvalidInput("limit", f"must be 1 to {MAX_COUNT}")
        return await self._letters(after, limit)

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        here = asyncio.get_running_loop()
        if returning := [task for task in self._returning if task.get_loop() is here]:
            await asyncio.wait(returning)
        await self._close()

    # --- cancellation ------------------------------------------------------------------------------------------

    async def _handed(self, taking: Coroutine[Any, Any, Taken]) -> Taken:
        """The answer; where the caller is cancelled, what the server hands out meanwhile goes back (TR-11)."""
        task = asyncio.ensure_future(taking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            back = asyncio.ensure_future(self._give_back(task))
            self._returning.add(back)
            back.add_done_callback(self._returning.discard)
            raise

    async def _give_back(self, taking: asyncio.Task[Taken]) -> None:
        try:
            for delivery in (await taking).deliveries:
                await self._release(delivery, 0)
        except StoreError as e:
            log.info("%s: what a cancelled consumer was handed comes again when its lease is over: %s", self.where, e)

    # --- losses ------------------------------------------------------------------------------------------------

    def _remember(self, deliveries: list[Delivery], until: float) -> None:
        now = time.monotonic()
        for over in [name for name, end in self._held.items() if end < now]:
            del self._held[over]
        for delivery in deliveries:
            self._held[delivery.id, delivery.fence] = until

    def _told(self, delivery: Delivery, settled: Settled) -> bool:
        """Whether it was done. Who surely holds an entry that is not there any more knows that it was lost (TR-10)."""
        until = self._held.pop((delivery.id, delivery.fence), 0.0)
        if settled is Settled.GONE and time.monotonic() < until:
            self._report([delivery.id], 1, "an entry was gone while it was held")
        return settled is Settled.DONE

    def _report(self, ids: list[str], number: int | None, what: str) -> None:
        lost = Lost(self.queue, tuple(ids), number, what)
        log.warning(
            "%s: queue %s lost %s entries: %s %s",
            *(self.where, self.queue, "some" if number is None else number, what, ", ".join(ids[:100])),
            extra={"turnkeeper_lost": lost},
        )
        if self._on_lost is not None:
            self._on_lost(lost)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(self.where, "the transport was closed")


def _name(field: str, text: str) -> str:
    """A key or a name that every server can keep.

    Raises:
        InvalidInput: it is none.
    """
    if not 1 <= len(text) <= MAX_NAME:
        raise InvalidInput(field, f"must be 1 to {MAX_NAME} characters")
    if "\0" in text or not _encodable(text):
        raise InvalidInput(field, "holds NUL or half of a surrogate pair, which not every server can keep")
    return text


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(text: str) -> str:
    """A reason as it is kept: evidence is not refused for how it is written."""
    return text[:_REASON].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _ms(field: str, seconds: float) -> int:
    """Seconds as whole milliseconds.

    Raises:
        InvalidInput: they are negative, no number, or too many.
    """
    if not (math.isfinite(seconds) and 0 <= seconds <= _LONGEST):
        raise InvalidInput(field, "must be seconds, 0 or more, and ten years at the most")
    return math.ceil(seconds * 1000)
