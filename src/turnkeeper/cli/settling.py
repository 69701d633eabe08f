"""`resolve`, `resolve-reply`, `resolve-model`, `approve` and `deny`: what a person has to say, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.asking import asked, asked_who, asked_why, somebody_is_there
from turnkeeper.cli.durations import seconds_of
from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, Json, RoundIndex, Scope, SlotIndex, StoreUrl, TurnId, Who, Why
from turnkeeper.cli.output import moment, owner_name, print_json
from turnkeeper.engine import documents
from turnkeeper.engine.stored import stored_response
from turnkeeper.engine.wire import ModelInvocationResponse
from turnkeeper.errors import InvalidInput
from turnkeeper.keeper import Keeper
from turnkeeper.log import values
from turnkeeper.turn import records as r
from turnkeeper.turn.history import TurnHistory
from turnkeeper.turn.names import Resolution
from turnkeeper.turn.state import Slot, rounds_of


class _Doubt(NamedTuple):
    """A tool call that may have happened."""

    round_index: int
    slot_index: int
    tool: str
    arguments: Any
    slot: Slot
    reason: str
    at: int


async def resolve(
    turn: TurnId,
    round: Annotated[  # noqa: A002  # the field's word
        int | None, Parameter(help="The round of the call, from 0; may be left out where one call alone is in doubt.")
    ] = None,
    slot: Annotated[int | None, Parameter(help="The place of the call in its round, from 0.")] = None,
    outcome: Annotated[
        Literal["happened", "did_not_happen", "unknown"] | None, Parameter(help="What was found out.")
    ] = None,
    *,
    who: Who = None,
    why: Why = None,
    fence: Annotated[
        int | None,
        Parameter(
            help="The call's fence as `show` printed it; needed with `did_not_happen`, since the call runs again."
        ),
    ] = None,
    result: Annotated[str | None, Parameter(help="What the model is told; needed with `happened`.")] = None,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Settle a tool call that may have happened."""
    async with await open_keeper(store) as keeper:
        if round is None or slot is None or (outcome is None and somebody_is_there()):
            doubt = await _doubt(keeper, turn, scope, round, slot)
            round, slot = doubt.round_index, doubt.slot_index  # noqa: A001
            if somebody_is_there():
                _show(doubt)
                # What is said from here on is about the run that was shown.
                fence = doubt.slot.fence if fence is None else fence
        told = await asked(outcome, "outcome", "What was found out", choices=[one.value for one in Resolution])
        if told == Resolution.HAPPENED.value:
            result = await asked(result, "--result", "What the model is told of it")
        if told == Resolution.DID_NOT_HAPPEN.value and fence is None:
            raise InvalidInput("--fence", "is needed with `did_not_happen`: `turnkeeper show` prints it")
        why, who = await asked_why(why), await asked_who(who)
        await keeper.resolve_tool(turn, round, slot, told, who=who, why=why, fence=fence, result=result, scope=scope)
    _say(told, turn, scope, as_json=json, who=who, why=why, round=round, slot=slot)
    return 0


async def _doubt(keeper: Keeper, turn: str, scope: str, round_index: int | None, slot_index: int | None) -> _Doubt:
    history = await keeper.history(turn, scope)
    found = [] if history is None else _doubts(history)
    fitting = [d for d in found if round_index in (None, d.round_index) and slot_index in (None, d.slot_index)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise InvalidInput("turn", f"of the turn {turn!r} ({scope}) no such call is in doubt")
    places = ", ".join(f"{d.round_index} {d.slot_index} ({d.tool})" for d in fitting)
    raise InvalidInput("round", f"and slot are needed, several calls are in doubt: {places}")


def _doubts(history: TurnHistory) -> list[_Doubt]:
    why = {
        (entry.record.round_index, entry.record.slot_index): (entry.record.reason, entry.at)
        for entry in history.entries
        if isinstance(entry.record, r.ToolAmbiguous)
    }
    return [
        _Doubt(round_.index, index, call.tool_name, request.arguments, slot, *why[round_.index, index])
        for round_ in rounds_of(history.state)
        for index, (call, slot, request) in enumerate(
            zip(round_.calls, round_.slots, stored_response(round_).tool_requests, strict=True)
        )
        if slot is not None and slot.open_question
    ]


def _show(doubt: _Doubt) -> None:
    console = Console(stderr=True, highlight=False)
    given = doubt.arguments
    arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    console.print(escape(f"{doubt.round_index}.{doubt.slot_index} {doubt.tool} {arguments}"))
    console.print(escape(f"in doubt since {moment(doubt.at)}: {doubt.reason}"))
    console.print(escape(f"owner {owner_name(doubt.slot.owner)}, fence {doubt.slot.fence}"))
    if doubt.slot.evidence is not None:
        late = msgspec.json.encode(values.thaw(doubt.slot.evidence)).decode()
        console.print(escape(f"a result came too late to count: {late}"))


async def resolve_reply(
    turn: TurnId,
    *,
    who: Who = None,
    why: Why = None,
    message_id: Annotated[str | None, Parameter(help="The channel's id of the message: it was sent.")] = None,
    not_sent_by: Annotated[
        str | None, Parameter(help="It was not sent, by this sender, as `show` printed it; it is sent again.")
    ] = None,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Settle a reply that may have been sent."""
    if (message_id is None) == (not_sent_by is None):
        raise InvalidInput("--message-id", "or --not-sent-by is needed, and not both: was the reply sent or not?")
    why, who = await asked_why(why), await asked_who(who)
    async with await open_keeper(store) as keeper:
        await keeper.resolve_delivery(turn, message_id, who=who, why=why, sender=not_sent_by, scope=scope)
    told = "not_sent" if message_id is None else "sent"
    _say(told, turn, scope, as_json=json, who=who, why=why, message_id=message_id)
    return 0


async def resolve_model(
    turn: TurnId,
    outcome: Annotated[Literal["happened", "did_not_happen"], Parameter(help="What was found out.")],
    *,
    who: Who = None,
    why: Why = None,
    response: Annotated[
        Path | None,
        Parameter(help="A JSON file with the provider's answer, a ModelInvocationResponse; with `happened`."),
    ] = None,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Settle a model call that may have been answered."""
    answer: ModelInvocationResponse | None = None
    if response is not None:
        try:
            answer = documents.from_json(ModelInvocationResponse, await anyio.Path(response).read_bytes()).value
        except OSError as e:
            raise InvalidInput("--response", f"{response} cannot be read: {e.strerror}") from e
    why, who = await asked_why(why), await asked_who(who)
    async with await open_keeper(store) as keeper:
        await keeper.resolve_model(turn, outcome, who=who, why=why, response=answer, scope=scope)
    _say(outcome, turn, scope, as_json=json, who=who, why=why)
    return 0


async def approve(
    turn: TurnId,
    round: RoundIndex,  # noqa: A002  # the field's word
    slot: SlotIndex,
    *,
    who: Annotated[str | None, Parameter(help="Who decides; asked for on a terminal.")] = None,
    why: Annotated[str | None, Parameter(help="The reason.")] = None,
    valid: Annotated[str | None, Parameter(help="How long the approval holds: 90s, 15m, 12h, 7d.")] = None,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Let a parked tool call run."""
    seconds = None if valid is None else seconds_of(valid, "--valid")
    who = await asked_who(who)
    async with await open_keeper(store) as keeper:
        await keeper.decide_permission(turn, round, slot, True, who=who, why=why, valid_seconds=seconds, scope=scope)
    _say("approved", turn, scope, as_json=json, who=who, why=why, round=round, slot=slot)
    return 0


async def deny(
    turn: TurnId,
    round: RoundIndex,  # noqa: A002  # the field's word
    slot: SlotIndex,
    *,
    who: Annotated[str | None, Parameter(help="Who decides; asked for on a terminal.")] = None,
    why: Annotated[str | None, Parameter(help="The reason, which the model is told.")] = None,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Do not let a parked tool call run; the model is told why."""
    who = await asked_who(who)
    async with await open_keeper(store) as keeper:
        await keeper.decide_permission(turn, round, slot, False, who=who, why=why, scope=scope)
    _say("denied", turn, scope, as_json=json, who=who, why=why, round=round, slot=slot)
    return 0


def _say(settled: str, turn: str, scope: str, *, as_json: bool, **more: Any) -> None:
    if as_json:
        print_json({"turn": turn, "scope": scope, "settled": settled, **more})
    else:
        Console().print(escape(f"settled: {settled}. Run the turn {turn} again."))
