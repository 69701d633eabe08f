"""Things of the user's own code that a command is given as `module:attribute`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import TypeVar

from turnkeeper.errors import InvalidInput

T = TypeVar("T")


def load(target: str, kind: type[T], field: str) -> T:
    """The object that `module:attribute` names: it itself, or what a function of that name makes.

    Modules are looked for in the current folder first.

    Raises:
        InvalidInput: there is no such module or attribute, or it is of another kind; names the field.
    """
    found = _named(target, field)
    return _checked(found() if not isinstance(found, kind) and callable(found) else found, target, kind, field)


async def opened_by(target: str, kind: type[T], field: str) -> T:
    """What a function, sync or async, of that name opens.

    Raises:
        InvalidInput: as `load`.
    """
    found = _named(target, field)
    made: object = found() if callable(found) else found
    return _checked(await made if inspect.isawaitable(made) else made, target, kind, field)


def _named(target: str, field: str) -> object:
    module_name, colon, attribute = target.partition(":")
    if not module_name or not colon or not attribute:
        raise InvalidInput(field, f"{target!r} is not of the form module:attribute, as app:{field.strip('-')}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not module_name.startswith(e.name):
            raise
        raise InvalidInput(field, f"there is no module {module_name!r} here") from e
    return getattr(module, attribute, None)


def _checked(made: object, target: str, kind: type[T], field: str) -> T:
    if not isinstance(made, kind):
        raise InvalidInput(field, f"{target!r} is no turnkeeper.{kind.__name__}, nor a function that makes one")
    return made
