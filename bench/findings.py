"""What a measurement found, and how it is shown."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Finding(NamedTuple):
    """One figure, with the target that it has to meet where there is one, and the figures behind it."""

    what: str
    value: float
    unit: str
    more: dict[str, float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**self._asdict(), "met": self.met}


def show(console: Console, title: str, findings: list[Finding]) -> None:
    """Print one group of findings."""
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("met")
    table.add_column("from", style="dim")
    for finding in findings:
        met = {None: Text(""), True: Text("yes", "green"), False: Text("no", "red")}[finding.met]
        behind = ", ".join(f"{name} {value:,.4g}" for name, value in finding.more.items())
        table.add_row(finding.what, f"{finding.value:,.3g} {finding.unit}", finding.target, met, behind)
    console.print(table)
