"""Flows: named, ordered steps, each a plain async function (flows.md F1)."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from turnkeeper.conversation.message import Message
from turnkeeper.errors import InvalidInput
from turnkeeper.log import values

if TYPE_CHECKING:
    from turnkeeper.conversation.context import FlowContext

END: Final = "\x00end"
"""What a step returns to end its flow."""

Step = Callable[["FlowContext"], Awaitable[Any]]
Resume = Literal["all-answers", "first-wait"]
WhileRunning = Literal["queue", "steer", "cancel"]


class Flow:
    """A conversation's course.

    A step's code runs again from its start whenever it is gone on with by another process, with the answers that it was
    given before. So what it does has to be the same again: messages go through `c.send` and `c.ask`, effects through `c.do`,
    time and chance through `c.now` and `c.random`, everything else that may differ through `c.once`.
    """

    def __init__(
        self,
        name: str,
        *,
        version: int = 1,
        resume: Resume = "all-answers",
        starts: Callable[[Message], bool] | None = None,
        cancel_words: Collection[str] = (),
        restart_words: Collection[str] = (),
        while_running: WhileRunning = "queue",
        renamed: Mapping[str, str] | None = None,
        initial: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """
        Args:
            name: names the flow in its checkpoints.
            version: of its code; a checkpoint of a newer version is left to processes that know it.
            resume: `all-answers` keeps what every wait of the unfinished step was answered; `first-wait` keeps the first
                one's answer only, and asks the later ones again when its process is lost (the seed's mode).
            starts: whether a message begins this flow where none is under way; None: every text does.
            cancel_words, restart_words: texts (in any case) that end the flow, or begin it anew, at any wait.
            while_running: what a second message does while a step runs. `queue`: it waits. `steer`: it is shown to the agent
                of `c.run` before its next model call. `cancel`: what is under way is given up, unless an effect was begun, and
                begun anew with both messages.
            renamed: steps of older versions by their present names. A step that is not there any more, under no name, ends
                the flow with the reason `version`.
            initial: makes the state that the flow begins with.

        Raises:
            InvalidInput: an argument is not known.
        """
        self.name = values.identifier(name, "flow name", longest=128)
        self.version = version
        if resume not in ("all-answers", "first-wait"):
            raise InvalidInput("resume", f"must be 'all-answers' or 'first-wait', not {resume!r}")
        if while_running not in ("queue", "steer", "cancel"):
            raise InvalidInput("while_running", f"must be 'queue', 'steer' or 'cancel', not {while_running!r}")
        self.resume: Resume = resume
        self.while_running: WhileRunning = while_running
        self.cancel_words = frozenset(word.casefold() for word in cancel_words)
        self.restart_words = frozenset(word.casefold() for word in restart_words)
        self.renamed = dict(renamed or {})
        self.initial = initial
        self._starts = starts
        self._steps: dict[str, Step] = {}
        self.when_cancelled: Step | None = None
        self.when_unasked: Step | None = None
        self.when_ended: Step | None = None

    def step(self, function: Step) -> Step:
        """Make an async function the flow's next step. It gets a `FlowContext`, and returns the next step's name, the next
        step itself, `END`, or None for the step that was defined behind it.

        Raises:
            InvalidInput: it is no async function, or there is a step of that name.
        """
        name = getattr(function, "__name__", "")
        if not inspect.iscoroutinefunction(function):
            raise InvalidInput("step", f"{name or function!r} of the flow {self.name!r} has to be an async function")
        if name in self._steps:
            raise InvalidInput("step", f"the flow {self.name!r} has two steps named {name!r}")
        self._steps[values.identifier(name, "step name", longest=128)] = function
        return function

    def on_cancel(self, function: Step) -> Step:
        """Run this when a cancel word ends the flow; it may send."""
        self.when_cancelled = function
        return function

    def on_unasked(self, function: Step) -> Step:
        """Run this for a message that is no answer to anything: `c.why` tells why. It may send."""
        self.when_unasked = function
        return function

    def on_interrupted(self, function: Step) -> Step:
        """Run this when the flow cannot be gone on with: `c.why` is `version` or `interrupted`. It may send."""
        self.when_ended = function
        return function

    # --- for the runner --------------------------------------------------------------------------------------

    @property
    def first_step(self) -> str:
        """Where it begins.

        Raises:
            InvalidInput: it has no steps.
        """
        if not self._steps:
            raise InvalidInput("flow", f"the flow {self.name!r} has no steps")
        return next(iter(self._steps))

    def begins_with(self, message: Message) -> bool:
        """Whether a message begins this flow."""
        return message.kind == "text" if self._starts is None else self._starts(message)

    def meaning(self, text: str) -> Literal["cancel", "restart"] | None:
        """Whether a text ends the flow, or begins it anew; None for any other."""
        word = text.strip().casefold()
        if not word:
            return None
        if word in self.cancel_words:
            return "cancel"
        return "restart" if word in self.restart_words else None

    def present_name(self, step: str) -> str | None:
        """What a step of any version is called now; None where it has no successor."""
        step = self.renamed.get(step, step)
        return step if step in self._steps else None

    def code(self, step: str) -> Step:
        """The function of a step."""
        return self._steps[step]

    def after(self, step: str, returned: Any) -> str | None:
        """The name of the step behind `step`, by what that returned; None where the flow ends.

        Raises:
            InvalidInput: it named a step that there is not.
        """
        if returned is None:
            names = list(self._steps)
            behind = names.index(step) + 1
            return names[behind] if behind < len(names) else None
        if returned == END:
            return None
        name = returned if isinstance(returned, str) else getattr(returned, "__name__", "")
        if name not in self._steps:
            raise InvalidInput(
                "step", f"{step!r} of the flow {self.name!r} goes on with {returned!r}, which is no step"
            )
        return name
