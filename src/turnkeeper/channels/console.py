"""The console as a channel: a person types, and everything said and sent stands in a transcript (flows.md, Channels)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread

from turnkeeper.channels.transcript import Said, Taken, Transcript, Wrote
from turnkeeper.conversation.channel import NotSent, Refused, SendOutcome, Sent, Unknown
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import MAX_MESSAGE, Content, Message, keep_message
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp
from turnkeeper.errors import InvalidInput, TranscriptError, ValueTooLarge
from turnkeeper.log.keyring import Keyring
from turnkeeper.stores.opening import open_store

log = logging.getLogger(__name__)

_LOOKS: Final = 1.0
"""Most seconds between two looks: an operator may have settled something."""
_SOONEST: Final = 0.01
_CHUNK: Final = 64 * 1024
_LINE: Final = 2 * MAX_MESSAGE
"""Bytes of a line that are read; what is over it is one message that is too large, however long it is."""

Show = Callable[[str], None]


class ConsoleChannel:
    """Sends by writing to a transcript and showing it; a transcript tells of each key whether it was sent."""

    def __init__(self, transcript: Transcript, show: Callable[[Wrote], None]) -> None:
        self.dedup_window = 0.0
        self.max_length: int | None = None
        self._transcript = transcript
        self._show = show
        self._writing = anyio.Lock()

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """Write it to the transcript, then show it: whoever comes after a crash in between shows it again."""
        if conversation_id != self._transcript.conversation_id:
            return NotSent(f"the transcript is of the conversation {self._transcript.conversation_id!r}")
        buttons = tuple((one.label, one.value or one.label) for one in content.buttons)
        line = Wrote(key=key, text=content.text, buttons=buttons, data=content.data)
        async with self._writing:
            known = self._transcript.wrote.get(key)
            if known is not None:
                return Sent(str(known))
            try:
                number = await anyio.to_thread.run_sync(self._transcript.append, line)
            except InvalidInput as e:
                return Refused(str(e))
            except TranscriptError as e:
                return Unknown(str(e)) if e.applied is None else NotSent(str(e))
        self._show(line)
        return Sent(str(number))

    async def find(self, conversation_id: str, key: str) -> LookedUp:
        """Conclusive: nobody else writes to the transcript, and a line stands there as a whole or not at all."""
        number = self._transcript.wrote.get(key)
        return DidNotHappen() if number is None else Happened(str(number), "it stands in the transcript")

    async def note(self, line: Said | Taken) -> int:
        """Write what came in; its number."""
        async with self._writing:
            return await anyio.to_thread.run_sync(self._transcript.append, line)


async def run_console(
    flows: Flow | Sequence[Flow],
    store_url: str,
    conversation_id: str,
    transcript: str | os.PathLike[str],
    *,
    lease_seconds: float = 5.0,
    keyring: Keyring | None = None,
) -> None:
    """Talk to flows on standard input and output, a line a message, until the input ends.

    Killed at any point and started again, it goes on where it stood: what was said and not journaled is journaled, what was
    answered is not asked again, and what stands in the transcript since the last thing said is shown again. A text that is
    the label of a button under the last message presses it.

    Args:
        store_url: see `turnkeeper.stores.opening.open_store`.
        transcript: the file; begun if there is none.
        lease_seconds: how long to wait, after a crash in the middle of a step, until it may be gone on with.
        keyring: what the store's records are encrypted with; the transcript is a plain file in any case.

    Raises:
        TranscriptError: the transcript cannot be used.
        FlowUnknown: the conversation is in a flow, or a version, that is not among `flows`.
        StoreError: the store failed; start again.
    """
    flows = [flows] if isinstance(flows, Flow) else flows
    with Transcript(transcript, conversation_id) as paper:
        store = await open_store(store_url, keyring=keyring)
        try:
            screen = _Screen()
            channel = ConsoleChannel(paper, screen.show)
            async with Conversations(store, flows, channel, lease_seconds=lease_seconds) as bot:
                await _Console(bot, paper, channel, screen).run()
        finally:
            await store.close()


class _Screen:
    """Standard output: plain lines into a pipe; with a prompt at the bottom on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def begin(self, lines: Sequence[Wrote]) -> None:
        """Show where the conversation stands."""
        for line in lines:
            self.show(line)
        if self._terminal and not lines:
            self._write("> ")

    def show(self, line: Wrote) -> None:
        """Show what was sent."""
        text = line.text
        if line.buttons:
            text += "\n" + "  ".join(f"[{label}]" for label, _ in line.buttons)
        if self._terminal:
            # What a model says must not steer the terminal.
            text = "".join(one for one in text if one.isprintable() or one in "\n\t")
            self._write(f"\r\x1b[K{text}\n> ")
        else:
            self._write(f"{text}\n")

    def tell(self, text: str) -> None:
        """Say something that is not of the conversation."""
        self._write(f"\r\x1b[K({text})\n> " if self._terminal else f"({text})\n")

    def _write(self, text: str) -> None:
        # Gone with its reader: what was to be shown stands in the transcript.
        with suppress(OSError):
            sys.stdout.buffer.write(text.encode(errors="replace"))
            sys.stdout.buffer.flush()


class _Console:
    """One person at a console: what is typed is journaled at once, also while a step runs."""

    def __init__(self, bot: Conversations, transcript: Transcript, channel: ConsoleChannel, screen: _Screen) -> None:
        self._bot = bot
        self._transcript = transcript
        self._channel = channel
        self._screen = screen
        self._news = anyio.Event()
        self._ended = False
        self._failure: Exception | None = None
        self._held = False

    async def run(self) -> None:
        """Until the input ends and everything that can be done is."""
        self._screen.begin(self._transcript.since)
        for number, said in list(self._transcript.untaken.items()):
            await self._take(number, said)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            if threading.current_thread() is threading.main_thread():
                tasks.start_soon(_end_on_interrupt, tasks.cancel_scope)
            try:
                await self._answer()
            except Exception as e:  # told as itself, and not as a group
                self._failure = e
            tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _answer(self) -> None:
        conversation_id = self._transcript.conversation_id
        while self._failure is None:
            self._news = anyio.Event()
            last = self._ended  # whatever was said before it ended is in the journal
            processed = await self._bot.process(conversation_id)
            if processed.left == "held" and not self._held:
                log.warning("conversation %s is held: somebody has to look at its first message", conversation_id)
            self._held = processed.left == "held"
            if last and processed.left != "busy":
                return
            again_in = _LOOKS if processed.again_in is None else processed.again_in
            with anyio.move_on_after(min(max(again_in, _SOONEST), _LOOKS)):
                await self._news.wait()

    async def _listen(self) -> None:
        try:
            async for line in _lines(sys.stdin.fileno()):
                text = line.decode(errors="replace").rstrip("\r\n")
                if text.strip():
                    await self._say(text)
        except Exception as e:
            self._failure = e
        self._ended = True
        self._news.set()

    async def _say(self, text: str) -> None:
        key, value = self._button(text)
        said = Said(text=text, prompt=key, value=value)
        try:
            keep_message(self._message(0, said))
        except ValueTooLarge as e:
            self._screen.tell(f"not taken: {e}")
            return
        await self._take(await self._channel.note(said), said)

    async def _take(self, number: int, said: Said) -> None:
        """Into the journal, and only then on to the next line (J1)."""
        await self._bot.receive(self._transcript.conversation_id, self._message(number, said))
        # Without this, a start after the journal has forgotten the event's id would take it for a new one.
        await self._channel.note(Taken(number=number))
        self._news.set()

    def _message(self, number: int, said: Said) -> Message:
        # Line numbers begin again in another transcript.
        event_id = f"{self._transcript.id}:{number}"
        kind = "button" if said.prompt else "text"
        return Message(event_id=event_id, kind=kind, text=said.text, prompt=said.prompt, value=said.value)

    def _button(self, text: str) -> tuple[str, str]:
        """Key and value of the button that the text presses."""
        below = next((one for one in reversed(self._transcript.since) if one.buttons), None)
        pressed = text.strip().casefold()
        for label, value in () if below is None else below.buttons:
            if below is not None and label.casefold() == pressed:
                return below.key, value
        return "", ""


async def _end_on_interrupt(scope: anyio.CancelScope) -> None:
    """Ctrl-C hands over. A scope stays cancelled; a task's one cancellation may be lost in a time limit that ends just then."""
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


async def _lines(file: int) -> AsyncIterator[bytes]:
    """Lines of a pipe, a terminal or a file, the last one also without its end. No thread is left behind in a read."""
    rest = b""
    while chunk := await _read(file):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        rest = rest[:_LINE]
    if rest:
        yield rest


async def _read(file: int) -> bytes:
    # The loop does not wait for files, nor for /dev/null: they are always ready.
    with suppress(PermissionError):
        await anyio.wait_readable(file)
    return os.read(file, _CHUNK)
