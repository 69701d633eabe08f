"""What the tests of telemetry share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.observe.watching import Watched
from turnkeeper import Keeper
from turnkeeper.log.store import Store
from turnkeeper.stores.sqlite import SqliteStore


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # used by its name
    """Pauses between attempts are not looked at here."""
    monkeypatch.setattr("turnkeeper.engine.model_calls._PAUSE", 0.001)
    monkeypatch.setattr("turnkeeper.engine.rounds._PAUSE", 0.001)
    monkeypatch.setattr("turnkeeper.engine.delivery._PAUSE", 0.001)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """Telemetry does not depend on the store."""
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


@pytest.fixture
def watched() -> Watched:
    """A host with telemetry."""
    return Watched()


@pytest.fixture
def keeper(store: Store, watched: Watched) -> Keeper:
    """A Keeper with it."""
    return Keeper(store, telemetry=watched.telemetry)
