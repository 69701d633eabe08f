"""Runs the real `turnkeeper` command as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    """How the command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output."""
        return json.loads(self.out)


def turnkeeper(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 110, environment: Mapping[str, str] | None = None
) -> Done:
    """Run the command to its end, with nothing but these variables of the environment."""
    done = subprocess.run(
        [sys.executable, "-c", "from turnkeeper.cli.app import main; main()", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "160", "NO_COLOR": "1", **(environment or {})},
    )
    return Done(done.returncode, done.stdout, done.stderr)
