"""A file whose records are encrypted, for the crash tests: told by its name, as a process gets no more than a URL."""

from __future__ import annotations

from typing import Final

from turnkeeper.log.keyring import Keyring

SEALED: Final = "sqlite file encrypted"
SEALED_FILE: Final = "encrypted.db"
_KEYRING: Final = Keyring({"new": bytes(32), "old": b"o" * 32})


def keyring_of(url: str) -> Keyring | None:
    """What the store of that URL is encrypted with."""
    return _KEYRING if url.endswith(SEALED_FILE) else None
