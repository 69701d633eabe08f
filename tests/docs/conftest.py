"""Where the examples of the documentation run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They write into the working directory, and put into the environment what their pages tell to put there."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, {"OPENAI_API_KEY": "sk-of-the-examples", "COLUMNS": "160", "NO_COLOR": "1"}):
        yield
