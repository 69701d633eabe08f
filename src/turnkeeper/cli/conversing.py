"""`conversations`, `conversation`, `resolve-send` and `resolve-message`: an operator's look at conversations."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turnkeeper.cli.asking import asked_who, asked_why
from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, ConversationId, Json, Limit, StoreUrl, Who, Why
from turnkeeper.cli.output import moment, moment_iso, print_json, size
from turnkeeper.conversation.message import kept_content, kept_message
from turnkeeper.conversation.oversight import ConversationHistory, Entry
from turnkeeper.conversation.state import Answer, ConversationState, Inbound, Row, Send, SendKey
from turnkeeper.errors import InvalidInput
from turnkeeper.log.record import Head


async def conversations(
    *,
    store: StoreUrl = DEFAULT_STORE,
    attention: Annotated[bool, Parameter(negative="", help="Only conversations that need somebody.")] = False,
    limit: Limit = 50,
    json: Json = False,
) -> int:
    """Print the conversations of a store, those that need attention first."""
    async with await open_keeper(store) as keeper:
        found = [head async for head in keeper.conversation_heads(attention=attention or None)]
    found.sort(key=lambda head: (head.attention is None, -head.updated))
    shown = found[:limit] if limit > 0 else found
    if json:
        print_json([_head_json(head) for head in shown])
        return 0
    table = Table()
    for heading in ("conversation", "phase", "flow", "step", "needs", "owner", "last change"):
        table.add_column(heading, overflow="fold")
    for head in shown:
        table.add_row(
            escape(head.labels.get("conversation", head.key)),
            head.phase,
            escape(head.labels.get("flow", "")),
            escape(head.labels.get("step", "")),
            f"[bold red]{head.attention}[/]" if head.attention else "",
            escape(head.owner or ""),
            moment(head.updated),
        )
    console = Console()
    console.print(table)
    waiting = sum(head.attention is not None for head in found)
    console.print(f"{len(shown)} of {len(found)} conversations; {waiting} need attention")
    return 0


def _head_json(head: Head) -> dict[str, Any]:
    return {
        "conversation": head.labels.get("conversation"),
        "key": head.key,
        "phase": head.phase,
        "flow": head.labels.get("flow"),
        "step": head.labels.get("step"),
        "attention": head.attention,
        "owner": head.owner,
        "records": head.tail,
        "bytes": head.size,
        "created": moment_iso(head.created),
        "updated": moment_iso(head.updated),
    }


async def conversation(conversation: ConversationId, *, store: StoreUrl = DEFAULT_STORE, json: Json = False) -> int:
    """Print one conversation: what is pending, the flow, the outbox, and the records that compaction has left."""
    async with await open_keeper(store) as keeper:
        history = await keeper.conversation(conversation)
    if history is None:
        raise InvalidInput("conversation", f"there is no conversation {conversation!r} in {store}")
    if json:
        print_json(_conversation_json(history))
    else:
        _print_conversation(history)
    return 0


def _inbound_json(one: Inbound) -> dict[str, Any]:
    return {
        "number": one.number,
        "kind": one.kind,
        "text": kept_message(one.message).text,
        "at": moment_iso(one.at),
        "attempts": one.attempts,
        "quarantined": one.quarantined,
        "reason": one.reason or None,
    }


def _send_json(one: Send) -> dict[str, Any]:
    return {
        "key": list(one.key),
        "state": one.state.value,
        "text": kept_content(one.content).text,
        "message_id": one.message_id or None,
        "reason": one.reason or None,
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "flow": row.flow,
        "version": row.version,
        "step": row.step,
        "parked": row.parked,
        "inbound": row.inbound,
        "revision": row.revision,
        "ended": row.ended,
    }


def _conversation_json(history: ConversationHistory) -> dict[str, Any]:
    state = history.state
    return {
        "conversation": state.conversation_id,
        "attention": state.attention,
        "owner": state.owner or None,
        "received": state.received,
        "settled": state.settled,
        "pending": [_inbound_json(one) for one in state.inbound],
        "flow": None if state.row is None else _row_json(state.row),
        "outbox": [_send_json(one) for one in state.sends],
        "timers": [{"id": one.id, "due": moment_iso(one.due)} for one in state.timers],
        "records": [
            {"seq": one.seq, "at": moment_iso(one.at), "bytes": one.size, "what": _name(one), "detail": _detail(one)}
            for one in history.entries
        ],
    }


def _name(entry: Entry) -> str:
    return str(type(entry.record).__struct_config__.tag)


def _readable(value: Any) -> Any:
    """Frames as what they hold, where that is a message or a content; else by their size."""
    match value:
        case bytes():
            return f"{len(value)} bytes"
        case ConversationState():
            return f"{value.received} messages, {len(value.inbound)} pending"
        case Row():
            return f"{value.flow}.{value.step}{' (parked)' if value.parked else ''}"
        case Answer() | tuple() | msgspec.Struct():
            return msgspec.to_builtins(value, enc_hook=str)
        case _:
            return value


def _detail(entry: Entry) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in entry.record.__struct_fields__:
        value = getattr(entry.record, name)
        if isinstance(value, bytes) and name == "message":
            fields["text"] = kept_message(value).text
        elif isinstance(value, bytes) and name == "content":
            fields["text"] = kept_content(value).text
        elif value not in ("", 0, None, False) and name not in ("event", "seed", "fingerprint"):
            fields[name] = _readable(value)
    return fields


def _print_conversation(history: ConversationHistory) -> None:
    console, state = Console(), history.state
    console.print(f"[bold]{escape(state.conversation_id)}[/]: {state.received} messages, {len(state.inbound)} pending")
    if state.attention:
        console.print(f"[bold red]needs attention: {state.attention}[/]")
    if state.row is not None:
        row = state.row
        over = f", over: {row.ended}" if row.ended else ", parked at a wait" if row.parked else ""
        console.print(escape(f"flow {row.flow} version {row.version}, step {row.step}{over}"))
    for one in state.inbound:
        what = f"set aside: {one.quarantined}" if one.quarantined else one.reason or "pending"
        console.print(escape(f"message {one.number}: {kept_message(one.message).text!r:.60} ({what})"))
    for send in state.sends:
        if not send.settled or send.reason:
            key = ".".join(map(str, send.key))
            console.print(
                escape(f"send {key}: {send.state.value} {kept_content(send.content).text!r:.60} {send.reason}")
            )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("seq", "time", "bytes", "what", "detail"):
        table.add_column(heading, justify="right" if heading in ("seq", "bytes") else "left", overflow="fold")
    for entry in history.entries:
        detail = " ".join(f"{name}={value}" for name, value in _detail(entry).items())
        table.add_row(str(entry.seq), moment(entry.at), size(entry.size), _name(entry), escape(detail))
    console.print(table)


async def resolve_send(
    conversation: ConversationId,
    key: Annotated[str, Parameter(help="The send's key, as `conversation` prints it: 4.0.0.")],
    *,
    who: Who = None,
    why: Why = None,
    message_id: Annotated[str | None, Parameter(help="The channel's id of the message: it is out.")] = None,
    not_sent: Annotated[bool, Parameter(negative="", help="It is not out; it is given up, not sent late.")] = False,
    store: StoreUrl = DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Settle a message that may be out."""
    if (message_id is None) != not_sent:
        raise InvalidInput("--message-id", "or --not-sent is needed, and not both: is the message out or not?")
    try:
        record, sequence, chunk = map(int, key.split("."))
    except ValueError as e:
        raise InvalidInput("key", f"{key!r} is not of the form 4.0.0, as `turnkeeper conversation` prints it") from e
    why, who = await asked_why(why), await asked_who(who)
    async with await open_keeper(store) as keeper:
        await keeper.resolve_send(
            conversation, SendKey(record, sequence, chunk), message_id=message_id, who=who, why=why
        )
    if json:
        settled = "not_sent" if not_sent else "sent"
        told = {"conversation": conversation, "key": [record, sequence, chunk], "settled": settled}
        print_json({**told, "message_id": message_id, "who": who, "why": why})
    else:
        Console().print(escape(f"settled: {'given up, not sent' if not_sent else f'sent as {message_id}'}."))
    return 0


async def resolve_message(
    conversation: ConversationId,
    number: Annotated[int, Parameter(help="The message's number, as `conversation` prints it.")],
    *,
    who: Who = None,
    why: Why = None,
    drop: Annotated[bool, Parameter(negative="", help="Do not handle it, instead of trying again.")] = False,
    store: StoreUrl = DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Let a message be tried again that is quarantined or waits, or drop a quarantined one."""
    why, who = await asked_why(why), await asked_who(who)
    async with await open_keeper(store) as keeper:
        await keeper.resolve_message(conversation, number, drop=drop, who=who, why=why)
    if json:
        settled = "dropped" if drop else "tried_again"
        print_json({"conversation": conversation, "message": number, "settled": settled, "who": who, "why": why})
    else:
        told = "is dropped" if drop else "will be tried again"
        Console().print(f"message {number} {told}; the conversation goes on.")
    return 0
