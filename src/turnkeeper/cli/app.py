"""The `turnkeeper` command: its table of commands, and what their exit statuses mean.

A command's module is imported when it is asked for, so that the command itself starts fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from cyclopts import App, Group

LOOKING = Group("Looking", sort_key=1)
SETTLING = Group("Settling what only a person can", sort_key=2)
RUNNING = Group("Running", sort_key=3)
KEEPING = Group("Keeping a store", sort_key=4)
TRYING = Group("Trying it out", sort_key=5)

REFUSED = 2
"""Exit status: it was refused, and nothing was changed."""
NOT_NOW = 3
"""Exit status: it cannot be done now; the same command may succeed later."""
INTERRUPTED = 130
"""Exit status: Ctrl-C, as shells have it."""


class Command(NamedTuple):
    """A command of the table.

    Attributes:
        name: as it is typed.
        target: the function that does it, in this package.
        group: under which heading the help lists it.
        summary: one line, for the list of commands.
        examples: at least one line that can be typed.
        more: the rest of its help.
    """

    name: str
    target: str
    group: Group
    summary: str
    examples: tuple[str, ...]
    more: str = ""


COMMANDS = (
    Command(
        "list",
        "looking:list_turns",
        LOOKING,
        "List the turns of a store, those that need attention first.",
        ("turnkeeper list --attention", "turnkeeper list --unfinished --older-than 1h --label customer=4711 --json"),
    ),
    Command(
        "show",
        "looking:show",
        LOOKING,
        "Show one turn as a time line: rounds, slots, states, owners, times and sizes.",
        ("turnkeeper show message-4711", "turnkeeper show message-4711 --at 12"),
    ),
    Command(
        "tail",
        "following:tail",
        LOOKING,
        "Print a turn's records as they come, until it is closed.",
        ("turnkeeper tail message-4711 --wait",),
    ),
    Command(
        "diff",
        "following:diff",
        LOOKING,
        "Show what changed in a turn between two points of its log.",
        ("turnkeeper diff message-4711 3 9",),
        "The exit status is 1 if anything did, as diff's.",
    ),
    Command(
        "conversations",
        "conversing:conversations",
        LOOKING,
        "List the conversations of a store, those that need attention first.",
        ("turnkeeper conversations --attention",),
    ),
    Command(
        "conversation",
        "conversing:conversation",
        LOOKING,
        "Show one conversation: what is pending, its flow, its outbox, and the newest records of its log.",
        ("turnkeeper conversation chat-17",),
    ),
    Command(
        "resolve",
        "settling:resolve",
        SETTLING,
        "Settle a tool call that may have happened, with evidence. Run the turn again afterwards.",
        (
            "turnkeeper resolve message-4711",
            'turnkeeper resolve message-4711 1 0 happened --result "booked TK133" --who ann --why "booking no. 991"',
            'turnkeeper resolve message-4711 1 0 did_not_happen --fence 1 --who ann --why "not in the list"',
        ),
        "On a terminal, what is not given is asked for.",
    ),
    Command(
        "resolve-model",
        "settling:resolve_model",
        SETTLING,
        "Settle a model call that may have been answered, with evidence. Run the turn again afterwards.",
        ('turnkeeper resolve-model message-4711 did_not_happen --who ann --why "not in the provider\'s log"',),
    ),
    Command(
        "resolve-reply",
        "settling:resolve_reply",
        SETTLING,
        "Settle a reply that may have been sent, with evidence. Run the turn again afterwards.",
        ('turnkeeper resolve-reply message-4711 --message-id 991 --who ann --why "seen in the chat"',),
    ),
    Command(
        "resolve-send",
        "conversing:resolve_send",
        SETTLING,
        "Settle a conversation's message that may be out, with evidence.",
        (
            'turnkeeper resolve-send chat-17 4.0.0 --message-id 991 --who ann --why "seen in the chat"',
            'turnkeeper resolve-send chat-17 4.0.0 --not-sent --who ann --why "not there"',
        ),
    ),
    Command(
        "resolve-message",
        "conversing:resolve_message",
        SETTLING,
        "Let a message be tried again that was set aside, or waits for its next attempt; or drop it.",
        (
            'turnkeeper resolve-message chat-17 4 --who ann --why "the bug is fixed in 1.3"',
            'turnkeeper resolve-message chat-17 4 --drop --who ann --why "a test"',
        ),
        "Its conversation then goes on by itself. Only a message that was set aside can be dropped.",
    ),
    Command(
        "approve",
        "settling:approve",
        SETTLING,
        "Let a parked tool call run. Run the turn again afterwards.",
        ("turnkeeper approve message-4711 0 0 --who ann --valid 1h",),
    ),
    Command(
        "deny",
        "settling:deny",
        SETTLING,
        "Do not let a parked tool call run; the model is told why. Run the turn again afterwards.",
        ('turnkeeper deny message-4711 0 0 --who ann --why "over the limit"',),
    ),
    Command(
        "release",
        "going_on:release",
        SETTLING,
        "Take a turn or a conversation from an owner that is known to be dead, so that nobody waits for its lease.",
        (
            'turnkeeper release message-4711 --who ann --why "host-7 is off"',
            'turnkeeper release chat-17 --conversation --force --who ann --why "host-7 is off"',
        ),
        "It is refused (3) where the owner was heard of less than half a lease ago, unless --force is given. No effect is "
        "decided about: whoever comes next finds what a crash leaves.",
    ),
    Command(
        "retry",
        "going_on:retry",
        RUNNING,
        "Run a turn again from where its log stands, with an agent of your code.",
        (
            "turnkeeper retry message-4711 app:agent --no-reply",
            "turnkeeper retry message-4711 app:agent --reply app:reply",
        ),
        "What is done is not done again. The exit status is 1 if the turn is not finished then: it says what it waits for. "
        "A conversation's turns are run by its workers.",
    ),
    Command(
        "worker",
        "working:worker",
        RUNNING,
        "Handle the messages of a service until SIGTERM; run as many of these as you like, on any machines.",
        ("turnkeeper worker app:service --concurrency 32 --health-port 8081",),
    ),
    Command(
        "serve",
        "working:serve",
        RUNNING,
        "Take the messages of a service from outside until SIGTERM, as its front does; workers handle them.",
        ("turnkeeper serve app:service",),
    ),
    Command(
        "export",
        "exchange:export",
        KEEPING,
        "Write a turn's portable checkpoint (EngineCheckpoint), from which it can be gone on with elsewhere.",
        ("turnkeeper export message-4711 --output turn.yaml", "turnkeeper export message-4711 --events"),
    ),
    Command(
        "import",
        "exchange:import_checkpoint",
        KEEPING,
        "Begin a turn with a portable checkpoint; it is refused, and nothing written, where it contradicts itself.",
        ("turnkeeper import turn.yaml",),
    ),
    Command(
        "prune",
        "housekeeping:prune",
        KEEPING,
        "Remove completed turns that nobody needs any more. Unfinished and doubtful ones stay.",
        ("turnkeeper prune --older-than 30d --dry-run",),
    ),
    Command(
        "erase",
        "housekeeping:erase",
        KEEPING,
        "Erase one turn with all its scopes, and print a receipt. It cannot be undone, and neither can its proof.",
        ("turnkeeper erase message-4711", "turnkeeper erase chat-17 --conversation"),
        "The exit status is 1 if something is left.",
    ),
    Command(
        "copy",
        "housekeeping:copy",
        KEEPING,
        "Copy every log to another store, byte for byte, then verify. Run it again to go on after an interruption.",
        ("turnkeeper copy sqlite:///turns.db postgresql://localhost/turns",),
        "Encrypted logs are copied as they are, without any key. With --rekey they are opened, and encrypted anew.",
    ),
    Command(
        "keys",
        "housekeeping:keys",
        KEEPING,
        "Tell which keys the records of a store are encrypted with: whether an old one may go. It needs none of them.",
        ("turnkeeper keys --json",),
    ),
    Command(
        "migrate",
        "housekeeping:migrate",
        KEEPING,
        "Bring the schema of a PostgreSQL store to this version's; run it before the new processes start.",
        ("turnkeeper migrate postgresql://localhost/turns",),
    ),
    Command(
        "doctor",
        "housekeeping:doctor",
        KEEPING,
        "Tell what a store, as it is set up, promises. The exit status is 1 if a promise does not hold.",
        ("turnkeeper doctor sqlite:///turns.db",),
    ),
    Command(
        "init",
        "starting:init",
        TRYING,
        "Write a small working service: an agent with tools, a console to try it in, a webhook, and how to deploy it.",
        ("turnkeeper init mybot",),
        "Then: cd mybot && python app.py",
    ),
    Command(
        "demo",
        "demo.command:demo",
        TRYING,
        "Run conversations with workers that are killed all the time, and prove that nothing went twice or was lost.",
        ("turnkeeper demo --kills 100",),
        "Workers run the agent's turns and write bookings to a ledger; a supervisor kills them with SIGKILL, at random "
        "instants and at named places around every durable write and effect, and starts new ones until every turn is done. "
        "The table at the end comes from the ledger and the logs. The exit status is 1 if anything was done twice or lost.",
    ),
    Command(
        "fake-model",
        "fake_model:fake_model",
        TRYING,
        "Serve the APIs of OpenAI and Anthropic from a script of rounds, with faults, until interrupted.",
        ("turnkeeper fake-model script.yaml --port 8080",),
        "For trying out agents offline: their clients need only another base_url. At the end it prints how often each "
        "round's answer was bought.",
    ),
)


def _written_out(examples: Iterable[str]) -> str:
    return "\n".join(("Example:", *(f"  {example}" for example in examples)))


def _made() -> App:
    made = App(
        name="turnkeeper",
        help="Durable turns for LLM agents and chat bots: kill them anywhere, run them again, nothing happens twice.",
        help_format="plaintext",  # the library that renders markup takes a quarter of the time in which this command starts
        help_epilogue=_written_out(("turnkeeper list --attention", "turnkeeper show message-4711 --json")),
        result_action="return_value",
    )
    for command in COMMANDS:
        made.command(
            f"turnkeeper.cli.{command.target}",
            name=command.name,
            group=command.group,
            help="\n\n".join(filter(None, (command.summary, command.more))),
            help_epilogue=_written_out(command.examples),
        )
    made.command(
        "turnkeeper.cli.completing:install_completion",
        name="--install-completion",
        help="Install completion of commands, options and choices for bash, zsh or fish.",
        help_epilogue=_written_out(("turnkeeper --install-completion", "turnkeeper --install-completion --shell zsh")),
    )
    return made


app = _made()


def main() -> None:
    """The entry point. Exit status: what the command says (0, or 1 for "no"), or why there is none, on standard error."""
    from turnkeeper.errors import TurnkeeperError

    try:
        status = app()
    except TurnkeeperError as e:
        sys.exit(_refused([e]))
    except BaseExceptionGroup as e:
        ours = e.subgroup(TurnkeeperError)
        if ours is None:
            raise
        sys.exit(_refused(list(_leaves(ours))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _refused(errors: list[BaseException]) -> int:
    """Tell why; the exit status."""
    from turnkeeper.errors import (
        KeyUnavailable,
        OwnerAlive,
        StoreBusy,
        StoreContention,
        StoreUnavailable,
        TurnCheckpointBusy,
    )

    sys.stderr.write("".join(f"turnkeeper: {one}\n" for one in errors))
    passing = (KeyUnavailable, OwnerAlive, StoreBusy, StoreContention, StoreUnavailable, TurnCheckpointBusy)
    return NOT_NOW if all(isinstance(one, passing) for one in errors) else REFUSED


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
