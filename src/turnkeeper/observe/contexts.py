"""W3C trace contexts, as logs keep them. No OpenTelemetry here: rules and records may import this."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LONGEST_STATE: Final = 512


class TraceContext(NamedTuple):
    """A W3C trace context."""

    traceparent: str
    tracestate: str = ""


def valid(context: TraceContext) -> bool:
    """Whether it is W3C's form, with ids that are not zero."""
    return _TRACEPARENT.fullmatch(context.traceparent) is not None and len(context.tracestate) <= _LONGEST_STATE
