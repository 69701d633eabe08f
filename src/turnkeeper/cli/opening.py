"""Opening a store for an operator: with the environment's keys, for every command that looks into logs."""

from __future__ import annotations

from turnkeeper.keeper import Keeper
from turnkeeper.log.keyring import Keyring


async def open_keeper(url: str, *, create: bool = False) -> Keeper:
    """A keeper with the keyring of TURNKEEPER_KEYS or TURNKEEPER_KEYS_FILE, if one is set.

    Raises:
        InvalidInput: the keys that are set cannot be used.
    """
    return await Keeper.open(url, create=create, keyring=Keyring.from_environment())
