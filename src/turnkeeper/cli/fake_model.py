"""`fake-model`: a server that speaks the providers' APIs from a script, so that agents can be tried out offline."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from turnkeeper.models.fake.script import load_script
from turnkeeper.models.fake.server import FakeModel


def serve(script: Path, *, host: str, port: int, as_json: bool) -> int:
    """Serve a script until a signal ends it; then print the bill."""
    fake = FakeModel(load_script(script), host=host, port=port)
    addresses = {"openai": fake.openai_url, "anthropic": fake.url}
    console = Console(highlight=False)
    if as_json:
        sys.stdout.write(msgspec.json.encode(addresses).decode() + "\n")
    else:
        console.print(f"OpenAI's clients:    base_url={escape(addresses['openai'])}")
        console.print(f"Anthropic's clients: base_url={escape(addresses['anthropic'])}")
        console.print(f"What was asked and billed: {fake.url}/requests, {fake.url}/bill")
    sys.stdout.flush()
    fake.serve()
    if as_json:
        sys.stdout.write(msgspec.json.encode({"bill": fake.bill}).decode() + "\n")
    else:
        for round_index, times in sorted(fake.bought().items()):
            console.print(f"round {round_index}: {times} answer{'s' if times > 1 else ''} billed")
    return 0
