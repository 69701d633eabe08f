"""The programs of field case 07: a store that is opened in one place and used in another. Each runs in a new interpreter."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from turnkeeper.errors import StoreUnsuitable
from turnkeeper.log.store import Store, as_store
from turnkeeper.stores.opening import open_store
from turnkeeper.turn_checkpoint import TurnCheckpointSession

TURNS: Final = 100
"""Of each process."""
WORKERS: Final = 4


class Program:
    """A store and where its turns send their replies to: a file that all processes append to."""

    def __init__(self, url: str, ledger: Path) -> None:
        self._url = url
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def open(self) -> Store:
        """Open the store; `client:PORT` means a client that is made first."""
        kind, _, port = self._url.partition(":")
        if kind != "client":
            return await open_store(self._url)
        from redis.asyncio import Redis

        client: Any = Redis(port=int(port))
        await client.ping()
        await client.aclose()
        self.client = client
        return as_store(client)

    async def first_half(self, store: Store, name: str) -> None:
        """A turn up to its reply's text."""
        session = TurnCheckpointSession(store, name)
        await session.start([{"role": "user", "content": name}])
        await session.save_final_model("done")

    async def second_half(self, store: Store, name: str) -> None:
        """The reply of a turn, and its end."""
        session = TurnCheckpointSession(store, name)
        await session.load()
        await session.reserve_final_delivery("reply", "done")
        os.write(self._ledger, f"{name}\n".encode())
        await session.mark_delivered("reply", f"message of {name}")
        assert (await session.mark_completed()).completed

    async def turns(self, store: Store, who: str) -> None:
        """Whole turns, some at once."""
        for first in range(0, TURNS, 10):
            names = [f"{who}-{number}" for number in range(first, first + 10)]
            await asyncio.gather(*(self.first_half(store, name) for name in names))
            await asyncio.gather(*(self.second_half(store, name) for name in names))

    async def turns_and_close(self, store: Store, who: str) -> None:
        """Whole turns, and the store's end in this process."""
        await self.turns(store, who)
        await store.close()

    # --- the programs ------------------------------------------------------------------------------------------

    def loops(self) -> None:
        """An event loop for each task, as task queues make them."""
        store = asyncio.run(self.open())
        for number in range(TURNS):
            asyncio.run(self.first_half(store, f"loop-{number}"))
            asyncio.run(self.second_half(store, f"loop-{number}"))
        asyncio.run(store.close())

    def threads(self) -> None:
        """Threads with loops of their own, beside the main one, all at once."""
        store = asyncio.run(self.open())
        together = threading.Barrier(3)

        def work(number: int) -> None:
            together.wait()
            asyncio.run(self.turns(store, f"thread-{number}"))

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(work, number) for number in range(2)]
            work(2)
            for other in others:
                other.result()
        asyncio.run(store.close())

    def fork(self) -> None:
        """Opened and used, then forked: parent and child go on."""
        store = asyncio.run(self.open())
        asyncio.run(self.first_half(store, "before"))
        child = forked(lambda: asyncio.run(self.turns_and_close(store, "child")))
        asyncio.run(self.turns(store, "parent"))
        asyncio.run(self.second_half(store, "before"))
        reap(child)
        asyncio.run(store.close())

    def fork_in_loop(self) -> None:
        """Forked from inside a running event loop, whose connections are open."""

        async def main() -> None:
            store = await self.open()
            await self.first_half(store, "before")
            child = forked(lambda: new_loop(self.turns_and_close(store, "child")))
            await self.turns(store, "parent")
            await self.second_half(store, "before")
            await asyncio.to_thread(reap, child)
            await store.close()

        asyncio.run(main())

    def prefork(self) -> None:
        """Opened at import time, then forked into several workers, as a web server does."""
        store = asyncio.run(self.open())
        children = [
            forked(lambda number=number: asyncio.run(self.turns_and_close(store, f"worker-{number}")))
            for number in range(WORKERS)
        ]
        for child in children:
            reap(child)
        asyncio.run(store.close())

    def memory(self) -> None:
        """A store in memory cannot be shared with a child: its first call says so, and the parent is not disturbed."""

        def in_child() -> None:
            with pytest.raises(StoreUnsuitable, match="forked child needs a file"):
                asyncio.run(self.first_half(store, "child"))

        store = asyncio.run(self.open())
        asyncio.run(self.first_half(store, "parent"))
        reap(forked(in_child))
        asyncio.run(self.second_half(store, "parent"))
        asyncio.run(store.close())


def forked(work: Callable[[], None]) -> int:
    """A child that does the work and ends; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def reap(child: int) -> None:
    """Wait for a child; it has to have done its work."""
    _, status = os.waitpid(child, 0)
    assert status == 0, status


def new_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run in a child of a process whose event loop was running: that one is not the child's."""
    asyncio.set_event_loop(None)
    asyncio.run(work)


if __name__ == "__main__":
    getattr(Program(sys.argv[2], Path(sys.argv[3])), sys.argv[1])()
