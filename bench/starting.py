"""Starting: `import turnkeeper`, and `turnkeeper --help`, as whole processes beside one that does nothing."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from bench.findings import Finding
from bench.measured import Measured

_TIMES: Final = 20
_HELP: Final = "import sys; from turnkeeper.cli.app import main; sys.argv[1:] = ['--help']; main()"
_STARTED: Final = {"import turnkeeper": ("import turnkeeper", 150.0), "turnkeeper --help": (_HELP, 300.0)}
"""What is run, and how many milliseconds it may take, the interpreter's own start included."""


class _Cost(NamedTuple):
    wall: float
    cpu: float


def _started(code: str) -> _Cost:
    """Milliseconds of one process, from its start to its end."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, code
    return _Cost(1000 * (time.perf_counter() - start), 1000 * (used.ru_utime + used.ru_stime))


async def measure(_: Measured, progress: Callable[[str], None]) -> list[Finding]:
    """Each beside a bare interpreter, in turns: what else the machine does weighs on both."""
    found: list[Finding] = []
    for name, (code, most) in _STARTED.items():
        progress(f"starting {name}")
        _started(code)  # byte code is compiled once
        costs, bare = zip(*((_started(code), _started("pass")) for _ in range(_TIMES)), strict=True)
        more = {
            "CPU ratio": statistics.median(one.cpu / other.cpu for one, other in zip(costs, bare, strict=True)),
            "x bare interpreter": statistics.median(a.wall / b.wall for a, b in zip(costs, bare, strict=True)),
            "bare ms": statistics.median(one.wall for one in bare),
        }
        found.append(Finding(name, statistics.median(one.wall for one in costs), "ms", more, at_most=most))
    return found
