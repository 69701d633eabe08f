"""A second turn journal, as simple as can be, written from the tables of journal.md (T2, T3) alone.

It keeps plain values in plain lists, knows no records and no store, and is told the time. The stateful test compares the real
sessions with it, answer by answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

CLAIM_LEASE: Final = 400_000
EXECUTION_LEASE: Final = 1_100_000

Error = Literal["error", "conflict"]


class Call(NamedTuple):
    """A tool call of a decision, as the provider made it."""

    provider_call_id: str
    tool_name: str
    arguments: dict[str, Any]


@dataclass
class Slot:
    """A tool slot that was claimed."""

    state: str
    owner: str
    fence: int
    lease_end: int
    replay_safe: bool
    result: dict[str, Any] | None = None
    evidence: dict[str, Any] | None = None
    resolution: str | None = None

    @property
    def open_question(self) -> bool:
        """Nobody has decided what the model is told."""
        return self.state == "AMBIGUOUS" and self.resolution is None


@dataclass
class Round:
    """A decision and its slots."""

    response: dict[str, Any]
    calls: list[Call]
    slots: list[Slot | None]


class Answer(NamedTuple):
    """What a slot command is answered."""

    action: str
    slot: Slot | None = None


@dataclass
class Journal:
    """One turn."""

    proof_deadline: int
    report_ambiguous: bool
    now: int = 0
    phase: str | None = None
    revision: int = 0
    inbound: Any = None
    messages: list[Any] = field(default_factory=list[Any])
    tool_names: list[str] = field(default_factory=list[str])
    runtime: dict[str, Any] = field(default_factory=dict[str, Any])
    rounds: list[Round] = field(default_factory=list[Round])
    committed: int = 0
    final: str | None = None
    reply: tuple[str, str, dict[str, Any] | None] | None = None
    sent: str | None = None
    disputed: list[str] = field(default_factory=list[str])

    # --- T2 ----------------------------------------------------------------------------------------------------

    @property
    def current_round(self) -> int:
        """The highest reserved round."""
        return len(self.rounds) - 1

    def start(self, messages: list[Any], tools: list[str], runtime: dict[str, Any]) -> Error | None:
        """T2 `start`, T1.7."""
        if self.phase is None:
            if self.proof_deadline and self.now > self.proof_deadline:
                return "error"
            self.messages, self.tool_names, self.runtime = messages, tools, runtime
            self.inbound = runtime["inbound"]
            return self._to("STARTED")
        return None if runtime["inbound"] == self.inbound else "conflict"

    def reserve_assistant(self, index: int, response: dict[str, Any], calls: list[Call]) -> Error | None:
        """T2 `reserve_assistant`."""
        if self.phase is None:
            return "error"
        if 0 <= index < len(self.rounds):
            return None
        if self.phase not in ("STARTED", "ROUND_COMMITTED") or index != self.current_round + 1:
            return "error"
        self.rounds.append(Round(response, calls, [None] * len(calls)))
        return self._to("ASSISTANT_RESERVED")

    def commit_round(self, index: int, messages: list[Any], runtime: dict[str, Any]) -> Error | None:
        """T2 `commit_round`, ambiguity 7."""
        if 0 <= index < self.committed and self.phase != "COMPLETED":
            return None
        if self.phase != "ASSISTANT_RESERVED" or index != self.current_round:
            return "error"
        for slot in self.rounds[index].slots:
            if slot is None or slot.state not in ("COMPLETED", "AMBIGUOUS"):
                return "error"
            if slot.open_question and not self.report_ambiguous:
                return "error"
        self.messages, self.runtime, self.committed = messages, runtime, self.committed + 1
        return self._to("ROUND_COMMITTED")

    def save_final_model(self, content: str) -> Error | None:
        """T2 `save_final_model`."""
        if self.final is not None:
            return None
        undecided = self.phase == "ASSISTANT_RESERVED" and self.rounds[-1].calls
        if self.phase not in ("STARTED", "ASSISTANT_RESERVED", "ROUND_COMMITTED") or undecided:
            return "error"
        self.final = content
        return self._to("FINAL_MODEL_SAVED")

    def reserve_final_delivery(self, key: str, text: str, delivery: dict[str, Any] | None) -> Error | None:
        """T2 `reserve_final_delivery`."""
        if self.reply is not None:
            return None if self.reply[0] == key else "conflict"
        if self.phase != "FINAL_MODEL_SAVED":
            return "error"
        self.reply = (key, text, delivery)
        return self._to("DELIVERY_RESERVED")

    def mark_delivered(self, key: str, message_id: str) -> Error | None:
        """T2 `mark_delivered`."""
        if self.reply is None:
            return "error"
        if self.reply[0] != key:
            return "conflict"
        if self.phase == "DELIVERY_RESERVED":
            self.sent = message_id
            return self._to("DELIVERED")
        if message_id == self.sent:
            return None
        if message_id not in self.disputed:
            self.disputed.append(message_id)
            self.revision += 1
        return "conflict"

    def mark_completed(self, *, allow_no_output: bool) -> Error | None:
        """T2 `mark_completed`."""
        if self.phase == "COMPLETED":
            return None
        if self.phase != "DELIVERED":
            before = ("STARTED", "ASSISTANT_RESERVED", "ROUND_COMMITTED", "FINAL_MODEL_SAVED")
            if not allow_no_output or self.phase not in before:
                return "error"
            if self.phase == "ASSISTANT_RESERVED" and not all(
                slot is not None and slot.state in ("COMPLETED", "AMBIGUOUS") for slot in self.rounds[-1].slots
            ):
                return "error"
        return self._to("COMPLETED")

    def _to(self, phase: str) -> None:
        self.phase = phase
        self.revision += 1

    # --- T3 ----------------------------------------------------------------------------------------------------

    def slot(self, index: int, slot: int) -> Slot | None:
        """The slot, if it was ever claimed."""
        if not 0 <= index < len(self.rounds) or not 0 <= slot < len(self.rounds[index].slots):
            return None
        return self.rounds[index].slots[slot]

    def in_doubt(self, index: int, call: Call) -> bool:
        """Whether an earlier round has the same call, ambiguous: the trap of T3."""
        return any(
            slot is not None and slot.state == "AMBIGUOUS" and other[1:] == call[1:]
            for round_ in self.rounds[:index]
            for other, slot in zip(round_.calls, round_.slots, strict=True)
        )

    def claim_tool(
        self,
        index: int,
        slot: int,
        call: Call,
        owner: str,
        *,
        derived: bool,
        replay_safe: bool,
        begin: bool,
        repeat_ambiguous: bool,
    ) -> Answer:
        """T3 `claim_tool`, in its order. `derived`: the operation id is the right one."""
        if self.phase is None:
            return Answer("MISSING")
        there = self.slot(index, slot)
        done = there is not None and there.state == "COMPLETED"
        if (self.phase != "ASSISTANT_RESERVED" or index != self.current_round) and not done:
            return Answer("INVALID_STATE", there)
        calls = self.rounds[index].calls if 0 <= index < len(self.rounds) else []
        if not 0 <= slot < len(calls) or not derived or calls[slot] != call:
            return Answer("CONFLICT", there)
        if there is None:
            if not repeat_ambiguous and self.in_doubt(index, call):
                return Answer("AMBIGUOUS")
            return self._own("ACQUIRED", index, slot, owner, 1, replay_safe, begin=begin)
        return self._claim_again(there, index, slot, owner, there.replay_safe and replay_safe, begin=begin)

    def _claim_again(self, there: Slot, index: int, slot: int, owner: str, replay_safe: bool, *, begin: bool) -> Answer:
        live, mine = self.now < there.lease_end, owner == there.owner
        if there.state == "COMPLETED":
            return Answer("CACHED", there)
        if there.state == "AMBIGUOUS":
            return Answer("AMBIGUOUS", there)
        if live and not mine:
            return Answer("BUSY", there)
        if live and there.state == "EXECUTING":
            return Answer("ALREADY_EXECUTING", there)
        if live:
            return self._own("ACQUIRED", index, slot, owner, there.fence, replay_safe, begin=begin)
        if there.state == "EXECUTING" and not replay_safe:
            there.state = "AMBIGUOUS"
            self.revision += 1
            return Answer("AMBIGUOUS", there)
        return self._own("RECLAIMED", index, slot, owner, there.fence + 1, replay_safe, begin=begin)

    def _own(
        self, action: str, index: int, slot: int, owner: str, fence: int, replay_safe: bool, *, begin: bool
    ) -> Answer:
        if begin and self._proof_is_over():
            return Answer("LEASE_EXPIRED", self.slot(index, slot))
        lease = EXECUTION_LEASE if begin else CLAIM_LEASE
        owned = Slot("EXECUTING" if begin else "CLAIMED", owner, fence, self.now + lease, replay_safe)
        self.rounds[index].slots[slot] = owned
        self.revision += 1
        return Answer("BEGUN" if begin else action, owned)

    def _proof_is_over(self) -> bool:
        return bool(self.proof_deadline) and self.now > self.proof_deadline

    def begin_tool(self, index: int, slot: int, owner: str, fence: int) -> Answer:
        """T3 `begin_tool`."""
        there = self.slot(index, slot)
        refusal = self._refusal(there, owner, fence)
        if refusal or there is None:
            return Answer(refusal or "MISSING", there)
        if there.state == "EXECUTING":
            return Answer("ALREADY_EXECUTING", there)
        if self.now >= there.lease_end or self._proof_is_over():
            return Answer("LEASE_EXPIRED", there)
        there.state, there.lease_end = "EXECUTING", self.now + EXECUTION_LEASE
        self.revision += 1
        return Answer("BEGUN", there)

    def renew_tool(self, index: int, slot: int, owner: str, fence: int) -> Answer:
        """T3 `renew_tool`."""
        there = self.slot(index, slot)
        refusal = self._refusal(there, owner, fence, executing=True)
        if refusal or there is None:
            return Answer(refusal or "MISSING", there)
        there.lease_end = self.now + EXECUTION_LEASE
        self.revision += 1
        return Answer("RENEWED", there)

    def abandon_tool(self, index: int, slot: int, owner: str, fence: int) -> Answer:
        """T3 `abandon_tool`."""
        there = self.slot(index, slot)
        refusal = self._refusal(there, owner, fence, executing=True)
        if refusal or there is None:
            return Answer(refusal or "MISSING", there)
        there.state, there.lease_end = "CLAIMED", self.now
        self.revision += 1
        return Answer("ABANDONED", there)

    def _refusal(self, there: Slot | None, owner: str, fence: int, *, executing: bool = False) -> str | None:
        if self.phase is None or there is None:
            return "MISSING"
        if there.state == "COMPLETED":
            return "CACHED"
        if there.state == "AMBIGUOUS":
            return "AMBIGUOUS"
        if (there.owner, there.fence) != (owner, fence):
            return "STALE_OWNER"
        if executing and there.state != "EXECUTING":
            return "INVALID_STATE"
        return "LEASE_EXPIRED" if executing and self.now >= there.lease_end else None

    def complete_tool(self, index: int, slot: int, owner: str, fence: int, result: dict[str, Any]) -> Answer:
        """T3 `complete_tool`; late ones are taken while nobody has changed the slot."""
        there = self.slot(index, slot)
        if there is None:
            return Answer("MISSING")
        if there.state == "COMPLETED":
            return Answer("CACHED" if there.result == result else "CONFLICT", there)
        if (there.owner, there.fence) != (owner, fence):
            return Answer("STALE_OWNER", there)
        if there.state == "CLAIMED":
            return Answer("INVALID_STATE", there)
        if there.state == "AMBIGUOUS":
            if there.evidence != result:
                there.evidence = result
                self.revision += 1
            return Answer("AMBIGUOUS", there)
        there.state, there.result = "COMPLETED", result
        self.revision += 1
        return Answer("COMPLETED", there)

    def release(self, owner: str) -> Error | None:
        """A lease that somebody takes from its owner ends now, and nothing else changes."""
        if self.phase is None:
            return "error"
        slots = self.rounds[self.current_round].slots if self.phase == "ASSISTANT_RESERVED" else []
        held = [
            there
            for there in slots
            if there and there.owner == owner and there.state in ("CLAIMED", "EXECUTING") and self.now < there.lease_end
        ]
        if not held:
            return "conflict"
        for there in held:
            there.lease_end = self.now
        self.revision += 1
        return None

    def resolve_tool(self, index: int, slot: int, resolution: str, result: dict[str, Any] | None) -> Answer | Error:
        """T3, the audited way out of AMBIGUOUS."""
        there = self.slot(index, slot)
        if self.phase is None:
            return Answer("MISSING")
        if there is None:
            return "error"
        if there.state != "AMBIGUOUS":
            again = there.resolution == resolution == "happened" and there.result == result
            return Answer("CACHED", there) if again else "conflict"
        if resolution == "did_not_happen":
            if self.phase != "ASSISTANT_RESERVED" or index != self.current_round:
                return "error"
            there.state, there.lease_end, there.resolution = "CLAIMED", self.now, None
            self.revision += 1
            return Answer("ABANDONED", there)
        if there.resolution == resolution and there.result == result:
            return Answer("AMBIGUOUS", there)
        there.resolution, there.result = resolution, result
        there.state = "COMPLETED" if resolution == "happened" else "AMBIGUOUS"
        self.revision += 1
        return Answer("COMPLETED" if resolution == "happened" else "AMBIGUOUS", there)
