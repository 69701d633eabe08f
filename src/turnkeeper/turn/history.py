"""A turn's records with their times and sizes, and its state at any sequence: for operators, export and proof."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from turnkeeper.errors import TurnSchemaConflict
from turnkeeper.log import frames
from turnkeeper.log.record import Position
from turnkeeper.log.store import Store
from turnkeeper.turn.records import AnyRecord
from turnkeeper.turn.state import TurnRules, TurnState


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
    if tail.position == Position(b"", 0):
        return None
    rules = TurnRules(0)
    decoder = rules.decoder()
    state = rules.initial()
    entries: list[Entry] = []
    for record in tail.records:
        if at is not None and record.seq > at:
            break
        where = f"{key} record {record.seq}"
        try:
            decoded = decoder.decode(frames.decode(record.body, where=where))[1]
        except (msgspec.ValidationError, msgspec.DecodeError) as e:
            raise TurnSchemaConflict(where, str(e)) from e
        state = rules.evolve(state, decoded, record.at)
        entries.append(Entry(record.seq, record.at, len(record.body), decoded))
    return TurnHistory(entries, state, tail.position.seq)
