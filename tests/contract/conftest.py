"""What the contract's tests share: a Keeper on a store of its own, without pauses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from turnkeeper import Keeper
from turnkeeper.stores.sqlite import SqliteStore


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    """A store of its own for each scenario."""
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


@pytest.fixture
def keeper(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    """A Keeper on it, without pauses between attempts."""
    for module in ("model_calls", "delivery"):
        monkeypatch.setattr(f"turnkeeper.engine.{module}._PAUSE", 0.001)
    return Keeper(store)
