"""Keys by id, one of them current: what records are sealed with, and where the keys come from.

Nothing here shows a key: not an error, not a `repr`, not a log line. What names a key is its id.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import anyio.to_thread

from turnkeeper.errors import InvalidInput, KeyMissing, KeyUnavailable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEYS_VARIABLE: Final = "TURNKEEPER_KEYS"
FILE_VARIABLE: Final = "TURNKEEPER_KEYS_FILE"
PLAIN_VARIABLE: Final = "TURNKEEPER_ALLOW_PLAIN"

KEY_BYTES: Final = 32
CHECK_BYTES: Final = 4

_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CIPHERS: Final = 1024
"""Logs whose ciphers are kept ready, for each key."""

KeySource = bytes | Callable[[], bytes | Awaitable[bytes]]
"""A key of 32 bytes, or a function that gives it: async, or a plain one, which is called in a thread."""


class Key:
    """One key: its id, and a cipher of its own for each log.

    A cipher's key is derived from the log's name (HMAC-SHA256). Nonces are random, 96 bits, and AES-GCM stands no two that are
    equal under one key: so what counts is how many records one log has, not how many a deployment has.
    """

    __slots__ = ("__weakref__", "_material", "cipher", "header", "id")

    def __init__(self, key_id: str, material: bytes) -> None:
        """
        Raises:
            InvalidInput: it is no key of 32 bytes, or `cryptography` is not installed.
        """
        if type(material) is not bytes or len(material) != KEY_BYTES:
            _refuse(f"keys[{key_id!r}]", f"must be {KEY_BYTES} bytes")
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as e:
            raise InvalidInput("keyring", f"needs cryptography ({e}); pip install 'turnkeeper[encryption]'") from e
        self.id = key_id
        self._material = material
        # With four bytes of what only this key gives, a wrong key is told from a changed record.
        check = hmac.digest(material, b"turnkeeper key check", "sha256")[:CHECK_BYTES]
        self.header = bytes([len(key_id)]) + key_id.encode("ascii") + check
        """What a sealed record says of its key: the id, and the check of it."""

        def cipher(log: str) -> AESGCM:
            return AESGCM(hmac.digest(material, b"turnkeeper log\0" + log.encode(), "sha256"))

        self.cipher = lru_cache(maxsize=_CIPHERS)(cipher)

    def __repr__(self) -> str:
        return f"Key({self.id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are not pickled")


def _refuse(field: str, reason: str) -> NoReturn:
    # In a frame of its own: none of this frame's variables is a key, whatever reports the traceback with its variables.
    raise InvalidInput(field, reason)


class Keyring:
    """Keys by id. New records are sealed with the current one; every one opens what was sealed with it."""

    def __init__(self, keys: Mapping[str, KeySource], *, current: str | None = None, allow_plain: bool = False) -> None:
        """
        Args:
            keys: by id (1 to 64 of letters, digits, `.`, `_`, `-`): a key of 32 random bytes, or a function that gives it, which
                is asked when the key is first needed and, where it failed, again.
            current: the id of the key that new records are sealed with; the first one if None.
            allow_plain: whether records that are not encrypted may be read: those from before the encryption was switched on.
                Whoever can write to the store can then put records of his own in.

        Raises:
            InvalidInput: a key or an id cannot be, or `cryptography` is not installed.
        """
        if not keys:
            raise InvalidInput("keys", "a keyring needs at least one key")
        for key_id in keys:
            if not _ID.fullmatch(key_id):
                # Not shown: whoever has turned id and key around would find the key in a log.
                raise InvalidInput("keys", "an id is 1 to 64 of letters, digits, '.', '_', '-'")
        if current is not None and current not in keys:
            raise InvalidInput("current", f"there is no key {current!r} among {', '.join(keys)}")
        self.current = next(iter(keys)) if current is None else current
        self.allow_plain = allow_plain
        self.ids = tuple(keys)
        self._keys = {key_id: Key(key_id, source) for key_id, source in keys.items() if isinstance(source, bytes)}
        self._sources = {key_id: source for key_id, source in keys.items() if not isinstance(source, bytes)}

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self.ids)}; current={self.current!r}, allow_plain={self.allow_plain})"

    async def key(self, key_id: str, where: str) -> Key:
        """The key of that id, for `where`.

        Raises:
            KeyMissing: there is none.
            KeyUnavailable: the function that gives it failed, or gave something else.
        """
        key = self._keys.get(key_id)
        return key if key is not None else await self._fetch(key_id, where)

    async def _fetch(self, key_id: str, where: str) -> Key:
        source = self._sources.get(key_id)
        if source is None:
            known = ", ".join(self.ids)
            raise KeyMissing(where, key_id, f"is encrypted with the key {key_id!r}; this keyring has {known}")
        failed: str | None = None
        try:
            # Tasks that need it at the same time may all ask; that is seldom, and a lock would tie the keyring to one loop.
            given = source() if inspect.iscoroutinefunction(source) else await anyio.to_thread.run_sync(source)
            key = Key(key_id, await given if inspect.isawaitable(given) else given)
        except InvalidInput as e:
            failed = e.reason
        except Exception as e:
            # Only its kind: nobody knows what a KMS's client tells in its messages.
            raise KeyUnavailable(where, key_id, f"the key {key_id!r} cannot be had ({type(e).__name__})") from e
        else:
            return self._keys.setdefault(key_id, key)
        raise KeyUnavailable(where, key_id, f"what was given for the key {key_id!r} {failed}")

    async def ready(self) -> None:
        """Have the current key at hand, so that it is found out at once where it cannot be had. Raises what `key` raises."""
        await self.key(self.current, "keyring")

    @classmethod
    def parse(cls, text: str, *, allow_plain: bool = False, field: str = "keys") -> Keyring:
        """A keyring from `id:base64,id2:base64`, the first one current; new lines do as well as commas, `#` begins a comment.

        Raises:
            InvalidInput: it has another form; says which entry, and never what stands there.
        """
        lines = (line.partition("#")[0] for line in text.splitlines())
        entries = [entry for line in lines for entry in map(str.strip, line.split(",")) if entry]
        keys: dict[str, KeySource] = {}
        for number, entry in enumerate(entries, 1):
            key_id, colon, encoded = entry.partition(":")
            material = _material(encoded.strip())
            if not colon or material is None or not _ID.fullmatch(key_id.strip()):
                _refuse(field, f"entry {number} is not id:base64, with {KEY_BYTES} bytes in base64")
            if key_id.strip() in keys:
                _refuse(field, f"entry {number} has the id of one before it")
            keys[key_id.strip()] = material
        if not keys:
            _refuse(field, "holds no key")
        return cls(keys, allow_plain=allow_plain)

    @classmethod
    def from_file(cls, path: str | Path, *, allow_plain: bool = False) -> Keyring:
        """A keyring from a file with the text that `parse` takes.

        Raises:
            InvalidInput: the file cannot be read, or has another form.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "not text"
            raise InvalidInput("keys", f"{path} cannot be read ({why})") from None
        return cls.parse(text, allow_plain=allow_plain, field=str(path))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Keyring | None:
        """The keyring of TURNKEEPER_KEYS, or of the file that TURNKEEPER_KEYS_FILE names; None where neither is set.

        TURNKEEPER_ALLOW_PLAIN=1 also allows records that are not encrypted.

        Raises:
            InvalidInput: what is set cannot be used, or both are set.
        """
        text, path = environment.get(KEYS_VARIABLE), environment.get(FILE_VARIABLE)
        plain = environment.get(PLAIN_VARIABLE, "")
        if plain not in ("", "0", "1"):
            raise InvalidInput(PLAIN_VARIABLE, "must be 0 or 1")
        if text and path:
            raise InvalidInput(KEYS_VARIABLE, f"and {FILE_VARIABLE} are both set")
        if path:
            return cls.from_file(path, allow_plain=plain == "1")
        return cls.parse(text, allow_plain=plain == "1", field=KEYS_VARIABLE) if text else None


def _material(encoded: str) -> bytes | None:
    try:
        # Both alphabets: of what is left, base64 refuses everything else.
        material = base64.b64decode(encoded.translate({ord("-"): "+", ord("_"): "/"}), validate=True)
    except (binascii.Error, ValueError):
        return None
    return material if len(material) == KEY_BYTES else None
