"""The examples of docs/security.md run as they stand, and its table of limits is that of the code."""

from __future__ import annotations

import asyncio
import base64
import re
from pathlib import Path
from typing import Any

import pytest

from turnkeeper import Keyring
from turnkeeper.errors import EncryptionError, InvalidInput
from turnkeeper.log.keeping import Limits

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
ENCRYPTED, WRAPPED, REDACTED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KIB = 1024
UNITS = {"KiB": KIB, "MiB": KIB * KIB}


def run(block: str, **given: Any) -> dict[str, Any]:
    """What a block leaves."""
    names = {"__name__": "example", **given}
    exec(compile(block, "docs/security.md", "exec"), names)
    return names


def test_an_encrypted_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNKEEPER_KEYS", f"2026-11:{base64.b64encode(bytes(32)).decode()}")
    run(ENCRYPTED)
    assert b"Hello" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_key_of_a_kms() -> None:
    class Kms:
        """Unwraps by doing nothing."""

        async def decrypt(self, wrapped: bytes) -> bytes:
            return wrapped

    keyring: Keyring = run(WRAPPED, kms=Kms(), wrapped_key=bytes(32), old_key=b"o" * 32)["keyring"]
    asyncio.run(keyring.ready())
    assert (keyring.current, keyring.ids) == ("2026-11", ("2026-11", "2026-05"))


def test_redaction() -> None:
    run(REDACTED)


def test_the_table_of_limits() -> None:
    rows = re.findall(r"^\| `(\w+)`:[^|]* \| (\d+) (\w+) \| (\d+) (\w+) \|", PAGE, re.MULTILINE)
    defaults = Limits()
    assert [row[0] for row in rows] == list(Limits.__struct_fields__)
    for name, default, unit, most, of in rows:
        assert getattr(defaults, name) == int(default) * UNITS[unit]
        largest = int(most) * UNITS[of]
        assert getattr(Limits(**{name: largest}), name) == largest
        with pytest.raises(InvalidInput):
            Limits(**{name: largest + 1})


def test_the_table_of_errors() -> None:
    named = set(re.findall(r"^\| [^|]* \| `(\w+)`[^|]*\|$", PAGE.partition("### What is not")[0], re.MULTILINE))
    assert named == {kind.__name__ for kind in EncryptionError.__subclasses__()}
