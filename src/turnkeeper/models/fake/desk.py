"""What a fake provider knows: its script, who asked for what, what it billed, and what it keeps."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from turnkeeper.models.fake.script import Fault, Script, ScriptedRound

MARK: Final = "turnkeeper_invocation_id"
CREATED: Final = 1_700_000_000
"""When everything was made: a script has no clock."""


class Rejected(Exception):
    """A request that no provider would accept.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Billed(msgspec.Struct, frozen=True):
    """An answer that was made, and is to be paid.

    Attributes:
        api: `chat`, `responses` or `messages`.
        round: the place of the answer in its conversation, from 0.
        invocation: the client's own id of the call, or None.
        answer: the provider's id of the answer.
    """

    api: str
    round: int
    invocation: str | None
    answer: str


class Asked(msgspec.Struct, frozen=True):
    """A request for an answer, as it came; of its headers, none that holds a key."""

    api: str
    round: int
    invocation: str | None
    body: dict[str, Any]


@dataclass
class Work:
    """An answer that is being made.

    Attributes:
        number: counts the answers of this provider.
        round_index: the place of the answer in its conversation.
        round: what it says.
        body: the request.
    """

    number: int
    round_index: int
    round: ScriptedRound
    body: dict[str, Any]

    def call_id(self, prefix: str, index: int) -> str:
        """The id of a call."""
        given = self.round.calls[index].id
        return f"{prefix}_{self.number}_{index}" if given is None else given


@dataclass
class Kept:
    """A stored answer: given out once it is ready."""

    work: Work
    invocation: str | None
    polls: int = 0
    cancelled: bool = False


@dataclass
class Desk:
    """The provider's own side: everything that its APIs share."""

    script: Script
    bill: list[Billed] = field(default_factory=lambda: list[Billed]())
    asked: list[Asked] = field(default_factory=lambda: list[Asked]())
    kept: dict[str, Kept] = field(default_factory=lambda: dict[str, Kept]())

    def __post_init__(self) -> None:
        self._faults = [deque(round_.faults) for round_ in self.script.rounds]
        self._look_up_faults = [deque(round_.look_up_faults) for round_ in self.script.rounds]
        self._numbers: defaultdict[str, int] = defaultdict(int)

    def ask(self, api: str, round_index: int, body: dict[str, Any], headers: Mapping[str, str]) -> Fault:
        """Note a request; the fault that it meets.

        Raises:
            Rejected: the script has no such round.
        """
        self.asked.append(Asked(api, round_index, invocation_of(body, headers), body))
        if round_index >= len(self.script.rounds):
            raise Rejected(f"the script ends before round {round_index}")
        faults = self._faults[round_index]
        return faults.popleft() if faults else Fault()

    def look_up_fault(self, round_index: int) -> Fault:
        """The fault that a look-up of a stored answer meets."""
        faults = self._look_up_faults[round_index]
        return faults.popleft() if faults else Fault()

    def work(self, api: str, round_index: int, body: dict[str, Any]) -> Work:
        """Make an answer."""
        self._numbers[api] += 1
        return Work(self._numbers[api], round_index, self.script.rounds[round_index], body)

    def charge(self, api: str, work: Work, answer: str, invocation: str | None) -> None:
        """Put an answer on the bill."""
        self.bill.append(Billed(api, work.round_index, invocation, answer))

    def bought(self) -> Counter[int]:
        """How often each round's answer was bought."""
        return Counter(one.round for one in self.bill)


def invocation_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The client's own id of a call."""
    metadata: Mapping[str, Any] = body.get("metadata") or {}
    marked: Any = metadata.get(MARK)
    return marked if isinstance(marked, str) else headers.get("x-client-request-id")


def sign(text: str) -> str:
    """What only the provider can make and check: stands for a signature, and for content that it has encrypted."""
    return hashlib.blake2b(text.encode(), key=b"fake provider", digest_size=16).hexdigest()


def pieces(text: str | None, count: int = 3) -> list[str]:
    """A text as it is streamed."""
    text = text or ""
    size = max(-(-len(text) // count), 1)
    return [text[at : at + size] for at in range(0, len(text), size)]


def check_results(expected: list[str], answered: list[str]) -> None:
    """Check that the calls of an answer have their results, as every provider does.

    Raises:
        Rejected: one is missing, or too many.
    """
    if sorted(expected) != sorted(answered):
        raise Rejected(f"the calls {expected} are answered by results of {answered}")
