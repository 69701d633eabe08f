"""The chat platform of the flow crash tests, and the people at it: outside the store, in a ledger."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tests.crash.ledger import Ledger
from tests.crash.scenario import Boundaries
from turnkeeper.conversation import commands as c
from turnkeeper.conversation.channel import SendOutcome, Sent
from turnkeeper.conversation.conversations import Conversations
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.identity import send_key
from turnkeeper.conversation.message import Content, Message, kept_content
from turnkeeper.conversation.state import SendState
from turnkeeper.engine.outcomes import DidNotHappen, Happened

CHANNELS: Final = ("keyed", "searched", "neither")
"""What a channel can: drop a second message with a key, look a message up by its key, or nothing."""
FOREVER: Final = 1e12
Told = Callable[[], Awaitable[bool]]


def visible(ledger: Ledger, conversation: str) -> list[dict[str, Any]]:
    """What people see, in order. A keyed platform has dropped the second of a key already."""
    shown: list[dict[str, Any]] = []
    keys: set[str] = set()
    for row in ledger.rows("send", conversation=conversation):
        if row["key"] not in keys or not row["keyed"]:
            shown.append(row)
        keys.add(row["key"])
    return shown


class Platform:
    """A channel without keys and without a search."""

    dedup_window: float = 0.0
    max_length: int | None = None
    keyed: bool = False

    def __init__(self, ledger: Ledger, boundaries: Boundaries, life: int = 0) -> None:
        self._ledger = ledger
        self._reach = boundaries.reach
        self._life = life
        self.told: Told | None = None
        """Called when a message has become visible."""

    async def send(self, conversation_id: str, key: str, content: Content) -> SendOutcome:
        """See `Channel`."""
        self._reach("before a send")
        self._ledger.write(
            "send",
            conversation=conversation_id,
            key=key,
            text=content.text,
            keyed=self.keyed,
            life=self._life,
            by="bot",
        )
        if self.told is not None:
            await self.told()
        self._reach("behind a send")
        return Sent(f"id-{key}")


class KeyedPlatform(Platform):
    """A channel that drops a second message with the same key."""

    dedup_window: float = FOREVER
    keyed: bool = True


class SearchedPlatform(Platform):
    """A channel whose messages can be looked up; its senders are dead by then, so absence is conclusive."""

    async def find(self, conversation_id: str, key: str) -> Happened | DidNotHappen:
        """See `FindingChannel`."""
        self._reach("before a look-up")
        found = self._ledger.rows("send", conversation=conversation_id, key=key)
        self._reach("behind a look-up")
        return Happened(f"id-{key}") if found else DidNotHappen()


def platform(kind: str, ledger: Ledger, boundaries: Boundaries, life: int = 0) -> Platform:
    """The channel of that kind."""
    kinds = {"keyed": KeyedPlatform, "searched": SearchedPlatform, "neither": Platform}
    return kinds[kind](ledger, boundaries, life)


class Person:
    """Answers the latest question that is visible. What she says is journaled by a front-end, and told to it twice."""

    def __init__(self, front: Conversations, conversation: str, ledger: Ledger, *, insists: bool) -> None:
        """
        Args:
            insists: whether she says each answer again, as another message.
        """
        self._front = front
        self._insists = insists
        self._conversation = conversation
        self._ledger = ledger

    async def says(self, event: str, text: str) -> bool:
        """Say it once; whether it was new."""
        said = Message(event_id=event, text=text)
        receipt = await self._front.receive(self._conversation, said)
        again = await self._front.receive(self._conversation, said)
        assert again.duplicate, again
        if receipt.duplicate:
            return False
        self._ledger.write("said", event=event, text=text, number=receipt.number)
        return True

    async def repeats(self) -> None:
        """The platform delivers everything again that was said before: none of it is new."""
        for row in self._ledger.rows("said"):
            assert not await self.says(row["event"], row["text"])

    async def answers(self) -> bool:
        """Answer the latest question, naming its message; whether that was still to be done."""
        questions = [row for row in visible(self._ledger, self._conversation) if row["text"].endswith("?")]
        if not questions:
            return False
        latest = questions[-1]
        answer = f"{latest['text']} {latest['key']}"
        new = await self.says(f"answer to {latest['key']}", answer)
        if self._insists:
            await self.says(f"again to {latest['key']}", answer)
        return new


async def settle_doubts(handle: ConversationHandle, ledger: Ledger) -> list[str]:
    """The operator: what may be out is looked for on the platform, and sent by hand where it is not; the keys of those sends."""
    state = await handle.read()
    doubts = [send for send in state.sends if send.state is SendState.AMBIGUOUS]
    settled: list[str] = []
    for send in doubts:
        key = send_key(state.conversation_id, state.seed, send.key)
        ledger.write("doubt", key=key)
        if not ledger.rows("send", conversation=state.conversation_id, key=key):
            text = kept_content(send.content).text
            ledger.write(
                "send", conversation=state.conversation_id, key=key, text=text, keyed=False, life=-1, by="operator"
            )
        await handle.ask(c.ResolveSend(send.key, True, "operator", "as the platform shows", f"id-{key}"))
        settled.append(key)
    return settled
