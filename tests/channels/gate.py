"""A store whose writes wait, or fail, when a test says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from tests.engine.wrapped import WrappedStore
from turnkeeper.errors import StoreUnavailable
from turnkeeper.log.store import Store

T = TypeVar("T")


class Gate(WrappedStore):
    """Holds writes up until it is opened, or fails them."""

    def __init__(self, inner: Store, *, is_open: bool = False) -> None:
        super().__init__(inner)
        self.waiting = anyio.Event()
        self.open = anyio.Event()
        self.fails = False
        self.failed = 0
        if is_open:
            self.open.set()

    async def around(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make the write, when it may be made."""
        if self.fails:
            self.failed += 1
            raise StoreUnavailable("the store at 10.1.2.3", "is away", applied=False)
        self.waiting.set()
        await self.open.wait()
        return await write()


async def so(holds: Callable[[], bool]) -> bool:
    """For `until`, where nothing has to be awaited."""
    return holds()
