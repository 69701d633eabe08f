"""Shared material of the contract tests: the vectors, and the traces of another engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.conftest import SHARED, shared_json


def vectors(name: str) -> list[dict[str, Any]]:
    """The cases of a file of vectors."""
    return shared_json(f"vectors/prompty/{name}")["vectors"]


def traces() -> list[dict[str, Any]]:
    """The traces of the engine in Java, one for each scenario; skips where the folder is missing."""
    path = SHARED / "vectors/traces/engine-traces.jsonl"
    if not path.exists():
        missing = "the shared material is not beside the project (engine-traces.jsonl)"
        if "CI" in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)
    return [json.loads(line) for line in path.read_text().splitlines()]


def traced_checkpoints() -> Iterator[dict[str, Any]]:
    """Every checkpoint in the traces."""
    for trace in traces():
        yield from (write["checkpoint"] for write in trace.get("log", []) if "checkpoint" in write)
        if "checkpoint" in trace:
            yield trace["checkpoint"]


def traced_events() -> Iterator[dict[str, Any]]:
    """Every event in the traces."""
    for trace in traces():
        for write in trace.get("log", []):
            yield from write.get("events", [write["event"]] if "event" in write else [])


def traced_results() -> Iterator[dict[str, Any]]:
    """Every result in the traces."""
    return (trace["result"] for trace in traces() if "result" in trace)


def without_empty_lists(tree: Any) -> Any:
    """A document without its empty lists, which mean the same as absent ones (1.1)."""
    if isinstance(tree, dict):
        fields = cast("dict[str, Any]", tree)
        return {key: without_empty_lists(item) for key, item in fields.items() if item != []}
    return [without_empty_lists(item) for item in cast("list[Any]", tree)] if isinstance(tree, list) else tree
