"""Tool arguments as the model gives them: one complete JSON object, or no arguments, or refused (field case 06)."""

from __future__ import annotations

import json
from typing import Any, cast


class InvalidArguments(ValueError):
    """The arguments of a call are not one complete JSON object. The model is told; nothing runs."""


def _no_constant(name: str) -> Any:
    raise InvalidArguments(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise InvalidArguments(f"the number {text} is out of range")
    return number


def parse_arguments(raw: Any) -> dict[str, Any]:
    """The arguments of a call. None, blank text and the JSON text `""` mean no arguments.

    Of a key given twice the last value counts, as everywhere in Python's JSON.

    Raises:
        InvalidArguments: anything that is not one complete JSON object.
    """
    if raw is None:
        return {}
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
