"""What single pages promise of their examples beyond what they show."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.channels.gate import so
from tests.channels.telegram_server import TOKEN, Telegram
from tests.conversation.platform import Platform
from tests.docs.pages import ROOT, blocks_of, run_page
from tests.engine.support import until
from tests.models.clients import port_at, settling
from turnkeeper import (
    DidNotHappen,
    Flow,
    FlowContext,
    Happened,
    Keeper,
    Keyring,
    ModelRequest,
    ScriptedModel,
    StillUnknown,
    TurnCheckpointSession,
)
from turnkeeper.channels import telegram_api
from turnkeeper.conversation.channel import FindingChannel, NotSent, Refused, Sent, Unknown
from turnkeeper.conversation.message import Button, Content
from turnkeeper.errors import EncryptionError, InvalidInput
from turnkeeper.log.keeping import Limits
from turnkeeper.models.fake import FakeModel, load_script
from turnkeeper.models.scripted import calls
from turnkeeper.stores.sqlite import SqliteStore
from turnkeeper.turn_checkpoint import TurnPhase

README = ROOT / "README.md"
CONVERSATIONS, CHANNELS, MODELS, SECURITY = (
    ROOT / "docs" / f"{name}.md" for name in ("conversations", "channels", "models", "security")
)


def test_readme_parks_until_somebody_approves() -> None:
    agent = run_page(README, until="Permission, other agents, budgets")["agent"]
    model = ScriptedModel([calls(("clerk", {"task": "book TK133"})), "It is booked."])

    async def run() -> None:
        parking = dataclasses.replace(agent, model=model)
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            assert (await keeper.run(parking, "Book TK133", turn_id="t")).status == "parked"
            await keeper.decide_permission("t", 0, 0, True, who="ann")
            result = await keeper.run(parking, "Book TK133", turn_id="t")
        assert (result.status, result.output) == ("success", "It is booked.")

    asyncio.run(run())


def test_readme_by_hand() -> None:
    run_page(README)

    async def run() -> None:
        async with await SqliteStore.open("turns.db") as store:
            snapshot = await TurnCheckpointSession(store, "message-4712").load()
        assert snapshot is not None
        assert snapshot.phase is TurnPhase.ASSISTANT_RESERVED

    asyncio.run(run())


def test_a_conversation_on_the_console(tmp_path: Path) -> None:
    """By a process for each line; each shows again where the conversation stands."""
    (tmp_path / "greeting.py").write_text(blocks_of(CONVERSATIONS)[0].text)
    shown = ""
    for typed in ("hi\n", "Ann\n", "red\n"):
        command = [sys.executable, "-W", "error", "greeting.py"]
        done = subprocess.run(
            command, cwd=tmp_path, input=typed, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stderr == ""
        shown += done.stdout
    assert shown.splitlines() == [
        *["What is your name?"] * 2,
        *["Which colour do you like, Ann?"] * 2,
        "Ann likes red.",
    ]


def test_conversations_in_your_own_program() -> None:
    serve = run_page(CONVERSATIONS)["serve"]
    flow, platform = Flow("greeting"), Platform()

    @flow.step
    async def greet(c: FlowContext) -> None:
        await c.ask("Who are you?")

    async def run() -> None:
        async with await Keeper.open("sqlite:///:memory:") as keeper:
            for _ in range(2):
                await serve(keeper, flow, platform)

    asyncio.run(run())
    assert platform.texts("chat-17") == ["Who are you?"]


def test_a_channel_of_your_own() -> None:
    my_channel = run_page(CONVERSATIONS)["MyChannel"]
    answers: dict[str, Any] = {}
    asked: list[Any] = []

    def platform(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            known = [one for one in asked if one["metadata"] == request.url.params["metadata"]]
            return httpx2.Response(200, json=[{"id": 7} for _ in known])
        asked.append(json.loads(request.content))
        answer = answers["next"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run() -> None:
        transport = httpx2.MockTransport(platform)
        async with httpx2.AsyncClient(transport=transport, base_url="http://platform") as client:
            channel: Any = my_channel(client)
            assert isinstance(my_channel(client), FindingChannel)
            content = Content(text="Hi", buttons=(Button("Yes"),))
            for answer, outcome in (
                (httpx2.Response(200, json={"id": 5}), Sent("5")),
                (httpx2.Response(429, headers={"retry-after": "3"}), Refused("too many messages", retry_after=3.0)),
                (httpx2.Response(400, text="no"), Refused("no")),
                (httpx2.Response(503), Unknown("status 503")),
                (httpx2.ReadTimeout("slow"), Unknown("slow")),
                (httpx2.ConnectError("down"), NotSent("down")),
            ):
                answers["next"] = answer
                assert await channel.send("c", "k", content) == outcome
            assert asked[0] == {"text": "Hi", "buttons": ["Yes"], "metadata": "k"}
            assert await channel.find("c", "k") == Happened("7")
            assert await channel.find("c", "other") == DidNotHappen()

    asyncio.run(run())


def test_the_bot_that_polls_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    poll = run_page(CHANNELS)["poll"]

    async def run() -> None:
        async with Telegram() as telegram, anyio.create_task_group() as tasks:
            defaults = telegram_api.BotApi.__init__.__kwdefaults__
            assert defaults is not None
            monkeypatch.setitem(defaults, "base_url", telegram.url)
            tasks.start_soon(poll, TOKEN)
            telegram.say("hi")
            await until(lambda: so(lambda: telegram.texts() == ["Who are you?"]))
            telegram.say("Ann")
            await until(lambda: so(lambda: telegram.texts() == ["Who are you?", "Hello, Ann."]))
            tasks.cancel_scope.cancel()

    asyncio.run(run())


def test_the_model_ports() -> None:
    names = run_page(MODELS)
    assert names["agent"].reconcile_model == names["model"].reconcile

    class Model:
        """Finds what it is told to find."""

        def __init__(self, found: Any) -> None:
            self.found = found

        async def reconcile(self, request: ModelRequest) -> Any:
            """See `OpenAIResponses.reconcile`."""
            return self.found

    names["model"] = Model(StillUnknown())
    assert isinstance(asyncio.run(names["look_up"](None)), DidNotHappen)
    names["model"] = Model(Happened("answer"))
    assert asyncio.run(names["look_up"](None)) == Happened("answer")


@pytest.mark.anyio
async def test_the_script_of_a_fake_model(tmp_path: Path) -> None:
    """With its faults: refused, made and lost, cut, each as the page says."""
    path = tmp_path / "script.yaml"
    path.write_text(next(block.text for block in blocks_of(MODELS) if block.language == "yaml"))
    with FakeModel(load_script(path)) as fake:
        async with port_at(fake.url, "stored chat") as port, await Keeper.open("sqlite:///:memory:") as keeper:
            result = await keeper.run(settling(port), "Lisbon, please", turn_id="t")
    assert (result.status, result.output) == ("success", "It is booked.")
    assert len(fake.requests) == 3
    assert fake.bought() == {0: 1, 1: 1}


def test_an_encrypted_store(tmp_path: Path) -> None:
    run_page(SECURITY, until="Encryption")
    assert b"Hello" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_key_of_a_kms() -> None:
    class Kms:
        """Unwraps by doing nothing."""

        async def decrypt(self, wrapped: bytes) -> bytes:
            return wrapped

    keyring: Keyring = run_page(SECURITY)["keyring_of"](Kms(), bytes(32), b"o" * 32)
    asyncio.run(keyring.ready())
    assert (keyring.current, keyring.ids) == ("2026-11", ("2026-11", "2026-05"))


def test_the_table_of_limits() -> None:
    units = {"KiB": 1024, "MiB": 1024 * 1024}
    rows = re.findall(r"^\| `(\w+)`:[^|]* \| (\d+) (\w+) \| (\d+) (\w+) \|", SECURITY.read_text(), re.MULTILINE)
    defaults = Limits()
    assert [row[0] for row in rows] == list(Limits.__struct_fields__)
    for name, default, unit, most, of in rows:
        assert getattr(defaults, name) == int(default) * units[unit]
        largest = int(most) * units[of]
        assert getattr(Limits(**{name: largest}), name) == largest
        with pytest.raises(InvalidInput):
            Limits(**{name: largest + 1})


def test_the_table_of_encryption_errors() -> None:
    above = SECURITY.read_text().partition("### What is not")[0]
    named = set(re.findall(r"^\| [^|]* \| `(\w+)`[^|]*\|$", above, re.MULTILINE))
    assert named == {kind.__name__ for kind in EncryptionError.__subclasses__()}
