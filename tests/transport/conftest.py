"""Queues for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.transport.support import PLACES, ClockedTransport, Place, place_named


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Every place that queues have to behave the same in."""
    async with place_named(request.param, request, tmp_path) as found:
        yield found


@pytest.fixture
async def queue(place: Place) -> ClockedTransport:
    """An empty queue in every place."""
    return await place.open()
