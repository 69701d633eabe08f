"""`retry` and `release`: a turn that nobody goes on with is run again, and one whose owner died is not waited for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from turnkeeper.cli.asking import asked_who, asked_why
from turnkeeper.cli.loading import load, opened_by
from turnkeeper.cli.opening import open_keeper
from turnkeeper.cli.options import DEFAULT_STORE, Json, StoreUrl, TurnId, Who
from turnkeeper.cli.output import owner_name, print_json
from turnkeeper.engine.ports import Agent, ReplyPort
from turnkeeper.errors import InvalidInput
from turnkeeper.keeper import Keeper
from turnkeeper.turn.leases import Lease

_CONVERSATION = "conversation"


async def retry(
    turn: TurnId,
    agent: Annotated[str, Parameter(help="The agent, as module:attribute.")],
    *,
    reply: Annotated[str | None, Parameter(help="Where its answer is sent: a ReplyPort, as module:attribute.")] = None,
    no_reply: Annotated[bool, Parameter(negative="", help="Its answer is sent nowhere.")] = False,
    keeper: Annotated[
        str | None,
        Parameter(
            help="A function of your code that opens your Keeper, as module:attribute, in place of --store; needed where yours "
            "redacts or limits what it keeps."
        ),
    ] = None,
    store: StoreUrl = DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Run a turn again from where its log stands. The exit status is 1 if it is not finished then."""
    if (reply is None) != no_reply:
        # Without its channel the turn would be closed, and nobody would ever get the answer.
        raise InvalidInput("--reply", "or --no-reply is needed, and not both: is its answer sent anywhere?")
    who_runs = load(agent, Agent, "agent")
    channel = None if reply is None else load(reply, ReplyPort, "--reply")
    async with await (open_keeper(store) if keeper is None else opened_by(keeper, Keeper, "--keeper")) as opened:
        await _refuse_a_conversations(opened, turn)
        result = await opened.resume(who_runs, turn_id=turn, reply=channel, wait=False)
    if json:
        print_json(asdict(result))
    else:
        console = Console(highlight=False)
        console.print(escape(f"{result.status}: {result.output if result.status == 'success' else result.message}"))
        for round_index, slot_index in result.open_slots:
            console.print(f"  waits for somebody: {round_index} {slot_index}")
    return 0 if result.status == "success" else 1


async def _refuse_a_conversations(keeper: Keeper, turn: str) -> None:
    """Its conversation's owner runs it, with what belongs to it; another run would get in its way."""
    history = await keeper.history(turn)
    whose = None if history is None else history.state.labels.get(_CONVERSATION)
    if whose is not None:
        raise InvalidInput(
            "turn", f"is one of the conversation {whose!r}, whose workers run it; see `turnkeeper resolve-message`"
        )


async def release(
    turn: Annotated[str, Parameter(help="The turn's id; with --conversation, the conversation's.")],
    *,
    conversation: Annotated[bool, Parameter(negative="", help="Release a conversation instead of a turn.")] = False,
    owner: Annotated[
        str | None, Parameter(help="Whose, as `show --json` prints it; needed where a turn has several.")
    ] = None,
    force: Annotated[bool, Parameter(negative="", help="Also where the owner was heard of just now.")] = False,
    who: Who = None,
    why: Annotated[str | None, Parameter(help="How it is known that the owner is dead.")] = None,
    store: StoreUrl = DEFAULT_STORE,
    scope: Annotated[
        str | None, Parameter(help="Only of this run: primary, or a delegated run's id. All of the turn's without it.")
    ] = None,
    json: Json = False,
) -> int:
    """Take a turn or a conversation from an owner that is known to be dead."""
    why, who = await asked_why(why), await asked_who(who)
    async with await open_keeper(store) as keeper:
        if conversation:
            whose = await keeper.release_conversation(turn, who=who, why=why, owner=owner, force=force)
            told = [f"released from {whose}: a worker takes it over at its next look."]
            document = {"conversation": turn, "owner": whose}
        else:
            taken = await keeper.release(turn, who=who, why=why, owner=owner, force=force, scope=scope)
            held = [(of, lease) for of, leases in taken.items() for lease in leases]
            told = [*(_line(of, lease) for of, lease in held), f"Run the turn {turn} again."]
            released = [
                {"scope": of, "owner": one.owner, "what": one.what, "slot": one.slot, "lease_ms": one.length}
                for of, one in held
            ]
            document = {"turn": turn, "released": released}
    if json:
        print_json({**document, "who": who, "why": why})
    else:
        Console(highlight=False).print(escape("\n".join(told)))
    return 0


def _line(scope: str, lease: Lease) -> str:
    where = "" if lease.slot is None else f" {lease.slot[0]}.{lease.slot[1]}"
    of = "" if scope == "primary" else f" of {scope}"
    may_be = "" if lease.what == "claim of a tool call" else "; it may have happened, its policy decides"
    return f"released from {owner_name(lease.owner)}: {lease.what}{where}{of}{may_be}"
