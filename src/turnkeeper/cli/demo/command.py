"""The demo as a command: sets the stage, shows the progress, prints the proof."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from turnkeeper.cli.demo.conversations import load, turns
from turnkeeper.cli.demo.ledger import Ledger
from turnkeeper.cli.demo.proof import Verdict, prove
from turnkeeper.cli.demo.supervisor import Progress, supervise
from turnkeeper.cli.demo.worker import Orders
from turnkeeper.cli.options import Json
from turnkeeper.cli.output import print_json
from turnkeeper.errors import InvalidInput
from turnkeeper.keeper import Keeper


async def demo(
    *,
    conversations: Annotated[Path | None, Parameter(help="Recorded conversations, one JSON object a line.")] = None,
    store: Annotated[str | None, Parameter(help="The store's URL; a new SQLite file without it.")] = None,
    kills: Annotated[int, Parameter(help="How many workers to kill.")] = 25,
    workers: Annotated[int, Parameter(help="How many workers to run at once.")] = 2,
    seed: Annotated[int, Parameter(help="Chooses when and where is killed.")] = 1,
    lease: Annotated[float, Parameter(help="Seconds that a worker may be silent before another takes over.")] = 2.0,
    json: Json = False,
) -> int:
    """Run the demo; the exit status: 1 if anything was done twice, lost, or left unfinished."""
    for name, number, least in (("kills", kills, 0), ("workers", workers, 1)):
        if number < least:
            raise InvalidInput(f"--{name}", f"must be at least {least}, not {number}")
    recorded = load(conversations)
    # A prefix of its own, so that a store that already holds turns of an earlier demo does not answer for this one.
    prefix = f"demo-{secrets.token_hex(4)}/"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnkeeper-demo-")))
        url = store or f"sqlite:///{folder / 'turns.db'}"
        orders = Orders(
            store=url,
            ledger=os.fspath(folder / "ledger.db"),
            conversations=None if conversations is None else str(await anyio.Path(conversations).absolute()),
            prefix=prefix,
            lease_seconds=lease,
        )
        show = _live_view(stack, Console(stderr=json), quiet=json and not sys.stderr.isatty())
        progress, seconds = await supervise(orders, recorded, workers=workers, kills=kills, seed=seed, show=show)
        wanted = [turn for conversation in recorded for turn in turns(conversation)]
        ledger = Ledger(Path(orders.ledger))
        try:
            async with await Keeper.open(url) as keeper:
                verdict = await prove(keeper, ledger, wanted, prefix, progress, seconds)
        finally:
            ledger.close()
    if json:
        print_json(verdict)
    else:
        _print(verdict, Console())
    return 0 if verdict.holds else 1


def _live_view(stack: ExitStack, console: Console, *, quiet: bool) -> Callable[[Progress], None]:
    if quiet:
        return lambda progress: None
    bars = stack.enter_context(
        Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
    )
    done = bars.add_task("turns answered", note="")
    killed = bars.add_task("workers killed", note="")

    def show(progress: Progress) -> None:
        bars.update(
            done,
            total=progress.turns,
            completed=len(progress.turns_done),
            note=f"{progress.settled_by_operator} settled by the operator",
        )
        bars.update(
            killed,
            total=progress.kills_wanted,
            completed=progress.kills_in_a_turn,
            note="in the middle of a turn",
        )

    return show


def _print(verdict: Verdict, console: Console) -> None:
    table = Table(title="What the ledger and the logs say", title_justify="left", show_header=True)
    for heading in ("", "wanted", "done", "done twice", "lost"):
        table.add_column(heading, justify="left" if not heading else "right")

    def fault(number: int) -> str:
        return f"[bold red]{number}[/]" if number else f"[green]{number}[/]"

    table.add_row(
        "effects (bookings, changes, certificates)",
        str(verdict.effects),
        str(verdict.effects_done),
        fault(verdict.effects_done_twice + verdict.effects_unwanted),
        fault(verdict.effects_lost),
    )
    table.add_row(
        "replies sent",
        str(verdict.replies),
        str(verdict.replies_sent),
        fault(verdict.duplicates - verdict.effects_done_twice - verdict.effects_unwanted),
        fault(verdict.replies_lost),
    )
    table.add_row(
        "model decisions",
        str(verdict.model_decisions),
        str(verdict.model_decisions),
        fault(verdict.decisions_made_twice),
        "",
    )
    table.add_row(
        "turns", str(verdict.turns), str(verdict.turns - verdict.turns_unfinished), "", fault(verdict.turns_unfinished)
    )
    console.print(table)
    again = verdict.model_calls - verdict.model_decisions
    settled = ", ".join(f"{count} {how}" for how, count in verdict.ambiguous_settled.items()) or "none"
    console.print(f"model calls: {verdict.model_calls} ({again} asked again, since their answer died with the process)")
    console.print(
        f"kills: {verdict.kills} SIGKILLs survived, {verdict.kills_in_a_turn} of them in the middle of a turn"
    )
    console.print(f"ambiguous tool calls: {verdict.ambiguous} found; settled: {settled}")
    console.print(f"transcripts that differ from the recorded ones: {fault(verdict.transcripts_wrong)}")
    console.print(f"stored: {verdict.records} records, {verdict.bytes_stored:,} bytes; {verdict.seconds:.1f} s")
    console.print("[bold green]Nothing twice, nothing lost.[/]" if verdict.holds else "[bold red]It does not hold.[/]")
