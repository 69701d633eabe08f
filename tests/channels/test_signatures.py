"""Signatures of Standard Webhooks, against the `standardwebhooks` package."""

from __future__ import annotations

import base64
import os
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from turnkeeper.channels.signatures import TOLERANCE, Signatures, Signed, secret_bytes
from turnkeeper.errors import InvalidInput

OLD = "whsec_" + base64.b64encode(b"o" * 24).decode()
NEW = "whsec_" + base64.b64encode(b"n" * 32).decode()
NOW = 1_700_000_000.0


def theirs(secret: str, message_id: str, body: str, at: float = NOW) -> Signed:
    """Signed by the package."""
    made = Webhook(secret).sign(message_id, datetime.fromtimestamp(at, UTC), body)
    return Signed(message_id, str(int(at)), made)


def ours(*secrets: str | bytes) -> Signatures:
    """With a clock that stands."""
    return Signatures(secrets, now=lambda: NOW)


@given(st.binary(min_size=24, max_size=64), st.text(), st.from_regex(r"\A[a-zA-Z0-9_-]{1,40}\Z"))
def test_each_verifies_what_the_other_has_signed(key: bytes, body: str, message_id: str) -> None:
    try:
        raw = body.encode()
    except UnicodeEncodeError:
        return
    secret = "whsec_" + base64.b64encode(key).decode()
    assert ours(secret).verify(theirs(secret, message_id, body), raw) == "good"
    signed = Signatures(key).sign(message_id, raw)
    Webhook(secret).verify(raw, signed.headers, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(raw + b" ", signed.headers, json_parse=False)


def test_rotation() -> None:
    """A receiver that knows both takes either; a sender that has both is understood by either."""
    for secret in (OLD, NEW):
        assert ours(OLD, NEW).verify(theirs(secret, "m", "x"), b"x") == "good"
        both = Signatures([OLD, NEW]).sign("m", b"x")
        Webhook(secret).verify(b"x", both.headers, json_parse=False)
    assert ours(NEW).verify(theirs(OLD, "m", "x"), b"x") == "bad_signature"


def test_what_is_not_signed_is_not_taken() -> None:
    good = theirs(OLD, "m", "body")
    check = ours(OLD)
    assert check.verify(good, b"body") == "good"
    assert check.verify(good, b"bodY") == "bad_signature"
    assert check.verify(good._replace(id="n"), b"body") == "bad_signature"
    assert check.verify(good._replace(timestamp=str(int(NOW) + 1)), b"body") == "bad_signature"
    assert check.verify(None, b"body") == "no_headers"
    value = good.signatures.removeprefix("v1,")
    for signatures in (
        "",
        "v1,",
        value,
        f"v1a,{value}",
        f"v2,{value}",
        f"v1,{value[:-1]}",
        "v1,\xe9",
        "v1," + "\udc80",
    ):
        assert check.verify(good._replace(signatures=signatures), b"body") == "bad_signature", signatures
    assert check.verify(good._replace(signatures=f"v1,AAAA v1a,x {good.signatures}"), b"body") == "good"
    many = " ".join(["v1,AAAA"] * 100)
    assert check.verify(good._replace(signatures=f"{many} {good.signatures}"), b"body") == "bad_signature"


@pytest.mark.parametrize(("off", "verdict"), [(0, "good"), (TOLERANCE, "good"), (TOLERANCE + 1, "bad_time")])
def test_time(off: int, verdict: str) -> None:
    for at in (NOW - off, NOW + off):
        assert ours(OLD).verify(theirs(OLD, "m", "x", at), b"x") == verdict


@pytest.mark.parametrize(
    "timestamp", ["", "abc", "-1", "1e9", " 1700000000", "1700000000.0", "\u0661\u0667" + "\u0660" * 8, "9" * 5000]
)
def test_a_timestamp_that_is_none(timestamp: str) -> None:
    assert ours(OLD).verify(Signed("m", timestamp, "v1,x"), b"x") == "bad_headers"


@pytest.mark.parametrize("message_id", ["", "a.b", "a b", "a\n", "é", "x" * 257])
def test_an_id_that_could_be_read_in_two_ways(message_id: str) -> None:
    """`m.1.2.x` could be the id `m` at the time 1 with `2.x`, or `m.1` at the time 2 with `x`."""
    assert ours(OLD).verify(Signed(message_id, str(int(NOW)), "v1,x"), b"x") == "bad_headers"
    with pytest.raises(InvalidInput):
        ours(OLD).sign(message_id, b"x")


def test_secrets() -> None:
    key = os.urandom(32)
    text = base64.b64encode(key).decode()
    assert secret_bytes(f"whsec_{text}") == secret_bytes(text) == secret_bytes(text.rstrip("=")) == key
    for secret in ("", "whsec_", "whsec_short", "whsec_" + "!" * 40, "whsec_" + "é" * 40, b"short"):
        with pytest.raises(InvalidInput) as caught:
            secret_bytes(secret)
        assert "!" * 9 not in str(caught.value)
    with pytest.raises(InvalidInput):
        Signatures([])
    assert text not in repr(Signatures(f"whsec_{text}"))
