"""Requests that send: what a failed one proves, and answers that are read only as far as they are of use."""

from __future__ import annotations

from typing import Final

import anyio

from turnkeeper.conversation.channel import NotSent, Refused, Unknown
from turnkeeper.engine.outcomes import classify
from turnkeeper.models.failures import MissingSdk

try:
    import httpx2
except ImportError as e:
    raise MissingSdk("webhook", e) from e

EXCHANGE_SECONDS = 120.0
"""Seconds that a request may take with its answer, however lively the connection is: timeouts are for each single read."""
ANSWER_SECONDS = 15.0
"""Seconds for which the body of an answer is read that nothing depends on."""
TIMEOUT: Final = httpx2.Timeout(30.0, connect=10.0, pool=10.0)
# A connection that was idle may be closed by the other side just when it is used, which leaves a doubt: it is not kept long.
LIMITS: Final = httpx2.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
_NEVER_LEFT: Final = (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)


def judged(error: Exception) -> NotSent | Refused | Unknown:
    """What an error of a request says of it. Addresses are left out: some hold secrets."""
    told = type(error).__name__
    if isinstance(error, _NEVER_LEFT):
        return Refused(f"{told}: the request cannot be made")
    if isinstance(error, httpx2.ProxyError) or classify(error) == "not sent":
        return NotSent(f"{told}: {_last_words(error)}")
    return Unknown(f"{told}: {_last_words(error)}")


def _last_words(error: BaseException) -> str:
    """What the operating system has said, or the first that says anything."""
    words = str(error)
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
        if isinstance(error, OSError) and str(error):
            words = str(error)
    return words or "no details"


async def read_bounded(response: httpx2.Response, limit: int, seconds: float) -> bytes:
    """The beginning of an answer's body, as it comes over the wire: nothing is unpacked, and nobody is waited for without end."""
    body = bytearray()
    with anyio.move_on_after(seconds):
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) >= limit:
                break
    return bytes(body[:limit])
