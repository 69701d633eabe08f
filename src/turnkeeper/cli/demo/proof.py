"""The demo's proof: what was wanted, what the ledger saw, and what the logs say; nothing else is believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from turnkeeper.cli.demo.conversations import Turn
from turnkeeper.cli.demo.ledger import Ledger
from turnkeeper.cli.demo.supervisor import Progress
from turnkeeper.engine.stored import stored_messages
from turnkeeper.engine.wire import chat_form
from turnkeeper.keeper import Keeper
from turnkeeper.turn import records as r
from turnkeeper.turn.identity import operation_id, trace_hash


class Verdict(msgspec.Struct, kw_only=True):
    """What came out. `duplicates` and `lost` count effects and replies; both must be 0, and so must the other faults."""

    turns: int = 0
    turns_unfinished: int = 0
    transcripts_wrong: int = 0
    model_calls: int = 0
    model_decisions: int = 0
    decisions_made_twice: int = 0
    effects: int = 0
    effects_done: int = 0
    effects_done_twice: int = 0
    effects_lost: int = 0
    effects_unwanted: int = 0
    replies: int = 0
    replies_sent: int = 0
    replies_sent_twice: int = 0
    replies_lost: int = 0
    duplicates: int = 0
    lost: int = 0
    kills: int = 0
    kills_in_a_turn: int = 0
    kills_at: dict[str, int] = {}
    workers_started: int = 0
    ambiguous: int = 0
    ambiguous_settled: dict[str, int] = {}
    records: int = 0
    bytes_stored: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether everything happened exactly once."""
        faults = (
            self.duplicates,
            self.lost,
            self.turns_unfinished,
            self.transcripts_wrong,
            self.decisions_made_twice,
            self.ambiguous - sum(self.ambiguous_settled.values()),
        )
        return not any(faults)


async def prove(
    keeper: Keeper, ledger: Ledger, wanted: Iterable[Turn], prefix: str, progress: Progress, seconds: float
) -> Verdict:
    """Compare what the recorded conversations want with the ledger and the logs."""
    verdict = Verdict(
        kills=progress.kills,
        kills_in_a_turn=progress.kills_in_a_turn,
        kills_at=dict(sorted(progress.kills_at.items())),
        workers_started=progress.workers_started,
        seconds=round(seconds, 2),
        model_calls=ledger.model_calls(),
    )
    done = Counter(effect.operation_id for effect in ledger.effects())
    sent = Counter(ledger.replies())
    settled: Counter[str] = Counter()
    for turn in wanted:
        turn_id = f"{prefix}{turn.id}"
        await _check_log(keeper, turn, turn_id, verdict, settled)
        for call in turn.calls:
            if not call.is_effect:
                continue
            operation = operation_id(trace_hash(turn_id), "primary", call.round_index, call.slot_index)
            times = done.pop(operation, 0)
            verdict.effects += 1
            verdict.effects_done += times > 0
            verdict.effects_lost += times == 0
            verdict.effects_done_twice += times > 1
        if turn.answer is not None:
            times = sent.pop((turn_id, turn.answer), 0)
            verdict.replies += 1
            verdict.replies_sent += times > 0
            verdict.replies_lost += times == 0
            verdict.replies_sent_twice += times > 1
    verdict.effects_unwanted = sum(done.values())
    verdict.duplicates = (
        verdict.effects_done_twice + verdict.effects_unwanted + verdict.replies_sent_twice + sum(sent.values())
    )
    verdict.lost = verdict.effects_lost + verdict.replies_lost
    verdict.ambiguous_settled = dict(sorted(settled.items()))
    return verdict


async def _check_log(keeper: Keeper, turn: Turn, turn_id: str, verdict: Verdict, settled: Counter[str]) -> None:
    verdict.turns += 1
    history = await keeper.history(turn_id)
    if history is None or not history.state.completed:
        verdict.turns_unfinished += 1
        return
    decided: Counter[int] = Counter()
    for entry in history.entries:
        verdict.bytes_stored += entry.size
        if isinstance(entry.record, r.AssistantReserved):
            decided[entry.record.round_index] += 1
        elif isinstance(entry.record, r.ToolAmbiguous):
            verdict.ambiguous += 1
        elif isinstance(entry.record, r.ToolResolved):
            who = "operator" if entry.record.who == "demo operator" else "look-up"
            settled[f"{entry.record.resolution.value} ({who})"] += 1
    verdict.records += len(history.entries)
    verdict.model_decisions += len(decided)
    verdict.decisions_made_twice += sum(times > 1 for times in decided.values())
    transcript: list[Any] = [chat_form(message) for message in stored_messages(history.state)]
    verdict.transcripts_wrong += transcript != turn.conversation.messages[: turn.end]
