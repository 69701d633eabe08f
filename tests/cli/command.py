"""Runs the real `turnkeeper` command as a process."""

from __future__ import annotations

import json
import subprocess
import sys
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


def turnkeeper(*arguments: str | Path, cwd: Path | None = None, timeout: float = 110) -> Done:
    """Run the command to its end."""
    done = subprocess.run(
        [sys.executable, "-c", "from turnkeeper.cli.app import main; main()", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "160", "NO_COLOR": "1"},
    )
    return Done(done.returncode, done.stdout, done.stderr)
