"""Values (`log/values.py`): what is kept exactly, what is refused and where, references, fingerprints, identifiers."""

from __future__ import annotations

import concurrent.futures
import datetime
import decimal
import enum
import math
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeeper.errors import InvalidInput, SchemaConflict, ValueTooLarge
from turnkeeper.log import frames, values

CODECS: tuple[frames.Codec, ...] = ("plain", "zstd", "seed")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**60), 10**60)
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 2**53 + 1, 10**40, -(10**400)])
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
    | st.binary(max_size=60)
)
examples = settings(max_examples=60, deadline=None)

ELSEWHERE = concurrent.futures.ThreadPoolExecutor(1)
"""A reader who did not write: a thread remembers the payloads of the frames that it made itself."""


def thaw(frame: bytes, shared: Sequence[str] = ()) -> Any:
    """The value, as a reader gets it who did not write the frame."""
    return ELSEWHERE.submit(values.thaw, frame, shared=shared).result()


json_like = st.recursive(leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5))


def exactly(one: Any, other: Any) -> bool:
    """Equality of value and type, all the way down; -0.0 is not 0.0 and the order of keys counts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        mine: list[tuple[Any, Any]] = list(one.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        return exactly(mine, list(other.items()))
    if isinstance(one, list | tuple):
        pairs: list[tuple[Any, Any]] = list(zip(one, other, strict=False))  # pyright: ignore[reportUnknownArgumentType]
        return len(pairs) == len(one) == len(other) and all(exactly(a, b) for a, b in pairs)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


# --- what is kept exactly --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@examples
@given(value=json_like)
def test_json_like_values_round_trip(codec: frames.Codec, value: Any) -> None:
    """None, bool, any int, finite float, text, bytes, lists and dicts with text keys: value, type and order."""
    assert exactly(thaw(values.freeze(value, codec=codec)), value)


@pytest.mark.parametrize("exponent", [1, 7, 8, 15, 31, 32, 62, 63, 64, 65, 127, 128, 255, 256, 1023, 50_000])
def test_integers_of_any_size(exponent: int) -> None:
    """Around every power of two that a format might stumble over, of both signs."""
    for value in (2**exponent + delta for delta in (-2, -1, 0, 1, 2)):
        for signed in (value, -value):
            assert exactly(thaw(values.freeze([signed])), [signed])


def test_kinds_are_told_apart() -> None:
    """1, 1.0, True, "1" and b"1" stay what they are, as do the empty list, the empty dict, "" and None."""
    value: list[Any] = [1, 1.0, True, "1", b"1", 0, 0.0, -0.0, False, "", b"", None, [], {}, [[]], [{}], {"": 0}]
    assert exactly(values.thaw(values.freeze(value)), value)


def test_a_tuple_comes_back_as_a_list() -> None:
    """The one change of shape, as documented, at any depth."""
    assert exactly(values.thaw(values.freeze((1, ("a", {"b": ()})))), [1, ["a", {"b": []}]])


@pytest.mark.parametrize(
    ("given_text", "kept"),
    [
        ("a\ud83d", "a\ufffd"),
        ("\ude02b", "\ufffdb"),
        ("\ude02\ud83d", "\ufffd\ufffd"),
        ("\ud800\udfff\udc80 and \U0001f602", "\ufffd\ufffd\ufffd and \U0001f602"),
        ("a\x00b", "a\x00b"),
        ("a\\u0000b", "a\\u0000b"),
        ("\uffff\ufeff\u2028\x7f\x85", "\uffff\ufeff\u2028\x7f\x85"),
    ],
)
def test_text(given_text: str, kept: str) -> None:
    """Halves of surrogate pairs become U+FFFD, one for each; all other text is untouched; in keys as in values."""
    assert values.thaw(values.freeze(given_text)) == kept
    assert values.thaw(values.freeze({given_text: [given_text]})) == {kept: [kept]}
    assert values.text(given_text, "field") == kept


@examples
@given(value=json_like)
def test_freezing_copies(value: Any) -> None:
    """Field case 10: the storable form shares no container with the caller's value, and each thawing is a new one."""
    frame = values.freeze({"v": value})
    one, two = values.thaw(frame), values.thaw(frame)
    one["v"] = one["more"] = [1]
    assert exactly(two, {"v": value})
    assert exactly(values.thaw(frame), {"v": value})


def test_storable_is_a_copy() -> None:
    """Also of what needs no change at all."""
    inner: list[Any] = [1]
    value = {"a": inner}
    copied = values.storable(value)
    inner.append(2)
    value["b"] = inner
    assert copied == {"a": [1]}


# --- what is refused, and where --------------------------------------------------------------------------------


class Named(enum.StrEnum):
    A = "a"


class Number(int):
    pass


REFUSED: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    {1, 2},
    frozenset({1}),
    datetime.datetime(2031, 3, 30, 1, 30, tzinfo=datetime.UTC),
    datetime.date(2031, 3, 30),
    decimal.Decimal("1.10"),
    uuid.UUID(int=1),
    1j,
    bytearray(b"x"),
    memoryview(b"x"),
    range(3),
    object(),
    Exception("x"),
    len,
    Named.A,
    Number(5),
    OrderedDict(a=1),
    msgspec.msgpack.Ext(1, b"x"),
    {1: "a"},
    {1: "a", "1": "b"},
    {None: 1},
    {(1, 2): 1},
    {b"x": 1},
    {Named.A: 1},
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_refused_with_the_path(value: Any) -> None:
    """Field case 11: everything else is refused before anything is written, and the error names the place inside."""
    for wrapped, path in (
        (value, "result"),
        ([0, value], "result[1]"),
        ({"a": {"b c": [0, (1, value)]}}, "result.a.b c[1][1]"),
    ):
        for refusing in (values.freeze, values.storable, values.fingerprint):
            with pytest.raises(InvalidInput) as raised:
                refusing(wrapped, "result")
            assert raised.value.field == path
            assert str(raised.value).startswith(f"{path}: ")


def test_keys_that_would_become_one() -> None:
    """Two keys that differ only in what is not kept would lose one of the values: refused."""
    with pytest.raises(InvalidInput) as raised:
        values.freeze({"x": dict.fromkeys(["a\ud83d", "a\ude02"], 1)}, "runtime")
    assert raised.value.field == "runtime.x"
    assert values.thaw(values.freeze({"a\ud83d": 1, "a": 2})) == {"a\ufffd": 1, "a": 2}


def _nested(depth: int, kind: type) -> Any:
    value: Any = None
    for _ in range(depth):
        value = {"k": value} if kind is dict else [value]
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_depth(kind: type) -> None:
    """Exact up to the documented depth, refused beyond it, without a crash at any depth."""
    deepest = _nested(values.MAX_DEPTH, kind)
    for codec in CODECS:
        assert thaw(values.freeze(deepest, codec=codec)) == deepest
    for depth in (values.MAX_DEPTH + 1, 300, 1010, 5000, 100_000):
        with pytest.raises(InvalidInput, match="nested deeper"):
            values.freeze(_nested(depth, kind))


def test_a_value_that_holds_itself() -> None:
    """Endless, so deeper than any limit."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidInput, match="nested deeper"):
        values.freeze(value)


def test_too_large() -> None:
    """Typed, with the sizes; nothing is cut."""
    with pytest.raises(ValueTooLarge) as raised:
        values.freeze({"a": "x" * 5000}, "messages", limit=1000)
    assert (raised.value.field, raised.value.limit) == ("messages", 1000)
    assert raised.value.size > 5000
    with pytest.raises(SchemaConflict):
        values.thaw(values.freeze("x" * 5000), limit=1000)


# --- damaged values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xa5abc",
        b"\x91" * 100_000,
        b"\xa1\xff",
        msgspec.msgpack.encode(msgspec.msgpack.Ext(77, b"x")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"0")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"many")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"-1")),
        b"\x01\x02",
    ],
    ids=[
        "empty",
        "unused",
        "cut",
        "deep",
        "utf-8",
        "extension",
        "no such string",
        "no number",
        "negative",
        "two values",
    ],
)
def test_damaged_values(payload: bytes) -> None:
    """Whatever is in a frame: a value or SchemaConflict, and nothing that loads runs code."""
    for codec in CODECS:
        with pytest.raises(SchemaConflict):
            values.thaw(frames.encode(payload, codec))


@examples
@given(payload=st.binary(max_size=80))
def test_noise(payload: bytes) -> None:
    """Any msgpack or none."""
    try:
        value = values.thaw(b"\x01" + payload)
    except SchemaConflict:
        return
    assert value is None or isinstance(value, str | bytes | int | float | list | dict | datetime.datetime)


# --- shared strings --------------------------------------------------------------------------------------------


def test_shared_strings_are_written_once() -> None:
    """A long string that stands in the round already is a reference, wherever it stands; short ones are not."""
    long, other, short = "said before " * 20, "said now " * 20, "short"
    shared = [short, long]
    index = {string: number for number, string in enumerate(shared)}
    value = {"a": [long, other, short, {long: long}]}
    frame = values.freeze(value, codec="plain", shared=index)
    assert frame.count(long.encode()) == 1  # the key
    assert frame.count(other.encode()) == 1
    assert values.thaw(frame, shared=shared) == value
    with pytest.raises(SchemaConflict):
        values.thaw(frame)


@examples
@given(value=json_like, strings=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=48), max_size=3))
def test_shared_strings_round_trip(value: Any, strings: list[str]) -> None:
    """Whatever is shared, the value is the same."""
    whole = [value, strings, {"k": strings}]
    shared = list(values.strings_of(values.thaw(values.freeze(strings))))
    index = {string: number for number, string in reversed(list(enumerate(shared)))}
    assert exactly(thaw(values.freeze(whole, shared=index), shared=shared), whole)


def test_strings_of() -> None:
    """Long strings in the order of the value, not of keys, and of nothing but strings."""
    long, longer = "a" * values.SHARED_FROM, "b" * 100
    assert list(values.strings_of([1, long, {"k" * 99: longer, "l": [b"c" * 99, long]}, "short"])) == [
        long,
        longer,
        long,
    ]


# --- sameness --------------------------------------------------------------------------------------------------


@examples
@given(value=json_like)
def test_a_fingerprint_survives_storing(value: Any) -> None:
    """The original and what comes back have one fingerprint, so that a repeated start is the same turn (case 09)."""
    assert values.fingerprint(value) == values.fingerprint(values.thaw(values.freeze(value)))


def test_fingerprints() -> None:
    """Of the value as stored: whatever the order of keys, tuple or list; 1, 1.0, True and "1" are different values."""
    assert values.fingerprint({"a": 1, "b": (1, "\ud83d")}) == values.fingerprint({"b": [1, "\ufffd"], "a": 1})
    different: list[Any] = [1, 1.0, True, "1", b"1", None, 0, "", [], {}, [1], 2**64, str(2**64), -0.0, 0.0]
    assert len({values.fingerprint(value) for value in different}) == len(different)


@examples
@given(one=json_like, other=json_like)
def test_sameness_is_equality_of_what_is_stored(one: Any, other: Any) -> None:
    """`exactly` and `same_frames` say what the fingerprints say; a value is the same as itself under any codec."""
    equal = values.fingerprint(one) == values.fingerprint(other)
    assert (values.exactly(values.storable(one)) == values.storable(other)) is equal
    assert (values.storable(other) == values.exactly(values.storable(one))) is equal
    assert values.exactly(values.storable(one)) == values.storable(one)
    assert values.exactly(values.thaw(values.freeze(one))) == values.storable(one)
    assert values.same_frames(values.freeze(one), values.freeze(other, codec="seed")) is equal
    assert values.same_frames(values.freeze(one, codec="seed"), values.freeze(one))


def test_what_python_takes_for_equal() -> None:
    """1 == 1.0 == True in Python; stored, they are three values, at any depth. No frame is the same as none."""
    alike: list[Any] = [[1, True, 1.0], [0, False, 0.0, -0.0], [2**53, 2.0**53], [2**64, 2.0**64]]
    for group in alike:
        for one in group:
            for other in group:
                expected = (type(one), repr(one)) == (type(other), repr(other))
                for wrap in (lambda value: value, lambda value: [value], lambda value: {"a": [0, value]}):  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
                    assert (values.exactly(wrap(one)) == wrap(other)) is expected
                    assert values.same_frames(values.freeze(wrap(one)), values.freeze(wrap(other))) is expected
    assert values.exactly({"a": 1, "b": 2}) == {"b": 2, "a": 1}
    assert values.exactly([10**5000]) == [10**5000]
    assert values.exactly([10**5000]) != [10**5000 + 1]
    assert values.same_frames(None, None)
    assert not values.same_frames(None, values.freeze(None))


# --- identifiers and text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["a", " ", "a b", "\u6f22\u5b57", "\U0001f602", "{}:*%_'\"\\;--", "\uffff\u2028\x85", "x" * 512]
)
def test_identifiers(value: str) -> None:
    """Any text that every store can take, up to the limit, as it is."""
    assert values.identifier(value, "trace_id") is value


@pytest.mark.parametrize(
    "value", ["", "\x00", "a\x00b", "a\nb", "\x1b[31m", "\x7f", "a\ud83d", "\ude02b", "x" * 513, None, 5, b"a", ["a"]]
)
def test_refused_identifiers(value: Any) -> None:
    """Empty, control characters, halves of surrogate pairs, too long, no text: typed, with the field's name."""
    with pytest.raises(InvalidInput) as raised:
        values.identifier(value, "trace_id")
    assert raised.value.field == "trace_id"


def test_identifiers_that_may_be_empty_or_must_be_short() -> None:
    """As the caller asks."""
    assert values.identifier("", "owner", empty=True) == ""
    with pytest.raises(InvalidInput, match="4 characters are over the limit of 3"):
        values.identifier("abcd", "scope", longest=3)


def test_text_is_text() -> None:
    """Other values are refused by name."""
    for value in (None, 5, b"text", ["text"]):
        with pytest.raises(InvalidInput) as raised:
            values.text(value, "content")
        assert raised.value.field == "content"
