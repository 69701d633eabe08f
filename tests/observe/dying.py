"""A process with telemetry that dies in the middle of a tool call: `python -m tests.observe.dying FILE TURN`."""

from __future__ import annotations

import asyncio
import os
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from tests.engine.support import asks
from turnkeeper import Agent, Keeper, Telemetry, Tool


async def dies() -> None:
    """Tell the span of the run, and die."""
    call = trace.get_current_span()
    assert isinstance(call, ReadableSpan)
    assert call.parent is not None
    print(f"{call.parent.trace_id:032x} {call.parent.span_id:016x}", flush=True)
    os._exit(9)


def agent() -> Agent:
    """Calls it."""
    return Agent(asks([("dies", {})]), [Tool(dies)], lease_seconds=0.2)


async def _main(path: str, turn_id: str) -> None:
    async with await Keeper.open(f"sqlite:///{path}", telemetry=Telemetry(TracerProvider())) as keeper:
        await keeper.run(agent(), "q", turn_id=turn_id)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
