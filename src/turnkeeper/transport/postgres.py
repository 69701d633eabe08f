"""A queue in PostgreSQL: one table beside the store's, rows taken with SKIP LOCKED, and notifications for who waits."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from turnkeeper.stores.postgres import PostgresStore
from turnkeeper.transport.base import BaseTransport, Settled, Taken
from turnkeeper.transport.protocol import (
    HISTORY,
    LEASE_ENDED,
    LIMIT_REACHED,
    MAX_ATTEMPTS,
    DeadLetter,
    Delivery,
    Depth,
    Failure,
    OnLost,
)

_LARGEST: Final = 2**63 - 1

_histories: Final = msgspec.json.Decoder(tuple[Failure, ...])


class PostgresTransport(BaseTransport):
    """A queue in the schema of a `PostgresStore`, through its connections.

    Durable means committed, as the server is set up. Time is the server's clock, read inside each step: where it is set back,
    leases last longer by as much.

    Who waits is notified; behind a transaction pooler it looks twice a second.
    """

    def __init__(
        self,
        store: PostgresStore,
        queue: str = "default",
        *,
        max_attempts: int = MAX_ATTEMPTS,
        on_lost: OnLost | None = None,
        closes: bool = False,
    ) -> None:
        """See `BaseTransport`; `closes` tells to close the store with the transport."""
        super().__init__(queue, store.address.where, max_attempts, on_lost)
        self._store = store
        self._closes = closes
        self._patience = store.address.patience_ms
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()
        schema = store.address.schema

        def call(function: str, *types: str) -> bytes:
            arguments = ", ".join(f"${number}::{kind}" for number, kind in enumerate(types, 1))
            return f'SELECT * FROM "{schema}".queue_{function}({arguments})'.encode()

        self._publish_text = call("publish_v1", "text", "text", "bytea", "bigint", "integer")
        self._take_text = call(
            "take_v1", *("text", "text", "integer", "bigint", "integer", "integer", "text", "text", "integer")
        )
        self._settle_text = call(
            "settle_v1", *("text", "bigint", "integer", "text", "bigint", "text", "integer", "integer", "integer")
        )
        self._look_text = call("look_v1", "text")
        self._exhume_text = call("exhume_v1", "text", "bigint", "boolean", "integer")
        self._letters_text = call("letters_v1", "text", "bigint", "integer")
        self._depth_text = call("depth_v1", "text")

    async def _publish(self, key: str, body: bytes, delay_ms: int) -> str:
        parameters = (self.queue, key, body, delay_ms, self._patience)
        ((entry,),) = await self._store.ask(self._publish_text, parameters, reads=False)
        return str(entry)

    async def _take(self, consumer: str, count: int, lease_ms: int) -> Taken:
        parameters = (
            *(self.queue, consumer, count, lease_ms, self.max_attempts, HISTORY),
            *(LEASE_ENDED, LIMIT_REACHED, self._patience),
        )
        rows = await self._store.ask(self._take_text, parameters, reads=False)
        if rows[0][0] is None:
            # 0 is also said where nothing is due at all (`greatest` passes over NULL); who waits looks by himself first.
            return Taken([], rows[0][6] or None)
        return Taken(
            [
                Delivery(str(number), key, body, attempt, consumer, fence, published)
                for number, key, body, attempt, fence, published, _ in rows
            ],
            None,
        )

    async def _wait(self, seconds: float, seen: tuple[bytes, ...]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds

        async def has_moved() -> bool:
            ((ready, due_in),) = await self._store.ask(self._look_text, (self.queue,), reads=True)
            # What is due before we would look again is a reason to wait anew, for less.
            return self._closed or ready or loop.time() + due_in / 1000 < deadline - 0.001

        waiting = asyncio.ensure_future(self._store.wait(f"queue:{self.queue}", has_moved, seconds))
        self._waiting.add((loop, waiting))
        try:
            await waiting
        except asyncio.CancelledError:
            if not self._closed or not waiting.cancelled():
                raise
        finally:
            waiting.cancel()
            self._waiting.discard((loop, waiting))

    async def _extend(self, delivery: Delivery, lease_ms: int) -> Settled:
        return await self._settle(delivery, "extend", lease_ms)

    async def _acknowledge(self, delivery: Delivery) -> Settled:
        return await self._settle(delivery, "acknowledge")

    async def _retry(self, delivery: Delivery, delay_ms: int, reason: str) -> Settled:
        return await self._settle(delivery, "retry", delay_ms, reason)

    async def _release(self, delivery: Delivery, delay_ms: int) -> Settled:
        return await self._settle(delivery, "release", delay_ms)

    async def _kill(self, delivery: Delivery, reason: str) -> Settled:
        return await self._settle(delivery, "kill", 0, reason)

    async def _settle(self, delivery: Delivery, what: str, length: int = 0, reason: str = "") -> Settled:
        parameters = (
            *(self.queue, _number(delivery.id), delivery.fence, what, length, reason),
            *(self.max_attempts, HISTORY, self._patience),
        )
        ((said,),) = await self._store.ask(self._settle_text, parameters, reads=False)
        return Settled(said)

    async def _letters(self, after: str, limit: int) -> list[DeadLetter]:
        rows = await self._store.ask(self._letters_text, (self.queue, _number(after), limit), reads=True)
        return [
            DeadLetter(str(number), key, body, published, attempts, reason, _histories.decode(history), died)
            for number, key, body, published, attempts, reason, history, died in rows
        ]

    async def revive(self, entry: str) -> bool:
        """See `Transport.revive`."""
        return await self._exhume(entry, True)

    async def discard(self, entry: str) -> bool:
        """See `Transport.discard`."""
        return await self._exhume(entry, False)

    async def _exhume(self, entry: str, revive: bool) -> bool:
        parameters = (self.queue, _number(entry), revive, self._patience)
        ((done,),) = await self._store.ask(self._exhume_text, parameters, reads=False)
        return done

    async def depth(self) -> Depth:
        """See `Transport.depth`."""
        (row,) = await self._store.ask(self._depth_text, (self.queue,), reads=True)
        return Depth(*row)

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the clock forward, for everybody who uses the schema: the test clock."""
        self._held.clear()
        await self._store.advance_clock(milliseconds)

    async def _close(self) -> None:
        for loop, waiting in list(self._waiting):
            if loop is asyncio.get_running_loop():
                waiting.cancel()
            elif loop.is_running():
                loop.call_soon_threadsafe(waiting.cancel)
        if self._closes:
            await self._store.close()


def _number(entry: str) -> int:
    """The number that an id stands for; one that no entry has where it is not ours."""
    return min(int(entry), _LARGEST) if entry.isascii() and entry.isdecimal() and len(entry) < 20 else -1
