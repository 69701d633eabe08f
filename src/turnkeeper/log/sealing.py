"""A store that keeps its records encrypted, in any other store; nothing above or below it knows.

A sealed record is a frame of its own:

| bytes | what |
| --- | --- |
| 1 | 0x03 |
| 1 | the form: 1 |
| 1 + *n* | the key's id, behind its length |
| 4 | the first bytes of an HMAC by the key, which tell a wrong key from a changed record |
| 12 | the nonce, random |
| the rest | AES-256-GCM of the record's body, with its tag of 16 bytes |

Authenticated with it are all of the above before the nonce, the record's sequence and the log's key: a record opens only in its
own place in its own log. The cipher's key is derived from the keyring's key and the log's key (`keyring.Key`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from turnkeeper.errors import InvalidInput, KeyWrong, RecordPlain, RecordTampered
from turnkeeper.log.frames import SEALED
from turnkeeper.log.keyring import CHECK_BYTES, Key, Keyring
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Record, Tail
from turnkeeper.log.store import (
    NotifyingStore,
    PrivateStore,
    Promise,
    RestoringStore,
    Store,
    TransactionalStore,
    WrappingStore,
)

T = TypeVar("T")

_FORM: Final = 1
_BEGIN: Final = bytes([SEALED, _FORM])
_NONCE: Final = 12
_TAG: Final = 16


class _Parts(NamedTuple):
    """A sealed record, taken apart; nothing in it is proven yet."""

    key_id: str
    header: bytes
    nonce: bytes
    rest: bytes


def is_sealed(body: bytes) -> bool:
    """Whether a record's body is a sealed one, as far as its form tells."""
    return _parts(body) is not None


def key_id_of(body: bytes) -> str | None:
    """The id of the key that a record's body says it is sealed with; None for one that is not sealed."""
    parts = _parts(body)
    return None if parts is None else parts.key_id


def _parts(body: bytes) -> _Parts | None:
    """None where the form is another one, or it was cut."""
    if len(body) < 3 or body[:2] != _BEGIN:
        return None
    end = 3 + body[2] + CHECK_BYTES
    if len(body) < end + _NONCE + _TAG:
        return None
    try:
        key_id = body[3 : 3 + body[2]].decode("ascii")
    except UnicodeDecodeError:
        return None
    return _Parts(key_id, body[2:end], body[end : end + _NONCE], body[end + _NONCE :])


def _bound_to(header: bytes, log: str, seq: int) -> bytes:
    # Each part's end is known: the header tells its length, and the sequence has eight bytes.
    return _BEGIN + header + seq.to_bytes(8, "big") + log.encode()


def seal(key: Key, log: str, seq: int, body: bytes) -> bytes:
    """A record's body for that place in that log."""
    nonce = os.urandom(_NONCE)
    return _BEGIN + key.header + nonce + key.cipher(log).encrypt(nonce, body, _bound_to(key.header, log, seq))


async def unseal(keyring: Keyring, log: str, record: Record) -> bytes:
    """The body of a record of that log.

    Raises:
        EncryptionError: it cannot be opened; says which log, record and key.
    """
    body = record.body
    if body[:1] != _BEGIN[:1]:
        if keyring.allow_plain:
            return body
        raise RecordPlain(
            _where(log, record.seq),
            None,
            "is not encrypted, and the keyring allows none that are not (allow_plain, TURNKEEPER_ALLOW_PLAIN)",
        )
    parts = _parts(body)
    if parts is None:
        raise RecordTampered(_where(log, record.seq), None, "has a sealed form that is not known here, or was changed")
    key = await keyring.key(parts.key_id, _where(log, record.seq))
    if parts.header != key.header:
        raise KeyWrong(
            _where(log, record.seq), key.id, f"was encrypted with another key {key.id!r} than the one in this keyring"
        )
    try:
        return key.cipher(log).decrypt(parts.nonce, parts.rest, _bound_to(parts.header, log, record.seq))
    except Exception:  # InvalidTag, which cannot be named without importing it; and it has nothing to tell
        raise RecordTampered(
            _where(log, record.seq),
            key.id,
            f"does not open with its key {key.id!r}: it was changed, or moved here from another log or place",
        ) from None


def _where(log: str, seq: int) -> str:
    return f"{log} record {seq}"


class EncryptedStore:
    """Any store, with the bodies of its records encrypted; it can do what that store can.

    Not encrypted are the logs' keys, their heads (`Head`: phase, owner, labels, times), and how long each record is.
    """

    def __init__(self, beneath: Store, keyring: Keyring) -> None:
        """
        Args:
            beneath: where the records are kept; closed with this one.
            keyring: what they are sealed with.

        Raises:
            InvalidInput: `beneath` is encrypted already.
        """
        if isinstance(beneath, WrappingStore):
            raise InvalidInput("store", "is encrypted already")
        self.beneath = beneath
        self.keyring = keyring
        # What only some stores can, this one can where that one can. It is set here and not by `__getattr__`: since Python 3.12
        # `isinstance` with a protocol does not ask that, and a name unknown here might hand out or take bodies.
        if isinstance(beneath, TransactionalStore):
            self.append_with = self._append_with
        if isinstance(beneath, RestoringStore):
            self.restore = self._restore
        if isinstance(beneath, NotifyingStore):
            self.changed = beneath.changed
        if isinstance(beneath, PrivateStore):
            self.private = beneath.private
        clock = getattr(beneath, "advance_clock", None)
        if clock is not None:
            self.advance_clock: Any = clock
            """The test clock's."""

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
        """See `Store`. Raises EncryptionError as well: with nothing appended."""
        secret = await self._current(key, expected.seq + 1)
        sealed = self._sealed(secret, key, expected, records)
        outcome = await self.beneath.append(
            key, sealed, expected=expected, head=head, guard=guard, compact_through=compact_through
        )
        return Behind(await self._opened(key, outcome.tail)) if isinstance(outcome, Behind) else outcome

    async def _append_with(
        self,
        key: str,
        effect: Callable[[Any], T],
        records: Callable[[T], Sequence[bytes]],
        *,
        expected: Position,
        head: Head,
        guard: Guard | None = None,
    ) -> tuple[T, Appended] | Behind | GuardFailed:
        """See `TransactionalStore`. What the effect itself writes in the transaction is not encrypted."""
        assert isinstance(self.beneath, TransactionalStore)
        secret = await self._current(key, expected.seq + 1)  # here: `records` is called where nothing can be waited for
        outcome = await self.beneath.append_with(
            key,
            effect,
            lambda result: self._sealed(secret, key, expected, records(result)),
            expected=expected,
            head=head,
            guard=guard,
        )
        return Behind(await self._opened(key, outcome.tail)) if isinstance(outcome, Behind) else outcome

    async def read(self, key: str, *, after: Position = NOWHERE) -> Tail:
        """See `Store`. Raises EncryptionError as well."""
        return await self._opened(key, await self.beneath.read(key, after=after))

    async def _restore(
        self, key: str, records: Sequence[Record], *, position: Position, compacted: int, head: Head
    ) -> bool:
        """See `RestoringStore`."""
        assert isinstance(self.beneath, RestoringStore)
        secret = await self._current(key, position.seq)
        if any(is_sealed(record.body) for record in records):
            raise InvalidInput("records", f"of {key} are encrypted already; restore them in the store beneath")
        sealed = [record._replace(body=seal(secret, key, record.seq, record.body)) for record in records]
        return await self.beneath.restore(key, sealed, position=position, compacted=compacted, head=head)

    def heads(self, query: HeadQuery = HeadQuery()) -> AsyncIterator[Head]:  # noqa: B008  # immutable
        """See `Store`."""
        return self.beneath.heads(query)

    async def erase(self, key: str, *, unchanged_since: int | None = None) -> bool:
        """See `Store`. Needs no key."""
        return await self.beneath.erase(key, unchanged_since=unchanged_since)

    async def tidy(self) -> None:
        """See `Store`."""
        await self.beneath.tidy()

    async def promises(self) -> list[Promise]:
        """See `Store`; and what is promised of the encryption."""
        ring = self.keyring
        plain = Promise(
            "plain records",
            "read as well" if ring.allow_plain else "refused",
            not ring.allow_plain,
            "anybody who can write to the store can put records in; `turnkeeper copy --rekey`, then do not allow them",
        )
        found = f"AES-256-GCM, new records with the key {ring.current}, of {', '.join(ring.ids)}"
        return [*await self.beneath.promises(), Promise("encrypted", found, True), plain]

    async def close(self) -> None:
        """See `Store`."""
        await self.beneath.close()

    async def _current(self, log: str, seq: int) -> Key:
        return await self.keyring.key(self.keyring.current, _where(log, seq))

    def _sealed(self, secret: Key, log: str, expected: Position, records: Sequence[bytes]) -> list[bytes]:
        # Sequences are dense (LOG-5) and an append is in only behind `expected` (LOG-2): so the places are known before it is.
        return [seal(secret, log, seq, body) for seq, body in enumerate(records, expected.seq + 1)]

    async def _opened(self, log: str, tail: Tail) -> Tail:
        records = [record._replace(body=await unseal(self.keyring, log, record)) for record in tail.records]
        return tail._replace(records=records)
