"""How commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def moment(milliseconds: int) -> str:
    """A time of the store's clock, in UTC, for people."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def moment_iso(milliseconds: int) -> str:
    """A time of the store's clock, RFC 3339, for programs."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def owner_name(owner: str) -> str:
    """A run's owner token without its random part, which `--json` has."""
    return owner.rsplit(":", 1)[0]


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count} B" if count < 10_000 else f"{count / 1000:,.1f} kB"
