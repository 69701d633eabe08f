"""A lifecycle projection in Redis: one hash a trace, beside the trace's logs in a cluster (journal.md T4)."""

from __future__ import annotations

from collections.abc import Callable

from turnkeeper.stores.redis import scripts
from turnkeeper.stores.redis.store import RedisStore


class RedisLifecycle:
    """The stage of each trace, for the transport that consumes them. A `turnkeeper.turn.lifecycle.Lifecycle`.

    A stage is recorded only behind its predecessor, and recording it again is harmless, so a lost answer is simply asked for
    again.
    """

    def __init__(self, store: RedisStore, tag_of: Callable[[str], str], *, ttl_seconds: float = 604_800) -> None:
        """
        Args:
            store: whose servers and key name are used.
            tag_of: the hash tag of a trace's keys: `turnkeeper.turn.identity.trace_hash`. It keeps the trace's lifecycle and
                logs in one slot, so that the consumer's last step can be one script.
            ttl_seconds: how long a stage is kept after it was recorded.
        """
        self._store = store
        self._tag_of = tag_of
        self._ttl_ms = round(ttl_seconds * 1000)

    def key(self, trace_id: str) -> bytes:
        """The key of a trace's lifecycle."""
        return f"{self._store.settings.name}.stage:{{{self._tag_of(trace_id)}}}".encode()

    async def stage(self, trace_id: str) -> str | None:
        """The stage recorded, or None."""
        server = await self._store.server()
        found: bytes | None = await server.call(key := self.key(trace_id), "HGET", key, "stage")
        return None if found is None else found.decode()

    async def advance(self, trace_id: str, predecessor: str | None, stage: str) -> bool:
        """Record `stage` if `predecessor` is recorded; True also if `stage` is recorded already."""
        server = await self._store.server()
        recorded, _ = await server.run(
            scripts.STAGE, self.key(trace_id), predecessor or "", stage, self._ttl_ms, repeatable=True
        )
        return bool(recorded)
