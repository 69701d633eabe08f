"""The ports of the engine: what it asks of a model and of a channel for replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from turnkeeper.engine.contract_ports import EnginePermissionPort, ModelStreamPort
from turnkeeper.engine.host import Host, QuietStream
from turnkeeper.engine.outcomes import LookedUp
from turnkeeper.engine.tools import Tool
from turnkeeper.engine.usage import Budget
from turnkeeper.engine.wire import (
    DelegatedStateReference,
    Message,
    ModelInvocationContextSnapshot,
    ModelInvocationResponse,
)
from turnkeeper.errors import InvalidInput, TurnkeeperError


async def _not_kept(_: DelegatedStateReference) -> None:
    """Of a request that is in no log."""


@dataclass(frozen=True)
class ModelRequest:
    """One model call.

    Attributes:
        turn_id: the turn.
        round_index: the zero-based round that the answer decides.
        attempt: the zero-based attempt at this round's answer, over all processes.
        invocation_id: the idempotency key of this attempt.
        messages: the conversation so far; every call in it has its result.
        tools: what the model may call.
        context: what the host's context pipeline made of the conversation, if it has one; `messages` are its.
        stream: shows the host what the model says while it says it.
        reference: what the provider calls this call, where that is journaled: a look-up asks for it by that.
        known_as: journals what the provider calls this call. Await it as soon as that is known, before the answer: whoever
            comes after a crash can then fetch the answer instead of buying another one.
    """

    turn_id: str
    round_index: int
    attempt: int
    invocation_id: str
    messages: Sequence[Message]
    tools: Sequence[Tool]
    context: ModelInvocationContextSnapshot | None = None
    stream: ModelStreamPort = field(default_factory=lambda: QuietStream(None), compare=False, repr=False)
    reference: DelegatedStateReference | None = None
    known_as: Callable[[DelegatedStateReference], Awaitable[None]] = field(default=_not_kept, compare=False, repr=False)


class ModelPort(Protocol):
    """Something that answers model requests.

    Attributes `provider` and `model`, where it has them, are names for telemetry, by the GenAI conventions (`openai`, `gpt-5.5`).
    """

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """Answer, wholly: what a cut stream brought is raised as an error, never returned.

        What it raises is taken for a call that brought no answer, and is tried again; `OutcomeUnknown` is not.
        """
        ...


class AnswerCut(TurnkeeperError):
    """The model's answer ended before it was complete; nothing of it is used."""


@dataclass(frozen=True)
class Reply:
    """A reply to be sent.

    Attributes:
        key: the same on every attempt; hand it to the channel as its idempotency key.
        text: the exact text.
        turn_id: the turn that it answers.
    """

    key: str
    text: str
    turn_id: str


@dataclass(frozen=True)
class ReplyPort:
    """A channel for replies, and what it can tell after a crash in the middle of a send.

    Attributes:
        send: sends, and gives the channel's message id. Raises `NotSent`, `EffectRefused` or `OutcomeUnknown`; any other
            exception is classified by `outcomes.classify`.
        keyed: the channel drops a second message with the same key, so an unknown send is sent again.
        find: looks for a sent reply by its key; `Happened(message_id)` where it is found.
    """

    send: Callable[[Reply], Awaitable[str]]
    keyed: bool = False
    find: Callable[[Reply], Awaitable[LookedUp]] | None = None


@dataclass(frozen=True)
class Agent:
    """A model with its tools.

    Attributes:
        model: answers.
        tools: what the model may call.
        instructions: a system message put before the conversation, or None.
        max_rounds: most model decisions in one turn. None: 50, or what the turn was adopted with.
        max_model_attempts: most calls for one decision in one run. None: 3, or what the turn was adopted with.
        parallel_tools: run the tools of a round at the same time. Results commit in request order either way.
        on_ambiguous: what to do where no policy can tell whether a tool's effect happened: stop the turn until somebody
            settles it, or tell the model that the outcome is unknown and go on. It is not repeated either way.
        permission: asked before each tool call; None allows all of them. `HumanApproval` parks the turn until somebody decides.
        host: what else the host has a say in.
        budget: what a turn may take before it stops with `budget_exhausted`; run again with a larger one, it goes on.
        max_depth: how deep agents may delegate to agents.
        unknown_model: what to do about a model call that may have been answered: `reinvoke` makes it again with the next run (it
            may be billed twice, its effects happen once), `reconcile` stops until that is settled.
        reconcile_model: looks up what became of such a call; `Happened(response)` brings its answer.
        lease_seconds: how long this worker may be silent before another may take its work over; renewed at a third of it.
    """

    model: ModelPort
    tools: Sequence[Tool] = ()
    instructions: str | None = None
    max_rounds: int | None = None
    max_model_attempts: int | None = None
    parallel_tools: bool = True
    on_ambiguous: Literal["stop", "report"] = "stop"
    permission: EnginePermissionPort | None = None
    host: Host = field(default_factory=Host)
    budget: Budget | None = None
    max_depth: int = 5
    unknown_model: Literal["reinvoke", "reconcile"] = "reinvoke"
    reconcile_model: Callable[[ModelRequest], Awaitable[LookedUp]] | None = None
    lease_seconds: float = 30.0
    by_name: dict[str, Tool] = field(init=False, repr=False)

    @property
    def announces_ahead(self) -> bool:
        """Whether a model call may be announced in the append that ends what was before it.

        Not where something comes in between; and not where a call that was announced counts as perhaps made: a process that dies
        before it gets there should leave no doubt.
        """
        return not self.host.prepares and self.unknown_model == "reinvoke"

    def __post_init__(self) -> None:
        for name, number in (("max_rounds", self.max_rounds), ("max_model_attempts", self.max_model_attempts)):
            if number is not None and number < 1:
                raise InvalidInput(name, f"must be at least 1, not {number}")
        if not self.lease_seconds > 0:
            raise InvalidInput("lease_seconds", f"must be more than 0, not {self.lease_seconds}")
        if self.unknown_model not in ("reinvoke", "reconcile"):
            raise InvalidInput("unknown_model", f"must be 'reinvoke' or 'reconcile', not {self.unknown_model!r}")
        if self.on_ambiguous not in ("stop", "report"):
            raise InvalidInput("on_ambiguous", f"must be 'stop' or 'report', not {self.on_ambiguous!r}")
        object.__setattr__(self, "by_name", {tool.name: tool for tool in self.tools})
        if len(self.by_name) != len(self.tools):
            raise InvalidInput("tools", "two tools have the same name")
