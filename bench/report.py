"""Findings of a run as tables in Markdown: `python -m bench.report FILE.json` prints what `python -m bench --json` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHOWN = (
    "quartiles",
    "and",
    "CPU ratio",
    "x bare interpreter",
    "bare ms",
    "ms",
    "raw ms",
    "x bodies",
    "KiB a turn",
    "messages a second",
    "p50 ms",
    "p99 ms",
)
"""Of the figures behind a finding, those that a reader wants beside it."""


def _row(finding: dict[str, Any]) -> str:
    target = ""
    if finding["at_most"] is not None:
        target = f"at most {finding['at_most']:g}"
    elif finding["at_least"] is not None:
        target = f"at least {finding['at_least']:g}"
    met = {None: "", True: "met", False: "**missed**"}[finding["met"]]
    more: dict[str, float] = finding["more"]
    behind = ", ".join(f"{name} {more[name]:.3g}" for name in _SHOWN if name in more)
    behind = behind.replace(", and ", " and ")
    return f"| {finding['what']} | {finding['value']:.3g} {finding['unit']} | {target} | {met} | {behind} |"


def tables(found: dict[str, Any]) -> Iterator[str]:
    """The lines of all tables."""
    yield ", ".join(f"{name}: {value}" for name, value in found["machine"].items())
    for store, parts in found.items():
        if store in ("machine", "not measured"):
            continue
        yield f"\n### {store}\n\n| measured | value | target | | |\n| --- | --- | --- | --- | --- |"
        for findings in parts.values():
            yield from map(_row, findings)


if __name__ == "__main__":
    print("\n".join(tables(json.loads(Path(sys.argv[1]).read_text()))))
