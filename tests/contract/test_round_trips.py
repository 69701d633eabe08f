"""What is written is read back the same: dict, JSON and YAML, here and in another implementation."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from typing import Any, cast

import msgspec
import prompty.model as theirs
import pytest
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.contract.generated import ALL_TYPES, wire_values
from tests.contract.material import traced_checkpoints, traced_events, traced_results, without_empty_lists
from turnkeeper.engine.documents import from_json, from_tree, from_yaml, to_json, to_tree, to_yaml
from turnkeeper.engine.wire import EngineCheckpoint, EngineEvent, TurnCommit, TurnEngineResult
from turnkeeper.errors import InvalidInput

# Shrinking a whole checkpoint takes minutes and says little more.
ROUND_TRIPS = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


DISPUTED = frozenset({"1e3", "-.5e3"})


class Unshared(yaml.SafeDumper):
    """PyYAML as it is, without aliases for what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def texts(tree: Any) -> set[str]:
    """All text in a document."""
    if isinstance(tree, dict):
        fields = cast("dict[str, Any]", tree)
        return {text for key, item in fields.items() for text in ({key} | texts(item))}
    if isinstance(tree, list):
        return {text for item in cast("list[Any]", tree) for text in texts(item)}
    return {tree} if isinstance(tree, str) else set()


def nulls_at_declared_fields(value: msgspec.Struct) -> list[str]:
    """Names of fields of a written document that are null though their type has them, at the first level."""
    return [name for name, item in to_tree(value).items() if item is None]


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.__name__)
@ROUND_TRIPS
@given(data=st.data())
def test_every_type_comes_back_from_every_form(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    """1.1: dict, JSON and YAML are one mapping; nothing is lost, and an optional field is never null."""
    value = data.draw(wire_values(kind))
    tree = to_tree(value)
    assert from_tree(kind, tree, strict=True).value == value
    assert from_json(kind, to_json(value), strict=True).value == value
    assert from_yaml(kind, to_yaml(value), strict=True).value == value
    assert json.loads(to_json(value)) == tree
    assert nulls_at_declared_fields(value) == []


@ROUND_TRIPS
@given(wire_values(EngineCheckpoint))
def test_our_yaml_is_read_the_same_by_a_reader_of_yaml_1_1(checkpoint: EngineCheckpoint) -> None:
    """PyYAML reads 1.1, as two other runtimes do: what it makes of our text is our tree."""
    assert yaml.safe_load(to_yaml(checkpoint)) == to_tree(checkpoint)


@ROUND_TRIPS
@given(wire_values(EngineCheckpoint))
def test_their_yaml_is_read_the_same_or_refused(checkpoint: EngineCheckpoint) -> None:
    """Text that PyYAML leaves without quotes comes back as text; only numbers that readers dispute are refused."""
    tree = to_tree(checkpoint)
    dump = cast("Any", yaml.dump)  # pyright: ignore[reportUnknownMemberType]  # its stubs leave a type open
    text: str = dump(tree, Dumper=Unshared, sort_keys=False, allow_unicode=True)
    assume(yaml.safe_load(text) == tree)  # it loses some line breaks of its own
    with suppress(InvalidInput) if DISPUTED & texts(tree) else nullcontext():
        assert from_yaml(EngineCheckpoint, text).value == checkpoint


def same(theirs_saved: Any, ours: Any) -> bool:
    """Whether two documents say the same."""
    return without_empty_lists(theirs_saved) == without_empty_lists(ours)


def test_every_traced_checkpoint_and_event_is_saved_as_it_was() -> None:
    """The traces of the engine in Java, to the key and in its order."""
    checkpoints, events, results = list(traced_checkpoints()), list(traced_events()), list(traced_results())
    assert (len(checkpoints), len(events), len(results)) == (20, 105, 7)
    kinds = [(EngineCheckpoint, checkpoints), (EngineEvent, events), (TurnEngineResult, results)]
    for kind, trees in kinds:
        for tree in trees:
            value = from_tree(kind, tree, strict=True).value
            assert json.dumps(to_tree(value)) == json.dumps(tree)
            assert from_json(kind, to_json(value), strict=True).value == value
            assert from_yaml(kind, to_yaml(value), strict=True).value == value


def test_the_other_implementation_reads_every_trace_as_we_write_it() -> None:
    """PyPI prompty loads and saves what we wrote, without a change (3.8)."""
    for kind, other, trees in (
        (EngineCheckpoint, theirs.EngineCheckpoint, traced_checkpoints()),
        (EngineEvent, theirs.EngineEvent, traced_events()),
        (TurnCommit, theirs.TurnCommit, (result["commit"] for result in traced_results())),
    ):
        for tree in trees:
            written = to_tree(from_tree(kind, tree).value)
            assert other.load(written).save() == written


@ROUND_TRIPS
@given(wire_values(EngineCheckpoint))
def test_the_other_implementation_reads_what_we_write(checkpoint: EngineCheckpoint) -> None:
    """PyPI prompty loses nothing of a generated checkpoint, and we read what it saved, as a dict and as JSON."""
    written = to_tree(checkpoint)
    loaded = theirs.EngineCheckpoint.load(written)
    assert same(loaded.save(), written)
    assert from_tree(EngineCheckpoint, loaded.save(), strict=True).value == checkpoint
    assert from_json(EngineCheckpoint, loaded.to_json(), strict=True).value == checkpoint


@ROUND_TRIPS
@given(wire_values(EngineEvent))
def test_the_other_implementation_reads_our_events(event: EngineEvent) -> None:
    """The same for events of all kinds."""
    written = to_tree(event)
    assert same(theirs.EngineEvent.load(written).save(), written)
