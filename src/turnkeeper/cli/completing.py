"""`--install-completion`: a script for the user's shell that completes commands, options and choices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError

from turnkeeper.errors import InvalidInput


def install_completion(
    *,
    shell: Annotated[
        Literal["bash", "zsh", "fish"] | None, Parameter(help="The shell; the one that this runs in without it.")
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="Write the script to this file, and leave the shell's start-up file alone.")
    ] = None,
) -> int:
    """Write the script to where the shell looks for it, and make its start-up file load it."""
    from turnkeeper.cli.app import app

    try:
        written = app.install_completion(shell=shell, output=output, add_to_startup=output is None)
    except ShellDetectionError as e:
        raise InvalidInput("--shell", "is needed: the shell that this runs in is not known") from e
    except OSError as e:
        raise InvalidInput("--output", f"{e.filename} cannot be written: {e.strerror}") from e
    sys.stdout.write(f"written to {written}\n")
    if output is None:
        sys.stdout.write("It counts from the next shell on.\n")
    return 0
