"""Encrypted records: opened in their own place, with their own key, unchanged; everything else is refused by name."""

from __future__ import annotations

import asyncio
import base64
import logging
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.support import HEAD, append, bodies
from tests.conversation.platform import Platform
from turnkeeper import Agent, Flow, FlowContext, Keeper, Keyring, ScriptedModel
from turnkeeper.conversation.message import Message
from turnkeeper.errors import (
    EncryptionError,
    InvalidInput,
    KeyMissing,
    KeyUnavailable,
    KeyWrong,
    RecordPlain,
    RecordTampered,
    SchemaConflict,
)
from turnkeeper.log.frames import SEALED
from turnkeeper.log.keyring import Key
from turnkeeper.log.record import NOWHERE, Behind, Position, Record
from turnkeeper.log.sealing import EncryptedStore, key_id_of, seal, unseal
from turnkeeper.log.store import (
    NotifyingStore,
    PrivateStore,
    RestoringStore,
    Store,
    TransactionalStore,
    as_kept,
)
from turnkeeper.moving import copy_logs, erase_logs, keys_in_use
from turnkeeper.service import Service
from turnkeeper.stores.opening import open_store
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.transport.opening import transport_in

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
RING = Keyring({"old": OLD})
ROTATED = Keyring({"new": NEW, "old": OLD})
SECRET = b"the card ends in 4711"
KEY = Key("old", OLD)


def opened(body: bytes, *, ring: Keyring = RING, log: str = "turn:1", seq: int = 3) -> bytes:
    """A record's body, opened."""
    return asyncio.run(unseal(ring, log, Record(seq, 0, body)))


# --- a record ------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=2000), st.text(max_size=40), st.integers(1, 2**62))
def test_what_is_sealed_opens_in_its_place(body: bytes, log: str, seq: int) -> None:
    log = log.encode(errors="ignore").decode()
    sealed = seal(KEY, log, seq, body)
    assert sealed[0] == SEALED
    assert key_id_of(sealed) == "old"
    assert opened(sealed, log=log, seq=seq) == body
    assert seal(KEY, log, seq, body) != sealed, "every time with a nonce of its own"


_SEALED = seal(KEY, "turn:1", 3, SECRET)
_REGIONS = {"first byte": 0, "form": 1, "length": 2, "key id": 4, "check": 7, "nonce": 12, "text": 25, "tag": -4}


@pytest.mark.parametrize("region", _REGIONS)
@given(st.data())
@settings(max_examples=30)
def test_a_changed_byte_is_noticed(region: str, data: st.DataObject) -> None:
    place = _REGIONS[region] % len(_SEALED)
    changed = bytearray(_SEALED)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(EncryptionError) as e:
        opened(bytes(changed))
    assert e.value.where == "turn:1 record 3"


@given(st.integers(0, len(_SEALED) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(place: int, bits: int) -> None:
    changed = bytearray(_SEALED)
    changed[place] ^= bits
    with pytest.raises(EncryptionError):
        opened(bytes(changed))


@given(st.integers(0, len(_SEALED) - 1), st.binary(max_size=20))
def test_cut_or_longer_is_noticed(length: int, more: bytes) -> None:
    for changed in (_SEALED[:length], _SEALED + b"x" + more):
        with pytest.raises(EncryptionError):
            opened(changed)


@given(st.binary(max_size=200))
def test_whatever_is_no_record_of_ours_is_refused(body: bytes) -> None:
    for begin in (b"", b"\x03", b"\x03\x01", b"\x03\x01\x03old"):
        with pytest.raises(EncryptionError):
            opened(begin + body)


@pytest.mark.parametrize(("log", "seq"), [("turn:2", 3), ("turn:1", 2), ("turn:1", 4), ("turn:1\x00", 3), ("", 3)])
def test_a_moved_record_is_refused(log: str, seq: int) -> None:
    with pytest.raises(RecordTampered, match="was changed, or moved here") as e:
        opened(_SEALED, log=log, seq=seq)
    assert (e.value.where, e.value.key_id) == (f"{log} record {seq}", "old")


def test_what_is_wrong_with_a_key_is_told() -> None:
    with pytest.raises(KeyMissing, match="encrypted with the key 'old'; this keyring has new"):
        opened(_SEALED, ring=Keyring({"new": NEW}))
    with pytest.raises(KeyWrong, match="with another key 'old'"):
        opened(_SEALED, ring=Keyring({"old": NEW}))
    with pytest.raises(RecordPlain, match="is not encrypted"):
        opened(b"\x01plain")
    assert opened(b"\x01plain", ring=Keyring({"old": OLD}, allow_plain=True)) == b"\x01plain"


# --- a store -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_nothing_of_a_body_is_in_the_file(tmp_path: Path) -> None:
    async with await Keeper.open(f"{tmp_path}/a.db", keyring=RING) as keeper:
        agent = Agent(ScriptedModel(["the answer is ZZsecretZZ"]))
        result = await keeper.run(agent, "what is QQsecretQQ?", turn_id="t", labels={"seen": "by operators"})
    assert result.output == "the answer is ZZsecretZZ"
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())  # noqa: ASYNC240
    assert b"secret" not in kept
    assert b"by operators" in kept, "heads are for operators"


@pytest.mark.anyio
async def test_a_rotated_keyring_reads_old_logs_and_writes_with_the_current_key() -> None:
    store = await SqliteStore.open(":memory:")
    first = await append(EncryptedStore(store, RING), "k", b"1")
    both = EncryptedStore(store, ROTATED)
    await append(both, "k", b"2", expected=first)
    assert bodies(await both.read("k")) == [b"1", b"2"]
    assert [key_id_of(body) for body in bodies(await store.read("k"))] == ["old", "new"]
    assert await keys_in_use(both) == {"new": (1, 1), "old": (1, 1)}

    # A process that has only one of the two says so, in reads and in Behind, and appends nothing.
    for ring, record, lacks in ((RING, 2, "new"), (Keyring({"new": NEW}), 1, "old")):
        one = EncryptedStore(store, ring)
        with pytest.raises(KeyMissing) as e:
            await one.read("k")
        assert (e.value.where, e.value.key_id, e.value.applied) == (f"k record {record}", lacks, False)
        with pytest.raises(KeyMissing):
            await one.append("k", [b"3"], expected=NOWHERE, head=HEAD)
    assert (await store.read("k")).position.seq == 2
    await both.close()


@pytest.mark.anyio
async def test_records_from_before_the_encryption(tmp_path: Path) -> None:
    """They are refused, so that nobody can put any in, unless the keyring allows them."""
    url = f"{tmp_path}/a.db"
    async with await Keeper.open(url) as keeper:
        await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="t")
    async with await Keeper.open(url, keyring=RING) as keeper:
        with pytest.raises(RecordPlain, match=r"^turn:.* record 1: .*allow_plain"):
            await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="t")
        told = {promise.name: promise for promise in await keeper.promises()}
        assert told["plain records"].holds
    async with await Keeper.open(url, keyring=Keyring({"old": OLD}, allow_plain=True)) as keeper:
        assert (await keeper.run(Agent(ScriptedModel([])), "hi", turn_id="t")).output == "hello"
        told = {promise.name: promise for promise in await keeper.promises()}
        assert told["encrypted"].holds
        assert not told["plain records"].holds


@pytest.mark.anyio
async def test_without_a_keyring_an_encrypted_log_says_what_it_needs(tmp_path: Path) -> None:
    url = f"{tmp_path}/a.db"
    async with await Keeper.open(url, keyring=RING) as keeper:
        await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="t")
    async with await Keeper.open(url) as keeper:
        for look in (
            lambda: keeper.history("t"),
            lambda: keeper.run(Agent(ScriptedModel(["other"])), "hi", turn_id="t"),
        ):
            with pytest.raises(KeyMissing, match=r"^turn:.* record 1: is encrypted with the key 'old', and no") as e:
                await look()
            assert e.value.key_id == "old"


def plain_of(one: object) -> set[str]:
    """Which of the optional protocols it keeps."""
    kinds = (TransactionalStore, RestoringStore, NotifyingStore, PrivateStore)
    return {kind.__name__ for kind in kinds if isinstance(one, kind)}


@pytest.mark.anyio
async def test_it_can_what_its_store_can() -> None:
    class Least:
        """A store with nothing optional."""

        def __init__(self, inner: Store) -> None:
            for name in ("append", "read", "heads", "erase", "tidy", "promises", "close"):
                setattr(self, name, getattr(inner, name))

    store = await SqliteStore.open(":memory:")
    least: Any = Least(store)
    for inner in (store, least):
        assert plain_of(EncryptedStore(inner, RING)) == plain_of(inner)
    encrypted = EncryptedStore(store, RING)
    assert encrypted.private
    assert as_kept(encrypted) is store
    assert as_kept(store) is store
    with pytest.raises(InvalidInput, match="encrypted already"):
        EncryptedStore(encrypted, ROTATED)
    queue = await transport_in(encrypted)
    await queue.publish("telegram:1")
    (delivery,) = await queue.consume("me")
    assert delivery.key == "telegram:1"
    await encrypted.close()


@pytest.mark.anyio
async def test_a_key_that_cannot_be_had_appends_nothing() -> None:
    up = True

    async def key() -> bytes:
        if not up:
            raise ConnectionError
        return OLD

    store = await SqliteStore.open(":memory:")
    up = False
    with pytest.raises(KeyUnavailable):
        await open_store("sqlite:///:memory:", keyring=Keyring({"old": key}))
    encrypted = EncryptedStore(store, Keyring({"old": key}))
    with pytest.raises(KeyUnavailable) as e:
        await encrypted.append("k", [b"1"], expected=NOWHERE, head=HEAD)
    assert (e.value.where, e.value.applied) == ("k record 1", False)
    up = True
    await append(encrypted, "k", b"1")
    assert bodies(await encrypted.read("k")) == [b"1"]
    await encrypted.close()


@pytest.mark.anyio
async def test_a_service_takes_the_environments_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is in the same store, with nothing of a message in it."""
    flow = Flow("echo")

    @flow.step
    async def say(c: FlowContext) -> None:
        await c.send("heard")

    monkeypatch.setenv("TURNKEEPER_KEYS", f"old:{base64.b64encode(OLD).decode()}")
    platform = Platform()
    service = Service(flow, {"test": platform}, store=f"sqlite:///{tmp_path}/a.db")
    async with service.open() as running:
        await running.bot.handle("test:1", Message(event_id="1", text="QQsecretQQ"))
        assert isinstance(running.store, EncryptedStore)
    assert platform.texts("test:1") == ["heard"]
    assert b"QQsecretQQ" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())  # noqa: ASYNC240
    monkeypatch.setenv("TURNKEEPER_KEYS", "old")
    with pytest.raises(InvalidInput, match=r"^TURNKEEPER_KEYS: entry 1"):
        Service(flow, {"test": platform})


# --- moving --------------------------------------------------------------------------------------------------------


async def filled(ring: Keyring | None) -> Store:
    """A store with a log that was compacted, and one that was not."""
    store = await open_store("sqlite:///:memory:", keyring=ring)
    position = await append(store, "a", b"1", b"2")
    await append(store, "a", b"3", b"4", expected=position, compact_through=2)
    await append(store, "b", SECRET)
    return store


@pytest.mark.anyio
async def test_copies_are_byte_for_byte_without_keys() -> None:
    source, target = await filled(RING), await SqliteStore.open(":memory:")
    copied = await copy_logs(as_kept(source), target)
    assert (copied.copied, copied.verified) == (2, 2)
    for key in "ab":
        assert (await target.read(key)).records == (await as_kept(source).read(key)).records
    assert bodies(await EncryptedStore(target, RING).read("a")) == [b"3", b"4"]
    with pytest.raises(InvalidInput, match="encrypted already"):
        await copy_logs(as_kept(source), await open_store("sqlite:///:memory:", keyring=RING))
    await source.close()
    await target.close()


@pytest.mark.anyio
@pytest.mark.parametrize("before", [None, RING], ids=["plain", "encrypted"])
async def test_a_copy_between_keyrings_encrypts_anew(before: Keyring | None) -> None:
    source, target = await filled(before), await open_store("sqlite:///:memory:", keyring=Keyring({"new": NEW}))
    copied = await copy_logs(source, target)
    assert (copied.copied, copied.verified) == (2, 2)
    for key in "ab":
        ours, theirs = await source.read(key), await target.read(key)
        assert (ours.records, ours.position) == (theirs.records, theirs.position)
    assert await keys_in_use(target) == {"new": (2, 3)}
    assert await keys_in_use(source) == ({"old": (2, 3)} if before else {None: (2, 3)})
    # Sequences go on behind the compaction, in the AAD too.
    position = (await target.read("a")).position
    behind = await target.append("a", [b"5"], expected=Position(position.incarnation, 3), head=HEAD)
    assert isinstance(behind, Behind)
    assert bodies(behind.tail) == [b"4"]
    await source.close()
    await target.close()


@pytest.mark.anyio
async def test_erasing_needs_no_key() -> None:
    store = await filled(RING)
    receipt = await erase_logs(EncryptedStore(as_kept(store), Keyring({"new": NEW})), "a")
    assert [(log.key, log.records) for log in receipt.erased] == [("a", 2)]
    assert receipt.left == 0
    assert (await store.read("a")).position == NOWHERE
    await store.close()


@pytest.mark.anyio
async def test_records_exchanged_in_the_store_are_refused() -> None:
    """Whoever can write to the store cannot give a log another's record, nor one of its own twice."""
    source = await filled(RING)
    kept = as_kept(source)
    target = await SqliteStore.open(":memory:")
    forged = {"c": [record._replace(seq=1) for record in (await kept.read("b")).records]}
    three, four = (await kept.read("a")).records
    forged["a"] = [three, three._replace(seq=4)]
    forged["b"] = [four._replace(seq=1)]
    for key, records in forged.items():
        position = Position(b"incarnat", records[-1].seq)
        assert isinstance(target, RestoringStore)
        assert await target.restore(key, records, position=position, compacted=records[0].seq - 1, head=HEAD)
        with pytest.raises(RecordTampered):
            await EncryptedStore(target, RING).read(key)
    await source.close()
    await target.close()


# --- what is seen ------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_no_error_and_no_log_line_holds_a_key_or_a_body(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    store = await SqliteStore.open(":memory:")
    await append(EncryptedStore(store, RING), "k", SECRET)
    for ring in (Keyring({"new": NEW}), Keyring({"old": NEW})):
        with pytest.raises(EncryptionError) as e:
            await EncryptedStore(store, ring).read("k")
        shown += ["".join(traceback.format_exception(e.value)), repr(e.value), repr(vars(e.value))]
    shown += [caplog.text, repr(EncryptedStore(store, RING)), repr(KEY), repr(vars(EncryptedStore(store, RING)))]
    for text in shown:
        for secret in (OLD, NEW, SECRET):
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text
    await store.close()


def test_importing_does_not_need_cryptography() -> None:
    code = "import sys, turnkeeper.service, turnkeeper.keeper, turnkeeper.log.sealing; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_cryptography_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(InvalidInput, match=r"pip install 'turnkeeper\[encryption\]'"):
        Keyring({"old": OLD})


@pytest.mark.anyio
async def test_a_damaged_record_beneath_the_encryption_is_a_schema_conflict(tmp_path: Path) -> None:
    """What opens and is no turn's record is told as without encryption."""
    async with await Keeper.open(f"{tmp_path}/a.db", keyring=RING) as keeper:
        await append(keeper.store, keeper.session("t").log.key, b"\x63nothing")
        with pytest.raises(SchemaConflict, match="record 1: unknown frame codec 0x63"):
            await keeper.history("t")
