"""The examples of docs/models.md work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.models.clients import port_at, settling
from turnkeeper import DidNotHappen, Happened, Keeper, ModelRequest, StillUnknown, tool
from turnkeeper.models.fake import FakeModel, load_script

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()
BLOCKS = [
    re.sub(r"(?m)^  ", "", block) if indent else block
    for indent, block in re.findall(r"(?ms)^( *)```python\n(.*?)```", PAGE)
]


@tool
def book(flight: str) -> str:
    """Book a flight."""
    return f"booked {flight}"


@pytest.mark.anyio
async def test_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-example")
    names: dict[str, Any] = {"book": book}
    exec(BLOCKS[0], names)
    assert names["agent"].reconcile_model == names["model"].reconcile

    class Model:
        def __init__(self, found: Any) -> None:
            self.found = found

        async def reconcile(self, request: ModelRequest) -> Any:
            return self.found

    names |= {"DidNotHappen": DidNotHappen, "StillUnknown": StillUnknown}
    exec(BLOCKS[1], names)
    names["model"] = Model(StillUnknown())
    assert isinstance(await names["look_up"](None), DidNotHappen)
    names["model"] = Model(Happened("answer"))
    assert await names["look_up"](None) == Happened("answer")


@pytest.mark.anyio
async def test_the_script(tmp_path: Path) -> None:
    """With its faults: refused, made and lost, cut, each as the page says."""
    path = tmp_path / "script.yaml"
    path.write_text(re.findall(r"(?s)```yaml\n(.*?)```", PAGE)[0])
    with FakeModel(load_script(path)) as fake:
        async with port_at(fake.url, "stored chat") as port, await Keeper.open("sqlite:///:memory:") as keeper:
            result = await keeper.run(settling(port), "Lisbon, please", turn_id="t")
    assert (result.status, result.output) == ("success", "It is booked.")
    assert len(fake.requests) == 3
    assert fake.bought() == {0: 1, 1: 1}
