"""`import turnkeeper` is light."""

from __future__ import annotations

import subprocess
import sys

EXTRAS = [
    *["anthropic", "cryptography", "hiredis", "httpx2", "openai", "opentelemetry", "psycopg", "redis", "starlette"],
    *["uvicorn", "yaml"],
]
HEAVY = [*EXTRAS, "msgspec", "anyio", "backports", "rich", "cyclopts", "asyncio", "sqlite3"]


def test_import_is_light() -> None:
    """It brings no library beside the standard one."""
    code = "import sys, turnkeeper; print(sorted({m.split('.')[0] for m in sys.modules} & {*sys.argv[1:]}))"
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_every_public_name_needs_no_extra() -> None:
    code = (
        "import sys\nsys.modules.update(dict.fromkeys(sys.argv[1:]))\nimport turnkeeper\n"
        "for name in turnkeeper.__all__: getattr(turnkeeper, name)\nprint(len(turnkeeper.__all__))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *EXTRAS], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0
