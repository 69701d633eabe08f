"""Moving logs between stores, and erasing them: byte for byte, resumable, verified, with a receipt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from turnkeeper.errors import TurnkeeperError
from turnkeeper.log.record import NOWHERE, Head, HeadQuery, Tail
from turnkeeper.log.sealing import key_id_of
from turnkeeper.log.store import RestoringStore, Store, as_kept


class CopyFailed(TurnkeeperError):
    """A log could not be copied as it is; what was copied before it stays.

    Attributes:
        key: the log.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key


class Copied(msgspec.Struct, frozen=True):
    """What a copy did: logs copied now, logs that were there already, and what was verified."""

    copied: int
    already_there: int
    verified: int
    records: int
    bytes: int


class Erased(msgspec.Struct, frozen=True):
    """One log that was erased."""

    key: str
    records: int
    bytes: int
    digest: str
    """BLAKE2b over the bodies that the log held: says what was erased without telling it."""


class Receipt(msgspec.Struct, frozen=True):
    """What an erasure removed, and that it is gone.

    Attributes:
        prefix: the keys that were asked for.
        at: the store's time, in milliseconds.
        erased: what was there.
        left: how many logs are there afterwards: 0, or somebody went on writing.
    """

    prefix: str
    at: int
    erased: list[Erased]
    left: int


def digest(tail: Tail) -> str:
    """A digest of a log's records: sequences, times and bodies."""
    found = hashlib.blake2b(digest_size=16)
    for record in tail.records:
        found.update(b"%d:%d:%d:" % (record.seq, record.at, len(record.body)))
        found.update(record.body)
    return found.hexdigest()


async def copy_logs(source: Store, target: Store, *, show: Callable[[Head], None] = lambda head: None) -> Copied:
    """Copy every log of `source` to `target`, then read both again and compare.

    A log that the target has already is left as it is and verified: a copy that was interrupted goes on where it stopped.
    Nothing may write to the source meanwhile; a log that grew during the copy is an error.

    The records are copied as these stores give and take them. Of encrypted stores, `as_kept` copies them sealed, without any
    key; given as they are, the records are opened, and sealed again with the current key of the target's keyring.

    Raises:
        EncryptionError: a record cannot be opened or sealed.
        CopyFailed: a log differs between the stores.
    """
    if not isinstance(target, RestoringStore):
        raise TurnkeeperError(f"logs cannot be copied to a {type(target).__name__}")
    copied = there = records = size = 0
    async for head in source.heads():
        tail = await source.read(head.key)
        if tail.position == NOWHERE:
            continue  # expired since it was listed
        compacted = tail.records[0].seq - 1 if tail.records else tail.position.seq
        restored = await target.restore(head.key, tail.records, position=tail.position, compacted=compacted, head=head)
        copied += restored
        there += not restored
        records += len(tail.records)
        size += sum(len(record.body) for record in tail.records)
        show(head)
    verified = 0
    async for head in source.heads():
        ours, theirs = await source.read(head.key), await target.read(head.key)
        if ours.position != theirs.position or digest(ours) != digest(theirs):
            raise CopyFailed(
                head.key, "differs between the two stores: was it written to meanwhile, or before by another copy?"
            )
        verified += 1
    return Copied(copied, there, verified, records, size)


class KeyUse(NamedTuple):
    """In how many logs and records a key is."""

    logs: int
    records: int


async def keys_in_use(store: Store) -> dict[str | None, KeyUse]:
    """Which keys the records of a store are sealed with, by id; under None those that are not encrypted.

    It reads every log and opens none: so it needs no keys, and believes what a record says of itself.
    """
    store = as_kept(store)
    logs: Counter[str | None] = Counter()
    records: Counter[str | None] = Counter()
    async for head in store.heads():
        ids = Counter(key_id_of(record.body) for record in (await store.read(head.key)).records)
        logs.update(ids.keys())
        records.update(ids)
    return {key_id: KeyUse(logs[key_id], records[key_id]) for key_id in sorted(logs, key=lambda id_: id_ or "")}


async def erase_logs(store: Store, prefix: str) -> Receipt:
    """Erase every log whose key begins with `prefix`, and make sure. It needs no keys: the digests are of what was kept."""
    store = as_kept(store)
    erased: list[Erased] = []
    async for head in store.heads(HeadQuery(prefix=prefix)):
        tail = await store.read(head.key)
        if await store.erase(head.key):
            size = sum(len(record.body) for record in tail.records)
            erased.append(Erased(head.key, len(tail.records), size, digest(tail)))
    left = 0
    async for _ in store.heads(HeadQuery(prefix=prefix)):
        left += 1
    await store.tidy()
    return Receipt(prefix, (await store.read(prefix)).now, erased, left)
