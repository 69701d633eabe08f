"""The Lua scripts of a queue in Redis; all keys of each are of one shard, and so in one slot."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from turnkeeper.stores.redis.scripts import Script

_LUA: Final = files("turnkeeper.transport").joinpath("lua")


def _of_queue(*parts: str) -> Script:
    return Script("queue.lua", *parts, folder=_LUA)


PUBLISH: Final = _of_queue("publish.lua")
TAKE: Final = _of_queue("take.lua")
SETTLE: Final = _of_queue("held.lua", "settle.lua")
FINISH: Final = _of_queue("held.lua", "finish.lua")
LETTERS: Final = _of_queue("letters.lua")
EXHUME: Final = _of_queue("exhume.lua")
DEPTH: Final = _of_queue("depth.lua")
ADVANCE: Final = Script("advance.lua", folder=_LUA)
