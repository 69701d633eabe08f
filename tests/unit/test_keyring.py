"""Keyrings: where keys come from, and that no key is ever seen."""

from __future__ import annotations

import base64
import pickle
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper import Keyring
from turnkeeper.errors import InvalidInput, KeyMissing, KeyUnavailable

ONE = bytes(range(32))
TWO = bytes(range(100, 132))
KEYS = f"one:{base64.b64encode(ONE).decode()}"
BOTH = f"{KEYS},two:{base64.b64encode(TWO).decode()}"


@pytest.mark.parametrize(
    "text",
    [
        BOTH,
        f" {BOTH.replace(',', ' , ')} ,",
        BOTH.replace(",", "\n"),
        f"# current\n{KEYS}  # since June\n\n{BOTH.partition(',')[2]}\n",
        f"one:{base64.urlsafe_b64encode(ONE).decode()},two:{base64.urlsafe_b64encode(TWO).decode()}",
    ],
)
def test_text_of_keys(text: str) -> None:
    ring = Keyring.parse(text)
    assert (ring.ids, ring.current, ring.allow_plain) == (("one", "two"), "one", False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# nothing", "holds no key"),
        ("one", "entry 1"),
        ("one:", "entry 1"),
        (f"{KEYS},two:{base64.b64encode(TWO[:31]).decode()}", "entry 2"),
        (f"{KEYS},two:{base64.b64encode(TWO + b'x').decode()}", "entry 2"),
        (f"{KEYS},two:!{base64.b64encode(TWO).decode()}", "entry 2"),
        (f"{KEYS},{KEYS}", "the id of one before"),
        (f"{KEYS},t wo:{base64.b64encode(TWO).decode()}", "entry 2"),
        (f"{'x' * 65}:{base64.b64encode(TWO).decode()}", "entry 1"),
        # Turned around, the key stands where an id should.
        (f"{base64.b64encode(TWO).decode()}:two", "entry 1"),
        (f"{base64.urlsafe_b64encode(TWO).decode().rstrip('=')}:two", "entry 1"),
    ],
)
def test_unusable_text_is_refused_without_showing_it(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as e:
        Keyring.parse(text, field="KEYS")
    assert e.value.field == "KEYS"
    shown = "".join(traceback.format_exception(e.value))
    assert base64.b64encode(TWO).decode()[:16] not in str(e.value)
    assert base64.b64encode(TWO).decode() not in shown


@pytest.mark.parametrize("keys", [{}, {"a b": ONE}, {"": ONE}, {"é": ONE}, {"one": ONE[:16]}, {"one": b""}])
def test_unusable_keys_are_refused(keys: Mapping[str, bytes]) -> None:
    with pytest.raises(InvalidInput):
        Keyring(keys)


def test_the_current_key_has_to_be_there() -> None:
    assert Keyring({"one": ONE, "two": TWO}, current="two").current == "two"
    with pytest.raises(InvalidInput, match="no key 'three' among one, two"):
        Keyring({"one": ONE, "two": TWO}, current="three")


def test_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(BOTH)
    assert Keyring.from_environment({}) is None
    assert Keyring.from_environment({"TURNKEEPER_KEYS": ""}) is None
    for environment in ({"TURNKEEPER_KEYS": BOTH}, {"TURNKEEPER_KEYS_FILE": str(path)}):
        ring = Keyring.from_environment(environment)
        assert ring is not None
        assert (ring.ids, ring.allow_plain) == (("one", "two"), False)
        ring = Keyring.from_environment({**environment, "TURNKEEPER_ALLOW_PLAIN": "1"})
        assert ring is not None
        assert ring.allow_plain
    with pytest.raises(InvalidInput, match="both set"):
        Keyring.from_environment({"TURNKEEPER_KEYS": BOTH, "TURNKEEPER_KEYS_FILE": str(path)})
    with pytest.raises(InvalidInput, match="0 or 1"):
        Keyring.from_environment({"TURNKEEPER_KEYS": BOTH, "TURNKEEPER_ALLOW_PLAIN": "yes"})
    with pytest.raises(InvalidInput, match="cannot be read"):
        Keyring.from_environment({"TURNKEEPER_KEYS_FILE": str(tmp_path / "missing")})


def test_nothing_shows_a_key() -> None:
    ring = Keyring.parse(BOTH)
    assert repr(ring) == "Keyring(one, two; current='one', allow_plain=False)"
    shown = f"{ring!r} {ring} {vars(ring)!r}"
    for key in (ONE, TWO):
        for form in (key.hex(), base64.b64encode(key).decode(), repr(key)[2:-1]):
            assert form not in shown
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(ring)


@pytest.mark.anyio
async def test_keys_that_a_function_gives() -> None:
    """A KMS is asked when a key is first needed, once, and again only where it failed."""
    asked: list[str] = []

    async def one() -> bytes:
        asked.append("one")
        return ONE

    def two() -> bytes:
        asked.append("two")
        if len(asked) == 2:
            raise OSError("the KMS says: " + TWO.hex())
        return TWO

    ring = Keyring({"one": one, "two": two})
    assert asked == []
    await ring.ready()
    assert (await ring.key("one", "here")).id == "one"
    with pytest.raises(KeyUnavailable, match=r"^here: the key 'two' cannot be had \(OSError\)$") as e:
        await ring.key("two", "here")
    assert (e.value.where, e.value.key_id, e.value.applied) == ("here", "two", False)
    assert (await ring.key("two", "here")) is await ring.key("two", "here")
    assert asked == ["one", "two", "two"]
    with pytest.raises(KeyMissing, match="this keyring has one, two") as missing:
        await ring.key("three", "here")
    assert missing.value.key_id == "three"


@pytest.mark.anyio
@pytest.mark.parametrize("given_", [b"short", "text", None])
async def test_what_is_no_key_is_refused_without_showing_it(given_: object) -> None:
    source: Callable[[], bytes | Awaitable[bytes]] = lambda: given_  # type: ignore[assignment,return-value]  # noqa: E731
    with pytest.raises(KeyUnavailable, match="what was given for the key 'one' must be 32 bytes") as e:
        await Keyring({"one": source}).ready()
    assert "short" not in str(e.value)


@given(st.text(max_size=80))
def test_any_text_is_a_keyring_or_refused(text: str) -> None:
    try:
        Keyring.parse(text)
    except InvalidInput as e:
        assert e.field == "keys"  # noqa: PT017  # either is right
