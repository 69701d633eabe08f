"""Values: which Python values are kept, exactly, and how they become bytes and come back.

Kept exactly: None, bool, int of any size, finite float, str, bytes, list, and dict with str keys, up to `MAX_DEPTH` deep.
A tuple comes back as a list. Half a surrogate pair comes back as U+FFFD, the one change of text that is made. Anything else
is refused with the path inside the value, before anything is written (field cases 09 and 11).

Freezing copies, so that nobody's later change of his own lists reaches what is stored, and thawing copies again (field case 10).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from turnkeeper.errors import InvalidInput, SchemaConflict
from turnkeeper.log import frames

MAX_DEPTH: Final = 128
"""How deep lists and dicts may be nested."""
SHARED_FROM: Final = 48
"""Strings from this length on are written once in a round and referred to afterwards."""

_BIG_INT: Final = 1
_SHARED: Final = 2
_INT64_MIN: Final = -(2**63)
_UINT64_MAX: Final = 2**64 - 1

_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="deterministic")


class _Refused(Exception):
    """Why a value is refused; the path grows while the exception climbs out of the value."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


def _text(value: str) -> str:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
    return value


def _storable(value: Any, depth: int, shared: Mapping[str, int] | None) -> Any:
    """`value` in a form that msgpack keeps exactly; a copy wherever a container has to differ."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]  # of anything
    if kind is str:
        if shared is not None and len(value) >= SHARED_FROM and (index := shared.get(value)) is not None:
            return msgspec.msgpack.Ext(_SHARED, b"%d" % index)
        return _text(value)
    if value is None or kind is bool or kind is bytes:
        return value
    if kind is int:
        if _INT64_MIN <= value <= _UINT64_MAX:
            return value
        return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if kind is float:
        if not math.isfinite(value):
            raise _Refused(f"{value!r} has no form in JSON; store a string or None")
        return value
    if kind is not dict and kind is not list and kind is not tuple:
        raise _Refused(f"values of type {kind.__module__}.{kind.__qualname__} are not kept; convert it first")
    if depth >= MAX_DEPTH:
        raise _Refused(f"nested deeper than {MAX_DEPTH} levels")
    if kind is dict:
        return _storable_dict(value, depth, shared)
    items: list[Any] = []
    for index, item in enumerate(value):
        try:
            items.append(_storable(item, depth + 1, shared))
        except _Refused as e:
            e.path.append(f"[{index}]")
            raise
    return items


def _storable_dict(value: dict[Any, Any], depth: int, shared: Mapping[str, int] | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        if type(key) is not str:
            raise _Refused(f"keys must be text, not {type(key).__name__} {key!r:.40}")
        try:
            result[_text(key)] = _storable(item, depth + 1, shared)
        except _Refused as e:
            e.path.append(f".{key}")
            raise
    if len(result) != len(value):
        raise _Refused("two keys differ only in characters that cannot be kept")
    return result


def storable(value: Any, field: str = "value", *, shared: Mapping[str, int] | None = None) -> Any:
    """A copy of `value` that is independent of the caller's, or the reason why it cannot be kept.

    Raises:
        InvalidInput: naming the path inside the value.
    """
    try:
        return _storable(value, 0, shared)
    except _Refused as e:
        raise InvalidInput(field + "".join(reversed(e.path)), e.reason) from None


def freeze(
    value: Any,
    field: str = "value",
    *,
    codec: frames.Codec = "zstd",
    limit: int = frames.MAX_INFLATED,
    shared: Mapping[str, int] | None = None,
) -> bytes:
    """`value` as a frame. Strings in `shared` are written as references, to be thawed with the same strings.

    Raises:
        InvalidInput: the value cannot be kept exactly; names the path.
        ValueTooLarge: it is over `limit` bytes.
    """
    return frames.encode(_encoder.encode(storable(value, field, shared=shared)), codec, limit=limit, field=field)


def thaw(frame: bytes, *, shared: Sequence[str] = (), limit: int = frames.MAX_INFLATED) -> Any:
    """The value of a frame, a new copy each time.

    Raises:
        SchemaConflict: the frame is unknown or damaged.
    """
    payload = frames.decode(frame, limit=limit)

    def extension(code: int, data: memoryview) -> Any:
        if code == _BIG_INT:
            return int.from_bytes(data, "big", signed=True)
        if code == _SHARED:
            return shared[int(bytes(data))]
        raise ValueError(f"unknown extension {code}")

    try:
        return msgspec.msgpack.decode(payload, ext_hook=extension)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, IndexError, RecursionError) as e:
        raise SchemaConflict("value", f"damaged value ({e})") from e


def text(value: Any, field: str) -> str:
    """`value` as text that is kept, for fields of a record that are text and not a frame.

    Raises:
        InvalidInput: it is not text.
    """
    if not isinstance(value, str):
        raise InvalidInput(field, f"must be text, not {type(value).__name__}")
    return _text(value)


def same(one: Any, other: Any) -> bool:
    """Whether two storable values are equal once stored: unlike `==`, which takes 1, 1.0 and True for one another."""
    return one is other or _canonical.encode(one) == _canonical.encode(other)


def same_frames(one: bytes | None, other: bytes | None) -> bool:
    """Whether two frames hold the same value, whatever the order of its keys and whoever compressed it."""
    if one is None or other is None or one == other:
        return one == other
    return fingerprint(thaw(one)) == fingerprint(thaw(other))


def fingerprint(value: Any, field: str = "value") -> str:
    """A short digest, the same for values that are equal once stored, whatever the order of their keys."""
    return hashlib.blake2b(_canonical.encode(storable(value, field)), digest_size=16).hexdigest()


def strings_of(value: Any) -> Iterator[str]:
    """The strings of a thawed value that are long enough to be shared, in a fixed order."""
    if isinstance(value, str):
        if len(value) >= SHARED_FROM:
            yield value
    elif isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  # thawed values are plain JSON
            yield from strings_of(item)
    elif isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from strings_of(item)


def identifier(value: Any, field: str, *, empty: bool = False, longest: int = 512) -> str:
    """`value` if it can serve as an identifier on every store: text, not empty, no control characters.

    Raises:
        InvalidInput: naming `field`. Nothing was written.
    """
    if not isinstance(value, str):
        raise InvalidInput(field, f"must be text, not {type(value).__name__}")
    if not value and not empty:
        raise InvalidInput(field, "must not be empty")
    if len(value) > longest:
        raise InvalidInput(field, f"{len(value)} characters are over the limit of {longest}")
    if any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in value):
        raise InvalidInput(field, "must not hold control characters or halves of surrogate pairs")
    return value
