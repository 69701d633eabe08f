"""A queue in Redis or a Redis Cluster: streams with a consumer group, leases and delays beside them, one script a step.

The stream holds what was not acknowledged, and nothing else. Who holds an entry, and until when, stands in keys of our own and is
judged by the server's clock inside the script; the group's pending list says the same, so that Redis's own tools tell the truth,
and what others do to it by hand is respected.

Consumers read with XREADGROUP inside the script that writes the lease: nothing is handed out without one. They wait on a small
stream of their own that changes whenever there is a reason to look, so waiting takes nothing, and can be ended at any time.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec

from turnkeeper.errors import InvalidInput, StoreUnavailable, StoreUnsuitable
from turnkeeper.stores.redis import RedisStore
from turnkeeper.stores.redis.scripts import Script
from turnkeeper.transport import redis_scripts as scripts
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
from turnkeeper.transport.redis_wakes import Wakes

log = logging.getLogger(__name__)

SHARDS: Final = 4
"""Parts of a queue in a cluster, so that its nodes share the work; elsewhere there is one."""
COMPLETED: Final = "COMPLETED"
ENDS: Final = (COMPLETED, "FAILED", "QUARANTINED")
"""Stages that end a trace's lifecycle; they belong to the consumer."""

_PARTS: Final = ("stream", "leases", "held", "delayed", "parked", "dead", "letters", "meta", "wake")
"""Keys of a shard, in the order of `lua/queue.lua`."""
_LIFECYCLE_TTL: Final = 604_800.0
"""Seconds for which a stage is kept behind its last change."""

_FORGET_CONSUMERS: Final = 3_600_000
"""Milliseconds after which the group forgets a consumer that holds nothing."""

_LEFT_OUT: Final = (0.25, 5.0)
"""Seconds for which a part of the queue that cannot be reached is left out: at first, and at the most."""
_PROBE: Final = 1.0
"""Seconds in which a part that was left out has to answer, so that the others need not wait for it."""

_histories: Final = msgspec.json.Decoder(tuple[Failure, ...])


class Finished(IntEnum):
    """What became of the last step."""

    GONE = -1
    """There is no such delivery any more: acknowledged already, or lost. Nothing was changed."""
    REFUSED = 0
    """The delivery is not held any more. Nothing was changed."""
    DONE = 1
    """Acknowledged, the stage recorded, and the trace out of the active index."""
    NOT_DELIVERED = 2
    """The stage may not follow the one that is recorded. Nothing was changed; project the lifecycle first."""


class _Out(NamedTuple):
    """A part of the queue that cannot be reached: why, until when it is left out, and for how long that was."""

    error: StoreUnavailable
    until: float
    pause: float


class Active(NamedTuple):
    """A trace that was begun and not ended: `since` in milliseconds of the server's clock."""

    trace_id: str
    since: int


class RedisTransport(BaseTransport):
    """A queue in Redis 6.2 or newer, a Redis Cluster, or Valkey, through the connections of a `RedisStore`.

    Durable means what the server is configured for (`turnkeeper doctor`); with the store's `?wait=N`, `publish` returns once that
    many replicas have the entry. Time is the server's, read inside each script.

    In a cluster a queue has parts, each in one slot, and a key's entries are all in the same part.
    """

    def __init__(
        self,
        store: RedisStore,
        queue: str = "default",
        *,
        max_attempts: int = MAX_ATTEMPTS,
        on_lost: OnLost | None = None,
        closes: bool = False,
        shards: int | None = None,
    ) -> None:
        """Use `open`. See `BaseTransport`.

        Args:
            closes: whether to close the store with the transport.
            shards: how many parts the queue has; the same in all processes, for as long as there is the queue.
        """
        super().__init__(queue, store.where, max_attempts, on_lost)
        self.shards = shards or (SHARDS if store.settings.kind == "cluster" else 1)
        self._store = store
        self._closes = closes
        self._offset = store.clock_offset_ms
        self._keys = [[self._key(shard, part) for part in _PARTS] for shard in range(self.shards)]
        self._first = 0
        """The shard that is asked first; another one each time."""
        self._out: dict[int, _Out] = {}
        """Shards that cannot be reached, while others can."""
        self._wakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Wakes] = weakref.WeakKeyDictionary()

    @classmethod
    async def open(
        cls,
        store: RedisStore,
        queue: str = "default",
        *,
        max_attempts: int = MAX_ATTEMPTS,
        on_lost: OnLost | None = None,
        closes: bool = False,
        shards: int | None = None,
    ) -> RedisTransport:
        """The queue of that name on a store's servers.

        Raises:
            StoreUnsuitable: other processes use the queue with another number of shards.
            StoreError: the servers cannot be used.
            InvalidInput: the name or the limit cannot be.
        """
        transport = cls(store, queue, max_attempts=max_attempts, on_lost=on_lost, closes=closes, shards=shards)
        server, meta = await store.server(), transport._key(0, "meta")
        await server.call(meta, "HSETNX", meta, "shards", transport.shards)
        found = int(await server.call(meta, "HGET", meta, "shards"))
        if found != transport.shards:
            raise StoreUnsuitable(store.where, f"the queue {queue!r} has {found} shards, not {transport.shards}")
        return transport

    # --- keys ----------------------------------------------------------------------------------------------------

    def shard_of(self, key: str) -> int:
        """The part that a key's entries are in."""
        return zlib.crc32(key.encode()) % self.shards

    def _key(self, shard: int, part: str) -> bytes:
        return f"{self._store.settings.name}:{{{self.queue}-{shard}}}:{part}".encode()

    def _shard_of_entry(self, entry: str) -> int | None:
        """The part that an entry is in, by its id; None where it is no id of ours."""
        last = entry.rpartition("-")[2]
        known = last.isascii() and last.isdecimal() and len(last) < 6 and int(last) < self.shards
        return int(last) if known else None

    async def _run(
        self,
        script: Script,
        shard: int,
        *arguments: bytes | str | int,
        repeatable: bool,
        more_keys: Sequence[bytes] = (),
        wait: int = 0,
    ) -> tuple[Any, int]:
        server = await self._store.server()
        first, *others = self._keys[shard]
        given = (self._offset, self.max_attempts, HISTORY, shard, *arguments)
        return await server.run(
            script, first, *given, repeatable=repeatable, more_keys=(*others, *more_keys), wait=wait
        )

    # --- the protocol --------------------------------------------------------------------------------------------

    async def _publish(self, key: str, body: bytes, delay_ms: int) -> str:
        wait = self._store.settings.wait
        entry, acknowledged = await self._run(
            scripts.PUBLISH, self.shard_of(key), key.encode(), body, delay_ms, repeatable=False, wait=wait
        )
        if acknowledged < wait:
            reason = f"an entry is in on its master, but only {acknowledged} of {wait} replicas have confirmed it"
            raise StoreUnavailable(self.where, reason)
        return entry.decode()

    async def _take(self, consumer: str, count: int, lease_ms: int) -> Taken:
        self._first = (self._first + 1) % self.shards
        deliveries: list[Delivery] = []
        dues: list[int] = []
        left = answered = 0
        seen = [b"0-0"] * self.shards
        for shard in (*range(self._first, self.shards), *range(self._first)):
            if not await self._is_there(shard):
                continue
            arguments = (
                *(consumer.encode(), count - len(deliveries), lease_ms, LEASE_ENDED, LIMIT_REACHED),
                *(_FORGET_CONSUMERS, left),
            )
            try:
                # An answer that was lost may have handed out something: that comes again when its lease is over.
                reply, _ = await self._run(scripts.TAKE, shard, *arguments, repeatable=False)
            except StoreUnavailable as e:
                if self.shards == 1:
                    raise
                self._leave_out(shard, e)
                if deliveries:
                    break  # they are not to wait for others that may be away too
                continue
            except BaseException:
                if deliveries:
                    await self._return(deliveries)
                raise
            due, seen[shard], group_gone, lost, others, handed, left = reply
            answered += 1
            deliveries += [
                Delivery(name.decode(), key.decode(), body, attempt, consumer, fence, int(published))
                for name, key, body, attempt, fence, published in handed
            ]
            if lost or others or group_gone:
                what = "the stream or its group was gone, and was made anew" if group_gone else "they were deleted"
                self._report([name.decode() for name in lost], len(lost) + others, what)
            if len(deliveries) == count:
                break
            if due >= 0:
                dues.append(due)
        if self._out and not deliveries:
            if not answered:
                error = next(iter(self._out.values())).error
                raise StoreUnavailable(error.where, error.reason, applied=error.applied) from error
            dues.append(round(_PROBE * 1000))
        return Taken(deliveries, min(dues, default=None), tuple(seen))

    def _leave_out(self, shard: int, error: StoreUnavailable) -> None:
        before = self._out.get(shard)
        if before is None:
            log.warning("%s: part %d of queue %s is away, the others go on: %s", self.where, shard, self.queue, error)
        pause = _LEFT_OUT[0] if before is None else min(2 * before.pause, _LEFT_OUT[1])
        self._out[shard] = _Out(error, time.monotonic() + pause, pause)

    async def _is_there(self, shard: int) -> bool:
        """Whether a shard is to be asked: one that was left out, once it answers again."""
        out = self._out.get(shard)
        if out is None:
            return True
        if time.monotonic() < out.until:
            return False
        try:
            async with asyncio.timeout(_PROBE):
                await self._run(scripts.DEPTH, shard, repeatable=True)
        except (StoreUnavailable, TimeoutError):
            self._leave_out(shard, out.error)
            return False
        self._out.pop(shard, None)
        log.info("%s: part %d of queue %s is there again", self.where, shard, self.queue)
        return True

    async def _return(self, deliveries: list[Delivery]) -> None:
        """Give back what other shards handed out before one failed: nobody would get to know of it."""
        try:
            for delivery in deliveries:
                await self._release(delivery, 0)
        except StoreUnavailable:
            return  # it comes again when its lease is over

    async def _wait(self, seconds: float, seen: tuple[bytes, ...]) -> None:
        loop = asyncio.get_running_loop()
        wakes = self._wakes.get(loop)
        if wakes is None:
            server = await self._store.server()
            wakes = self._wakes.setdefault(loop, Wakes(server, [keys[-1] for keys in self._keys]))
        await wakes.wait(seconds, seen)

    async def _extend(self, delivery: Delivery, lease_ms: int) -> Settled:
        return await self._settle(delivery, "extend", lease_ms, repeatable=True)

    async def _acknowledge(self, delivery: Delivery) -> Settled:
        return await self._settle(delivery, "acknowledge")

    async def _retry(self, delivery: Delivery, delay_ms: int, reason: str) -> Settled:
        return await self._settle(delivery, "retry", delay_ms, reason)

    async def _release(self, delivery: Delivery, delay_ms: int) -> Settled:
        return await self._settle(delivery, "release", delay_ms)

    async def _kill(self, delivery: Delivery, reason: str) -> Settled:
        return await self._settle(delivery, "kill", 0, reason)

    async def _settle(
        self, delivery: Delivery, what: str, length: int = 0, reason: str = "", *, repeatable: bool = False
    ) -> Settled:
        arguments = (delivery.id, delivery.fence, what, length, reason)
        said, _ = await self._run(scripts.SETTLE, self.shard_of(delivery.key), *arguments, repeatable=repeatable)
        return Settled(said)

    async def _letters(self, after: str, limit: int) -> list[DeadLetter]:
        pages = [await self._run(scripts.LETTERS, shard, after, limit, repeatable=True) for shard in range(self.shards)]
        found = [
            DeadLetter(
                name.decode(), key.decode(), body, int(at), n, reason.decode(), _histories.decode(history), int(died)
            )
            for page, _ in pages
            for name, key, body, at, n, reason, history, died in page
        ]
        return sorted(found, key=lambda letter: letter.id)[:limit]

    async def revive(self, entry: str) -> bool:
        """See `Transport.revive`."""
        return await self._exhume(entry, "revive")

    async def discard(self, entry: str) -> bool:
        """See `Transport.discard`."""
        return await self._exhume(entry, "discard")

    async def _exhume(self, entry: str, what: str) -> bool:
        shard = self._shard_of_entry(entry)
        if shard is None:
            return False
        done, _ = await self._run(scripts.EXHUME, shard, entry, what, repeatable=False)
        return done > 0

    async def depth(self) -> Depth:
        """See `Transport.depth`."""
        found = [(await self._run(scripts.DEPTH, shard, repeatable=True))[0] for shard in range(self.shards)]
        return Depth(*(sum(numbers) for numbers in zip(*found, strict=True)))

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the clock of this object forward: the test clock."""
        self._held.clear()
        self._offset += milliseconds

    async def _close(self) -> None:
        for loop, wakes in list(self._wakes.items()):
            if loop is asyncio.get_running_loop():
                await wakes.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wakes.close(), loop))
        if self._closes:
            await self._store.close()

    # --- the lifecycle of traces -----------------------------------------------------------------------------------

    def lifecycle(self, key: str, *, ttl_seconds: float = _LIFECYCLE_TTL) -> QueueLifecycle:
        """Where the stages of traces are kept that deliveries of `key` lead to: beside the queue, for `finish`."""
        return QueueLifecycle(self, key, round(ttl_seconds * 1000))

    async def finish(
        self, delivery: Delivery, trace_id: str, *, stage: str = COMPLETED, ttl_seconds: float = _LIFECYCLE_TTL
    ) -> Finished:
        """The last step of a turn, all of it or nothing (journal.md T4): acknowledge, record the stage, leave the active index.

        COMPLETED follows DELIVERED; FAILED and QUARANTINED follow whatever has no end yet. What has that end already is
        acknowledged.

        Raises:
            InvalidInput: the stage is no end.
            StoreError: with `applied` None it may have been done; ask again, `GONE` then means that it was.
        """
        if stage not in ENDS:
            raise InvalidInput("stage", f"must be one of {', '.join(ENDS)}")
        lifecycle = self.lifecycle(delivery.key)
        said, _ = await self._run(
            scripts.FINISH,
            self.shard_of(delivery.key),
            *(delivery.id, delivery.fence, trace_id.encode(), stage, round(ttl_seconds * 1000)),
            repeatable=False,
            more_keys=lifecycle.keys(trace_id),
        )
        finished = Finished(said)
        if finished is not Finished.NOT_DELIVERED:
            self._told(delivery, Settled(said))
        return finished

    async def active(self) -> list[Active]:
        """Traces that were begun and not ended, the oldest first: also those whose entries were lost (field case 12)."""
        server = await self._store.server()
        keys = [self._key(shard, "active") for shard in range(self.shards)]
        # Not WITHSCORES: RESP2 and RESP3 tell scores in different forms.
        names = await server.call_many([(key, ("ZRANGE", key, 0, -1)) for key in keys])
        pairs = [(key, name) for key, found in zip(keys, names, strict=True) for name in found]
        scores = await server.call_many([(key, ("ZSCORE", key, name)) for key, name in pairs])
        found = [
            Active(name.decode(), int(float(score))) for (_, name), score in zip(pairs, scores, strict=True) if score
        ]
        return sorted(found, key=lambda active: active.since)

    async def record_stage(self, key: str, trace_id: str, predecessor: str | None, stage: str, ttl_ms: int) -> bool:
        """See `QueueLifecycle.advance`."""
        server = await self._store.server()
        home, active = self.lifecycle(key).keys(trace_id)
        recorded, _ = await server.run(
            scripts.ADVANCE,
            home,
            *(trace_id.encode(), predecessor or "", stage, ttl_ms),
            repeatable=True,
            more_keys=[active],
        )
        return bool(recorded)

    async def stage_of(self, key: str, trace_id: str) -> str | None:
        """See `QueueLifecycle.stage`."""
        server = await self._store.server()
        home, _ = self.lifecycle(key).keys(trace_id)
        found: bytes | None = await server.call(home, "HGET", home, "stage")
        return None if found is None else found.decode()

    def lifecycle_keys(self, key: str, trace_id: str) -> tuple[bytes, bytes]:
        """The keys of a trace's lifecycle and of the active index that it is in."""
        shard = self.shard_of(key)
        return self._key(shard, f"stage:{trace_id}"), self._key(shard, "active")


class QueueLifecycle:
    """The stage of each trace, beside the queue. A `turnkeeper.turn.lifecycle.Lifecycle`; safe to repeat."""

    def __init__(self, transport: RedisTransport, key: str, ttl_ms: int) -> None:
        """Use `RedisTransport.lifecycle`."""
        self._transport = transport
        self._key = key
        self._ttl_ms = ttl_ms

    def keys(self, trace_id: str) -> tuple[bytes, bytes]:
        """The keys of a trace's lifecycle and of the active index that it is in."""
        return self._transport.lifecycle_keys(self._key, trace_id)

    async def stage(self, trace_id: str) -> str | None:
        """The stage recorded, or None."""
        return await self._transport.stage_of(self._key, trace_id)

    async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
        """Record `stage` if `predecessor` is recorded; True also if `stage` is recorded already."""
        return await self._transport.record_stage(self._key, trace_id, predecessor, stage, self._ttl_ms)
