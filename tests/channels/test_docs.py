"""The programs of docs/channels.md are programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.channels.gate import so
from tests.channels.telegram_server import TOKEN, Telegram
from tests.engine.support import until
from turnkeeper.channels import telegram_api

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "channels.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.anyio
async def test_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them can be defined, one behind the other; the one that polls answers."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    assert {"serve", "poll", "hook", "answer"} <= names.keys()
    async with Telegram() as telegram, anyio.create_task_group() as tasks:
        defaults = telegram_api.BotApi.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "base_url", telegram.url)
        tasks.start_soon(names["poll"], TOKEN)
        telegram.say("hi")
        await until(lambda: so(lambda: telegram.texts() == ["Who are you?"]))
        telegram.say("Ann")
        await until(lambda: so(lambda: telegram.texts() == ["Who are you?", "Hello, Ann."]))
        tasks.cancel_scope.cancel()
