"""Delegated runs: a tool that lets another agent do it, in a turn log of its own that a resumed parent finds again (2.14)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from turnkeeper.engine.outcomes import EffectRefused
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.tools import Tool, ToolContext
from turnkeeper.errors import InvalidInput, TurnkeeperError

Delegate = Callable[[Agent, Sequence[Any], ToolContext], Awaitable["DelegatedResult"]]
"""Runs an agent below a tool call. The engine puts it into the context of the tools of `subagent`."""


class DelegationTooDeep(EffectRefused):
    """An agent delegated to an agent that delegated …, deeper than allowed. The model is told; nothing was begun."""

    def __init__(self, depth: int, most: int) -> None:
        super().__init__(f"a delegated run at depth {depth} is over the limit of {most}", kind="delegation_too_deep")


class ChildPaused(TurnkeeperError):
    """A delegated run cannot go on before somebody has decided or settled something in it; its parent waits for that.

    Attributes:
        scope: the child's log, in the parent's trace.
        status, error_kind: the child's.
    """

    def __init__(self, scope: str, status: str, error_kind: str | None, message: str | None) -> None:
        super().__init__(f"the delegated run {scope} is {status}: {message}")
        self.scope = scope
        self.status = status
        self.error_kind = error_kind


class DelegatedResult:
    """How a delegated run ended."""

    def __init__(
        self, scope: str, status: str, output: str | None, error_kind: str | None, message: str | None
    ) -> None:
        self.scope = scope
        self.status = status
        self.output = output
        self.error_kind = error_kind
        self.message = message


def subagent(
    agent: Agent,
    *,
    name: str,
    description: str,
) -> Tool:
    """A tool that hands its `task` to another agent, and gives the model that agent's answer.

    The child's log is named after the call's operation id, so it is the same on every attempt: whatever the child has done is
    done, and a parent that is resumed goes on with it. A child that waits for somebody lets its parent wait. A child is
    cancelled with its parent, and takes no more than what is left of its parent's budget.

    Raises:
        InvalidInput: the name cannot serve as a tool's.
    """

    async def delegate(task: str, context: ToolContext) -> str:
        if context.delegate is None:
            raise InvalidInput("context", "only the engine can run a delegated agent")
        ended: DelegatedResult = await context.delegate(agent, [{"role": "user", "content": task}], context)
        if ended.status in ("reconciliation_required", "parked"):
            raise ChildPaused(ended.scope, ended.status, ended.error_kind, ended.message)
        if ended.status != "success":
            raise EffectRefused(f"{name} failed: {ended.message}", kind=ended.error_kind or "delegated_run_failed")
        return ended.output or ""

    # Its effects are its own log's: running it again finds them done.
    return Tool(delegate, name=name, description=description, replay_safe=True)
