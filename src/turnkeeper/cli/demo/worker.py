"""A worker process of the demo: runs the conversations that its supervisor names, until it is killed or told to stop.

Reads one JSON object a line, `{"conversation": id}` or `{"stop": true}`, and writes one a line: `ready`, `begin`, `end`,
`done`, `at`.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from turnkeeper.cli.demo.agent import Stage
from turnkeeper.cli.demo.boundaries import ANY, BoundaryStore
from turnkeeper.cli.demo.conversations import Turn, load, turns
from turnkeeper.cli.demo.ledger import Ledger
from turnkeeper.keeper import Keeper
from turnkeeper.stores.opening import open_store


class Orders(msgspec.Struct, frozen=True):
    """What a worker is told on its command line, as JSON.

    Attributes:
        stop_at, stop_count: freeze at the n-th passing of this boundary, or of any, and say so: the supervisor then kills.
        stop_latest: freeze at the n-th of all boundaries passed, if not before.
    """

    store: str
    ledger: str
    conversations: str | None
    prefix: str
    lease_seconds: float
    stop_at: str | None = None
    stop_count: int = 1
    stop_latest: int | None = None


class _Worker:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._left = orders.stop_count
        self._left_of_all = orders.stop_latest
        self._lock = threading.Lock()
        conversations = load(None if orders.conversations is None else Path(orders.conversations))
        self._turns: dict[str, list[Turn]] = {one.id: turns(one) for one in conversations}

    def _say(self, **message: Any) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
            sys.stdout.buffer.flush()

    def _reached(self, boundary: str) -> None:
        self._left -= self._orders.stop_at in (boundary, ANY)
        if self._left_of_all is not None:
            self._left_of_all -= 1
        if self._left == 0 or self._left_of_all == 0:
            self._say(at=boundary)
            while True:  # until the supervisor's SIGKILL
                time.sleep(60)

    async def run(self) -> None:
        ledger = Ledger(Path(self._orders.ledger))
        store = BoundaryStore(await open_store(self._orders.store), self._reached)
        stage = Stage(
            (turn for listed in self._turns.values() for turn in listed), ledger, self._orders.prefix, self._reached
        )
        agent = stage.agent(self._orders.lease_seconds)
        async with Keeper(store) as keeper, anyio.create_task_group() as tasks:
            self._say(ready=True)

            async def converse(conversation_id: str) -> None:
                for turn in self._turns[conversation_id]:
                    turn_id = f"{self._orders.prefix}{turn.id}"
                    self._say(begin=turn_id)
                    result = await keeper.run(
                        agent,
                        turn.conversation.messages[: turn.start],
                        turn_id=turn_id,
                        reply=stage.reply_port(),
                        labels={"conversation": conversation_id},
                    )
                    self._say(end=turn_id, status=result.status, message=result.message, open=result.open_slots)
                    if result.status != "success":
                        break
                self._say(done=conversation_id)

            while line := await anyio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
                order: dict[str, Any] = msgspec.json.decode(line)
                if "conversation" not in order:
                    break
                tasks.start_soon(converse, order["conversation"])
        ledger.close()


def main() -> None:
    """Run as `python -m turnkeeper.cli.demo.worker ORDERS`."""
    anyio.run(_Worker(msgspec.json.decode(sys.argv[1], type=Orders)).run)


if __name__ == "__main__":
    main()
