"""Runs the benchmarks and prints what they found: `python -m bench [--store NAME ...] [--only PART ...] [--json FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from bench import finished, growth, loading, memory, messages, projecting, ratio, service, starting
from bench.drivers import JOURNAL
from bench.findings import Finding, show
from bench.loop import LOOP
from bench.measured import Measured
from bench.scratch import disk, servers_disk
from bench.stores import NAMES, NotInstalled, under_measure
from bench.texts import Texts
from bench.workload import TURN

Progress = Callable[[str], None]


def _floor(measured: Measured, progress: Progress) -> Awaitable[list[Finding]]:
    return ratio.measure(measured, [*JOURNAL, *LOOP], progress)


def _writes(measured: Measured, progress: Progress) -> Awaitable[list[Finding]]:
    return ratio.count(measured, [*JOURNAL, *LOOP], progress)


class _Part(NamedTuple):
    title: str
    measure: Callable[[Measured, Progress], Awaitable[list[Finding]]]
    stores: tuple[str, ...] = NAMES


_PARTS: Final[dict[str, _Part]] = {
    "floor": _Part(f"{TURN} beside the bare floor", _floor),
    "writes": _Part("writes and bytes", _writes),
    "growth": _Part("a round, late in a turn", growth.measure),
    "loading": _Part("loading", loading.measure, ("sqlite",)),  # beside a raw read of SQLite's rows
    "projecting": _Part("projecting", projecting.measure, ("sqlite",)),
    "memory": _Part("memory of open turns", memory.measure, ("sqlite",)),  # which no store keeps for us
    "messages": _Part("messages of conversations beside the bare floor", messages.measure),
    "service": _Part("a service of real processes", service.measure),
    "opening": _Part("opening a long conversation", messages.opening, ("sqlite",)),  # what is read is the same on all
    "finished": _Part("memory of finished turns", finished.measure),
    "starting": _Part("starting", starting.measure, ("sqlite",)),  # which has nothing to do with stores
}


async def _run(console: Console, measured: Measured, parts: list[str]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for part in parts:
        title, measure, stores = _PARTS[part]
        if measured.name not in stores:
            console.print(f"{measured.name}: {title}: measured on {', '.join(stores)} alone", style="dim")
            continue
        with console.status("") as status:
            found[part] = await measure(measured, lambda text: status.update(f"{measured.name}: {text}"))
        show(console, f"{measured.name}: {title}", found[part])
    return found


def _machine() -> dict[str, str]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
        "cores": str(os.cpu_count()),
        "disk": disk(),
        "servers' disk": servers_disk(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "text": Texts(0).source,
    }


def main() -> None:
    """The command line. Exit status 1 if a store could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="What a durable turn costs, on each store.")
    parser.add_argument("--store", nargs="+", choices=NAMES, default=list(NAMES), help="stores to measure")
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), default=list(_PARTS), help="parts to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE as well")
    arguments = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    machine = _machine()
    console.print(", ".join(f"{name}: {value}" for name, value in machine.items()), style="dim")
    written: dict[str, Any] = {"machine": machine}
    missing: dict[str, str] = {}
    for name in arguments.store:
        start = time.monotonic()
        try:
            with under_measure(name) as measured:
                found = asyncio.run(_run(console, measured, arguments.only))
        except NotInstalled as e:
            missing[name] = str(e)
            console.print(f"{name}: not measured: {e}", style="red")
            continue
        console.print(f"{name}: {time.monotonic() - start:.0f} s\n", style="dim")
        written[name] = {part: [one.as_json() for one in some] for part, some in found.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps({**written, "not measured": missing}, indent=2) + "\n")
    if missing:
        sys.exit(1)


if __name__ == "__main__":
    main()
