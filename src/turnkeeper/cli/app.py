"""The `turnkeeper` command: what can be asked on the command line. Commands import what they need when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, cast

from cyclopts import App, Parameter

app = App(
    name="turnkeeper",
    help="Durable turns for LLM agents and chat bots: kill them anywhere, run them again, nothing happens twice.",
    result_action="return_value",
)

StoreUrl = Annotated[str, Parameter(name="--store", env_var="TURNKEEPER_STORE", help="The store's URL.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document.")]
TurnId = Annotated[str, Parameter(help="The turn's id.")]
ConversationId = Annotated[str, Parameter(help="The conversation's id.")]
Scope = Annotated[str, Parameter(help="`primary`, or a delegated run's id.")]

_DEFAULT_STORE = "sqlite:///turnkeeper.db"


@app.command
async def demo(
    *,
    conversations: Annotated[Path | None, Parameter(help="Recorded conversations, one JSON object a line.")] = None,
    store: Annotated[str | None, Parameter(help="The store's URL; a new SQLite file without it.")] = None,
    kills: Annotated[int, Parameter(help="How many workers to kill.")] = 25,
    workers: Annotated[int, Parameter(help="How many workers to run at once.")] = 2,
    seed: Annotated[int, Parameter(help="Chooses when and where is killed.")] = 1,
    lease: Annotated[float, Parameter(help="Seconds that a worker may be silent before another takes over.")] = 2.0,
    json: Json = False,
) -> int:
    """Run conversations with workers that are killed all the time, and prove that nothing went twice or was lost.

    Workers run the agent's turns and write bookings to a ledger; a supervisor kills them with SIGKILL, at random instants
    and at named places around every durable write and effect, and starts new ones until every turn is done. The table at
    the end comes from the ledger and the logs. The exit status is 1 if anything was done twice or lost.
    """
    from turnkeeper.cli.demo.command import run_demo

    return await run_demo(
        conversations=conversations,
        store=store,
        kills=kills,
        workers=workers,
        seed=seed,
        lease_seconds=lease,
        as_json=json,
    )


@app.command(name="list")
async def list_turns(
    *,
    store: StoreUrl = _DEFAULT_STORE,
    attention: Annotated[bool, Parameter(negative="", help="Only turns that need somebody.")] = False,
    phase: Annotated[str | None, Parameter(help="Only turns in this phase, as COMPLETED.")] = None,
    label: Annotated[list[str] | None, Parameter(help="Only turns with this label, as customer=4711.")] = None,
    older_than: Annotated[str | None, Parameter(help="Only turns unchanged for so long: 90s, 15m, 12h, 7d.")] = None,
    limit: Annotated[int, Parameter(help="Most turns to print; 0 for all.")] = 50,
    json: Json = False,
) -> int:
    """List the turns of a store, those that need attention first."""
    from turnkeeper.cli.looking import print_list

    return await print_list(
        store, attention=attention, phase=phase, labels=label or [], older_than=older_than, limit=limit, as_json=json
    )


@app.command
async def show(
    turn: TurnId,
    *,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
    at: Annotated[int | None, Parameter(help="As it was at this sequence number.")] = None,
    json: Json = False,
) -> int:
    """Show one turn as a time line: rounds, slots, states, owners, times and sizes."""
    from turnkeeper.cli.looking import print_turn

    return await print_turn(store, turn, scope, at=at, as_json=json)


@app.command
async def tail(
    turn: TurnId,
    *,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
    wait: Annotated[bool, Parameter(negative="", help="Wait also for a turn that is not there yet.")] = False,
    json: Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object a line.")] = False,
) -> int:
    """Print a turn's records as they come, until it is closed."""
    from turnkeeper.cli.following import follow_turn

    return await follow_turn(store, turn, scope, wait=wait, as_json=json)


@app.command
async def diff(
    turn: TurnId,
    before: Annotated[int, Parameter(help="The earlier sequence number; 0 for before the turn.")],
    after: Annotated[int | None, Parameter(help="The later one; the last without it.")] = None,
    *,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
    json: Json = False,
) -> int:
    """Show what changed in a turn between two points of its log. The exit status is 1 if anything did, as diff's."""
    from turnkeeper.cli.following import print_difference

    return await print_difference(store, turn, scope, before, after, as_json=json)


@app.command
async def resolve(
    turn: TurnId,
    round: Annotated[int, Parameter(help="The round of the call, from 0.")],  # noqa: A002  # the field's word
    slot: Annotated[int, Parameter(help="The place of the call in its round, from 0.")],
    outcome: Annotated[Literal["happened", "did_not_happen", "unknown"], Parameter(help="What was found out.")],
    *,
    who: Annotated[str, Parameter(help="Who decided.")],
    why: Annotated[str, Parameter(help="The evidence.")],
    fence: Annotated[
        int | None,
        Parameter(
            help="The call's fence as `show` printed it; needed with `did_not_happen`, since the call runs again."
        ),
    ] = None,
    result: Annotated[str | None, Parameter(help="What the model is told; needed with `happened`.")] = None,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Settle a tool call that may have happened, with evidence. Run the turn again afterwards."""
    from turnkeeper.cli.settling import settle_call

    return await settle_call(store, turn, scope, round, slot, outcome, who=who, why=why, fence=fence, result=result)


@app.command
async def resolve_model(
    turn: TurnId,
    outcome: Annotated[Literal["happened", "did_not_happen"], Parameter(help="What was found out.")],
    *,
    who: Annotated[str, Parameter(help="Who decided.")],
    why: Annotated[str, Parameter(help="The evidence.")],
    response: Annotated[
        Path | None,
        Parameter(help="A JSON file with the provider's answer, a ModelInvocationResponse; with `happened`."),
    ] = None,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Settle a model call that may have been answered, with evidence. Run the turn again afterwards."""
    from turnkeeper.cli.settling import settle_model

    return await settle_model(store, turn, scope, outcome, response, who=who, why=why)


@app.command
async def approve(
    turn: TurnId,
    round: Annotated[int, Parameter(help="The round of the call, from 0.")],  # noqa: A002  # the field's word
    slot: Annotated[int, Parameter(help="The place of the call in its round, from 0.")],
    *,
    who: Annotated[str, Parameter(help="Who decides.")],
    why: Annotated[str | None, Parameter(help="The reason.")] = None,
    valid: Annotated[str | None, Parameter(help="How long the approval holds: 90s, 15m, 12h, 7d.")] = None,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Let a parked tool call run. Run the turn again afterwards."""
    from turnkeeper.cli.settling import decide_call

    return await decide_call(store, turn, scope, round, slot, approved=True, who=who, why=why, valid=valid)


@app.command
async def deny(
    turn: TurnId,
    round: Annotated[int, Parameter(help="The round of the call, from 0.")],  # noqa: A002  # the field's word
    slot: Annotated[int, Parameter(help="The place of the call in its round, from 0.")],
    *,
    who: Annotated[str, Parameter(help="Who decides.")],
    why: Annotated[str | None, Parameter(help="The reason, which the model is told.")] = None,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Do not let a parked tool call run; the model is told why. Run the turn again afterwards."""
    from turnkeeper.cli.settling import decide_call

    return await decide_call(store, turn, scope, round, slot, approved=False, who=who, why=why, valid=None)


@app.command
async def export(
    turn: TurnId,
    *,
    at: Annotated[int | None, Parameter(help="As it was at this sequence number.")] = None,
    format: Annotated[  # noqa: A002  # the field's word
        Literal["json", "yaml"] | None, Parameter(help="By the file's name, else JSON.")
    ] = None,
    output: Annotated[Path | None, Parameter(help="Write to this file.")] = None,
    events: Annotated[bool, Parameter(negative="", help="The events instead, one JSON object a line.")] = False,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Write a turn's portable checkpoint (EngineCheckpoint), from which it can be gone on with elsewhere."""
    from turnkeeper.cli.exchange import export_turn

    return await export_turn(store, turn, scope, at=at, form=format, output=output, events=events)


@app.command(name="import")
async def import_checkpoint(
    file: Annotated[Path, Parameter(help="An EngineCheckpoint, in JSON or YAML.")],
    *,
    format: Annotated[  # noqa: A002  # the field's word
        Literal["json", "yaml"] | None, Parameter(help="By the file's name, else JSON.")
    ] = None,
    store: StoreUrl = _DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Begin a turn with a portable checkpoint; it is refused, and nothing written, where it contradicts itself."""
    from turnkeeper.cli.exchange import import_turn

    return await import_turn(store, file, form=format, as_json=json)


@app.command
async def resolve_reply(
    turn: TurnId,
    *,
    who: Annotated[str, Parameter(help="Who decided.")],
    why: Annotated[str, Parameter(help="The evidence.")],
    message_id: Annotated[str | None, Parameter(help="The channel's id of the message: it was sent.")] = None,
    not_sent_by: Annotated[
        str | None, Parameter(help="It was not sent, by this sender, as `show` printed it; it is sent again.")
    ] = None,
    store: StoreUrl = _DEFAULT_STORE,
    scope: Scope = "primary",
) -> int:
    """Settle a reply that may have been sent, with evidence. Run the turn again afterwards."""
    from turnkeeper.cli.settling import settle_reply

    return await settle_reply(store, turn, scope, message_id, not_sent_by, who=who, why=why)


@app.command
async def conversations(
    *,
    store: StoreUrl = _DEFAULT_STORE,
    attention: Annotated[bool, Parameter(negative="", help="Only conversations that need somebody.")] = False,
    limit: Annotated[int, Parameter(help="Most conversations to print; 0 for all.")] = 50,
    json: Json = False,
) -> int:
    """List the conversations of a store, those that need attention first."""
    from turnkeeper.cli.conversing import print_conversations

    return await print_conversations(store, attention=attention, limit=limit, as_json=json)


@app.command
async def conversation(conversation: ConversationId, *, store: StoreUrl = _DEFAULT_STORE, json: Json = False) -> int:
    """Show one conversation: what is pending, where its flow stands, its outbox, and the newest records of its log."""
    from turnkeeper.cli.conversing import print_conversation

    return await print_conversation(store, conversation, as_json=json)


@app.command
async def resolve_send(
    conversation: ConversationId,
    key: Annotated[str, Parameter(help="The send's key, as `conversation` prints it: 4.0.0.")],
    *,
    who: Annotated[str, Parameter(help="Who decided.")],
    why: Annotated[str, Parameter(help="The evidence.")],
    message_id: Annotated[str | None, Parameter(help="The channel's id of the message: it is out.")] = None,
    not_sent: Annotated[bool, Parameter(negative="", help="It is not out; it is given up, not sent late.")] = False,
    store: StoreUrl = _DEFAULT_STORE,
) -> int:
    """Settle a conversation's message that may be out, with evidence."""
    from turnkeeper.cli.conversing import settle_send

    return await settle_send(store, conversation, key, message_id=message_id, not_sent=not_sent, who=who, why=why)


@app.command
async def resolve_message(
    conversation: ConversationId,
    number: Annotated[int, Parameter(help="The message's number, as `conversation` prints it.")],
    *,
    who: Annotated[str, Parameter(help="Who decided.")],
    why: Annotated[str, Parameter(help="The reason.")],
    drop: Annotated[bool, Parameter(negative="", help="Do not handle it, instead of trying again.")] = False,
    store: StoreUrl = _DEFAULT_STORE,
) -> int:
    """Let a message that was set aside be tried again, or drop it; its conversation then goes on."""
    from turnkeeper.cli.conversing import settle_message

    return await settle_message(store, conversation, number, drop=drop, who=who, why=why)


_Wait = Annotated[str, Parameter(help="How long to wait at the start for a store that cannot be reached yet.")]


@app.command
async def worker(
    service: Annotated[str, Parameter(help="The service, as module:attribute.")],
    *,
    concurrency: Annotated[int, Parameter(help="Conversations that are handled at the same time.")] = 16,
    drain: Annotated[str, Parameter(help="How long what is under way may take after SIGTERM: 20s, 5m.")] = "20s",
    lease: Annotated[str, Parameter(help="How long a dead worker's hints stay its: 30s.")] = "30s",
    sweep: Annotated[str, Parameter(help="Between two looks through the store for what no hint told of.")] = "15s",
    wait: _Wait = "1m",
    health_port: Annotated[int | None, Parameter(help="Serve /healthz and /readyz on this port of 127.0.0.1.")] = None,
) -> int:
    """Handle the messages of a service until SIGTERM; run as many of these as you like, on any machines.

    Example: `turnkeeper worker app:service --concurrency 32 --health-port 8081`.
    """
    from turnkeeper.cli.durations import seconds_of
    from turnkeeper.cli.working import run_worker

    return await run_worker(
        service,
        concurrency=concurrency,
        drain_seconds=seconds_of(drain, "--drain"),
        lease_seconds=seconds_of(lease, "--lease"),
        sweep_seconds=seconds_of(sweep, "--sweep"),
        wait_seconds=seconds_of(wait, "--wait"),
        health_port=health_port,
    )


@app.command
async def serve(
    service: Annotated[str, Parameter(help="The service, as module:attribute.")],
    *,
    wait: _Wait = "1m",
) -> int:
    """Take the messages of a service from outside until SIGTERM, as its `front` does; workers handle them.

    Example: `turnkeeper serve app:service`.
    """
    from turnkeeper.cli.durations import seconds_of
    from turnkeeper.cli.working import run_front

    return await run_front(service, wait_seconds=seconds_of(wait, "--wait"))


@app.command
def init(
    folder: Annotated[Path, Parameter(help="Where to; it is made if it is not there.")] = Path(),
) -> int:
    """Write a small working service: an agent with tools, a console to try it in, a webhook, and how to deploy it.

    Example: `turnkeeper init mybot && cd mybot && python app.py`.
    """
    from turnkeeper.cli.starting import write_service

    return write_service(folder)


@app.command
async def prune(
    *,
    older_than: Annotated[str, Parameter(help="Age of the last change: 90s, 15m, 12h, 7d.")],
    store: StoreUrl = _DEFAULT_STORE,
    dry_run: Annotated[bool, Parameter(negative="", help="Change nothing, only count.")] = False,
    json: Json = False,
) -> int:
    """Remove completed turns that nobody needs any more. Unfinished and doubtful ones stay."""
    from turnkeeper.cli.housekeeping import prune_turns

    return await prune_turns(store, older_than, dry_run=dry_run, as_json=json)


@app.command
async def erase(
    turn: Annotated[str, Parameter(help="The turn's id; with --conversation, the conversation's.")],
    *,
    conversation: Annotated[
        bool, Parameter(negative="", help="Erase a conversation, with the turns that its steps ran.")
    ] = False,
    store: StoreUrl = _DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Erase one turn with all its scopes, and print a receipt. It cannot be undone, and neither can its proof."""
    from turnkeeper.cli.housekeeping import erase_turn

    return await erase_turn(store, turn, conversation=conversation, as_json=json)


@app.command
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
    """Copy every log to another store, byte for byte, then verify. Run it again to go on after an interruption.

    Encrypted logs are copied as they are, without any key. With --rekey they are opened, and encrypted anew.
    """
    from turnkeeper.cli.housekeeping import copy_store

    return await copy_store(source, target, rekey=rekey, as_json=json)


@app.command
async def keys(*, store: StoreUrl = _DEFAULT_STORE, json: Json = False) -> int:
    """Tell which keys the records of a store are encrypted with: whether an old one may go. It needs none of them."""
    from turnkeeper.cli.housekeeping import list_keys

    return await list_keys(store, as_json=json)


@app.command
async def migrate(url: Annotated[str, Parameter(help="The store's URL.")], *, json: Json = False) -> int:
    """Bring the schema of a PostgreSQL store to this version's; run it before the new processes start."""
    from turnkeeper.cli.housekeeping import migrate_schema

    return await migrate_schema(url, as_json=json)


@app.command
async def doctor(
    url: Annotated[str, Parameter(help="The store's URL.")] = _DEFAULT_STORE, *, json: Json = False
) -> int:
    """Tell what a store, as it is set up, promises. The exit status is 1 if a promise does not hold."""
    from turnkeeper.cli.housekeeping import examine

    return await examine(url, as_json=json)


@app.command
def fake_model(
    script: Annotated[Path, Parameter(help="The answers: JSON, or YAML by its name. See docs/models.md.")],
    *,
    host: Annotated[str, Parameter(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The port to listen at; 0 for one that is free.")] = 0,
    json: Json = False,
) -> int:
    """Serve the APIs of OpenAI and Anthropic from a script of rounds, with faults, until interrupted.

    For trying out agents offline: their clients need only another `base_url`. At the end it prints how often each round's
    answer was bought. Example: `turnkeeper fake-model script.yaml --port 8080`.
    """
    from turnkeeper.cli.fake_model import serve

    return serve(script, host=host, port=port, as_json=json)


def main() -> None:
    """The entry point: exit status 2 for what Turnkeeper refuses, with the reason on standard error."""
    from turnkeeper.errors import TurnkeeperError

    try:
        status = app()
    except TurnkeeperError as e:
        sys.stderr.write(f"turnkeeper: {e}\n")
        sys.exit(2)
    except BaseExceptionGroup as e:
        ours = e.subgroup(TurnkeeperError)
        if ours is None:
            raise
        sys.stderr.write("".join(f"turnkeeper: {one}\n" for one in _leaves(ours)))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            found.append(error)
    return found
