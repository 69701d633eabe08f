"""`import turnkeeper` is light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = [
    *["msgspec", "anyio", "backports", "rich", "cyclopts", "redis", "psycopg", "asyncio", "sqlite3"],
    *["openai", "anthropic", "httpx2", "starlette", "uvicorn"],
]


def test_import_is_light() -> None:
    """It brings no library beside the standard one."""
    code = "import sys, turnkeeper; print(sorted({m.split('.')[0] for m in sys.modules} & {*sys.argv[1:]}))"
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
