"""Runs the benchmarks and prints what they found: `python -m bench [--only PART ...] [--json FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import growth, loading, memory, ratio
from bench.drivers import JOURNAL
from bench.findings import Finding, show
from bench.loop import LOOP
from bench.scratch import disk
from bench.texts import Texts
from bench.workload import TURN

Progress = Callable[[str], None]


def _floor(progress: Progress) -> Awaitable[list[Finding]]:
    return ratio.measure([*JOURNAL, *LOOP], progress)


def _writes(progress: Progress) -> Awaitable[list[Finding]]:
    return ratio.count([*JOURNAL, *LOOP], progress)


_PARTS: Final[dict[str, tuple[str, Callable[[Progress], Awaitable[list[Finding]]]]]] = {
    "floor": (f"{TURN} beside the bare floor", _floor),
    "writes": ("Writes and bytes", _writes),
    "growth": ("A round, late in a turn", growth.measure),
    "loading": ("Loading", loading.measure),
    "memory": ("Memory", memory.measure),
}


async def _run(console: Console, parts: list[str]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for part in parts:
        title, measure = _PARTS[part]
        with console.status("") as status:
            found[part] = await measure(status.update)
        show(console, title, found[part])
    return found


def _machine() -> dict[str, str]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
        "cores": str(os.cpu_count()),
        "disk": disk(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "text": Texts(0).source,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="What a durable turn costs, on SQLite.")
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), default=list(_PARTS), help="parts to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE as well")
    arguments = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    machine = _machine()
    console.print(", ".join(f"{name}: {value}" for name, value in machine.items()), style="dim")
    found = asyncio.run(_run(console, arguments.only))
    if arguments.json:
        written = {"machine": machine, **{part: [one.as_json() for one in some] for part, some in found.items()}}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
