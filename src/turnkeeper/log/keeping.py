"""What may be kept, and in which form: the size limits, and the host's hook that redacts texts before they are kept.

All limits are here. They are far below what any store takes in one record (Redis 512 MB, PostgreSQL 1 GB, SQLite 1 GB), so that a
store's own limit is never what is met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from turnkeeper.errors import InvalidInput
from turnkeeper.log.frames import MAX_INFLATED

MAX_RECORD: Final = 256 * 1024 * 1024
"""The most bytes, in one append, that any limits can allow."""

_KIB: Final = 1024
_MIB: Final = 1024 * 1024

Place = Literal["input", "result", "message"]
"""Where a text is about to be kept: in a turn's input, in a tool's result, in a conversation's incoming message."""
Redact = Callable[[Place, str], str]
"""Gives the text that is kept in the place of a text, and used in its place: now, and by whoever resumes."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest sizes that are kept, in bytes, encoded and before compression. What is over one is refused with its field, its
    size and the limit (`ValueTooLarge`); below, what becomes of it.

    Attributes:
        message: a conversation's incoming message. Refused, nothing is written.
        arguments: of one tool call. The decision is kept, the call does not run, and the model is told why.
        result: of one tool call. The call has happened, and its slot is completed with a stand-in that tells the model so.
        transcript: of a turn. A longer input is refused; a turn that has grown longer stops before it asks the model again.
        record: all that one append writes. Refused, nothing is written. A snapshot that is larger is left out.
    """

    message: int = 256 * _KIB
    arguments: int = _MIB
    result: int = 16 * _MIB
    transcript: int = 64 * _MIB
    record: int = MAX_RECORD

    def __post_init__(self) -> None:
        """
        Raises:
            InvalidInput: a limit is not positive, or over what can be kept at all.
        """
        for name in self.__struct_fields__:
            most = MAX_RECORD if name == "record" else MAX_INFLATED
            if not 1 <= getattr(self, name) <= most:
                raise InvalidInput(f"limits.{name}", f"must be 1 to {most} bytes, not {getattr(self, name)}")


class Keeping(NamedTuple):
    """Limits, and a redacting function if the host has one."""

    limits: Limits = Limits()
    redact: Redact | None = None

    def redacted(self, place: Place, value: Any, field: str) -> Any:
        """A JSON-like value with every text in it redacted (names of objects' fields are not texts); itself where nobody redacts.

        Raises:
            InvalidInput: the function failed, or gave no text. Its own words are not told: they may hold what it was to hide.
        """
        if self.redact is None:
            return value
        try:
            return _each_text(value, lambda text: cast("Redact", self.redact)(place, text))
        except Exception as e:
            raise InvalidInput(field, f"could not be redacted ({type(e).__name__})") from None


KEEPING: Final = Keeping()
"""The limits where nobody has said anything else."""


def _each_text(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        kept: Any = redact(value)
        if not isinstance(kept, str):
            raise TypeError
        return kept
    if isinstance(value, list):
        return [_each_text(item, redact) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _each_text(item, redact) for key, item in cast("dict[Any, Any]", value).items()}
    return value
