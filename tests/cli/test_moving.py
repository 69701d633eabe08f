"""`copy` and `erase`: logs byte for byte in another store, resumable, verified; and gone with a receipt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import turnkeeper
from turnkeeper import Agent, Keeper, ScriptedModel
from turnkeeper.log.record import NOWHERE, Head, Position
from turnkeeper.moving import CopyFailed, copy_logs, digest
from turnkeeper.stores.opening import open_store
from turnkeeper.stores.sqlite import SqliteStore


async def _fill(url: str, names: tuple[str, ...]) -> None:
    async with await Keeper.open(url) as keeper:
        for name in names:
            assert (await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id=name)).status == "success"


@pytest.mark.anyio
async def test_copy_is_byte_for_byte_resumable_and_verified(tmp_path: Path) -> None:
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    await _fill(source, ("one", "two", "three"))
    assert turnkeeper("copy", source, target, "--json").document["copied"] == 3
    again = turnkeeper("copy", source, target, "--json").document
    assert (again["copied"], again["already_there"], again["verified"]) == (0, 3, 3)

    # The copied turn is the same turn: its result is the recorded one, nothing is asked or written.
    model = ScriptedModel([])
    async with await Keeper.open(target) as keeper:
        assert (await keeper.run(Agent(model), "hi", turn_id="two")).output == "hello"
    assert model.requests == []
    ours, theirs = await open_store(source), await open_store(target)
    async for head in ours.heads():
        one, other = await ours.read(head.key), await theirs.read(head.key)
        assert (one.position, one.records) == (other.position, other.records)
        assert digest(one) == digest(other)
    await ours.close()
    await theirs.close()


@pytest.mark.anyio
async def test_copy_tells_a_log_that_differs(tmp_path: Path) -> None:
    head = Head(kind="turn", phase="X")
    async with await SqliteStore.open(tmp_path / "a.db") as source, await SqliteStore.open(tmp_path / "b.db") as target:
        await source.append("k", [b"1"], expected=NOWHERE, head=head)
        await target.append("k", [b"1"], expected=NOWHERE, head=head)
        with pytest.raises(CopyFailed, match="differs between the two stores"):
            await copy_logs(source, target)


@pytest.mark.anyio
async def test_copy_keeps_a_compacted_log(tmp_path: Path) -> None:
    """LOG-5: sequences go on where they were, also in the other store."""
    head = Head(kind="turn", phase="X")
    async with await SqliteStore.open(tmp_path / "a.db") as source, await SqliteStore.open(tmp_path / "b.db") as target:
        await source.append("k", [b"1", b"2"], expected=NOWHERE, head=head)
        position = (await source.read("k")).position
        await source.append("k", [b"snapshot"], expected=position, head=head, compact_through=2)
        await copy_logs(source, target)
        tail = await target.read("k", after=Position(position.incarnation, 1))
        assert tail.restart
        assert [(record.seq, record.body) for record in tail.records] == [(3, b"snapshot")]


@pytest.mark.anyio
async def test_erase_gives_a_receipt(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    await _fill(url, ("one", "two"))
    async with await Keeper.open(url) as keeper:
        await keeper.run(Agent(ScriptedModel(["child"])), "hi", turn_id="one", scope="run-7")
    receipt = turnkeeper("erase", "one", "--store", url, "--json").document
    assert (len(receipt["erased"]), receipt["left"]) == (2, 0)
    assert all(log["digest"] and log["records"] for log in receipt["erased"])
    assert [turn["turn"] for turn in turnkeeper("list", "--store", url, "--json").document] == ["two"]
    assert turnkeeper("erase", "one", "--store", url, "--json").document["erased"] == []
