"""Signatures of Standard Webhooks: HMAC-SHA256 over `id.timestamp.body`, with several secrets while one replaces another."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from turnkeeper.errors import InvalidInput

TOLERANCE: Final = 300
"""Seconds by which a timestamp may differ from our clock: a captured message cannot be played back later."""
_PREFIX: Final = "whsec_"
_SHORTEST: Final = 24
"""Bytes of a secret, as the specification wants them."""
_MOST: Final = 16
"""Signatures of one message that are looked at."""
# No full stop: it separates the signed parts, so an id that holds one could be read as another id and timestamp.
_ID: Final = re.compile(r"[!-\-/-~]{1,256}", re.ASCII)
_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}", re.ASCII)

Verdict = Literal["good", "no_headers", "bad_headers", "bad_time", "bad_signature"]


class Signed(NamedTuple):
    """The three headers of a message."""

    id: str
    timestamp: str
    signatures: str

    @property
    def headers(self) -> dict[str, str]:
        """By their names."""
        return {
            "webhook-id": self.id,
            "webhook-timestamp": self.timestamp,
            "webhook-signature": self.signatures,
        }


def secret_bytes(secret: str | bytes) -> bytes:
    """The key of a secret: bytes, or text as providers show it (`whsec_` and base64).

    Raises:
        InvalidInput: it is no such text, or is too short to be safe. What it is, is not told.
    """
    if isinstance(secret, str):
        try:
            text = secret.removeprefix(_PREFIX).rstrip("=")  # some providers leave the padding away
            key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput("secret", f"must be {_PREFIX!r} and base64, or bytes") from None
    else:
        key = bytes(secret)
    if len(key) < _SHORTEST:
        raise InvalidInput("secret", f"must have at least {_SHORTEST} bytes")
    return key


class Signatures:
    """Signs and verifies with a set of secrets; its text shows none of them."""

    def __init__(self, secrets: str | bytes | Sequence[str | bytes], *, now: Callable[[], float] = time.time) -> None:
        """
        Args:
            secrets: one, or several while one replaces another: any of them verifies, all of them sign.
            now: seconds since 1970.

        Raises:
            InvalidInput: there is none, or one of them cannot be used.
        """
        given = [secrets] if isinstance(secrets, str | bytes) else list(secrets)
        if not given:
            raise InvalidInput("secrets", "there has to be one")
        self._keys = [secret_bytes(one) for one in given]
        self._now = now

    def sign(self, message_id: str, body: bytes) -> Signed:
        """The headers of a message that is sent now.

        Raises:
            InvalidInput: that cannot be a message's id.
        """
        if not _ID.fullmatch(message_id):
            raise InvalidInput("message_id", "must be visible ASCII without full stops")
        timestamp = str(int(self._now()))
        made = self._made(message_id, timestamp, body)
        return Signed(message_id, timestamp, " ".join(f"v1,{one.decode()}" for one in made))

    def refuse_early(self, signed: Signed | None) -> Verdict:
        """What the headers alone tell; `good`: read the body, and verify."""
        if signed is None:
            return "no_headers"
        if not _ID.fullmatch(signed.id) or not _TIMESTAMP.fullmatch(signed.timestamp):
            return "bad_headers"
        if abs(self._now() - int(signed.timestamp)) > TOLERANCE:
            return "bad_time"
        return "good"

    def verify(self, signed: Signed | None, body: bytes) -> Verdict:
        """Whether one of the secrets has signed this, not long ago. Takes the same time for each wrong signature."""
        early = self.refuse_early(signed)
        if early != "good" or signed is None:
            return early
        made = self._made(signed.id, signed.timestamp, body)
        told = [
            one.removeprefix("v1,").encode("utf-8", "surrogateescape")
            for one in signed.signatures.split(" ")[:_MOST]
            if one.startswith("v1,")  # other versions are signatures of another kind
        ]
        # All are compared, also behind one that fits.
        fits = [hmac.compare_digest(one, other) for one in made for other in told]
        return "good" if any(fits) else "bad_signature"

    def _made(self, message_id: str, timestamp: str, body: bytes) -> list[bytes]:
        signed = f"{message_id}.{timestamp}.".encode() + body
        return [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)) for key in self._keys]


def signed_headers(headers: Mapping[str, str], counts: Callable[[str], int]) -> Signed | None:
    """The three headers of a request; None where one is missing, or is there twice: which one counts is nobody's guess."""
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    if any(counts(name) != 1 for name in names):
        return None
    return Signed(*(headers[name] for name in names))
