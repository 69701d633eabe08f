"""What the engine's tests share: a Keeper on every store, and no pauses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import opened
from tests.engine.wrapped import CountingStore
from turnkeeper import Keeper
from turnkeeper.log.store import Store


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # used by its name
    """Pauses between attempts are politeness to a server, not behaviour that is looked at here."""
    monkeypatch.setattr("turnkeeper.engine.model_calls._PAUSE", 0.001)
    monkeypatch.setattr("turnkeeper.engine.loop._POLL", 0.005)
    monkeypatch.setattr("turnkeeper.engine.rounds._PAUSE", 0.001)
    monkeypatch.setattr("turnkeeper.engine.delivery._PAUSE", 0.001)


@pytest.fixture(params=["sqlite file", "redis cluster"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Two stores that differ as much as stores can; that all of them keep the same rules is the conformance suite's."""
    async with opened(request.param, request, tmp_path) as store:
        yield store


@pytest.fixture
def counted(store: Store) -> CountingStore:
    """The store, with its writes counted."""
    return CountingStore(store)


@pytest.fixture
def keeper(counted: CountingStore) -> Keeper:
    """A Keeper on the store. The store's fixture closes it."""
    return Keeper(counted)
