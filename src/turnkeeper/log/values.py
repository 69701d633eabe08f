"""Values: which Python values are kept, exactly, and how they become bytes and come back.

Kept exactly: None, bool, int of any size, finite float, str, bytes, list, and dict with str keys, up to `MAX_DEPTH` deep.
A tuple comes back as a list. Half a surrogate pair comes back as U+FFFD, the one change of text that is made. Anything else
is refused with the path inside the value, before anything is written (field cases 09 and 11).

Freezing copies, so that nobody's later change of his own lists reaches what is stored, and thawing copies again (field case 10).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from turnkeeper.errors import InvalidInput, SchemaConflict
from turnkeeper.log import frames

MAX_DEPTH: Final = 128
"""How deep lists and dicts may be nested."""
SHARED_FROM: Final = 16
"""Strings from this length on are written once in a round and referred to afterwards."""

_BIG_INT: Final = 1
_SHARED: Final = 2
_INT64_MIN: Final = -(2**63)
_UINT64_MAX: Final = 2**64 - 1

_UNFIT: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters and halves of surrogate pairs."""

_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="deterministic")


class _Refused(Exception):
    """Why a value is refused; the path grows while the exception climbs out of the value."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
    return value


def _storable(value: Any, depth: int) -> Any:
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]  # of anything
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is dict or kind is list or kind is tuple:
        if depth >= MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} levels")
        return _storable_dict(value, depth) if kind is dict else _storable_list(value, depth)
    if value is None or kind is bool or kind is int or kind is bytes:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise _Refused(f"{value!r} has no form in JSON; store a string or None")
        return value
    raise _Refused(f"values of type {kind.__module__}.{kind.__qualname__} are not kept; convert it first")


def _storable_list(value: Sequence[Any], depth: int, first: int = 0) -> list[Any]:
    items: list[Any] = []
    try:
        for item in value:
            items.append(_storable(item, depth + 1))  # noqa: PERF401  # its length tells which item is refused
    except _Refused as e:
        e.path.append(f"[{first + len(items)}]")
        raise
    return items


def _storable_dict(value: dict[Any, Any], depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        if type(key) is not str:
            raise _Refused(f"keys must be text, not {type(key).__name__} {key!r:.40}")
        try:
            # Most items are text that is as it has to be; a call for each would double what this takes.
            plain = type(item) is str and item.isascii()
            result[key if key.isascii() else _text(key)] = item if plain else _storable(item, depth + 1)
        except _Refused as e:
            e.path.append(f".{key}")
            raise
    if len(result) != len(value):
        raise _Refused("two keys differ only in characters that cannot be kept")
    return result


def storable(value: Any, field: str = "value", *, first: int = 0) -> Any:
    """A copy of `value`, independent of the caller's, as it comes back from the store; or the reason why it cannot be kept.

    With `first`, `value` is a part of a list, and its first item has that number there: the path tells.

    Raises:
        InvalidInput: naming the path inside the value.
    """
    try:
        return _storable_list(value, 0, first) if first else _storable(value, 0)
    except _Refused as e:
        raise InvalidInput(field + "".join(reversed(e.path)), e.reason) from None


def reference(number: int) -> Any:
    """What stands in a storable copy for the value of that number among the shared ones, to be thawed with the same."""
    return msgspec.msgpack.Ext(_SHARED, b"%d" % number)


def _extended(stored: Any, shared: Mapping[str, int]) -> Any:
    """A storable copy with an extension of msgpack in place of every shared string and every int that msgpack lacks."""
    kind = type(stored)  # pyright: ignore[reportUnknownVariableType]  # of anything
    if kind is str:
        index = shared.get(stored) if len(stored) >= SHARED_FROM else None
        return stored if index is None else reference(index)
    if kind is dict:
        return {key: _extended(item, shared) for key, item in stored.items()}
    if kind is list:
        return [_extended(item, shared) for item in stored]
    if kind is int and not _INT64_MIN <= stored <= _UINT64_MAX:
        return msgspec.msgpack.Ext(_BIG_INT, stored.to_bytes(stored.bit_length() // 8 + 1, "big", signed=True))
    return stored


def pack(stored: Any, encoder: msgspec.msgpack.Encoder = _encoder, shared: Mapping[str, int] | None = None) -> bytes:
    """The msgpack of a copy that `storable` made, or of one with references in it."""
    if not shared:
        try:
            return encoder.encode(stored)
        except OverflowError:
            shared = {}
    return encoder.encode(_extended(stored, shared))


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
    return seal(storable(value, field), field, codec=codec, limit=limit, shared=shared)


def seal(
    stored: Any,
    field: str = "value",
    *,
    codec: frames.Codec = "zstd",
    limit: int = frames.MAX_INFLATED,
    shared: Mapping[str, int] | None = None,
) -> bytes:
    """A copy that `storable` made, as a frame: the second half of `freeze`, for who needs the copy as well.

    Raises:
        ValueTooLarge: it is over `limit` bytes.
    """
    return frames.encode(pack(stored, shared=shared), codec, limit=limit, field=field)


def thaw(frame: bytes, *, shared: Sequence[Any] = (), limit: int = frames.MAX_INFLATED) -> Any:
    """The value of a frame, a new copy each time. References in it give what `shared` gives for their number.

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


class _Exactly:
    """Equals only a number of the same type and form: `==` takes 1, 1.0 and True for one another, and 0.0 for -0.0."""

    __slots__ = ("_value",)

    def __init__(self, value: int | float) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        mine = self._value
        return type(other) is type(mine) and other == mine and (mine != 0 or str(other) == str(mine))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # no key of anything


def exactly(stored: Any) -> Any:
    """A storable copy in a form that `==` compares with another storable copy by what is stored, and text at the speed of C."""
    kind = type(stored)  # pyright: ignore[reportUnknownVariableType]  # of anything
    if kind is dict:
        return {key: item if type(item) is str else exactly(item) for key, item in stored.items()}
    if kind is list:
        return [exactly(item) for item in stored]
    return _Exactly(stored) if kind is int or kind is float or kind is bool else stored


def same_frames(one: bytes | None, other: bytes | None) -> bool:
    """Whether two frames hold the same value, whatever the order of its keys and whoever compressed it."""
    if one is None or other is None or one == other:
        return one == other
    return fingerprint(thaw(one)) == fingerprint(thaw(other))


def fingerprint(value: Any, field: str = "value") -> str:
    """A short digest, the same for values that are equal once stored, whatever the order of their keys."""
    return hashlib.blake2b(pack(storable(value, field), _canonical), digest_size=16).hexdigest()


def strings_of(value: Any) -> list[str]:
    """The strings of a thawed value that are long enough to be shared, in a fixed order."""
    found: list[str] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[str]) -> None:
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]  # of anything
    if kind is str:
        if len(value) >= SHARED_FROM:
            found.append(value)
    elif kind is list:
        for item in value:
            _collect(item, found)
    elif kind is dict:
        for item in value.values():
            _collect(item, found)


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
    if _UNFIT.search(value):
        raise InvalidInput(field, "must not hold control characters or halves of surrogate pairs")
    return value
