"""Frames (`log/frames.py`): every codec, the first seed's exact form, bounded inflating, and refusals."""

from __future__ import annotations

import base64
import concurrent.futures
import os
import sys
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeeper.errors import InvalidInput, KeyMissing, SchemaConflict, ValueTooLarge
from turnkeeper.log import frames

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODECS: tuple[frames.Codec, ...] = ("plain", "zstd", "seed")
MEGABYTE = 1024 * 1024


def _repeated(part: bytes, times: int) -> bytes:
    return part * times


payloads: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=2000), st.builds(_repeated, st.binary(max_size=40), st.integers(0, 300))
)
"""Short, long, and long enough with repeats that compressing is worth it."""
examples = settings(max_examples=60, deadline=None)

ELSEWHERE = concurrent.futures.ThreadPoolExecutor(1)
"""A reader who did not write: a thread remembers the payloads of the frames that it made itself."""


def decode(frame: bytes, limit: int = frames.MAX_INFLATED) -> bytes:
    """The payload, as a reader gets it who did not write the frame."""
    return ELSEWHERE.submit(frames.decode, frame, limit=limit).result()


def again(frame: bytes, limit: int) -> bytes:
    """The payload, as its writer gets it back."""
    return frames.decode(frame, limit=limit)


@pytest.mark.parametrize("codec", CODECS)
@examples
@given(payload=payloads)
def test_every_codec_round_trips(codec: frames.Codec, payload: bytes) -> None:
    """What was wrapped comes out, and the bound holds exactly at its size."""
    frame = frames.encode(payload, codec, limit=len(payload))
    for reading in (decode, again):
        assert reading(frame, len(payload)) == payload
        if payload:
            with pytest.raises(SchemaConflict):
                reading(frame, len(payload) - 1)
    if payload:
        with pytest.raises(ValueTooLarge):
            frames.encode(payload, codec, limit=len(payload) - 1)


def test_the_first_byte_names_the_codec() -> None:
    """Small values stay plain, also where zstd was asked for; so does what does not get smaller."""
    text = b"text " * 400
    assert frames.encode(b"small")[0] == frames.PLAIN
    assert frames.encode(text)[0] == frames.ZSTD
    assert frames.encode(text, "plain") == b"\x01" + text
    assert frames.encode(text, "seed")[0] == frames.SEED
    noise = os.urandom(2000)
    assert frames.encode(noise) == b"\x01" + noise
    assert len(frames.encode(text)) < len(text) / 10


def test_the_zstd_form() -> None:
    """0x02, the length in four bytes, one zstd frame: also from another writer."""
    text = b"text " * 400
    frame = frames.encode(text)
    assert int.from_bytes(frame[1:5], "big") == len(text)
    assert zstd.decompress(frame[5:]) == text
    assert frames.decode(b"\x02" + len(text).to_bytes(4, "big") + zstd.compress(text, 19)) == text


@examples
@given(payload=payloads)
def test_the_seeds_form(payload: bytes) -> None:
    """journal.md T1.2: `<codec version>:<uncompressed length>:<base64>` of zlib, read and written in exactly this form."""
    theirs = b"1:" + str(len(payload)).encode() + b":" + base64.b64encode(zlib.compress(payload))
    assert frames.decode(theirs) == payload
    version, length, text = frames.encode(payload, "seed").split(b":")
    assert (version, length) == (b"1", str(len(payload)).encode())
    assert zlib.decompress(base64.b64decode(text, validate=True)) == payload


@pytest.mark.parametrize("level", range(10))
def test_the_seeds_form_at_any_level(level: int) -> None:
    """Whatever level the other side compressed at."""
    payload = b"what the other side wrote " * 50
    theirs = b"1:%d:%s" % (len(payload), base64.b64encode(zlib.compress(payload, level)))
    assert frames.decode(theirs) == payload


# --- bounds ----------------------------------------------------------------------------------------------------


def _zstd(length: int, packed: bytes) -> bytes:
    return b"\x02" + length.to_bytes(4, "big") + packed


def _seed(length: int, packed: bytes) -> bytes:
    return b"1:%d:%s" % (length, base64.b64encode(packed))


@pytest.mark.parametrize("claimed", [10, 5000, 2 * MEGABYTE - 1])
@pytest.mark.parametrize("form", ["zstd", "seed"])
def test_a_bomb_is_not_inflated(form: str, claimed: int) -> None:
    """50 MB behind a small claim: refused once the claim is passed, without the memory that it would take."""
    zeros = bytes(50 * MEGABYTE)
    frame = _zstd(claimed, zstd.compress(zeros)) if form == "zstd" else _seed(claimed, zlib.compress(zeros))
    assert len(frame) < MEGABYTE
    del zeros
    tracemalloc.start()
    try:
        with pytest.raises(SchemaConflict, match="does not inflate to"):
            frames.decode(frame, limit=2 * MEGABYTE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MEGABYTE


@pytest.mark.parametrize("claimed", [2 * MEGABYTE + 1, 2**32 - 1])
def test_an_open_bomb_is_refused_by_its_claim(claimed: int) -> None:
    """A frame that says itself that it is over the limit is not even begun."""
    packed = b"not even compressed data"
    for frame in (_zstd(claimed, packed), _seed(claimed, packed)):
        with pytest.raises(SchemaConflict, match="claims"):
            frames.decode(frame, limit=2 * MEGABYTE)


def test_the_default_limit() -> None:
    """Without an argument the bound is 64 MiB, for writing and for reading."""
    too_much = frames.MAX_INFLATED + 1
    for frame in (_zstd(too_much, b""), _seed(too_much, b""), b"\x01" + bytes(too_much)):
        with pytest.raises(SchemaConflict):
            frames.decode(frame)
    with pytest.raises(ValueTooLarge) as raised:
        frames.encode(bytes(too_much), field="result")
    assert isinstance(raised.value, InvalidInput)
    assert (raised.value.field, raised.value.size, raised.value.limit) == ("result", too_much, frames.MAX_INFLATED)


@pytest.mark.parametrize("off_by", [-1000, -1, 1, 1000])
def test_a_lying_length(off_by: int) -> None:
    """Longer or shorter than what is there: refused, not cut and not padded."""
    payload = b"0123456789" * 300
    for frame in (
        _zstd(len(payload) + off_by, zstd.compress(payload)),
        _seed(len(payload) + off_by, zlib.compress(payload)),
    ):
        with pytest.raises(SchemaConflict, match="does not inflate to"):
            frames.decode(frame)


# --- damaged and unknown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [value for value in range(256) if value not in (frames.PLAIN, frames.ZSTD, frames.SEED, frames.SEALED)]
)
def test_unknown_codecs(first: int) -> None:
    """Every other first byte is a codec of a newer version: refused with its number and with the place."""
    with pytest.raises(SchemaConflict, match=f"log k record 7: unknown frame codec 0x{first:02x}") as raised:
        frames.decode(bytes([first]) + b"rest", where="log k record 7")
    assert raised.value.where == "log k record 7"


@pytest.mark.parametrize(
    ("rest", "key_id"), [(b"\x01\x03keyrest", "key"), (b"\x01\x03k", "k"), (b"\x01\x00", ""), (b"", "")]
)
def test_a_sealed_frame(rest: bytes, key_id: str) -> None:
    """Who reads an encrypted record without a keyring is told which key it needs, and where."""
    with pytest.raises(KeyMissing, match=f"log k record 7: is encrypted with the key '{key_id}', and no") as raised:
        frames.decode(b"\x03" + rest, where="log k record 7")
    assert (raised.value.where, raised.value.key_id) == ("log k record 7", key_id)


def test_an_empty_frame() -> None:
    """Nothing at all is no frame; a frame around nothing is one."""
    with pytest.raises(SchemaConflict, match="unknown frame"):
        frames.decode(b"")
    for codec in CODECS:
        assert frames.decode(frames.encode(b"", codec)) == b""


@pytest.mark.parametrize("codec", ["zstd", "seed"])
def test_every_cut_is_noticed(codec: frames.Codec) -> None:
    """A frame that ends too early, wherever, is refused and never half read."""
    frame = frames.encode(b"".join(b"%d " % number for number in range(300)), codec)
    for end in range(1, len(frame)):
        with pytest.raises(SchemaConflict):
            frames.decode(frame[:end])


@pytest.mark.parametrize("codec", ["zstd", "seed"])
def test_something_behind_the_end(codec: frames.Codec) -> None:
    """More than one value is no value."""
    payload = b"0123456789" * 300
    packed = zstd.compress(payload) if codec == "zstd" else zlib.compress(payload)
    form = _zstd if codec == "zstd" else _seed
    assert frames.decode(form(len(payload), packed)) == payload
    for more in (b"x", b"\x00", packed):
        with pytest.raises(SchemaConflict):
            frames.decode(form(len(payload), packed + more))


@examples
@given(data=st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """No damaged frame raises anything else than SchemaConflict (or one that looks encrypted KeyMissing), or takes more room than
    its claim."""
    codec = data.draw(st.sampled_from(CODECS))
    frame = bytearray(frames.encode(b"".join(b"%d " % number for number in range(300)), codec))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        payload = frames.decode(bytes(frame), limit=5000)
    except (SchemaConflict, KeyMissing):
        return
    assert len(payload) <= 5000


@examples
@given(start=st.sampled_from([b"", b"\x01", b"\x02\x00\x00", b"1:", b"1:9:"]), rest=st.binary(max_size=60))
def test_noise_is_refused(start: bytes, rest: bytes) -> None:
    """Any bytes at all: a payload or SchemaConflict, or KeyMissing for what looks encrypted."""
    try:
        payload = frames.decode(start + rest, limit=1000)
    except (SchemaConflict, KeyMissing):
        return
    assert len(payload) <= 1000


@pytest.mark.parametrize(
    "frame",
    [
        b"1",
        b"1:",
        b"1:3",
        b"1:3:",
        b"1::eJxLTEoGAAJNASc=",
        b"1:x:eJxLTEoGAAJNASc=",
        b"1:-3:eJxLTEoGAAJNASc=",
        b"1:+3:eJxLTEoGAAJNASc=",
        b"1: 3:eJxLTEoGAAJNASc=",
        b"1:0_3:eJxLTEoGAAJNASc=",
        b"1:3.0:eJxLTEoGAAJNASc=",
        b"1:%s:eJxLTEoGAAJNASc=" % (b"9" * 5000),
        b"1:3:eJxLTEoG AAJNASc=",
        b"1:3:eJxLTEoGAAJNASc=\n",
        b"1:3:eJxLTEoGAAJNASc",
        b"1:3:\xff\xff\xff\xff",
        b"1:3:YWJj",
        b"12:3:eJxLTEoGAAJNASc=",
        b"1x:3:eJxLTEoGAAJNASc=",
    ],
)
def test_damaged_frames_of_the_seeds_form(frame: bytes) -> None:
    """Only digits, only base64, only version 1 (`1:3:eJxLTEoGAAJNASc=` is `abc`)."""
    assert frames.decode(b"1:3:eJxLTEoGAAJNASc=") == b"abc"
    with pytest.raises(SchemaConflict):
        frames.decode(frame)


def test_several_threads() -> None:
    """Each thread has a compressor of its own: nothing of one value gets into another."""
    values = [b"%d " % number * 2000 for number in range(200)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(frames.decode, pool.map(frames.encode, values))) == values
