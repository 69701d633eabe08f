"""What a step is given: the conversation as its code sees it."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from turnkeeper.conversation.message import Content, Message, as_content
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.tools import Tool
from turnkeeper.engine.tools import tool as as_tool
from turnkeeper.errors import TurnkeeperError

if TYPE_CHECKING:
    from turnkeeper.conversation.agent_turns import AgentAnswer
    from turnkeeper.conversation.run import StepRun

T = TypeVar("T")
Validate = Callable[[Message], Any]


class Reject(ValueError):
    """A validator raises this: the wait stays, and the text is sent as the new prompt, with the buttons of the old one (C6).

    Any other `ValueError` rejects, too; then the old prompt is sent again.
    """


class TimedOut(TurnkeeperError):
    """A wait was not answered in time."""


class FlowContext:
    """One visit of a step.

    Attributes:
        conversation_id: the conversation.
        state: the flow's data, JSON-like; kept when the step ends. A step that runs again begins with it as it was.
        message: the message that is handled now: the one that the step was entered with, then each wait's answer.
        earlier: messages whose handling that one has cancelled (`while_running="cancel"`), oldest first.
        why: for `on_unasked` and `on_interrupted`, the reason.
    """

    def __init__(self, run: StepRun, state: dict[str, Any], *, why: str = "") -> None:
        self._run = run
        self.state = state
        self.why = why

    @property
    def conversation_id(self) -> str:
        """The conversation."""
        return self._run.conversation_id

    @property
    def message(self) -> Message:
        """The message that is handled now."""
        return self._run.message

    @property
    def earlier(self) -> list[Message]:
        """Messages whose handling that one has cancelled."""
        return self._run.earlier

    async def send(self, content: str | Content) -> str | None:
        """Send a message, once. The channel's id of it; None where it may be out and nobody can know.

        Raises:
            MessageRefused: the channel refuses it for good.
            MessageNotDelivered: it could not be brought out for now; not caught, the step is tried again later.
            OutboxConflict: this step has sent something else here when it ran first.
        """
        return (await self._run.send(as_content(content))).message_id

    async def ask(
        self,
        prompt: str | Content | None = None,
        *,
        validate: Validate | None = None,
        timeout: float | None = None,
        only_after: bool = False,
    ) -> Any:
        """Send a prompt (or none), and wait for the next message: for days, and through any restart.

        Args:
            validate: is given the message, may be async, and gives the value that `ask` gives; `Reject` asks again. Without
                it the value is the text, or a button's value.
            timeout: seconds after which `TimedOut` is raised; a rejected answer begins them anew.
            only_after: messages that were on their way when the prompt went out are no answers to it.

        Raises:
            TimedOut: nobody answered in time.
        """
        content = None if prompt is None else as_content(prompt)
        return await self._run.ask(content, validate, timeout, only_after=only_after)

    async def do(self, effect: Tool | Callable[..., Any], **arguments: Any) -> Any:
        """Call a tool once, by its policy, and give its result: the recorded one, where it was called before.

        Raises:
            EffectFailed: it was refused, or did not happen.
            EffectConflict: this step has called it with other arguments when it ran first.
            TurnUnfinished: nobody knows whether it happened; not caught, the conversation waits until that is settled.
        """
        made = effect if isinstance(effect, Tool) else as_tool(effect)
        return await self._run.do(made, arguments)

    async def run(self, agent: Agent, input: str | Sequence[Any], *, name: str = "agent") -> AgentAnswer:  # noqa: A002
        """Run an agent's turn once, or give its recorded result.

        Args:
            input: the user's text, or the conversation up to and with the message to be answered.
            name: tells turns of different agents in one step apart.

        Raises:
            TurnUnfinished: the turn waits for somebody; not caught, so does the conversation.
            EffectFailed: the turn failed; not caught, the step is tried again, and the turn goes on.
            EffectConflict: this step has given it another input when it ran first.
        """
        messages = [{"role": "user", "content": input}] if isinstance(input, str) else list(input)
        return await self._run.agent_turn(agent, messages, name)

    async def once(self, name: str, function: Callable[[], T | Awaitable[T]]) -> T:
        """The value of `function`, made once in this visit of the step: for what differs from call to call, without effects.

        Raises:
            InvalidInput: the value cannot be kept.
        """
        return cast("T", await self._run.once(name, function))

    def now(self) -> datetime:
        """When the message that is handled now was taken, by the store's clock: the same when the step runs again."""
        return datetime.fromtimestamp(self._run.at / 1000, UTC)

    @property
    def random(self) -> random.Random:
        """Chance that is the same when the step runs again; begins anew with each answer. Not for secrets."""
        return self._run.chance

    def uuid(self) -> uuid.UUID:
        """An id that is the same when the step runs again."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    async def remind(self, name: str, content: str | Content, *, after: float) -> None:
        """Send a message `after` seconds from now, whatever the flow is at by then, once. The same name again puts it off."""
        await self._run.remind(name, as_content(content), after)

    async def forget(self, name: str) -> None:
        """Not send the reminder of that name."""
        await self._run.forget(name)

    async def send_reminder(self) -> None:
        """Send what the reminder that has fired holds."""
        await self._run.send_reminder()
