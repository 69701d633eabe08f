"""A worker process for field case 19: begins a tool, writes its ledger line, and waits for a file before it returns."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from turnkeeper import Agent, Keeper, ScriptedModel, tool


async def main(url: str, folder: Path, lease_seconds: float) -> None:
    """Run the turn; its result goes to the file `result`."""

    @tool
    async def charge() -> str:
        with (folder / "ledger").open("a") as ledger:
            ledger.write("charged\n")
        while not (folder / "go").exists():  # blocks the event loop on purpose
            time.sleep(0.01)  # noqa: ASYNC251
        return "charged"

    call = {"role": "assistant", "tool_calls": [{"id": "c", "name": "charge", "arguments": ""}]}
    agent = Agent(ScriptedModel([call, "done"]), [charge], lease_seconds=lease_seconds)
    async with await Keeper.open(url) as keeper:
        result = await keeper.run(agent, "pay", turn_id="t")
    (folder / "result").write_text(result.status)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
