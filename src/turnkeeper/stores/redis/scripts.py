"""The Lua scripts, as they are sent: each touches the keys that it is given, and those of the store one key alone."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

_LUA: Final = files("turnkeeper.stores.redis").joinpath("lua")


class Script:
    """A script and the digest by which a server that has it knows it."""

    def __init__(self, *parts: str, folder: Traversable = _LUA) -> None:
        self.source = b"\n".join(folder.joinpath(part).read_bytes() for part in parts)
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


APPEND: Final = Script("log.lua", "append.lua")
READ: Final = Script("log.lua", "read.lua")
ERASE: Final = Script("log.lua", "erase.lua")
RESTORE: Final = Script("log.lua", "restore.lua")
STAGE: Final = Script("stage.lua")
