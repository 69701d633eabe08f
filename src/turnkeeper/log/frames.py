"""Frames: how bytes of msgpack are wrapped for keeping. One byte names the codec; inflating is bounded.

| first byte | codec | rest |
| --- | --- | --- |
| 0x01 | plain | msgpack |
| 0x02 | zstd | length of the msgpack (4 bytes, big endian), zstd frame |
| 0x03 | sealed | see `turnkeeper.log.sealing`: what is sealed is a frame of one of the others |
| `1` (0x31) | the first seed's | `1:<length>:<base64 of zlib>` (journal.md T1.2) |
"""

from __future__ import annotations

import base64
import binascii
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Final, Literal

from turnkeeper.errors import KeyMissing, SchemaConflict, ValueTooLarge

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Codec = Literal["plain", "zstd", "seed"]

PLAIN: Final = 0x01
ZSTD: Final = 0x02
SEALED: Final = 0x03
SEED: Final = ord("1")

_PLAIN_BYTE: Final = b"\x01"

COMPRESS_FROM: Final = 512
"""Below this size compression costs more than it saves."""
MAX_INFLATED: Final = 64 * 1024 * 1024
"""Largest msgpack, in bytes, that is written or inflated unless the caller says otherwise."""

_LEVEL: Final = 1
"""Measured on 2 KiB of English: level 3 takes a fifth longer and saves one byte in a hundred."""
_LATELY: Final = 256
"""Frames whose payload a thread remembers."""
_SMALL: Final = 16 * 1024
"""Largest payload, in bytes, that is remembered: with the frames at the most 8 MB in a thread."""


class _Compressor(threading.local):
    """One compressor for each thread: setting one up costs more than compressing a kilobyte."""

    def __init__(self) -> None:
        self.zstd = zstd.ZstdCompressor(level=_LEVEL)

    def __call__(self, payload: bytes) -> bytes:
        return self.zstd.compress(payload, zstd.ZstdCompressor.FLUSH_FRAME)


_compress = _Compressor()


class _Lately(threading.local):
    """Payloads of the frames that this thread made last.

    A round looks at its own decision and results again and again: they are given back as stored, compared, and referred
    to by the commit. (Measured: without this, a turn driven by hand computes an eighth more.)
    """

    def __init__(self) -> None:
        self.payloads: dict[bytes, bytes] = {}

    def remember(self, frame: bytes, payload: bytes) -> None:
        if len(payload) <= _SMALL:
            self.payloads[frame] = payload
            if len(self.payloads) > _LATELY:
                del self.payloads[next(iter(self.payloads))]


_lately = _Lately()


def encode(payload: bytes, codec: Codec = "zstd", *, limit: int = MAX_INFLATED, field: str = "value") -> bytes:
    """Wrap `payload`. `zstd` falls back to plain where it would not be smaller.

    Raises:
        ValueTooLarge: `payload` is longer than `limit`.
    """
    if len(payload) > limit:
        raise ValueTooLarge(field, len(payload), limit)
    if codec == "seed":
        return b"1:%d:%s" % (len(payload), base64.b64encode(zlib.compress(payload)))
    if codec == "zstd" and len(payload) >= COMPRESS_FROM:
        packed = _compress(payload)
        if len(packed) + 5 < len(payload):
            frame = b"\x02" + len(payload).to_bytes(4, "big") + packed
            _lately.remember(frame, payload)
            return frame
    return b"\x01" + payload


def joined(bodies: Sequence[bytes]) -> bytes | None:
    """Plain frames as one msgpack array of what they hold, to be decoded in one go; None where one of them is not plain."""
    if any(body[:1] != _PLAIN_BYTE for body in bodies):
        return None
    return b"\xdd" + len(bodies).to_bytes(4, "big") + b"".join([body[1:] for body in bodies])


def decode(frame: bytes, *, limit: int = MAX_INFLATED, where: str = "frame") -> bytes:
    """Unwrap a frame of any codec.

    Raises:
        SchemaConflict: the codec is unknown, the frame is damaged, or it would inflate beyond `limit` bytes.
        KeyMissing: it is sealed, and whoever reads it has no keyring.
    """
    codec = frame[0] if frame else None
    if codec == PLAIN:
        if len(frame) - 1 > limit:
            raise SchemaConflict(where, f"frame holds {len(frame) - 1} bytes, more than the limit of {limit}")
        return frame[1:]
    if codec == ZSTD:
        length = int.from_bytes(frame[1:5], "big")
        _check_length(length, limit, where)
        remembered = _lately.payloads.get(frame)
        if remembered is not None:
            return remembered
        try:
            inflater = zstd.ZstdDecompressor()
            payload = inflater.decompress(frame[5:], length + 1)
        except zstd.ZstdError as e:
            raise SchemaConflict(where, f"damaged zstd frame ({e})") from e
        return _exact(payload, length, inflater.eof and not inflater.unused_data, where)
    if codec == SEED:
        return _decode_seed(frame, limit, where)
    if codec == SEALED:
        key_id = frame[3 : 3 + frame[2]].decode("ascii", "replace") if len(frame) > 2 else ""
        raise KeyMissing(
            where, key_id, f"is encrypted with the key {key_id!r}, and no keyring was given to open it with"
        )
    raise SchemaConflict(where, "unknown frame" if codec is None else f"unknown frame codec 0x{codec:02x}")


def _decode_seed(frame: bytes, limit: int, where: str) -> bytes:
    try:
        version, digits, text = frame.split(b":", 2)
        if not digits.isdigit():
            raise ValueError("a length is digits only")
        length = int(digits)
        packed = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as e:
        raise SchemaConflict(where, "damaged frame of the seed's form") from e
    if version != b"1":
        raise SchemaConflict(where, f"unknown seed codec version {version[:16]!r}")
    _check_length(length, limit, where)
    try:
        inflater = zlib.decompressobj()
        payload = inflater.decompress(packed, length + 1)
    except zlib.error as e:
        raise SchemaConflict(where, f"damaged zlib frame ({e})") from e
    return _exact(payload, length, inflater.eof and not inflater.unused_data, where)


def _check_length(length: int, limit: int, where: str) -> None:
    if not 0 <= length <= limit:
        raise SchemaConflict(where, f"frame claims {length} bytes, the limit is {limit}")


def _exact(payload: bytes, length: int, complete: bool, where: str) -> bytes:
    if len(payload) != length or not complete:
        raise SchemaConflict(where, f"frame does not inflate to the {length} bytes that it claims")
    return payload
