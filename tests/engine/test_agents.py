"""Agents and tools that are put together wrongly say so when they are, with the name of what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from turnkeeper import Agent, Happened, ScriptedModel, Tool, ToolContext, tool
from turnkeeper.engine.tools import Policy
from turnkeeper.engine.transcript import request_ids
from turnkeeper.engine.wire import ModelInvocationResponse, ModelToolRequest
from turnkeeper.errors import InvalidInput


async def look_up(context: ToolContext) -> Happened:
    """Look up."""
    return Happened()


def act(n: int = 1) -> int:
    """Act."""
    return n


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_rounds": 0}, "max_rounds"),
        ({"max_model_attempts": 0}, "max_model_attempts"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lease_seconds": -1}, "lease_seconds"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"tools": [Tool(act), Tool(act)]}, "tools"),
    ],
)
def test_an_agent_says_what_is_wrong_with_it(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Agent(ScriptedModel([]), **options)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, Policy.FAIL_CLOSED),
        ({"replay_safe": True}, Policy.REPLAY_SAFE),
        ({"reconcile": look_up}, Policy.RECONCILE),
        ({"transactional": True}, Policy.TRANSACTIONAL),
    ],
)
def test_a_tool_has_one_policy(options: dict[str, Any], policy: Policy) -> None:
    assert Tool(act, **options).policy is policy
    others: list[dict[str, Any]] = [{"replay_safe": True}, {"reconcile": look_up}, {"transactional": True}]
    for other in others if options else ():
        if options == other:
            continue
        with pytest.raises(InvalidInput, match="two policies"):
            Tool(act, **{**options, **other})


def test_a_transactional_tool_is_a_plain_function() -> None:
    async def wait() -> None:
        """Wait."""

    with pytest.raises(InvalidInput, match="transactional"):
        Tool(wait, transactional=True)


def _positions(*arguments: int) -> None:
    """A tool's arguments have names."""


def _by_position(n: int, /) -> None:
    """A tool's arguments have names."""


@pytest.mark.parametrize("function", [_positions, _by_position])
def test_a_tools_parameters_have_names(function: Any) -> None:
    with pytest.raises(InvalidInput, match="ordinary named one"):
        Tool(function)


@pytest.mark.parametrize("name", ["two\nlines", "x" * 200])
def test_a_tools_name_can_serve_as_one(name: str) -> None:
    with pytest.raises(InvalidInput):
        Tool(act, name=name)


def test_what_the_model_reads_of_a_tool() -> None:
    @tool(name="search", refusals=(KeyError,))
    def find(words: list[str], context: ToolContext, most: int = 10) -> None:
        """Find.

        By words.
        """

    assert (find.name, find.description) == ("search", "Find.\n\nBy words.")
    assert find.parameters["required"] == ["words"]
    assert find.parameters["properties"]["most"]["type"] == "integer"
    assert "context" not in find.parameters["properties"]
    assert find.parameters["additionalProperties"] is False


def requested(*ids: str | None) -> list[str]:
    """The ids that calls with these provider ids have in the transcript of round 3."""
    requests = [ModelToolRequest(id=given, name="act") for given in ids]
    return request_ids(ModelInvocationResponse(tool_requests=requests), 3)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a"], ["a", "call_3_1"]),
        (["", None], ["call_3_0", "call_3_1"]),
        # A provider may count as we do, before or behind.
        (["call_3_1", ""], ["call_3_1", "call_3_1_"]),
        (["", "call_3_0"], ["call_3_0_", "call_3_0"]),
    ],
)
def test_every_call_of_a_round_has_an_id_of_its_own(given: list[str | None], used: list[str]) -> None:
    assert requested(*given) == used
