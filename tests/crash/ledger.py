"""The world outside the store, as the crash tests see it: effects, sends and model calls, one fsynced line for each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Ledger:
    """A file that is only ever appended to. It does not deduplicate: what happened twice stands in it twice."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, **fields: Any) -> None:
        """Note what happened, durably: a process killed right behind this call leaves the line."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            assert os.write(file, line) == len(line)
            os.fsync(file)
        finally:
            os.close(file)

    def rows(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """What happened, in order: the lines of that kind whose fields are as wanted."""
        if not self._path.exists():
            return []
        lines: list[dict[str, Any]] = [json.loads(line) for line in self._path.read_text().splitlines()]
        return [
            line
            for line in lines
            if line["kind"] == kind and all(line.get(name) == value for name, value in wanted.items())
        ]
