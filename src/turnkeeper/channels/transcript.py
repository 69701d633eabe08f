"""The transcript of one conversation: a file of JSON lines that is only ever appended to, by one process at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import msgspec

from turnkeeper.errors import InvalidInput, TranscriptError
from turnkeeper.log import values

_VERSION: Final = 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Head(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="transcript"):
    """The first line: which transcript this is (a later one of the same name has another id), and of whom."""

    id: str
    conversation: str
    version: int = _VERSION


class Said(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="said", omit_defaults=True):
    """What a person has said. `prompt` and `value`: the button that it was."""

    text: str
    prompt: str = ""
    value: str = ""
    at: str = msgspec.field(default_factory=_now)


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="taken"):
    """The line of that number is in the journal, and needs not be given to it again."""

    number: int


class Wrote(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="wrote", omit_defaults=True):
    """What was sent, under its outbox key. `buttons`: (label, value) each."""

    key: str
    text: str
    buttons: tuple[tuple[str, str], ...] = ()
    data: dict[str, Any] = {}
    at: str = msgspec.field(default_factory=_now)


Line = Head | Said | Taken | Wrote
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Line).decode
_BEGINNING: Final = b'{"line":"transcript",'


class Transcript:
    """A transcript that this process holds, and nobody else. Use it as a context manager.

    Attributes:
        path: the file.
        id: of this transcript, made when it began.
        conversation_id: whose it is.
        wrote: line numbers of what was sent, by outbox key.
        untaken: lines said that are not known to be in the journal, in order.
        since: what was sent since a person has last said something.
    """

    def __init__(self, path: str | os.PathLike[str], conversation_id: str) -> None:
        """Take the transcript, or begin one.

        Raises:
            TranscriptError: another process has it, it is of another conversation, or it is no transcript. It was left alone.
            OSError: the file cannot be opened.
        """
        self.path = Path(path)
        self.conversation_id = values.identifier(conversation_id, "conversation_id")
        self.id = ""
        self.wrote: dict[str, int] = {}
        self.untaken: dict[int, Said] = {}
        self.since: list[Wrote] = []
        self._count = 0
        self._broken = False
        new = not self.path.exists()
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self._lock()
            self._load()
            if not self.id:
                self.append(Head(id=os.urandom(8).hex(), conversation=conversation_id))
            if new:
                self._sync_folder()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Transcript:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, line: Line) -> int:
        """Write one line, durably; its number.

        Raises:
            InvalidInput: something in it is not JSON.
            TranscriptError: it could not be written. `applied` is False where nothing of it is left in the file.
        """
        if self._broken or self._file < 0:
            raise TranscriptError(str(self.path), "is closed, or was left in doubt before", applied=False)
        try:
            encoded = _encode(line) + b"\n"
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise InvalidInput("content.data", f"is not JSON: {e}") from e
        before = os.fstat(self._file).st_size
        try:
            # One write for a line: a process that is killed leaves the line, or nothing of it.
            if os.write(self._file, encoded) != len(encoded):
                raise OSError("only a part of the line could be written")
            os.fsync(self._file)
        except OSError as e:
            applied: Literal[False] | None = None
            with suppress(OSError):
                os.ftruncate(self._file, before)
                applied = False
            self._broken = applied is None
            raise TranscriptError(str(self.path), f"cannot be written: {e}", applied=applied) from e
        self._count += 1
        self._note(self._count, line)
        return self._count

    # --- reading it ------------------------------------------------------------------------------------------

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with its process, however that ends
        except OSError as e:
            raise TranscriptError(str(self.path), "another process has it; end that one first") from e

    def _load(self) -> None:
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            end = 0
            for raw in file:
                if not raw.endswith(b"\n"):
                    self._drop_torn(raw, end)
                    break
                end += len(raw)
                self._count += 1
                self._note(self._count, self._read(raw))

    def _drop_torn(self, raw: bytes, end: int) -> None:
        """A machine went down in the middle of a write. The line was neither journaled nor told to be sent, so it is as if it
        had never been written; its number is given again."""
        if not self._count and not (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)):
            raise TranscriptError(str(self.path), "is no transcript")
        os.ftruncate(self._file, end)

    def _read(self, raw: bytes) -> Line:
        try:
            line = _decode(raw)
        except (msgspec.DecodeError, RecursionError) as e:
            raise TranscriptError(str(self.path), f"line {self._count} is no line of a transcript: {e}") from e
        if isinstance(line, Head) != (self._count == 1):
            raise TranscriptError(str(self.path), f"line {self._count}: the first line, and no other, says whose it is")
        if isinstance(line, Head):
            if line.version > _VERSION:
                raise TranscriptError(str(self.path), f"has version {line.version}; this process knows {_VERSION}")
            if line.conversation != self.conversation_id:
                raise TranscriptError(
                    str(self.path), f"is of the conversation {line.conversation!r}, not {self.conversation_id!r}"
                )
        return line

    def _note(self, number: int, line: Line) -> None:
        match line:
            case Head():
                self.id = line.id
            case Said():
                self.untaken[number] = line
                self.since.clear()
            case Taken():
                self.untaken.pop(line.number, None)
            case Wrote():
                self.wrote.setdefault(line.key, number)
                self.since.append(line)

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
