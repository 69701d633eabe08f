"""Files that a SQLite store cannot be kept in: each is refused by a typed error and left as it is, byte for byte."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.support import append, whole
from turnkeeper.errors import (
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnsuitable,
    StoreVersion,
)
from turnkeeper.stores.sqlite import SqliteStore, schema

pytestmark = pytest.mark.anyio

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def _sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def _foreign(path: Path) -> None:
    _sql(path, "CREATE TABLE notes (text TEXT)", "INSERT INTO notes VALUES ('mine')")


def _foreign_with_our_tables(path: Path) -> None:
    _sql(path, "CREATE TABLE head (x)", "CREATE TABLE record (x)", "CREATE TABLE meta (x)")


def _foreign_by_id(path: Path) -> None:
    _sql(path, "PRAGMA application_id = 1196444487", "PRAGMA user_version = 10200")


def _foreign_by_version(path: Path) -> None:
    _sql(path, "PRAGMA user_version = 7")


def _foreign_wal(path: Path) -> None:
    _sql(path, "PRAGMA journal_mode = wal", "CREATE VIEW v AS SELECT 1")


def _newer(path: Path) -> None:
    _sql(
        path,
        f"PRAGMA application_id = {schema.APPLICATION_ID}",
        f"PRAGMA user_version = {schema.VERSION + 1}",
        "CREATE TABLE record_v2 (x)",
    )


def _writes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


NOISE = random.Random(1).randbytes(20_000)
BAD: dict[str, tuple[Callable[[Path], object], type[StoreError]]] = {
    "another program's": (_foreign, StoreForeign),
    "tables named like ours": (_foreign_with_our_tables, StoreForeign),
    "another application's id": (_foreign_by_id, StoreForeign),
    "another program's version": (_foreign_by_version, StoreForeign),
    "a view alone, in WAL": (_foreign_wal, StoreForeign),
    "a newer version": (_newer, StoreVersion),
    "a text": (_writes(b"Dear diary,\n" * 1000), StoreForeign),
    "noise": (_writes(NOISE), StoreForeign),
    "one byte": (_writes(b"\n"), StoreForeign),
    "five bytes": (_writes(b"hello"), StoreForeign),
    "zeros": (_writes(bytes(8192)), StoreForeign),
    "SQLite's first words alone": (_writes(b"SQLite format 3\x00"), StoreForeign),
    "SQLite's first words and noise": (_writes(b"SQLite format 3\x00" + NOISE), StoreForeign),
}


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("name", BAD)
async def test_files_that_are_not_ours(tmp_path: Path, name: str, journal: str) -> None:
    """Typed, with the path and what to do; the file is the same afterwards, and nothing lies beside it."""
    make, error = BAD[name]
    path = tmp_path / "turns.db"
    make(path)
    before = _snapshot(tmp_path)
    assert list(before) == ["turns.db"]
    for _ in range(2):
        with pytest.raises(error) as raised:
            await SqliteStore.open(path, journal=journal)
        assert raised.value.where == str(path)
        assert raised.value.applied is False
        assert _snapshot(tmp_path) == before


async def test_a_newer_version_tells_both(tmp_path: Path) -> None:
    """So that an operator knows which process to upgrade."""
    path = tmp_path / "turns.db"
    _newer(path)
    with pytest.raises(StoreVersion, match="upgrade") as raised:
        await SqliteStore.open(path)
    assert (raised.value.found, raised.value.known) == (schema.VERSION + 1, schema.VERSION)


async def test_an_empty_file_becomes_ours(tmp_path: Path) -> None:
    """As `touch` or a temporary file makes it; so does a database without anything in it."""
    touched, blank = tmp_path / "touched.db", tmp_path / "blank.db"
    touched.touch()
    _sql(blank, "VACUUM")
    for path in (touched, blank):
        async with await SqliteStore.open(path) as store:
            await append(store, "k", b"1")
        async with await SqliteStore.open(path) as store:
            assert await whole(store, "k") == [(1, b"1")]


async def test_no_folder(tmp_path: Path) -> None:
    """A folder that is missing is not made, and a folder in the place of the file is not touched."""
    with pytest.raises(StoreReadOnly, match="check that the folder exists"):
        await SqliteStore.open(tmp_path / "missing" / "turns.db")
    with pytest.raises(StoreReadOnly):
        await SqliteStore.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreReadOnly):
        await SqliteStore.open(tmp_path / "file" / "turns.db")
    assert _snapshot(tmp_path) == {"file": b""}


async def test_a_path_without_a_name() -> None:
    """SQLite would give every connection a private file that is gone afterwards: no place for turns."""
    with pytest.raises(StoreUnsuitable):
        await SqliteStore.open("")


async def _ours(path: Path) -> dict[str, bytes]:
    async with await SqliteStore.open(path) as store:
        await append(store, "k", b"1")
    return _snapshot(path.parent)


async def test_a_file_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading works, each write is refused by a typed error, and the file stays as it is."""
    path = tmp_path / "turns.db"
    before = await _ours(path)
    connect = sqlite3.connect

    def read_only(place: str, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{place}?mode=ro", uri=True, **options)

    with monkeypatch.context() as patch:
        patch.setattr("turnkeeper.stores.sqlite.schema.sqlite3.connect", read_only)
        async with await SqliteStore.open(path) as store:
            assert await whole(store, "k") == [(1, b"1")]
            tail = await store.read("k")
            for write in (
                lambda: append(store, "k", b"2", expected=tail.position),
                lambda: append(store, "new", b"1"),
                lambda: store.erase("k"),
                lambda: store.advance_clock(1),
            ):
                with pytest.raises(StoreReadOnly, match="permissions") as raised:
                    await write()
                assert raised.value.applied is False
            assert await whole(store, "k") == [(1, b"1")]
    assert _snapshot(tmp_path)["turns.db"] == before["turns.db"]


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
async def test_a_folder_and_a_file_without_permission(tmp_path: Path) -> None:
    """The same from the system's permissions."""
    path = tmp_path / "turns.db"
    before = await _ours(path)
    os.chmod(path, 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        with pytest.raises(StoreReadOnly):
            async with await SqliteStore.open(path) as store:
                await append(store, "new", b"1")
        with pytest.raises(StoreReadOnly):
            await SqliteStore.open(tmp_path / "new.db")
        assert _snapshot(tmp_path) == before
    finally:
        os.chmod(tmp_path, 0o755)


async def test_a_damaged_file(tmp_path: Path) -> None:
    """Damage inside is told as such, and the file is kept for whoever repairs it."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path) as store:
        for number in range(50):
            await append(store, f"k{number}", bytes(3000))
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 200] = NOISE[:200]
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match="damaged"):
        async with await SqliteStore.open(path) as store:
            await store.read("k1")
    assert path.read_bytes() == bytes(data)


async def test_a_file_that_goes_away(tmp_path: Path) -> None:
    """A file whose tables are gone under the store is a typed error, from every call, and the store can still be closed."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path) as store:
        await append(store, "k", b"1")
        _sql(path, "DROP TABLE meta")
        for call in (
            lambda: append(store, "new", b"1"),
            lambda: store.read("k"),
            lambda: store.erase("k"),
            store.promises,
        ):
            with pytest.raises(StoreUnavailable) as raised:
                await call()
            assert raised.value.applied is None


async def test_a_lock_while_opening(tmp_path: Path) -> None:
    """A new file that another process keeps locked: one typed error after the busy timeout."""
    path = tmp_path / "turns.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreBusy):
            await SqliteStore.open(path, busy_timeout=0.1)
        holder.execute("ROLLBACK")
    async with await SqliteStore.open(path, busy_timeout=0.1) as store:
        await append(store, "k", b"1")


@pytest.mark.parametrize("in_time", [False, True])
async def test_a_writer_while_wal_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    """SQLite does not wait for a writer where the journal mode is changed: the store does, and in the end says it was busy."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, journal="delete") as store:
        await append(store, "k", b"1")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        if in_time:
            # The writer ends as soon as the store has found out that it has to wait.
            monkeypatch.setattr(schema.time, "sleep", lambda _: writer.in_transaction and writer.execute("ROLLBACK"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
            async with await SqliteStore.open(path) as store:
                assert await whole(store, "k") == [(1, b"1")]
            assert not writer.in_transaction
        else:
            with pytest.raises(StoreBusy):
                await SqliteStore.open(path, busy_timeout=0.1)


async def test_a_reader_while_wal_is_set(tmp_path: Path) -> None:
    """A reader that does not end in time is told in the same way."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path, journal="delete") as store:
        await append(store, "k", b"1")
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM head").fetchone()
        with pytest.raises(StoreBusy):
            await SqliteStore.open(path, busy_timeout=0.1)
        reader.execute("ROLLBACK")
    async with await SqliteStore.open(path, busy_timeout=0.1) as store:
        assert await whole(store, "k") == [(1, b"1")]


async def test_memory() -> None:
    """`:memory:` is a store of its own each time, makes no file, promises no durability, and is gone once closed."""
    async with await SqliteStore.open(":memory:") as one, await SqliteStore.open(":memory:") as two:
        await append(one, "k", b"1")
        assert await whole(one, "k") == [(1, b"1")]
        assert await whole(two, "k") == []
        await one.tidy()
        promises = {promise.name: promise for promise in await one.promises()}
        assert not promises["durable"].holds
        assert "memory" in promises["durable"].found
    assert ":memory:" not in os.listdir()
    with pytest.raises(StoreClosed):
        await one.read("k")


async def test_what_is_durable_is_there_again(tmp_path: Path) -> None:
    """LOG-1: closed and opened again, a file holds what was appended, and positions go on."""
    path = tmp_path / "turns.db"
    async with await SqliteStore.open(path) as store:
        position = await append(store, "k", b"1", b"2")
        promises = {promise.name: promise for promise in await store.promises()}
        assert promises["durable"].holds
    async with await SqliteStore.open(str(path)) as store:
        await append(store, "k", b"3", expected=position)
        assert await whole(store, "k") == [(1, b"1"), (2, b"2"), (3, b"3")]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
