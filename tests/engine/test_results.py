"""Results that cannot be kept as they are: the effect has happened, so the model is told, and the turn goes on."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pytest

from tests.engine.support import Ledger, asks_once, last_results, messages_of, records_of
from turnkeeper import Agent, Keeper, ToolContext, tool
from turnkeeper.engine.stored import stored_result
from turnkeeper.engine.wire import Outcome
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn import records as r

pytestmark = pytest.mark.anyio


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "output",
    [
        {1, 2},
        float("nan"),
        {"price": float("inf")},
        {1: "one"},
        b"\x00",
        [b"\x00"],
        object(),
        datetime.date(2024, 2, 29),
        decimal.Decimal("0.1"),
        ValueError("returned"),
        _deep(),
    ],
    ids=lambda output: f"{output!r:.20}",
)
async def test_what_cannot_be_kept_gets_a_stand_in(keeper: Keeper, output: Any, *, parallel: bool) -> None:
    ledger = Ledger()

    @tool
    async def act(n: int, context: ToolContext) -> Any:
        ledger.write(context)
        return output if n == 1 else "fine"

    model = asks_once(*[("act", {"n": n}) for n in range(3)])
    result = await keeper.run(Agent(model, [act], parallel_tools=parallel), "go", turn_id="t")
    assert result.status == "success"
    assert ledger.once(3)
    told = last_results(model.requests[1])
    assert (told[0], told[2]) == ("fine", "fine")
    assert "was made" in told[1]
    assert "cannot be kept" in told[1]
    assert "round 0 slot 1" in told[1]
    completed = next(record for record in await records_of(keeper, r.ToolCompleted) if record.slot_index == 1)
    kept = stored_result(completed.result, "", "act")
    # The call succeeded: it is its result that is missing.
    assert (kept.outcome, kept.error_kind) == (Outcome.SUCCESS, "result_not_storable")


async def test_a_result_over_the_limit_gets_a_stand_in(tmp_path: Any) -> None:
    """Not retried, and neither are its siblings (field case 25 has the rest)."""
    ledger = Ledger()

    @tool
    async def read(megabytes: int, context: ToolContext) -> str:
        ledger.write(context)
        return "x" * (megabytes << 20)

    async with await SqliteStore.open(tmp_path / "turns.db") as store:
        keeper = Keeper(store)
        model = asks_once(("read", {"megabytes": 70}), ("read", {"megabytes": 0}))
        assert (await keeper.run(Agent(model, [read]), "go", turn_id="t")).status == "success"
        told = last_results(model.requests[1])
        assert "over the limit" in told[0]
        assert told[1] == ""
        assert ledger.once(2)
        kinds = {
            stored_result(record.result, "", "").error_kind for record in await records_of(keeper, r.ToolCompleted)
        }
        assert kinds == {"result_too_large", None}


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (None, ""),
        ("text", "text"),
        ("", ""),
        ("half a pair: \ud800", "half a pair: \ufffd"),
        (["half a pair: \ud800"], '["half a pair: \ufffd"]'),
        ((1, (2, 3)), "[1,[2,3]]"),
        (10**30, str(10**30)),
        (-0.0, "-0.0"),
        (True, "true"),
        ({"b": 1, "a": [None, "ü"]}, '{"b":1,"a":[null,"ü"]}'),
    ],
)
async def test_the_model_is_shown_the_same_in_this_run_and_in_any_other(
    keeper: Keeper, output: Any, shown: str
) -> None:
    """What it is shown is what is kept, and what the tool gave, also before anybody has to read it back."""

    @tool
    async def act() -> Any:
        return output

    model = asks_once(("act", ""))
    await keeper.run(Agent(model, [act]), "go", turn_id="t")
    assert last_results(model.requests[1]) == [shown]
    assert list(model.requests[1].messages) == (await messages_of(keeper))[:-1]
