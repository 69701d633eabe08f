"""The pages' links lead somewhere, on the site and on a git host; every page and every public name can be found."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import turnkeeper
from tests.docs.pages import PAGES, ROOT, anchor_of, headings_of, name_of, prose_of

SITE = ROOT / "docs"


def links_of(page: Path) -> list[str]:
    """The targets of the links on a page."""
    return re.findall(r"\]\(([^)\s]+)\)", prose_of(page))


def site_anchor(heading: str) -> str:
    """What the site calls a heading: the slug of Python-Markdown's table of contents."""
    bare = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
    return re.sub(r"[-\s]+", "-", bare)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        address, _, anchor = link.partition("#")
        if address.startswith(("http:", "https:")):
            assert address.startswith("https:"), link
            continue
        target = (page.parent / address).resolve() if address else page
        assert target.is_file(), link
        assert SITE not in page.parents or SITE in target.parents, f"{link} is not on the site"
        if anchor:
            headings = [heading for heading in headings_of(target).values() if anchor_of(heading) == anchor]
            assert headings, f"{link}: there is no such heading"
            assert site_anchor(headings[0]) == anchor, f"{link}: the site calls it otherwise"


def test_every_page_is_in_the_navigation() -> None:
    nav: list[Any] = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = re.findall(r"'([^']*\.md)'", repr(nav))
    assert sorted(listed) == sorted(page.relative_to(SITE).as_posix() for page in PAGES if SITE in page.parents)


def test_the_reference_has_every_public_name() -> None:
    """Where it is at home; and every module and member that the reference names is there."""
    listed: dict[str, list[str]] = {}
    for page in PAGES:
        entry = re.compile(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\]\n)?", re.MULTILINE)
        for module, members in entry.findall(prose_of(page) + "\n"):
            found = importlib.import_module(module)
            listed[module] = members.split(", ") if members else list(vars(found))
            assert {*listed[module]} <= vars(found).keys(), module
    for name in turnkeeper.__all__:
        value: Any = getattr(turnkeeper, name)
        assert name == "END" or name in listed.get(value.__module__, []), f"{name}, of {value.__module__}"
