"""What the tests of single stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.postgres import Server


@pytest.fixture(scope="session")
def _scratch_database(postgres: Server) -> str:
    return postgres.database()


@pytest.fixture
def database(postgres: Server, _scratch_database: str) -> Iterator[str]:
    """An empty database of the tests' PostgreSQL server."""
    yield _scratch_database
    postgres.wipe(_scratch_database)
