"""`fake-model`: a server that speaks the providers' APIs from a script, so that agents can be tried out offline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.options import JsonLines


def fake_model(
    script: Annotated[Path, Parameter(help="The answers: JSON, or YAML by its name. See docs/models.md.")],
    *,
    host: Annotated[str, Parameter(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The port to listen at; 0 for one that is free.")] = 0,
    json: JsonLines = False,
) -> int:
    """Serve a script until a signal ends it; then print the bill."""
    # Here, since only this command needs their extra: the help and the completion of all commands read this module.
    from turnkeeper.models.fake.script import load_script
    from turnkeeper.models.fake.server import FakeModel

    fake = FakeModel(load_script(script), host=host, port=port)
    addresses = {"openai": fake.openai_url, "anthropic": fake.url}
    console = Console(highlight=False)
    if json:
        sys.stdout.write(msgspec.json.encode(addresses).decode() + "\n")
    else:
        console.print(f"OpenAI's clients:    base_url={escape(addresses['openai'])}")
        console.print(f"Anthropic's clients: base_url={escape(addresses['anthropic'])}")
        console.print(f"What was asked and billed: {fake.url}/requests, {fake.url}/bill")
    sys.stdout.flush()
    fake.serve()
    if json:
        sys.stdout.write(msgspec.json.encode({"bill": fake.bill}).decode() + "\n")
    else:
        for round_index, times in sorted(fake.bought().items()):
            console.print(f"round {round_index}: {times} answer{'s' if times > 1 else ''} billed")
    return 0
