"""What every test may use: shared material, and stores by name."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from turnkeeper.stores.sqlite import SqliteStore

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared_json(name: str) -> Any:
    """A JSON file of the shared material; skips the test where the folder is missing."""
    path = SHARED / name
    if not path.exists():
        missing = f"the shared material is not beside the project ({name})"
        if "CI" in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)
    return json.loads(path.read_text())


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, which the stores' clients need."""
    return "asyncio"


@pytest.fixture(params=["sqlite file", "sqlite memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """Every store that a behaviour has to be the same on."""
    path = tmp_path / "turns.db" if request.param == "sqlite file" else ":memory:"
    async with await SqliteStore.open(path) as opened:
        yield opened
