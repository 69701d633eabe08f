"""`prune`, `erase`, `copy`, `keys`, `migrate` and `doctor`: keeping a store small, safe, and as it should be."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from msgspec import to_builtins
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turnkeeper.cli.durations import seconds_of
from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, Json, OlderThan, StoreUrl
from turnkeeper.cli.output import moment_iso, print_json, size
from turnkeeper.errors import InvalidInput
from turnkeeper.keeper import Keeper
from turnkeeper.log.keyring import Keyring
from turnkeeper.moving import copy_logs, keys_in_use
from turnkeeper.stores.opening import migrate_store


async def prune(
    *,
    older_than: OlderThan,
    store: StoreUrl = DEFAULT_STORE,
    dry_run: Annotated[bool, Parameter(negative="", help="Change nothing, only count.")] = False,
    json: Json = False,
) -> int:
    """Remove old completed turns, and say how many went and stayed."""
    age = seconds_of(older_than, "--older-than")
    async with await Keeper.open(store, create=False) as keeper:
        pruned = await keeper.prune(older_than_seconds=age, dry_run=dry_run)
    if json:
        print_json({**pruned._asdict(), "dry_run": dry_run})
    else:
        verb = "would be removed" if dry_run else "removed"
        Console().print(f"{pruned.removed} turns {verb} ({size(pruned.bytes_removed)}), {pruned.kept} kept")
    return 0


async def erase(
    turn: Annotated[str, Parameter(help="The turn's id; with --conversation, the conversation's.")],
    *,
    conversation: Annotated[
        bool, Parameter(negative="", help="Erase a conversation, with the turns that its steps ran.")
    ] = False,
    store: StoreUrl = DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Erase a turn, or a conversation, and print the receipt. The exit status is 1 if something is left."""
    async with await Keeper.open(store, create=False) as keeper:
        receipt = await (keeper.erase_conversation(turn) if conversation else keeper.erase(turn))
    if json:
        print_json(
            {"conversation" if conversation else "turn": turn, **to_builtins(receipt), "at": moment_iso(receipt.at)}
        )
    else:
        console = Console()
        for log in receipt.erased:
            console.print(f"erased {escape(log.key)}: {log.records} records, {size(log.bytes)}, digest {log.digest}")
        console.print(f"{len(receipt.erased)} logs erased, {receipt.left} left, at {moment_iso(receipt.at)}")
    return 1 if receipt.left else 0


async def copy(
    source: Annotated[str, Parameter(help="The URL to copy from; nothing may write to it meanwhile.")],
    target: Annotated[str, Parameter(help="The URL to copy to.")],
    *,
    rekey: Annotated[
        bool,
        Parameter(
            negative="", help="Encrypt what is copied with the current key of TURNKEEPER_KEYS; the others open it."
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Copy all logs from one store to another: as they are kept, without keys, or opened and sealed again."""
    keyring = Keyring.from_environment() if rekey else None
    if rekey and keyring is None:
        raise InvalidInput("--rekey", "needs the keys in TURNKEEPER_KEYS or TURNKEEPER_KEYS_FILE")
    async with (
        await Keeper.open(source, create=False, keyring=keyring) as old,
        await Keeper.open(target, keyring=keyring) as new,
    ):
        copied = await copy_logs(old.store, new.store)
    if json:
        print_json(copied)
    else:
        Console().print(
            f"{copied.copied} logs copied, {copied.already_there} were there already, {copied.verified} verified: "
            f"{copied.records} records, {size(copied.bytes)}"
        )
    return 0


async def keys(*, store: StoreUrl = DEFAULT_STORE, json: Json = False) -> int:
    """Print which keys the records of a store are sealed with. Opens no record, and needs no key."""
    async with await Keeper.open(store, create=False) as keeper:
        found = await keys_in_use(keeper.store)
    if json:
        print_json([{"key": key_id, **use._asdict()} for key_id, use in found.items()])
        return 0
    table = Table()
    for heading in ("key", "logs", "records"):
        table.add_column(heading, overflow="fold", justify="left" if heading == "key" else "right")
    for key_id, use in found.items():
        table.add_row("not encrypted" if key_id is None else escape(key_id), str(use.logs), str(use.records))
    Console().print(table)
    return 0


async def migrate(url: Annotated[str, Parameter(help="The store's URL.")], *, json: Json = False) -> int:
    """Migrate a store's schema, and print the versions."""
    before, after = await migrate_store(url)
    if json:
        print_json({"before": before, "after": after})
    else:
        Console().print("is up to date" if before == after else f"schema version {before} is now {after}")
    return 0


async def doctor(url: Annotated[str, Parameter(help="The store's URL.")] = DEFAULT_STORE, *, json: Json = False) -> int:
    """Print what the store promises."""
    async with await open_keeper(url) as keeper:
        promises = await keeper.promises()
    if json:
        print_json([promise._asdict() for promise in promises])
    else:
        table = Table()
        for heading in ("promise", "found", "", "advice"):
            table.add_column(heading, overflow="fold")
        for promise in promises:
            mark, advice = ("[green]holds[/]", "") if promise.holds else ("[bold red]does not hold[/]", promise.advice)
            table.add_row(promise.name, escape(promise.found), mark, escape(advice))
        Console().print(table)
    return 0 if all(promise.holds for promise in promises) else 1
