"""A turn's records with their times and sizes, and its state at any sequence: for operators, export and proof."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from turnkeeper.errors import TurnSchemaConflict
from turnkeeper.log import frames
from turnkeeper.log.record import NOWHERE, Record
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
    decoder = TurnRules(0).decoder()
    entries: list[Entry] = []
    for record in records:
        where = f"{key} record {record.seq}"
        try:
            decoded = decoder.decode(frames.decode(record.body, where=where))[1]
        except (msgspec.ValidationError, msgspec.DecodeError) as e:
            raise TurnSchemaConflict(where, str(e)) from e
        entries.append(Entry(record.seq, record.at, len(record.body), decoded))
    return entries
