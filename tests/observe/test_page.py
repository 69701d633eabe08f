"""docs/telemetry.md says what `names.py` says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from turnkeeper.observe import names

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table as the page has it."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def keys(found: Iterable[str]) -> str:
    """Names in a cell."""
    return ", ".join(f"`{key}`" for key in found) or "-"


def rendered() -> dict[str, str]:
    """The tables of the page, by the marks that they stand between."""
    return {
        "spans": table(
            ("span", "kind", "covers", "attributes", "with `contents=True`"),
            [(f"`{s.name}`", s.kind, s.covers, keys(s.attributes), keys(s.contents)) for s in names.SPANS],
        ),
        "metrics": table(
            ("metric", "instrument", "unit", "counts", "attributes"),
            [(f"`{m.name}`", m.instrument, f"`{m.unit}`", m.counts, keys(m.attributes)) for m in names.METRICS],
        ),
        "attributes": table(("attribute", "says"), [(f"`{key}`", says) for key, says in names.ATTRIBUTES.items()]),
        "log fields": table(("field", "says"), [(f"`{key}`", says) for key, says in names.LOG_FIELDS.items()]),
    }


@pytest.mark.parametrize("mark", rendered())
def test_the_page_has_the_tables_of_the_names(mark: str) -> None:
    """To write them anew: `python -m tests.observe.test_page`."""
    found = re.search(rf"<!-- {mark} -->\n\n(.*?)\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == rendered()[mark]


def test_every_name_is_told_of() -> None:
    """What an attribute says, for each that is used; and none besides."""
    used = {key for span in names.SPANS for key in (*span.attributes, *span.contents)}
    used |= {key for metric in names.METRICS for key in metric.attributes}
    assert used | {names.ERROR_TYPE} == set(names.ATTRIBUTES)
    constants = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    emitted = {span.name for span in names.SPANS} | {metric.name for metric in names.METRICS} | set(names.ATTRIBUTES)
    assert constants - {names.SCOPE} == emitted


if __name__ == "__main__":
    page = PAGE.read_text()
    for mark, text in rendered().items():
        page = re.sub(
            rf"(<!-- {mark} -->\n\n).*?\n<!-- end -->",
            lambda m, t=text: f"{m[1]}{t}\n<!-- end -->",
            page,
            flags=re.DOTALL,
        )
    PAGE.write_text(page)
