"""`resolve`, `resolve-reply`, `resolve-model` and `approve`: what a person has to say, with evidence."""

from __future__ import annotations

from pathlib import Path

import anyio
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.durations import seconds_of
from turnkeeper.cli.opening import open_keeper
from turnkeeper.engine import documents
from turnkeeper.engine.wire import ModelInvocationResponse
from turnkeeper.errors import InvalidInput


async def settle_call(
    url: str,
    turn_id: str,
    scope: str,
    round_index: int,
    slot_index: int,
    outcome: str,
    *,
    who: str,
    why: str,
    fence: int | None,
    result: str | None,
) -> int:
    """Settle a tool call that may have happened."""
    if outcome == "happened" and result is None:
        raise InvalidInput("--result", "is needed with `happened`: it is what the model is told")
    if outcome == "did_not_happen" and fence is None:
        raise InvalidInput("--fence", "is needed with `did_not_happen`: `turnkeeper show` prints it")
    async with await open_keeper(url) as keeper:
        await keeper.resolve_tool(
            turn_id, round_index, slot_index, outcome, who=who, why=why, fence=fence, result=result, scope=scope
        )
    _say(outcome, turn_id)
    return 0


async def settle_reply(
    url: str, turn_id: str, scope: str, message_id: str | None, not_sent_by: str | None, *, who: str, why: str
) -> int:
    """Settle a reply that may have been sent."""
    if (message_id is None) == (not_sent_by is None):
        raise InvalidInput("--message-id", "or --not-sent-by is needed, and not both: was the reply sent or not?")
    async with await open_keeper(url) as keeper:
        await keeper.resolve_delivery(turn_id, message_id, who=who, why=why, sender=not_sent_by, scope=scope)
    _say("not sent" if message_id is None else f"sent as {message_id}", turn_id)
    return 0


async def settle_model(
    url: str, turn_id: str, scope: str, outcome: str, response: Path | None, *, who: str, why: str
) -> int:
    """Settle a model call that may have been answered."""
    answer: ModelInvocationResponse | None = None
    if response is not None:
        try:
            answer = documents.from_json(ModelInvocationResponse, await anyio.Path(response).read_bytes()).value
        except OSError as e:
            raise InvalidInput("--response", f"{response} cannot be read: {e.strerror}") from e
    async with await open_keeper(url) as keeper:
        await keeper.resolve_model(turn_id, outcome, who=who, why=why, response=answer, scope=scope)
    _say(outcome, turn_id)
    return 0


async def decide_call(
    url: str,
    turn_id: str,
    scope: str,
    round_index: int,
    slot_index: int,
    *,
    approved: bool,
    who: str,
    why: str | None,
    valid: str | None,
) -> int:
    """Say whether a parked tool call may run."""
    seconds = None if valid is None else seconds_of(valid, "--valid")
    async with await open_keeper(url) as keeper:
        await keeper.decide_permission(
            turn_id, round_index, slot_index, approved, who=who, why=why, valid_seconds=seconds, scope=scope
        )
    _say("approved" if approved else "denied", turn_id)
    return 0


def _say(settled: str, turn_id: str) -> None:
    Console().print(escape(f"settled: {settled}. Run the turn {turn_id} again."))
