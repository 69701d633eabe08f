"""A whole turn through `TurnCheckpointSession`, mutation by mutation, and the worker that brings any turn of it to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from turnkeeper.log import frames
from turnkeeper.log.store import Store
from turnkeeper.turn.evolve import TurnRules
from turnkeeper.turn.records import AnyRecord
from turnkeeper.turn_checkpoint import (
    ToolCallAction,
    ToolCallDecision,
    ToolCallState,
    TurnCheckpointSession,
    TurnSnapshot,
)

TRACE: Final = "trace-1"
OWNER: Final = "worker-1"
MESSAGES: Final = [{"role": "user", "content": "order two things"}]
RUNTIME: Final = {"inbound": {"id": "m-1"}, "n": [1]}
ARGUMENTS: Final = ('{"what": "tea"}', '{"what": "cups"}')
DECISION: Final = {
    "content": None,
    "tool_calls": [
        {"id": f"call-{slot}", "function": {"name": "order", "arguments": arguments}}
        for slot, arguments in enumerate(ARGUMENTS)
    ],
}
FINAL: Final = "Both are ordered."
REPLY_KEY: Final = "reply-1"
MESSAGE_ID: Final = "message-9"
Tool = tuple[int, int]

STEPS: Final = (
    "start",
    "reserve_assistant",
    "claim 0",
    "begin 0",
    "renew 0",
    "complete 0",
    "claim and begin 1",
    "abandon 1",
    "claim and begin 1 again",
    "complete 1",
    "commit_round",
    "save_final_model",
    "reserve_final_delivery",
    "mark_delivered",
    "mark_completed",
)
"""Every mutation of a turn that goes well, in order."""


def result(slot: int, padding: str = "") -> dict[str, Any]:
    """What the tool of a slot gives back."""
    return {"ok": True, "ordered": [ARGUMENTS[slot]], "receipt": padding}


class Script:
    """One worker on one turn. What it knows of its fences outlives a session, as it would a cancelled call."""

    def __init__(self, store: Store, ledger: Counter[str], *, trace: str = TRACE, padding: str = "") -> None:
        self.ledger = ledger
        self.padding = padding
        self.trace = trace
        self.fences: dict[int, int] = {0: 1, 1: 1}
        self.session = TurnCheckpointSession(store, trace)

    def on(self, store: Store) -> Script:
        """The same worker with a new session on `store`, as behind a lost connection."""
        other = Script(store, self.ledger, trace=self.trace, padding=self.padding)
        other.fences = self.fences
        return other

    async def steps(self, names: Sequence[str]) -> list[Any]:
        """Take several steps, and give their answers."""
        return [await self.step(name) for name in names]

    async def step(self, name: str) -> Any:
        """Take one step of `STEPS`."""
        session = self.session
        operation, _, where = name.partition(" ")
        slot = 1 if "1" in where else 0
        match operation:
            case "start":
                return await session.start(MESSAGES, ["order"], RUNTIME)
            case "reserve_assistant":
                return await session.reserve_assistant(0, DECISION)
            case "claim":
                return await self._claim(slot, begin="begin" in where)
            case "begin":
                return self._begun(slot, await session.begin_tool(0, slot, OWNER, self.fences[slot]))
            case "renew":
                return await session.renew_tool(0, slot, OWNER, self.fences[slot])
            case "abandon":
                return await session.abandon_tool(0, slot, OWNER, self.fences[slot])
            case "complete":
                return await session.complete_tool(0, slot, OWNER, self.fences[slot], result(slot, self.padding))
            case "commit_round":
                return await session.commit_round(0, self.transcript(), {**RUNTIME, "n": [1, 2]})
            case "save_final_model":
                return await session.save_final_model(FINAL + self.padding)
            case "reserve_final_delivery":
                return await session.reserve_final_delivery(REPLY_KEY, FINAL, {"buttons": [self.padding]})
            case "mark_delivered":
                return await session.mark_delivered(REPLY_KEY, MESSAGE_ID)
            case "mark_completed":
                return await session.mark_completed()
            case _:
                raise AssertionError(name)

    def transcript(self) -> list[Any]:
        """The messages behind the round."""
        answers = [
            {"role": "tool", "tool_call_id": f"call-{slot}", "content": result(slot, self.padding)} for slot in (0, 1)
        ]
        return [*MESSAGES, {"role": "assistant", **DECISION}, *answers]

    async def _claim(self, slot: int, *, begin: bool) -> ToolCallDecision:
        session = self.session
        decision = await session.claim_tool(
            0,
            slot,
            f"call-{slot}",
            "order",
            ARGUMENTS[slot],
            session.logical_operation_id(0, slot),
            owner_token=OWNER,
            begin=begin,
        )
        self.fences[slot] = decision.fence
        # The fused claim of the script is abandoned before its effect, and claimed again: that one has the effect.
        return decision if slot == 1 and decision.fence == 1 else self._begun(slot, decision)

    def _begun(self, slot: int, decision: ToolCallDecision) -> ToolCallDecision:
        """The effect, if it is authorised."""
        if decision.should_begin:
            self.ledger[self.session.logical_operation_id(0, slot)] += 1
        return decision

    async def finish(self) -> TurnSnapshot:
        """Bring the turn to its end from wherever it stands, as its live owner would who was cancelled or refused."""
        session = self.session
        snapshot = await session.load()
        if snapshot is not None and snapshot.completed:
            return snapshot
        await self.steps(STEPS[:2])
        for slot in (0, 1):
            await self._finish_slot(slot)
        return (await self.steps(STEPS[STEPS.index("commit_round") :]))[-1]

    async def _finish_slot(self, slot: int) -> None:
        session = self.session
        done = self.ledger[session.logical_operation_id(0, slot)] > 0
        decision = await self._claim(slot, begin=False)
        if decision.action is ToolCallAction.CACHED:
            return
        if decision.action is ToolCallAction.ALREADY_EXECUTING and not done:
            # The answer to `begin` was lost, so the effect was never started: its owner knows, and says so.
            abandoned = await self.step(f"abandon {slot}")
            assert abandoned.state is ToolCallState.CLAIMED  # also if a cancelled call of the same kind was in before
            decision = await self._claim(slot, begin=False)
            assert decision.action is ToolCallAction.RECLAIMED
        if not done:
            assert (await self._begin_with_effect(slot)).should_begin
        await self.step(f"complete {slot}")

    async def _begin_with_effect(self, slot: int) -> ToolCallDecision:
        return self._begun(slot, await self.session.begin_tool(0, slot, OWNER, self.fences[slot]))


async def turn_without_tools(store: Store, trace: str) -> None:
    """A whole turn, the shortest that has a reply."""
    session = TurnCheckpointSession(store, trace)
    await session.start(MESSAGES)
    await session.save_final_model(FINAL)
    await session.reserve_final_delivery(REPLY_KEY, FINAL)
    await session.mark_delivered(REPLY_KEY, MESSAGE_ID)
    assert (await session.mark_completed()).completed


def plain(answer: Any) -> Any:
    """An answer in a form that compares: everything but when its lease ends and which revision it is."""
    if isinstance(answer, TurnSnapshot):
        names = ("phase", "messages", "tool_names", "runtime", "final_model", "final_text", "final_delivery")
        more = ("reply_message_key", "sent_message_id", "completed", "current_round", "assistant_responses")
        return {name: getattr(answer, name) for name in names + more}
    if isinstance(answer, ToolCallDecision):
        return {
            name: getattr(answer, name)
            for name in (
                "state",
                "round_index",
                "slot_index",
                "tool_name",
                "raw_arguments",
                "owner_token",
                "fence",
                "result",
            )
        }
    return answer


async def records(store: Store, key: str) -> list[AnyRecord]:
    """The records of a turn's log, without the ids of their appends."""
    decoder: msgspec.msgpack.Decoder[tuple[bytes, AnyRecord]] = TurnRules(1).decoder()
    return [decoder.decode(frames.decode(record.body))[1] for record in (await store.read(key)).records]
