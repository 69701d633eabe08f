"""Fresh folders for the files of a measurement, on the disk of the project: a temporary folder may lie in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from turnkeeper.stores.sqlite.schema import file_system_type

_BUILD = Path(__file__).resolve().parents[1] / "build"


@contextmanager
def scratch() -> Generator[Path]:
    """A new folder, gone behind the block."""
    _BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=_BUILD) as folder:
        yield Path(folder)


def disk() -> str:
    """The type of the file system that is measured on, for the report."""
    return file_system_type(_BUILD.parent) or "unknown file system"


def servers_disk() -> str:
    """The same of where servers keep their data: temporary folders, which `TMPDIR` puts elsewhere."""
    return file_system_type(Path(tempfile.gettempdir())) or "unknown file system"
