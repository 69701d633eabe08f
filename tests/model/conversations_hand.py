"""A conversation's log by hand: commands one by one, on a clock that stands still until it is moved."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.decide import LOST, Claimed, Receipt, decide_all
from turnkeeper.conversation.evolve import evolve
from turnkeeper.conversation.outbox import SendAnswer
from turnkeeper.conversation.records import AnyRecord
from turnkeeper.conversation.state import ConversationState, Row, SendKey

LEASE: Final = 1000
START: Final = c.Start("order", 1, "first", b"")


class Hand:
    """One log, its clock, and what was written to it."""

    def __init__(self) -> None:
        self.state = ConversationState()
        self.now = 1_000_000
        self.records: list[AnyRecord] = []

    def ask(self, *commands: c.Command) -> list[Any]:
        """Put commands, at the true time."""
        decision = decide_all(self.state, commands, self.now)
        assert decision.guard is None or decision.guard.holds(self.now)
        for record in decision.records:
            self.state = evolve(self.state, record, self.now)
        self.records = list(decision.records)
        return decision.answer

    def receive(self, number: int, kind: str = "text") -> Receipt:
        """The message of that number comes (again)."""
        event = number.to_bytes(12, "big")
        (receipt,) = self.ask(c.Receive("c", b"seed", event, kind, b"message %d" % number))
        return receipt

    def claim(
        self,
        about: int,
        intent: c.Intent = "answer",
        *,
        owner: str = "a",
        start: c.Start | None = START,
        live: int | None = None,
        most: int = 5,
        on_poison: Any = "hold",
    ) -> Claimed:
        """Claim the first message."""
        (claimed,) = self.ask(c.Claim(owner, LEASE, about, intent, start, live, most, on_poison))
        return claimed

    @property
    def row(self) -> Row:
        """The row, which there is."""
        assert self.state.row is not None
        return self.state.row

    @property
    def mine(self) -> tuple[str, int]:
        """Who owns it, and the fence."""
        return self.state.owner, self.state.fence

    def begin(self, record: int, sequence: int, text: str = "hello", **more: Any) -> SendAnswer:
        """Begin a send."""
        (answer,) = self.ask(
            c.BeginSend(*self.mine, SendKey(record, sequence), text.encode(), fingerprint=text, **more)
        )
        return answer

    def settle_send(self, record: int, sequence: int, outcome: Any = "sent", **more: Any) -> SendAnswer:
        """Say what became of it."""
        (answer,) = self.ask(c.SettleSend(*self.mine, SendKey(record, sequence), outcome, "id", **more))
        return answer

    def send(self, record: int, sequence: int, text: str = "hello", **more: Any) -> None:
        """Send, and say so."""
        assert self.begin(record, sequence, text, **more).what == "begun"
        self.settle_send(record, sequence)

    def park(self, number: int, **changes: Any) -> None:
        """The step parks at a wait, and message `number` is handled."""
        parked = replace(self.row, **{"parked": True, "inbound": number, **changes})
        assert self.ask(c.SetRow(*self.mine, parked), c.Settle(*self.mine, number, "parked"))[0] is not LOST

    def parked(self, *, first_wait: bool = False, **changes: Any) -> None:
        """Message 1 comes, begins a flow, and its first step asks under the key (1, 0)."""
        self.receive(1)
        self.claim(1, "start", start=replace(START, first_wait=first_wait))
        self.send(1, 0, watermark=True)
        self.park(1, **changes)


__all__ = ["LEASE", "LOST", "START", "Hand"]
