"""Field case 25: stores that grow to gigabytes, and one payload that is too big."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import pytest

from turnkeeper import Agent, Keeper, ScriptedModel, tool
from turnkeeper.errors import ValueTooLarge
from turnkeeper.turn.names import ToolCallAction, ToolCallState

IMAGE = 1_500_000
RESULT = 40_000
MEGABYTE = 1024 * 1024


def _text(size: int, seed: int) -> str:
    """Text that hardly compresses, so that stored bytes are about unique bytes."""
    return base64.b64encode(random.Random(seed).randbytes(size * 3 // 4)).decode()


def _on_disk(file: Path) -> int:
    return file.stat().st_size + Path(f"{file}-wal").stat().st_size


async def _bytes_after(rounds: int) -> tuple[int, int]:
    """Stored bytes, and bytes of unique data, of a turn with an image and so many rounds."""
    image = _text(IMAGE, 0)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]

    @tool(replay_safe=True)
    async def look(page: int) -> str:
        return _text(RESULT, page + 1)

    calls = [
        {"role": "assistant", "tool_calls": [{"id": f"c{n}", "name": "look", "arguments": f'{{"page":{n}}}'}]}
        for n in range(rounds)
    ]
    agent = Agent(ScriptedModel([*calls, "seen it all"]), [look], max_rounds=rounds + 1)
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        assert (await keeper.run(agent, messages, turn_id="t")).status == "success"
        (head,) = [head async for head in keeper.turns()]
    return head.size, IMAGE + rounds * RESULT


@pytest.mark.anyio
async def test_a_stored_bytes_grow_with_the_data() -> None:
    stored = {rounds: await _bytes_after(rounds) for rounds in (15, 30, 60)}
    for rounds, (size, unique) in stored.items():
        assert size <= 1.1 * unique, f"{rounds} rounds: {size} bytes for {unique}"
    first, second = (stored[b][0] - stored[a][0] for a, b in ((15, 30), (30, 60)))
    assert second <= 2.2 * first  # twice the rounds, twice the bytes: not their square


@pytest.mark.anyio
async def test_b_an_oversize_result_is_told_once_and_gets_a_stand_in() -> None:
    big = "x" * (70 * MEGABYTE)
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        session = keeper.session("t")
        await session.start([{"role": "user", "content": "go"}], ["fetch"], {})
        await session.reserve_assistant(0, {"tool_calls": [{"id": "c", "name": "fetch", "arguments": ""}]})
        operation = session.logical_operation_id(0, 0)
        claim = await session.claim_tool(0, 0, "c", "fetch", "", operation, owner_token="w", begin=True)
        with pytest.raises(ValueTooLarge, match="round 0 slot 0") as told:
            await session.complete_tool(0, 0, "w", claim.fence, {"content": big})
        assert told.value.size > told.value.limit == 64 * MEGABYTE
        slot = await session.get_tool(0, 0)
        assert slot is not None
        assert (slot.state, slot.owner_token) == (ToolCallState.EXECUTING, "w")
        done = await session.complete_tool(0, 0, "w", claim.fence, {"content": "70 MiB, see the bucket"})
        assert done.action is ToolCallAction.COMPLETED


@pytest.mark.anyio
async def test_b_the_engine_puts_a_stand_in_and_goes_on() -> None:
    ledger: list[int] = []

    @tool
    def fetch() -> str:
        ledger.append(1)
        return "x" * (70 * MEGABYTE)

    call = {"role": "assistant", "tool_calls": [{"id": "c", "name": "fetch", "arguments": ""}]}
    model = ScriptedModel([call, "too big to show"])
    async with await Keeper.open("sqlite:///:memory:") as keeper:
        assert (await keeper.run(Agent(model, [fetch]), "go", turn_id="t")).output == "too big to show"
    assert ledger == [1]
    assert "cannot be kept" in model.requests[-1].messages[-1].text


@pytest.mark.anyio
async def test_c_prune_removes_what_is_done_and_the_file_gets_smaller(tmp_path: Path) -> None:
    done, day = 1_000, 86_400
    file = tmp_path / "t.db"
    async with await Keeper.open(f"sqlite:///{file}") as keeper:
        store: Any = keeper.store
        for number in range(done):
            session = keeper.session(f"done-{number}")
            await session.start([{"role": "user", "content": _text(1500, number)}], [], {})
            await session.mark_completed(allow_no_output=True)
        for number in range(3):
            await keeper.session(f"unfinished-{number}").start([{"role": "user", "content": "go"}], [], {})
        call = {"role": "assistant", "tool_calls": [{"id": "c", "name": "pay", "arguments": ""}]}

        @tool
        async def pay() -> str:
            raise TimeoutError("no answer")

        for number in range(2):
            agent = Agent(ScriptedModel([call]), [pay])
            assert (await keeper.run(agent, "go", turn_id=f"doubt-{number}")).status == "reconciliation_required"
        await store.advance_clock((day + 1) * 1000)
        before = _on_disk(file)
        counted = await keeper.prune(older_than_seconds=day, dry_run=True)
        assert (counted.removed, counted.kept) == (done, 5)
        assert len([head async for head in keeper.turns()]) == done + 5
        pruned = await keeper.prune(older_than_seconds=day)
        assert (pruned.removed, pruned.kept) == (done, 5)
        assert pruned.bytes_removed == counted.bytes_removed > 1_000_000
        left = sorted([head.labels["turn"] async for head in keeper.turns()])
        assert left == ["doubt-0", "doubt-1", "unfinished-0", "unfinished-1", "unfinished-2"]
        assert _on_disk(file) < before / 4
