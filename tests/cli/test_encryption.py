"""The command on encrypted stores: with the environment's keys, without them, and with others."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.cli.command import turnkeeper
from turnkeeper import Agent, Keeper, Keyring, ScriptedModel

OLD, NEW = (f"{name}:{base64.b64encode(name.encode() * 8).decode()}" for name in ("old1", "new2"))


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A store with one turn, encrypted with the old key."""
    url = f"sqlite:///{tmp_path}/a.db"
    async with await Keeper.open(url, keyring=Keyring.parse(OLD)) as keeper:
        assert (await keeper.run(Agent(ScriptedModel(["hello"])), "hi", turn_id="t")).status == "success"
    return url


@pytest.mark.anyio
async def test_looking_needs_the_keys_and_listing_does_not(url: str, tmp_path: Path) -> None:
    assert [turn["turn"] for turn in turnkeeper("list", "--store", url, "--json").document] == ["t"]
    (tmp_path / "keys").write_text(f"{NEW}\n{OLD}\n")
    for environment in ({"TURNKEEPER_KEYS": f"{NEW},{OLD}"}, {"TURNKEEPER_KEYS_FILE": str(tmp_path / "keys")}):
        shown = turnkeeper("show", "t", "--store", url, environment=environment)
        assert (shown.status, "phase COMPLETED" in shown.out) == (0, True)
    for environment, said in (
        ({}, "is encrypted with the key 'old1', and no keyring was given"),
        ({"TURNKEEPER_KEYS": NEW}, "is encrypted with the key 'old1'; this keyring has new2"),
        ({"TURNKEEPER_KEYS": "old1:" + NEW.partition(":")[2]}, "was encrypted with another key 'old1'"),
        ({"TURNKEEPER_KEYS": OLD[:-4]}, "TURNKEEPER_KEYS: entry 1 is not id:base64"),
    ):
        refused = turnkeeper("show", "t", "--store", url, environment=environment)
        assert (refused.status, refused.out) == (2, "")
        assert said in refused.err
        assert "Traceback" not in refused.err
        assert not any(key.partition(":")[2][:20] in refused.err for key in (OLD, NEW))


@pytest.mark.anyio
async def test_rotating_by_a_copy(url: str, tmp_path: Path) -> None:
    as_it_is, anew = f"sqlite:///{tmp_path}/b.db", f"sqlite:///{tmp_path}/c.db"
    assert turnkeeper("copy", url, as_it_is, "--json").document["verified"] == 1
    (before,) = turnkeeper("keys", "--store", as_it_is, "--json").document
    assert (before["key"], before["logs"]) == ("old1", 1)

    assert "needs the keys in TURNKEEPER_KEYS" in turnkeeper("copy", url, anew, "--rekey").err
    both = {"TURNKEEPER_KEYS": f"{NEW},{OLD}"}
    assert turnkeeper("copy", url, anew, "--rekey", "--json", environment=both).document["verified"] == 1
    assert turnkeeper("keys", "--store", anew, "--json").document == [{**before, "key": "new2"}]
    shown = turnkeeper("show", "t", "--store", anew, environment={"TURNKEEPER_KEYS": NEW})
    assert "phase COMPLETED" in shown.out
    assert "new2" in turnkeeper("keys", "--store", anew).out
    assert "AES-256-GCM" in turnkeeper("doctor", anew, environment=both).out

    # Housekeeping needs no key.
    assert len(turnkeeper("erase", "t", "--store", anew, "--json").document["erased"]) == 1
