"""`export` and `import`: a turn as the portable checkpoint that other engines read, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, Json, Scope, StoreUrl, TurnId
from turnkeeper.cli.output import print_json
from turnkeeper.engine import documents
from turnkeeper.engine.wire import EngineCheckpoint
from turnkeeper.errors import InvalidInput, TurnCheckpointError

Format = Literal["json", "yaml"]
_Format = Annotated[Format | None, Parameter(help="By the file's name, else JSON.")]


async def export(
    turn: TurnId,
    *,
    at: Annotated[int | None, Parameter(help="As it was at this sequence number.")] = None,
    format: _Format = None,  # noqa: A002  # the field's word
    output: Annotated[Path | None, Parameter(help="Write to this file.")] = None,
    events: Annotated[bool, Parameter(negative="", help="The events instead, one JSON object a line.")] = False,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Print a turn's checkpoint, or its events one a line; into a file where one is named."""
    async with await open_keeper(store) as keeper:
        if events:
            told = await keeper.events(turn, scope, at=at)
            text = "".join(documents.to_json(event) + "\n" for event in told)
        else:
            checkpoint = await keeper.checkpoint(turn, scope, at=at)
            text = "" if checkpoint is None else _written(checkpoint, format or _form_of(output))
    if not text:
        raise TurnCheckpointError(f"turn {turn!r} ({scope}) is not in this store, or has no checkpoint up to there")
    if output is None:
        sys.stdout.write(text)
    else:
        await anyio.Path(output).write_text(text)
    return 0


async def import_checkpoint(
    file: Annotated[Path, Parameter(help="An EngineCheckpoint, in JSON or YAML.")],
    *,
    format: _Format = None,  # noqa: A002  # the field's word
    store: StoreUrl = DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Begin a turn with the checkpoint in a file."""
    try:
        text = await anyio.Path(file).read_bytes()
    except OSError as e:
        raise InvalidInput("FILE", f"{file} cannot be read: {e.strerror}") from e
    read = documents.from_yaml if (format or _form_of(file)) == "yaml" else documents.from_json
    loaded = read(EngineCheckpoint, text)
    async with await open_keeper(store, create=True) as keeper:
        scope = await keeper.adopt(loaded.value)
    turn_id = loaded.value.turn_id
    if json:
        print_json({"turn": turn_id, "scope": scope, "ignored": sorted(loaded.unknown)})
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
