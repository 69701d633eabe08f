"""Our log records carry what they are about as fields, for whatever formatter the host has; nothing is configured here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final

Fields = Mapping[str, Any]

_about: Final[ContextVar[Fields]] = ContextVar("turnkeeper_about", default={})  # noqa: B039  # never changed in place


class about:  # noqa: N801  # reads as a word of `with`
    """Within the block, and in the tasks that are begun in it, log records carry these fields. `with` or `async with`."""

    __slots__ = ("_before", "_fields")

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._before: Token[Fields] = _about.set({**_about.get(), **self._fields})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _about.reset(self._before)

    async def __aenter__(self) -> None:
        """For the same line as another `async with`."""
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def current() -> Fields:
    """The fields here and now: for what is told later, from another task."""
    return _about.get()


class _Logger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**_about.get(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The module's logger. Its records carry the fields of `about`, and what the caller gives as `extra`."""
    return _Logger(logging.getLogger(name))
