"""A clock that holds a SQLite store's writer in the middle of its transaction."""

from __future__ import annotations

import threading


class Gate:
    """A store's clock that, once armed, holds the transaction that asks it until it is let go."""

    def __init__(self) -> None:
        self.armed = False
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> int:
        """The time, when it is let go."""
        if self.armed:
            self.armed = False
            self.entered.set()
            assert self.release.wait(30)
        return 1_900_000_000_000
