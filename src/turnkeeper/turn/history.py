"""A turn's records with their times and sizes, and its state at any sequence: for operators, export and proof."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from turnkeeper.errors import TurnSchemaConflict
from turnkeeper.log import frames
from turnkeeper.log.record import NOWHERE, Record
from turnkeeper.log.shell import decode_many
from turnkeeper.log.store import Store
from turnkeeper.turn.evolve import TurnRules, fold
from turnkeeper.turn.records import AnyRecord
from turnkeeper.turn.state import TurnState


class Entry(NamedTuple):
    """One record: its sequence, the store's time of its append in milliseconds, its stored size in bytes."""

    seq: int
    at: int
    size: int
    record: AnyRecord


class TurnHistory(NamedTuple):
    """The records up to a sequence, and the state that they make."""

    entries: list[Entry]
    state: TurnState
    tail: int
    """The last sequence of the whole log."""


async def read_entries(store: Store, key: str, *, at: int | None = None) -> list[Entry]:
    """The records of a turn's log, up to the sequence `at` if one is given.

    Raises:
        TurnSchemaConflict: a record has a form that this version does not know.
    """
    records = (await store.read(key)).records
    return decode_entries(key, records if at is None else [record for record in records if record.seq <= at])


async def read_history(store: Store, key: str, *, at: int | None = None) -> TurnHistory | None:
    """Read the log of a turn, up to the sequence `at` if one is given. None if there is no such log.

    Raises:
        TurnSchemaConflict: a record has a form that this version does not know.
    """
    tail = await store.read(key)
    if tail.position == NOWHERE:
        return None
    shown = tail.records if at is None else [record for record in tail.records if record.seq <= at]
    entries = decode_entries(key, shown)
    state = fold(TurnState(), ((entry.record, entry.at) for entry in entries))
    return TurnHistory(entries, state, tail.position.seq)


def decode_entries(key: str, records: Iterable[Record]) -> list[Entry]:
    """A turn log's records as what they say.

    Raises:
        TurnSchemaConflict: one of them has a form that this version does not know.
    """
    decoder, found = TurnRules(0).decoder(), list(records)
    many = decode_many(decoder, found)
    if many is None:
        many = [_decoded(decoder, record, f"{key} record {record.seq}") for record in found]
    return [Entry(seq, at, len(body), record) for (seq, at, body), (_, record) in zip(found, many, strict=True)]


def _decoded(
    decoder: msgspec.msgpack.Decoder[tuple[bytes, AnyRecord]], record: Record, where: str
) -> tuple[bytes, AnyRecord]:
    try:
        return decoder.decode(frames.decode(record.body, where=where))
    except (msgspec.ValidationError, msgspec.DecodeError) as e:
        raise TurnSchemaConflict(where, str(e)) from e
