"""Stores whose records are encrypted, for the crash tests: told by a mark on the URL, as a process gets no more than that."""

from __future__ import annotations

from typing import Final

from turnkeeper.log.keyring import Keyring
from turnkeeper.log.store import Store
from turnkeeper.stores.opening import open_store

SEALED: Final = " encrypted"
"""Behind a store's name."""
_MARK: Final = "#encrypted"
_KEYRING: Final = Keyring({"new": bytes(32), "old": b"o" * 32})


def sealed(url: str) -> str:
    """The same store, encrypted."""
    return url + _MARK


def address(url: str) -> str:
    """The URL without the mark."""
    return url.removesuffix(_MARK)


async def open_marked(url: str) -> Store:
    """The store, encrypted if its URL says so."""
    return await open_store(address(url), keyring=_KEYRING if url.endswith(_MARK) else None)
