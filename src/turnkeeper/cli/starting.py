"""`init`: writes a small working service into a folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.options import Json
from turnkeeper.cli.output import print_json
from turnkeeper.errors import InvalidInput

_FILES: Final = ("app.py", "README.md")


def init(
    folder: Annotated[Path, Parameter(help="Where to; it is made if it is not there.")] = Path(), *, json: Json = False
) -> int:
    """Write it; nothing that is there is written over.

    Raises:
        InvalidInput: a file is there already, or the folder cannot be written.
    """
    there = [name for name in _FILES if (folder / name).exists()]
    if there:
        raise InvalidInput("folder", f"{folder} has {' and '.join(there)} already; nothing was written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            template = files("turnkeeper.cli.template").joinpath(name)
            (folder / name).write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as e:
        raise InvalidInput("folder", f"{folder} cannot be written: {e.strerror}") from e
    if json:
        print_json({"folder": str(folder), "files": list(_FILES)})
        return 0
    console = Console(highlight=False)
    console.print(escape(f"Written to {folder}: {', '.join(_FILES)}."))
    enter = "" if folder == Path() else f"cd {folder} && "
    console.print(escape(f"Talk to it: {enter}python app.py"))
    return 0
