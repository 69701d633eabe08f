"""A typist for each test, whose process does not outlive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.examples.typist import Typist


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Callable[[str], Typist]]:
    """Gives somebody at the console of an example."""
    made: list[Typist] = []

    def at(example: str) -> Typist:
        made.append(Typist(example, tmp_path))
        return made[-1]

    yield at
    for one in made:
        one.kill()
