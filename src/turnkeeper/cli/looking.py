"""`list` and `show`: an operator's look at turns."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turnkeeper.cli.durations import seconds_of
from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, Json, Limit, OlderThan, Scope, StoreUrl, TurnId
from turnkeeper.cli.output import moment, moment_iso, owner_name, print_json, size
from turnkeeper.cli.timeline import describe
from turnkeeper.errors import InvalidInput
from turnkeeper.log import values
from turnkeeper.log.record import Head
from turnkeeper.turn.history import TurnHistory
from turnkeeper.turn.leases import Lease, leases
from turnkeeper.turn.names import TurnPhase
from turnkeeper.turn.state import Round, final_text, rounds_of, thaw_messages


async def list_turns(
    *,
    store: StoreUrl = DEFAULT_STORE,
    attention: Annotated[bool, Parameter(negative="", help="Only turns that need somebody.")] = False,
    unfinished: Annotated[bool, Parameter(negative="", help="Only turns that are not completed.")] = False,
    phase: Annotated[str | None, Parameter(help="Only turns in this phase, as COMPLETED.")] = None,
    label: Annotated[list[str] | None, Parameter(help="Only turns with this label, as customer=4711.")] = None,
    older_than: OlderThan | None = None,
    limit: Limit = 50,
    json: Json = False,
) -> int:
    """Print the turns of a store."""
    pairs = [_label(one) for one in label or ()]
    age = None if older_than is None else seconds_of(older_than, "--older-than")
    try:
        wanted = None if phase is None else TurnPhase(phase.upper())
    except ValueError as e:
        raise InvalidInput("--phase", f"{phase} is none of {', '.join(p.value for p in TurnPhase)}") from e
    async with await open_keeper(store) as keeper:
        before = None if age is None else await keeper.now() - age * 1000
        found = [
            head
            async for head in keeper.turns(attention=attention or None, phase=wanted, unchanged_since=before)
            if all(head.labels.get(name) == value for name, value in pairs)
            and not (unfinished and head.phase == TurnPhase.COMPLETED.value)
        ]
    found.sort(key=lambda head: (head.attention is None, -head.updated))
    shown = found[:limit] if limit > 0 else found
    if json:
        print_json([_head_json(head) for head in shown])
        return 0
    table = Table()
    for heading in ("turn", "phase", "needs", "owner", "records", "stored", "last change"):
        table.add_column(heading, justify="right" if heading in ("records", "stored") else "left", overflow="fold")
    for head in shown:
        name = head.labels.get("turn", head.key)
        scope = head.labels.get("scope", "primary")
        table.add_row(
            escape(name if scope == "primary" else f"{name} ({scope})"),
            head.phase,
            f"[bold red]{head.attention}[/]" if head.attention else "",
            escape(owner_name(head.owner or "")),
            str(head.tail),
            size(head.size),
            moment(head.updated),
        )
    console = Console()
    console.print(table)
    waiting = sum(head.attention is not None for head in found)
    console.print(f"{len(shown)} of {len(found)} turns; {waiting} need attention")
    return 0


def _label(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name or not equals:
        raise InvalidInput("--label", f"{given!r} is not of the form name=value")
    return name, value


def _head_json(head: Head) -> dict[str, Any]:
    return {
        "turn": head.labels.get("turn"),
        "scope": head.labels.get("scope"),
        "key": head.key,
        "phase": head.phase,
        "attention": head.attention,
        "owner": head.owner,
        "labels": {name: label for name, label in head.labels.items() if name not in ("turn", "scope")},
        "records": head.tail,
        "bytes": head.size,
        "created": moment_iso(head.created),
        "updated": moment_iso(head.updated),
    }


async def show(
    turn: TurnId,
    *,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    at: Annotated[int | None, Parameter(help="As it was at this sequence number.")] = None,
    json: Json = False,
) -> int:
    """Print one turn as a time line."""
    if at is not None and at < 1:
        raise InvalidInput("--at", "sequence numbers begin with 1")
    async with await open_keeper(store) as keeper:
        history = await keeper.history(turn, scope, at=at)
        now = await keeper.now()
    if history is None:
        raise InvalidInput("turn", f"there is no turn {turn!r} with scope {scope!r} in {store}")
    if json:
        print_json(_turn_json(turn, scope, history, now))
    else:
        _print_turn(turn, scope, history, now)
    return 0


def _held(history: TurnHistory, now: int) -> list[Lease]:
    """The leases that somebody holds; of the past, nobody does."""
    return list(leases(history.state, now)) if len(history.entries) == history.tail else []


def _turn_json(turn_id: str, scope: str, history: TurnHistory, now: int) -> dict[str, Any]:
    state = history.state
    return {
        "turn": turn_id,
        "scope": scope,
        "phase": state.phase and state.phase.value,
        "attention": state.attention,
        "sequence": len(history.entries),
        "tail": history.tail,
        "model_calls": state.model_calls,
        "leases": [
            {"what": one.what, "slot": one.slot, "owner": one.owner, "until": moment_iso(one.end), "ms": one.length}
            for one in _held(history, now)
        ],
        "rounds": [_round_json(round_) for round_ in rounds_of(state)],
        "messages": thaw_messages(state.transcript),
        "final_text": final_text(state),
        "reply": state.delivery
        and {"key": state.delivery.key, "sender": state.delivery.owner, "unknown": state.delivery.unknown},
        "sent_message_id": state.sent_message_id,
        "records": [
            {"seq": entry.seq, "at": moment_iso(entry.at), "bytes": entry.size, **describe(entry.record).as_json()}
            for entry in history.entries
        ],
    }


def _round_json(round_: Round) -> dict[str, Any]:
    return {
        "round": round_.index,
        "slots": [
            {
                "slot": index,
                "tool": call.tool_name,
                "call_id": call.provider_call_id,
                "state": slot and slot.state.value,
                "owner": slot and slot.owner,
                "fence": slot and slot.fence,
                "replay_safe": slot and slot.replay_safe,
                "late": slot and slot.late,
                "resolution": slot and slot.resolution and slot.resolution.value,
                "result": None if slot is None or slot.result is None else values.thaw(slot.result),
                "evidence": None if slot is None or slot.evidence is None else values.thaw(slot.evidence),
            }
            for index, (call, slot) in enumerate(zip(round_.calls, round_.slots, strict=True))
        ],
    }


def _print_turn(turn_id: str, scope: str, history: TurnHistory, now: int) -> None:
    console = Console()
    state = history.state
    shown = len(history.entries)
    when = "" if shown == history.tail else f", as it was at {shown} of {history.tail}"
    console.print(f"[bold]{escape(turn_id)}[/] ({escape(scope)}){when}")
    console.print(
        f"phase {state.phase and state.phase.value}, round {state.current_round}, {state.model_calls} model calls"
    )
    if state.attention:
        console.print(f"[bold red]needs attention: {state.attention}[/]")
    for lease in _held(history, now):
        where = "" if lease.slot is None else f" {lease.slot[0]}.{lease.slot[1]}"
        heard = (now - lease.end + lease.length) / 1000
        until = moment(lease.end)[11:]
        console.print(
            escape(f"{lease.what}{where}: held by {owner_name(lease.owner)} until {until}, heard of {heard:.0f} s ago")
        )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("seq", "time", "+ms", "bytes", "round.slot", "what", "detail"):
        right = heading in ("seq", "+ms", "bytes")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "detail", overflow="fold")
    before: int | None = None
    for entry in history.entries:
        line = describe(entry.record)
        table.add_row(
            str(entry.seq),
            moment(entry.at)[11:],
            "" if before is None else str(entry.at - before),
            str(entry.size),
            line.place,
            f"[{line.style}]{line.what}[/]" if line.style else line.what,
            escape(line.detail),
        )
        before = entry.at
    console.print(table)
    for round_ in rounds_of(state):
        for index, (call, slot) in enumerate(zip(round_.calls, round_.slots, strict=True)):
            standing = "untouched" if slot is None else f"{slot.state.value} (fence {slot.fence})"
            if slot is not None and slot.resolution is not None:
                standing += f", settled: {slot.resolution.value}"
            console.print(f"  {round_.index}.{index} {escape(call.tool_name)}: {standing}")
    if state.delivery is not None and state.delivery.unknown:
        console.print(f"  reply: may have been sent, by {escape(state.delivery.owner)}")
