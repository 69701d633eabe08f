"""Lengths of time on the command line."""

from __future__ import annotations

import re
from typing import Final

from turnkeeper.errors import InvalidInput

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(length: str, option: str) -> int:
    """The seconds of a length like `15m`.

    Raises:
        InvalidInput: it is not written like that; names the option.
    """
    found = re.fullmatch(r"(\d+)([smhd])", length)
    if found is None:
        raise InvalidInput(option, f"{length!r} is no length of time; write 90s, 15m, 12h or 7d")
    return int(found[1]) * _UNITS[found[2]]
