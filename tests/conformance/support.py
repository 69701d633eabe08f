"""What the conformance tests share: a store with a test clock, heads, and short ways to append."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnkeeper.log.record import NOWHERE, Appended, Behind, Head, HeadQuery, Position, Tail
from turnkeeper.log.store import Store

HEAD = Head(kind="test", phase="OPEN")


class ClockedStore(Store, Protocol):
    """A store whose clock a test can move on."""

    async def advance_clock(self, milliseconds: int) -> None:
        """Move the store's clock forward, for everybody who uses the store."""
        ...


async def append(
    store: Store, key: str, *bodies: bytes, expected: Position = NOWHERE, head: Head = HEAD, compact_through: int = 0
) -> Position:
    """Append where the tail is known; the new position."""
    outcome = await store.append(key, bodies, expected=expected, head=head, compact_through=compact_through)
    assert isinstance(outcome, Appended), outcome
    return outcome.position


def bodies(tail: Tail) -> list[bytes]:
    """The bodies of a tail."""
    return [record.body for record in tail.records]


async def whole(store: Store, key: str) -> list[tuple[int, bytes]]:
    """Everything that a reader who knows nothing gets: sequence and body of every record."""
    return [(record.seq, record.body) for record in (await store.read(key)).records]


async def listed(store: Store, query: HeadQuery = HeadQuery()) -> Sequence[Head]:  # noqa: B008  # immutable
    """All heads that match."""
    return [head async for head in store.heads(query)]


async def contend(store: Store, key: str, name: str, count: int) -> list[tuple[int, bytes]]:
    """Append `count` records whatever others do; what was accepted, by sequence."""
    accepted: list[tuple[int, bytes]] = []
    position = NOWHERE
    while len(accepted) < count:
        body = f"{name}:{len(accepted)}".encode()
        outcome = await store.append(key, [body], expected=position, head=HEAD)
        if isinstance(outcome, Appended):
            position = outcome.position
            accepted.append((position.seq, body))
        else:
            assert isinstance(outcome, Behind)
            position = outcome.tail.position
    return accepted
