"""The transport: a queue of entries that are handed out under a lease until they are acknowledged, and its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

MAX_BODY: Final = 1 << 20
"""Bytes of a body at the most."""
MAX_NAME: Final = 512
"""Characters of a key or of a consumer's name at the most."""
MAX_COUNT: Final = 1000
"""Entries that one call of `consume` hands out at the most."""
MAX_ATTEMPTS: Final = 5
"""Deliveries of an entry, unless a transport is opened with another limit."""
HISTORY: Final = 20
"""What is remembered of an entry's deliveries: the last so many that failed."""
LEASE_ENDED: Final = "its lease ended"
"""The reason in an entry's history where its consumer died, or took too long."""
LIMIT_REACHED: Final = "delivered as often as is allowed, and not acknowledged"
"""The reason of a dead letter whose last consumer said nothing."""


class Failure(msgspec.Struct, frozen=True):
    """A delivery that did not end in an acknowledgement.

    Attributes:
        at: when that was known, in milliseconds of the transport's clock.
        attempt: which delivery it was, from 1.
        consumer: who had it.
        reason: what the consumer said, or `LEASE_ENDED`.
    """

    at: int
    attempt: int
    consumer: str
    reason: str


class Delivery(NamedTuple):
    """An entry in a consumer's hands.

    Attributes:
        id: the entry's, the same in all of its deliveries.
        key: as published: what it is for.
        body: as published.
        attempt: which delivery this is, from 1; counted by the transport. What was released does not count.
        consumer: who holds it.
        fence: of this delivery; another one of the same entry has another.
        published: when, in milliseconds of the transport's clock.
    """

    id: str
    key: str
    body: bytes
    attempt: int
    consumer: str
    fence: int
    published: int


class DeadLetter(NamedTuple):
    """An entry that is not delivered any more, until somebody revives it.

    Attributes:
        id, key, body, published: the entry, as it was published.
        attempts: how often it was delivered.
        reason: why it is here.
        history: what became of its deliveries, oldest first; the last `HISTORY` of them.
        died: since when, in milliseconds of the transport's clock.
    """

    id: str
    key: str
    body: bytes
    published: int
    attempts: int
    reason: str
    history: Sequence[Failure]
    died: int


class Depth(NamedTuple):
    """How many entries there are: to be handed out now, later, in the hands of consumers, and dead."""

    ready: int
    delayed: int
    in_flight: int
    dead: int


class Lost(NamedTuple):
    """Entries that are gone without having been acknowledged: deleted, trimmed or evicted behind the transport's back.

    Attributes:
        queue: the queue.
        ids: those that are known, in no order.
        number: how many, also where their ids are not known; None where nobody can tell.
        what: what was noticed.
    """

    queue: str
    ids: Sequence[str]
    number: int | None
    what: str


OnLost = Callable[[Lost], None]
"""Told of what was lost; must not raise, and is called in the consumer's event loop."""


class Transport(Protocol):
    """A queue. At least once: whoever works on a delivery does so behind a journal that knows what was done.

    TR-1  What was published is durable when `publish` returns, at the level that the server's page promises, and is handed out
          to one of the consumers. Input that is refused leaves nothing behind.
    TR-2  A delivery is held by one consumer until its lease ends. Leases are judged on the transport's clock, the server's, in
          the step that hands out or settles; no consumer's clock decides anything.
    TR-3  An entry whose lease ended comes again, with an attempt one higher and another fence.
    TR-4  Only who holds a delivery settles it. `extend`, `acknowledge`, `retry_later`, `release` and `dead_letter` of a delivery
          whose lease is over, or that is settled already, return False and change nothing.
    TR-5  What was acknowledged never comes again.
    TR-6  Delays run on the transport's clock: an entry does not come before its time, and comes then without anybody's doing.
    TR-7  An entry is delivered `max_attempts` times at the most; then it is a dead letter, with its body, the reason and its
          history. It is never dropped in silence, and is one dead letter at the most. The count is the transport's: a consumer
          that dies raises it. What is released does not count.
    TR-8  Entries of one key come in the order of their publication, as long as none of them was delayed, retried, or left by
          its consumer. Entries that fail hold up nobody: what was left by its consumer comes behind what is ready by then, and
          one of those with a call of `consume`, so that an entry that kills its consumers takes few others with it.
    TR-9  Bodies are opaque: what goes in comes out, byte for byte, up to `MAX_BODY`.
    TR-10 What was lost behind the transport's back is reported, with ids where they can be known, and holds up nothing:
          consumers go on with what is there, and what they hold stays theirs.
    TR-11 `consume` returns at once when there is something, and otherwise waits without asking all the time. Where it is
          cancelled, nothing stays held longer than its lease; what it was handed already, it gives back.
    TR-12 Dead letters are listed, oldest entries first, and can be revived: then they come as new ones, with their history.
          Of several who revive one, one does.
    TR-13 `close` lets waiting consumers go with nothing; deliveries in hand stay held until their leases end.

    Errors of all of them: `StoreError`, as the store of the same URL raises it; with `applied` None it may have been done. An
    acknowledgement whose answer was lost may be repeated: False then means that the entry is not held any more, either way.
    """

    async def publish(self, key: str, body: bytes = b"", *, delay: float = 0.0) -> str:
        """Put an entry in the queue, and give its id (TR-1).

        Args:
            key: what it is for: entries of one key keep their order (TR-8). 1 to `MAX_NAME` characters.
            delay: seconds before which it is not handed out (TR-6).

        Raises:
            ValueTooLarge: `body` is over `MAX_BODY`.
            InvalidInput: the key or the delay cannot be.
        """
        ...

    async def consume(
        self, consumer: str, *, count: int = 1, wait_seconds: float = 0.0, lease_seconds: float = 30.0
    ) -> list[Delivery]:
        """Up to `count` entries, as soon as there is one; none where there is nothing for `wait_seconds` (TR-2, TR-11).

        Args:
            consumer: who gets them; the name tells people where an entry is.
            count: 1 to `MAX_COUNT`.
            lease_seconds: how long they are held, unless they are extended.

        Raises:
            InvalidInput: an argument cannot be.
        """
        ...

    async def extend(self, delivery: Delivery, lease_seconds: float) -> bool:
        """Hold a delivery for `lease_seconds` from now on. False: it is not held any more, stop working on it (TR-4)."""
        ...

    async def acknowledge(self, delivery: Delivery) -> bool:
        """The entry is done with (TR-5). False: it was not held any more, and may have gone to somebody else (TR-4)."""
        ...

    async def retry_later(self, delivery: Delivery, *, delay: float, reason: str) -> bool:
        """Give it back as failed (TR-6, TR-7): it comes again after `delay` seconds, or is dead where the limit is reached."""
        ...

    async def release(self, delivery: Delivery, *, delay: float = 0.0) -> bool:
        """Give it back as not tried: it comes again after `delay` seconds, with the same attempt; without a delay, first."""
        ...

    async def dead_letter(self, delivery: Delivery, *, reason: str) -> bool:
        """Put it with the dead letters now (TR-7)."""
        ...

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> list[DeadLetter]:
        """Dead letters behind the id `after`, oldest entries first (TR-12)."""
        ...

    async def revive(self, entry: str) -> bool:
        """Put a dead letter back in the queue, as a new one of the same id (TR-12). False: it is not dead."""
        ...

    async def discard(self, entry: str) -> bool:
        """Forget a dead letter for good. False: it is not dead."""
        ...

    async def depth(self) -> Depth:
        """How many entries there are, at one moment for each part of the queue."""
        ...

    async def close(self) -> None:
        """Let go of the queue (TR-13)."""
        ...
