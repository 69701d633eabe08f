"""`turnkeeper fake-model`: the real command, asked by a provider's real client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from tests.cli.command import turnkeeper

SCRIPT = '{"rounds": [{"text": "Hello."}]}'
COMMAND = "from turnkeeper.cli.app import main; main()"


def test_it_serves_until_interrupted_and_prints_the_bill(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "fake-model", str(script), "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        assert addresses["openai"] == f"{addresses['anthropic']}/v1"
        with OpenAI(base_url=addresses["openai"], api_key="any") as client:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "Hello."
        process.send_signal(signal.SIGINT)
        bill = json.loads(process.stdout.read())["bill"]
        assert process.wait(30) == 0
    assert [(one["api"], one["round"], one["answer"]) for one in bill] == [("chat", 0, "chatcmpl-1")]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"rounds": [{"say": "Hello."}]}')
    done = turnkeeper("fake-model", script)
    assert (done.status, "$.rounds[0]" in done.err) == (2, True)
    script.write_text(SCRIPT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = turnkeeper("fake-model", script, "--port", str(taken.getsockname()[1]))
    assert (done.status, "cannot listen at" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("library", "code", "extra"),
    [
        (
            "uvicorn",
            "from turnkeeper.cli.app import main; sys.argv[1:] = ['fake-model', 'x.json']; main()",
            "fake-model",
        ),
        (
            "starlette",
            "from turnkeeper.cli.app import main; sys.argv[1:] = ['fake-model', 'x.json']; main()",
            "fake-model",
        ),
        ("openai", "import turnkeeper.models.openai", "openai"),
        (
            "anthropic",
            "try: import turnkeeper.models.anthropic\nexcept ImportError as e: sys.exit(str(e))",
            "anthropic",
        ),
    ],
)
def test_a_library_that_is_missing_is_named(library: str, code: str, extra: str) -> None:
    blocked = f"import sys; sys.modules[{library!r}] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert f"pip install 'turnkeeper[{extra}]'" in done.stderr


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    """Neither by the command nor by the package of the models."""
    code = (
        "import sys, turnkeeper.cli.app, turnkeeper.models.scripted, turnkeeper.keeper;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {*sys.argv[1:]}))"
    )
    heavy = ["openai", "anthropic", "httpx2", "pydantic", "starlette", "uvicorn"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
