"""`export` and `import`: a turn as the portable checkpoint that other engines read, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import anyio
import msgspec
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.opening import open_keeper
from turnkeeper.engine import documents
from turnkeeper.engine.wire import EngineCheckpoint
from turnkeeper.errors import InvalidInput, TurnCheckpointError

Format = Literal["json", "yaml"]


async def export_turn(
    url: str, turn_id: str, scope: str, *, at: int | None, form: Format | None, output: Path | None, events: bool
) -> int:
    """Print a turn's checkpoint, or its events one a line; into a file where one is named."""
    async with await open_keeper(url) as keeper:
        if events:
            told = await keeper.events(turn_id, scope, at=at)
            text = "".join(documents.to_json(event) + "\n" for event in told)
        else:
            checkpoint = await keeper.checkpoint(turn_id, scope, at=at)
            text = "" if checkpoint is None else _written(checkpoint, form or _form_of(output))
    if not text:
        raise TurnCheckpointError(f"turn {turn_id!r} ({scope}) is not in this store, or has no checkpoint up to there")
    if output is None:
        sys.stdout.write(text)
    else:
        await anyio.Path(output).write_text(text)
    return 0


async def import_turn(url: str, source: Path, *, form: Format | None, as_json: bool) -> int:
    """Begin a turn with the checkpoint in a file."""
    try:
        text = await anyio.Path(source).read_bytes()
    except OSError as e:
        raise InvalidInput("FILE", f"{source} cannot be read: {e.strerror}") from e
    read = documents.from_yaml if (form or _form_of(source)) == "yaml" else documents.from_json
    loaded = read(EngineCheckpoint, text)
    async with await open_keeper(url, create=True) as keeper:
        scope = await keeper.adopt(loaded.value)
    turn_id = loaded.value.turn_id
    if as_json:
        told = {"turn": turn_id, "scope": scope, "ignored": sorted(loaded.unknown)}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        return 0
    console = Console()
    for path in sorted(loaded.unknown):
        console.print(escape(f"ignored, since this version does not know it: {path}"))
    console.print(escape(f"imported: turn {turn_id} ({scope}). `Keeper.resume` goes on with it."))
    return 0


def _written(checkpoint: EngineCheckpoint, form: Format) -> str:
    if form == "yaml":
        return documents.to_yaml(checkpoint)
    return msgspec.json.format(documents.to_json(checkpoint), indent=2) + "\n"


def _form_of(path: Path | None) -> Format:
    return "yaml" if path is not None and path.suffix in (".yaml", ".yml") else "json"
