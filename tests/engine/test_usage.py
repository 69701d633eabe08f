"""What a turn took, added up as it goes on (issue C, 7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.support import state_of
from turnkeeper import Agent, Keeper, ModelInvocationResponse, ScriptedModel, Tool
from turnkeeper.engine import usage as metered
from turnkeeper.engine.identity import identity_of
from turnkeeper.engine.usage import NOTHING, Budget, Meter, usage_of
from turnkeeper.engine.wire import InvocationUsage
from turnkeeper.models.scripted import calls, text
from turnkeeper.turn.state import TurnState

pytestmark = pytest.mark.anyio

ROUNDS = 40


def used(response: ModelInvocationResponse, tokens: int) -> ModelInvocationResponse:
    """A response with its usage told."""
    usage = InvocationUsage(input_tokens=tokens, output_tokens=0, total_tokens=tokens)
    return ModelInvocationResponse(output=response.output, tool_requests=response.tool_requests, usage=usage)


def agent_of(rounds: int, **options: Any) -> Agent:
    """An agent that asks for a tool in each round."""

    def act() -> str:
        return "acted"

    script = [used(calls(("act", {})), 1)] * rounds
    return Agent(ScriptedModel([*script, used(text("done"), 1)]), [Tool(act)], **options)


async def test_each_decision_is_read_once_for_the_budget(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a round's share of it does not grow with the turn."""
    read: list[int] = []
    stored_response = metered.stored_response

    def noticed(round_: Any) -> ModelInvocationResponse:
        read.append(round_.index)
        return stored_response(round_)

    monkeypatch.setattr(metered, "stored_response", noticed)
    result = await keeper.run(agent_of(ROUNDS, budget=Budget(max_tokens=ROUNDS)), "go", turn_id="t")
    assert (result.error_kind, result.rounds) == ("budget_exhausted", ROUNDS)
    assert read == list(range(ROUNDS))
    more = agent_of(ROUNDS, budget=Budget(max_tokens=ROUNDS + 1))
    assert (await keeper.run(more, "go", turn_id="t")).status == "success"
    assert read == list(range(ROUNDS)) * 2


async def test_a_meter_says_what_a_new_one_says(keeper: Keeper) -> None:
    """At every record, read one behind the other or for the first time, and also where the log is another one."""
    meter, told = Meter(), [NOTHING]
    for turn_id, rounds in (("t", 3), ("u", 2)):
        await keeper.run(agent_of(rounds), "go", turn_id=turn_id)
        state = await state_of(keeper, turn_id)
        for at in range(1, state.revision + 1):
            history = await keeper.history(turn_id, at=at)
            assert history is not None
            identity = identity_of(history.state)
            told.append(meter.read(history.state, identity))
            assert told[-1] == usage_of(history.state, identity) == meter.read(history.state, identity)
    assert max(told, key=lambda one: one.total_tokens).total_tokens == 4
    assert meter.read(TurnState(), identity_of(TurnState())) == NOTHING
