"""The store protocol: the one small operation that every backend offers, and its rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from turnkeeper.errors import InvalidInput
from turnkeeper.log.record import Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Record, Tail

T = TypeVar("T")


class Promise(NamedTuple):
    """One line of what a store promises as it is set up: a name, what was found, whether it holds, advice."""

    name: str
    found: str
    holds: bool
    advice: str = ""


class Store(Protocol):
    """Logs under keys. Every backend MUST keep these rules; the conformance suite names the ones it proves.

    - LOG-1 An append is all or nothing, and durable when it returns, at the level that the store's page promises.
    - LOG-2 It succeeds only if the tail equals `expected`. Otherwise `Behind` brings every record after `expected` in
      the same round trip.
    - LOG-3 Every record is stamped `at` with the store's clock, inside the append. That clock never goes back within
      a log.
    - LOG-4 `guard` is judged on that clock in that same atomic step, after the tail was found equal. `GuardFailed`
      brings the store's time.
    - LOG-5 Sequences are dense from 1 and never go back, also across compaction. A log carries a random incarnation,
      new for each life of its key; a position of another life never matches.
    - LOG-6 After a lost answer (cancelled, timed out, cut) the append has happened wholly or not at all, and a read
      tells which. Cancellation never leaves a half-written step or a held lock.
    - LOG-7 Bodies are opaque. What goes in comes out, byte for byte.
    - LOG-8 `head` is for listing. It may lag behind the logs and never leads them.
    - LOG-9 Retention comes with the append, never with a read. A log is not dropped before `keep_until`.
    - LOG-10 Where a store tells of changes (`NotifyingStore`): a wait may end early, and never misses a change for longer
      than its timeout. It holds nobody up, and leaves nothing behind, however it ends.

    Errors are `turnkeeper.errors.StoreError`s: with `applied` False nothing was changed, with None read again.
    """

    async def append(
        self,
        key: str,
        records: Sequence[bytes],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
        compact_through: int = 0,
    ) -> Appended | Behind | GuardFailed:
        """Append `records` behind `expected`; drop those up to `compact_through` in the same step.

        `NOWHERE` as `expected` creates the log. At least one record; at most one append of a key at a time wins.
        """
        ...

    async def read(self, key: str, *, after: Position = ...) -> Tail:
        """Records behind `after`, the tail, and the store's time. A key that does not exist has the tail NOWHERE."""
        ...

    def heads(self, query: HeadQuery = ...) -> AsyncIterator[Head]:
        """Heads that match, by key. Holds no lock and no transaction between two of them."""
        ...

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """Drop the log; with `unchanged_since`, only if its tail is that sequence. Whether there was one to drop."""
        ...

    async def tidy(self) -> None:
        """Hand space that erased logs took back to the system."""
        ...

    async def promises(self) -> list[Promise]:
        """What this store, as it is set up, promises; for operators."""
        ...

    async def close(self) -> None:
        """Finish what was asked, and let go of every resource."""
        ...


@runtime_checkable
class RestoringStore(Protocol):
    """A store that logs can be moved to from another one."""

    async def restore(
        self, key: str, records: Sequence[Record], *, position: Position, compacted: int, head: Head
    ) -> bool:
        """Put a log there as it was elsewhere: sequences, times, bodies and incarnation, in one step.

        `compacted` is the last sequence that compaction had dropped. False, and nothing changed, if the key has a log.
        The log's clock goes on from its last record, also where this store's clock is behind (LOG-3).
        """
        ...


@runtime_checkable
class NotifyingStore(Protocol):
    """A store that can be waited on, so that who waits for another writer need not poll."""

    async def changed(self, key: str, *, since: Position, timeout: float) -> bool:
        """Wait until the log has moved on from `since` (or was erased), at most `timeout` seconds. Whether it has.

        At once where it has already. True says that a read brings something new; False says nothing about the time
        behind the answer (LOG-10).
        """
        ...


@runtime_checkable
class PrivateStore(Protocol):
    """A store that may be of one process alone."""

    @property
    def private(self) -> bool:
        """Whether no other process can reach it."""
        ...


@runtime_checkable
class TransactionalStore(Protocol):
    """A store whose transaction can hold a tool's effect and its completion (the policy `transactional=True`)."""

    async def append_with(
        self,
        key: str,
        effect: Callable[[Any], T],
        records: Callable[[T], Sequence[bytes]],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
    ) -> tuple[T, Appended] | Behind | GuardFailed:
        """Run `effect` on the store's transaction and append `records(its result)` with it: both, or neither.

        `effect` is called only if the tail is `expected` and the guard holds, at most once for each append that
        succeeds. What it raises comes back to the caller, and nothing has happened.
        """
        ...


@runtime_checkable
class WrappingStore(Protocol):
    """A store whose records are kept by another one, in another form: sealed, say."""

    @property
    def beneath(self) -> Store:
        """The store that keeps them."""
        ...


def as_kept(store: Store) -> Store:
    """The store that gives records as they are kept: for who counts, erases or copies them without looking inside."""
    while isinstance(store, WrappingStore):
        store = store.beneath
    return store


_ADAPTERS: Final = {"redis": "turnkeeper.stores.redis"}
"""By the package that a client comes from: the module whose `from_client` makes a store of it."""


class Client(Protocol):
    """Another library's client that `as_store` takes, as far as one can be told by its form."""

    async def aclose(self) -> None:
        """Close it."""
        ...


def as_store(given: Store | Client) -> Store:
    """A store as it is, or the store on the servers of another library's client (`redis.asyncio`'s, say).

    Raises:
        InvalidInput: it is neither.
    """
    if callable(getattr(given, "promises", None)):
        return cast("Store", given)
    packages = [cls.__module__.partition(".")[0] for cls in type(given).__mro__]
    adapter = next((_ADAPTERS[package] for package in packages if package in _ADAPTERS), None)
    if adapter is None:
        raise InvalidInput(
            "store", f"must be a store, or a client of {', '.join(_ADAPTERS)}, not {type(given).__name__}"
        )
    return cast("Store", import_module(adapter).from_client(given))
