"""Tool arguments as the model gives them: one complete JSON object, or no arguments, or refused (field case 06)."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from turnkeeper.errors import ValueTooLarge
from turnkeeper.log.keeping import Limits


class InvalidArguments(ValueError):
    """The arguments of a call are not one complete JSON object. The model is told; nothing runs."""


def _no_constant(name: str) -> Any:
    raise InvalidArguments(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise InvalidArguments(f"the number {text} is out of range")
    return number


def parse_arguments(raw: Any, limit: int = Limits().arguments) -> dict[str, Any]:
    """The arguments of a call. None, blank text and the JSON text `""` mean no arguments.

    Of a key given twice the last value counts, as everywhere in Python's JSON.

    Args:
        limit: bytes of JSON that they may have.

    Raises:
        InvalidArguments: anything that is not one complete JSON object, or a larger one.
    """
    if raw is None:
        return {}
    size = len(raw.encode(errors="replace") if isinstance(raw, str) else msgspec.json.encode(raw))
    if size > limit:
        raise InvalidArguments(str(ValueTooLarge("arguments", size, limit)))
    value = raw
    if isinstance(raw, str):
        if not raw.strip():
            return {}
        try:
            value = json.loads(raw, parse_constant=_no_constant, parse_float=_finite)
        except InvalidArguments:
            raise
        except (ValueError, RecursionError) as e:
            raise InvalidArguments(f"not a complete JSON object: {e}") from e
        if value == "":
            return {}
    if not isinstance(value, dict):
        raise InvalidArguments(f"must be a JSON object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)
