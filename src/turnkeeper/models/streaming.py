"""Reads an SDK's stream, and what is left of it when nobody wants more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio

_LINGER: Final = 0.5
"""Seconds that the rest of a stream may take. Behind the last event of an answer comes nothing but the stream's end."""


@asynccontextmanager
async def events_of(asked: Awaitable[Any]) -> AsyncGenerator[AsyncIterator[Any]]:
    """The events of a stream that was asked for.

    What is not read is read out, or cut off where it takes long: the clients read through generators within generators, and
    one that is left half-way is closed by the garbage collector, at any time and in any order.
    """
    async with await asked as stream:
        events = aiter(stream)
        try:
            yield events
        finally:
            with anyio.move_on_after(_LINGER), suppress(Exception):
                async for _ in events:
                    pass
