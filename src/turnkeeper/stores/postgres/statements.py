"""What is said to the server and how its answers are read: one statement for a step, parameters and results in binary."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from psycopg.adapt import AdaptersMap, Dumper
from psycopg.postgres import adapters
from psycopg.pq import Format

from turnkeeper.errors import StoreRolledBack
from turnkeeper.log.record import NOWHERE, Appended, Behind, Guard, GuardFailed, Head, HeadQuery, Position, Record, Tail

Row = tuple[Any, ...]

LOCKED: Final = "L"
_APPENDED: Final = "A"
_BEHIND: Final = "B"

_NO_GUARD: Final = Guard()
_APPEND_TYPES: Final = (
    *("text", "bytea", "bigint", "boolean"),
    *("text", "text", "text", "text", "text", "bigint", "bigint"),
    *("bigint", "bigint", "bigint", "bigint", "bytea[]"),
    *("integer", "boolean"),
)
_RESTORE_TYPES: Final = (
    *("text", "bytea", "bigint", "bigint"),
    *("text", "text", "text", "text", "text", "bigint", "bigint"),
    *("bigint", "bigint", "bigint", "bigint[]", "bigint[]", "bytea[]", "integer"),
)
_HEADS_TYPES: Final = ("text", "text", "text", "text", "text", "boolean", "bigint", "integer", "integer")
_HEAD_COLUMNS: Final = "key, tail, kind, phase, attention, owner, labels, ttl_ms, keep_until, size, created, updated"


class Bodies(tuple[bytes, ...]):
    """Bodies of records, as they go to the server."""


class _BodiesDumper(Dumper):
    """`bytea[]` in its binary form, which psycopg's own dumper of lists puts together element by element in Python."""

    format = Format.BINARY
    oid = 1001

    def dump(self, obj: Bodies) -> bytes:
        parts = [struct.pack("!5i", 1, 0, 17, len(obj), 1) if obj else struct.pack("!3i", 0, 0, 17)]
        for body in obj:
            parts += (struct.pack("!i", len(body)), body)
        return b"".join(parts)


ADAPTERS: Final = AdaptersMap(adapters)
"""How our parameters are written: a context for connections."""
ADAPTERS.register_dumper(Bodies, _BodiesDumper)


class Append(NamedTuple):
    """An append, in the order of the parameters of `append_v1`."""

    key: str
    incarnation: bytes
    seq: int
    create: bool
    kind: str
    phase: str
    attention: str | None
    owner: str | None
    labels: str
    ttl_ms: int
    keep_until: int
    not_before: int | None
    not_after: int | None
    compact_through: int
    size: int
    bodies: Bodies
    patience_ms: int
    wait: bool


def append(
    key: str,
    records: Sequence[bytes],
    expected: Position,
    head: Head,
    guard: Guard | None,
    compact_through: int,
    patience_ms: int,
) -> Append:
    """The parameters of an append that does not wait for who holds the log; for a new log with a new incarnation (LOG-5)."""
    create = expected == NOWHERE
    not_before, not_after = guard or _NO_GUARD
    return Append(
        key,
        os.urandom(8) if create else expected.incarnation,
        expected.seq,
        create,
        head.kind,
        head.phase,
        head.attention,
        head.owner,
        _labels(head),
        head.ttl_ms,
        head.keep_until,
        not_before,
        not_after,
        compact_through,
        sum(map(len, records)),
        Bodies(records),
        patience_ms,
        False,
    )


def _labels(head: Head) -> str:
    """Labels as JSON in ASCII, as PostgreSQL's texts hold no NUL (field case 09)."""
    return json.dumps(head.labels) if head.labels else "{}"


def restore_parameters(
    key: str, records: Sequence[Record], position: Position, compacted: int, head: Head, patience_ms: int
) -> tuple[Any, ...]:
    """The parameters of putting a log there."""
    return (
        key,
        position.incarnation,
        position.seq,
        compacted,
        head.kind,
        head.phase,
        head.attention,
        head.owner,
        _labels(head),
        head.ttl_ms,
        head.keep_until,
        head.size,
        head.created,
        head.updated,
        [record.seq for record in records],
        [record.at for record in records],
        Bodies(record.body for record in records),
        patience_ms,
    )


class Statements:
    """The statements of a schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.append = self._call("append_v1", *_APPEND_TYPES)
        self.read = self._call("read_v1", "text", "bytea", "bigint", "integer")
        self.heads = self._call("heads_v1", *_HEADS_TYPES, columns=_HEAD_COLUMNS)
        self.erase = self._call("erase_v1", "text", "bigint", "integer")
        self.restore = self._call("restore_v1", *_RESTORE_TYPES)
        self.catch_up = self._call("catch_up_v1", "bigint", "integer")
        self.writes = self._call("writes_v1")
        self.tail = self._call("tail_v1", "text", "integer")
        # With keepalives of the server's own: a waiter whose machine is gone without a word is noticed in half a minute.
        self.prepare_to_listen = (
            f"SELECT \"{schema}\".channel_v1(), pg_backend_pid(), set_config('tcp_keepalives_idle', '15', false), "
            "set_config('tcp_keepalives_interval', '5', false), set_config('tcp_keepalives_count', '3', false)"
        ).encode()
        self.lock = (
            "SELECT key, lock, pg_try_advisory_lock_shared(lock) FROM "
            f'(SELECT key, "{schema}".waiters_lock_v1(key) AS lock FROM unnest($1::text[]) AS k (key)) AS keys'
        ).encode()
        self.unlock = b"SELECT pg_advisory_unlock_shared(lock) FROM unnest($1::bigint[]) AS l (lock)"
        self.tidy = f'VACUUM (SKIP_LOCKED) "{schema}".record, "{schema}".head'.encode()
        self.advance_clock = (
            f"""UPDATE "{schema}".meta SET value = value + $1::bigint WHERE name = 'clock_offset_ms'""".encode()
        )

    def _call(self, function: str, *types: str, columns: str = "*") -> bytes:
        arguments = ", ".join(f"${number}::{kind}" for number, kind in enumerate(types, 1))
        return f'SELECT {columns} FROM "{self.schema}".{function}({arguments})'.encode()

    def appends(self, count: int) -> bytes:
        """One statement for `count` appends, each with its number in front of its rows."""
        return _appends(self.schema, count)


@lru_cache(256)
def _appends(schema: str, count: int) -> bytes:
    # The rows of VALUES are taken in their order, so that locks are taken in the order of the keys.
    width = len(_APPEND_TYPES)
    rows = (
        ", ".join(f"${number * width + place}::{kind}" for place, kind in enumerate(_APPEND_TYPES, 1))
        for number in range(count)
    )
    names = ", ".join(f"p{place}" for place in range(width))
    values = ", ".join(f"({number}, {row})" for number, row in enumerate(rows))
    return (
        f"SELECT v.number, a.* FROM (VALUES {values}) AS v (number, {names}) "
        f'CROSS JOIN LATERAL "{schema}".append_v1({names.replace("p", "v.p")}) AS a'
    ).encode()


def outcome(rows: Sequence[Row], expected: Position, where: str) -> Appended | Behind | GuardFailed:
    """What became of an append."""
    first = rows[0]
    if first[0] == _APPENDED:
        return Appended(Position(first[1], first[2]), first[3])
    if first[0] == _BEHIND:
        return Behind(tail([row[1:] for row in rows], expected, where))
    return GuardFailed(first[3])


def tail(rows: Sequence[Row], after: Position, where: str) -> Tail:
    """The answer to a read.

    Raises:
        StoreRolledBack: the log is the one that `after` is of, and does not reach that far.
    """
    incarnation, last, now, restart = rows[0][:4]
    if incarnation is None:
        return Tail(NOWHERE, [], now, after != NOWHERE)
    if incarnation == after.incarnation and last < after.seq:
        raise StoreRolledBack(where, f"a log ends at {last}, and was at {after.seq} when it was last heard of")
    records = [Record(*row[4:7]) for row in rows if row[4] is not None]
    return Tail(Position(incarnation, last), records, now, restart)


def is_late(rows: Sequence[Row]) -> bool:
    """Whether the server's clock is behind the log that was read."""
    return rows[0][7]


def heads_parameters(query: HeadQuery, last: str, limit: int, patience_ms: int) -> tuple[Any, ...]:
    """The parameters of a page of heads behind the key `last`."""
    return (
        last,
        query.prefix,
        _behind_prefix(query.prefix),
        query.kind,
        query.phase,
        query.attention,
        query.updated_before,
        limit,
        patience_ms,
    )


def _behind_prefix(prefix: str) -> str | None:
    """The first text behind all that start with `prefix`, by code points; None if there is none."""
    for place in range(len(prefix) - 1, -1, -1):
        following = ord(prefix[place]) + 1
        if following <= 0x10FFFF:
            # Half a surrogate pair is no text to PostgreSQL.
            return prefix[:place] + chr(0xE000 if 0xD800 <= following <= 0xDFFF else following)
    return None


def head(row: Row) -> Head:
    """The head of a row."""
    key, tail, kind, phase, attention, owner, labels, ttl_ms, keep_until, size, created, updated = row
    return Head(
        key=key,
        tail=tail,
        kind=kind,
        phase=phase,
        attention=attention,
        owner=owner,
        labels=json.loads(labels),
        ttl_ms=ttl_ms,
        keep_until=keep_until,
        size=size,
        created=created,
        updated=updated,
    )
