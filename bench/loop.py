"""The whole loop as a driver of the benchmark.

A driver is `Driver(name, run, 1.6, fewest_writes=True)` with `async def run(store, turn)` that takes the turn to its end:
its model port answers with the turn's decisions and final content in order, its tools answer with the turn's results.
Everything else (recording, floor, report) comes from being in `LOOP`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from bench.drivers import Driver
from bench.workload import Turn
from turnkeeper import Agent, Keeper, Reply, ReplyPort, ScriptedModel, Tool, ToolContext
from turnkeeper.log.store import Store

_played: dict[str, Turn] = {}
"""The turns under way: tools are made once in a process, as a host would, and find their results here."""


async def _look_up(context: ToolContext, **arguments: Any) -> str:
    result: str = _played[context.turn_id].rounds[context.round_index].results[context.slot_index]["content"]
    return result


@lru_cache
def _tool(name: str) -> Tool:
    return Tool(_look_up, name=name)


async def _send(reply: Reply) -> str:
    return f"message-{reply.key}"


async def _run(store: Store, turn: Turn, *, parallel: bool) -> None:
    model = ScriptedModel([*(round_.decision for round_ in turn.rounds), turn.final])
    tools = [_tool(name) for name in turn.tool_names]
    agent = Agent(model, tools, max_rounds=len(turn.rounds) + 1, parallel_tools=parallel)
    _played[turn.trace_id] = turn
    result = await Keeper(store).run(
        agent, turn.messages, turn_id=turn.trace_id, reply=ReplyPort(_send), runtime=turn.runtime
    )
    del _played[turn.trace_id]
    assert result.status == "success", result


async def _parallel(store: Store, turn: Turn) -> None:
    await _run(store, turn, parallel=True)


async def _sequential(store: Store, turn: Turn) -> None:
    await _run(store, turn, parallel=False)


LOOP: Final[list[Driver]] = [
    Driver("agent loop", _parallel, 1.6, fewest_writes=True),
    Driver("agent loop, one tool at a time", _sequential, 1.6, fewest_writes=True),
]
"""Drivers of the whole loop; 1.6 times the floor is their target."""
