"""`tail` and `diff`: a turn as it goes on, and what lies between two of its points."""

from __future__ import annotations

import difflib
import sys
from typing import Annotated, Any, Final

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, Json, JsonLines, Scope, StoreUrl, TurnId
from turnkeeper.cli.output import moment, moment_iso, print_json
from turnkeeper.cli.timeline import describe
from turnkeeper.errors import InvalidInput
from turnkeeper.keeper import Keeper
from turnkeeper.log.record import Position
from turnkeeper.log.store import NotifyingStore
from turnkeeper.turn.history import Entry, TurnHistory
from turnkeeper.turn.identity import trace_hash, turn_key
from turnkeeper.turn.state import TurnState, final_text, rounds_of, thaw_messages

_POLL: Final = 0.5
"""Seconds between two looks, where the store does not tell of changes; else the longest wait."""
_LINE: Final = 2000
"""Characters of a message that a difference shows."""


async def tail(
    turn: TurnId,
    *,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    wait: Annotated[bool, Parameter(negative="", help="Wait also for a turn that is not there yet.")] = False,
    json: JsonLines = False,
) -> int:
    """Print the records of a turn, and those that follow, until it is closed; one JSON object a line for programs."""
    console = Console(highlight=False)
    told = 0
    async with await open_keeper(store) as keeper:
        key = turn_key(trace_hash(turn), scope)
        while True:
            history = await keeper.history(turn, scope)
            if history is None and not wait:
                raise InvalidInput("turn", f"there is no turn {turn!r} with scope {scope!r} in {store}")
            if history is not None:
                for entry in history.entries[told:]:
                    _tell(console, entry, as_json=json)
                told = len(history.entries)
                if history.state.completed:
                    return 0
            await _changed(keeper, key)


async def _changed(keeper: Keeper, key: str) -> None:
    store = keeper.store
    if isinstance(store, NotifyingStore):
        position: Position = (await store.read(key)).position
        await store.changed(key, since=position, timeout=_POLL)
    else:
        await anyio.sleep(_POLL)


def _tell(console: Console, entry: Entry, *, as_json: bool) -> None:
    line = describe(entry.record)
    if as_json:
        told = {"seq": entry.seq, "at": moment_iso(entry.at), "bytes": entry.size, **line.as_json()}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()
        return
    what = f"[{line.style}]{line.what}[/]" if line.style else line.what
    console.print(f"{entry.seq:4} {moment(entry.at)} {line.place:>5} {what} {escape(line.detail)}")


async def diff(
    turn: TurnId,
    before: Annotated[int, Parameter(help="The earlier sequence number; 0 for before the turn.")],
    after: Annotated[int | None, Parameter(help="The later one; the last without it.")] = None,
    *,
    store: StoreUrl = DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Print what changed in a turn between two sequence numbers of its log. The exit status is 1 if anything did."""
    if before < 0 or (after is not None and after < 1):
        raise InvalidInput("sequence", "sequence numbers begin with 1; 0 is before the turn")
    async with await open_keeper(store) as keeper:
        one = await keeper.history(turn, scope, at=before) if before else None
        other = await keeper.history(turn, scope, at=after)
    if other is None:
        raise InvalidInput("turn", f"there is no turn {turn!r} with scope {scope!r} in {store}")
    old, new = _standing(None if one is None else one.state), _standing(other.state)
    added = [entry for entry in other.entries if entry.seq > before]
    if json:
        changed = {name: [old.get(name), new[name]] for name in new if old.get(name) != new[name]}
        records = [{"seq": entry.seq, **describe(entry.record).as_json()} for entry in added]
        print_json({"turn": turn, "from": before, "to": _last(other), "changed": changed, "records": records})
    else:
        _print_difference(old, new, before, _last(other))
    return 1 if added else 0


def _last(history: TurnHistory) -> int:
    return history.entries[-1].seq if history.entries else 0


def _standing(state: TurnState | None) -> dict[str, Any]:
    """What an operator compares of a turn."""
    if state is None or state.phase is None:
        return {}
    slots = {
        f"{round_.index}.{index} {call.tool_name}": None if slot is None else f"{slot.state.value}, fence {slot.fence}"
        for round_ in rounds_of(state)
        for index, (call, slot) in enumerate(zip(round_.calls, round_.slots, strict=True))
    }
    return {
        "phase": state.phase.value,
        "round": state.current_round,
        "attention": state.attention,
        "owner": state.owner,
        "model_calls": state.model_calls,
        "slots": slots,
        "messages": thaw_messages(state.transcript),
        "final_text": final_text(state),
        "sent_message_id": state.sent_message_id,
    }


def _lines(standing: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, value in standing.items():
        if name == "messages":
            lines += [f"message {msgspec.json.encode(message).decode()[:_LINE]}" for message in value]
        elif name == "slots":
            lines += [f"slot {slot}: {state or 'untouched'}" for slot, state in value.items()]
        elif value is not None:
            lines.append(f"{name} {value}")
    return lines


def _print_difference(old: dict[str, Any], new: dict[str, Any], before: int, after: int) -> None:
    console = Console(highlight=False)
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in difflib.unified_diff(_lines(old), _lines(new), f"at {before}", f"at {after}", lineterm="", n=1):
        style = styles.get(line[:1])
        console.print(f"[{style}]{escape(line)}[/]" if style else escape(line))
