"""The demo's conversations: read from JSON lines in chat form, and cut into turns."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from turnkeeper.errors import InvalidInput

EFFECT_TOOLS = {
    "book_reservation": "reconcile",
    "update_reservation_baggages": "reconcile",
    "send_certificate": "reconcile",
    "update_reservation_flights": "fail_closed",
    "update_reservation_passengers": "fail_closed",
    "cancel_reservation": "fail_closed",
}
"""The tools that change something, with the policy that the demo gives them. All others only read."""


class Conversation(msgspec.Struct, frozen=True):
    """A recorded conversation in chat form."""

    id: str
    messages: list[dict[str, Any]]


class Call(NamedTuple):
    """A recorded tool call: its place, its tool, and whether that changes something."""

    round_index: int
    slot_index: int
    tool: str
    is_effect: bool


class Turn(NamedTuple):
    """One user message up to the assistant's text answer to it, or up to the end where there is none.

    Attributes:
        id: conversation and number, unique in the file.
        start: how many messages of the conversation are the turn's input.
        decisions: the recorded assistant messages, by round; the last one has no calls, unless the turn has no answer.
        results: the recorded results by (round, slot).
        end: how many messages the transcript has when the turn is done.
    """

    id: str
    conversation: Conversation
    start: int
    decisions: list[dict[str, Any]]
    results: dict[tuple[int, int], str]
    end: int

    @property
    def answer(self) -> str | None:
        """The recorded answer, or None for a tail without one."""
        if not self.decisions or self.decisions[-1].get("tool_calls"):
            return None
        return self.decisions[-1]["content"]

    @property
    def calls(self) -> list[Call]:
        """The tool calls, in order."""
        return [
            Call(round_index, slot_index, call["function"]["name"], call["function"]["name"] in EFFECT_TOOLS)
            for round_index, decision in enumerate(self.decisions)
            for slot_index, call in enumerate(decision.get("tool_calls") or [])
        ]


def load(path: Path | None) -> list[Conversation]:
    """Read conversations, one JSON object a line: `{"id": …, "messages": [chat messages]}`. None: the demo's own.

    Raises:
        InvalidInput: the file cannot be read, or a line has another form; names the line.
    """
    try:
        text = (files("turnkeeper.cli.demo") / "conversations.jsonl" if path is None else path).read_text(
            encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"conversations file {path}", str(e)) from e
    conversations: list[Conversation] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                conversation = msgspec.json.decode(line, type=Conversation)
                turns(conversation)
            except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as e:
                raise InvalidInput(f"line {number} of {path}", f"is no conversation in chat form ({e})") from e
            conversations.append(conversation)
    if len({conversation.id for conversation in conversations}) != len(conversations):
        raise InvalidInput(f"conversations file {path}", "two conversations have the same id")
    if not conversations:
        raise InvalidInput(f"conversations file {path}", "holds no conversation")
    return conversations


def turns(conversation: Conversation) -> list[Turn]:
    """The turns of a conversation, in order."""
    found: list[Turn] = []
    messages = conversation.messages
    starts = [index + 1 for index, message in enumerate(messages) if message["role"] == "user"]
    for number, start in enumerate(starts):
        decisions: list[dict[str, Any]] = []
        results: dict[tuple[int, int], str] = {}
        end = start
        slot = 0
        while end < len(messages) and messages[end]["role"] in ("assistant", "tool"):
            message = messages[end]
            end += 1
            if message["role"] == "tool":
                results[len(decisions) - 1, slot] = message["content"]
                slot += 1
                continue
            decisions.append(message)
            slot = 0
            if not message.get("tool_calls"):
                break
        found.append(Turn(f"{conversation.id}/{number}", conversation, start, decisions, results, end))
    return found
