"""YAML as it is read and written: plain data, and never something else than what was meant."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.contract.generated import TRAPS
from turnkeeper.engine import yaml_text
from turnkeeper.engine.yaml_text import dump, parse
from turnkeeper.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("0x1F", 31),
        ("1.5", 1.5),
        ("1.0e+3", 1000.0),
        ("1.0e+20", 1e20),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("08", "08"),
        ("0o17", "0o17"),
        ("1_000", "1_000"),
        ("12:30:00", "12:30:00"),
        ("2026-07-01T00:00:00Z", "2026-07-01T00:00:00Z"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("|\n  a\n  b\n", "a\nb\n"),
        ("{a: [1, {b: }]}", {"a": [1, {"b": None}]}),
    ],
)
def test_what_scalars_mean(text: str, value: Any) -> None:
    """What both versions of YAML mean, and text where no writer writes anything else like this."""
    read = parse(text, "YAML")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("a: 1e3", "a", "read differently"),
        ("a: [1.5e3]", "a[0]", "read differently"),
        ("a: 010", "a", "read differently"),
        ("a: .nan", "a", "no form in JSON"),
        ("a: -.inf", "a", "no form in JSON"),
        ("a: 1\na: 2", "a", "twice"),
        ("b:\n- x: 1\n  x: 2", "b[0].x", "twice"),
        ("a: &x [1]\nb: *x", "b", "alias"),
        ("a: !!python/object/apply:os.system [ls]", "a", "tag"),
        ("a: !!str 1", "a", "tag"),
        ("!!int a: 1", "YAML", "key"),
        ("a:\n  <<: {b: 1}", "a", "key"),
        ("1: a", "YAML", "key"),
        ("[a]: b", "YAML", "key"),
        ("a: 1\n---\nb: 2", "YAML", "more than one"),
        ("a: [", "YAML", "no YAML"),
        ("a: \x00", "YAML", "no YAML"),
        ("a: \ud800", "YAML", "no YAML"),
        ("[" * 500 + "]" * 500, "[0]", "deeper"),
        (f"a: {'9' * 5000}", "a", "digits"),
    ],
)
def test_what_is_refused(text: str, field: str, reason: str) -> None:
    """With the path."""
    with pytest.raises(InvalidInput, match=reason) as caught:
        parse(text, "YAML")
    assert caught.value.field.startswith(field)


def test_a_small_text_does_not_unfold() -> None:
    """Nine lines that would be a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(InvalidInput, match="alias"):
        parse("\n".join(lines), "YAML")


@pytest.mark.parametrize("text", TRAPS)
def test_traps_are_written_so_that_every_reader_reads_text(text: str) -> None:
    """As a value, as a key and in a list."""
    tree = {text: text, "list": [text, {"a": text}]}
    assert parse(dump(tree), "YAML") == tree
    assert yaml.safe_load(dump(tree)) == tree


@pytest.mark.parametrize("text", ["1e3", "0o7", "08", ".5", "-.5e3"])
def test_numbers_of_yaml_1_2_are_quoted(text: str) -> None:
    """A reader of 1.2 would take the plain one for a number."""
    assert dump({"a": text}) in (f"a: '{text}'\n", f'a: "{text}"\n')


@pytest.mark.parametrize("text", TRAPS)
def test_without_libyaml_it_is_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML's own parser and emitter, where the one in C is not built."""
    monkeypatch.delattr(yaml, "CSafeLoader")
    monkeypatch.delattr(yaml, "CSafeDumper")
    fresh = yaml_text._dumper.__wrapped__()  # pyright: ignore[reportPrivateUsage]  # beside the cached one
    monkeypatch.setattr(yaml_text, "_dumper", lambda: fresh)
    tree = {text: text, "list": [text, {"a": text}]}
    assert parse(dump(tree), "YAML") == tree


def test_values_that_occur_twice_are_written_twice() -> None:
    """No aliases."""
    shared = {"x": [1]}
    assert dump({"a": shared, "b": shared}) == "a:\n  x:\n  - 1\nb:\n  x:\n  - 1\n"


def test_without_pyyaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional."""
    yaml_text._library.cache_clear()  # pyright: ignore[reportPrivateUsage]  # as in a process that has not loaded it
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(InvalidInput, match=r"turnkeeper\[yaml\]"):
        parse("a: 1", "YAML")
