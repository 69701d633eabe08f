"""Agent turns of a step: run once, recorded, and steered by messages that come meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.handle import ConversationHandle
from turnkeeper.conversation.message import kept_message
from turnkeeper.conversation.pen import Pen
from turnkeeper.conversation.state import ConversationState
from turnkeeper.engine.contract_ports import HostPolicyPort
from turnkeeper.engine.loop import run_turn
from turnkeeper.engine.ports import Agent
from turnkeeper.engine.stored import stored_messages, stored_result
from turnkeeper.engine.wire import (
    FinalOutputPolicyRequest,
    FinalOutputPolicyResult,
    HostPolicyRequest,
    HostPolicyResult,
    Message,
    ModelToolResult,
    Role,
    TextPart,
    chat_form,
)
from turnkeeper.errors import EffectFailed, TurnUnfinished
from turnkeeper.turn.handle import TurnHandle
from turnkeeper.turn.state import rounds_of

_NUMBER: Final = "conversationMessage"
"""Where a steered message's metadata has its number."""


@dataclasses.dataclass(frozen=True)
class AgentAnswer:
    """What an agent's turn came to.

    Attributes:
        text: its final answer, or None where it has none.
        messages: the whole conversation with it, in the chat form; give it to the next turn.
        turn_id: the turn.
        tool_results: what its tools gave, in the order of the calls: how a flow learns what the agent has decided.
    """

    text: str | None
    messages: list[dict[str, Any]]
    turn_id: str
    tool_results: tuple[ModelToolResult, ...] = ()


class _Steering:
    """Shows the agent, before each model call, what was said meanwhile; each message once, over all restarts."""

    def __init__(
        self,
        handle: ConversationHandle,
        pen: Pen,
        into: int,
        is_word: Callable[[str], bool],
        below: HostPolicyPort | None,
    ) -> None:
        self._handle = handle
        self._pen = pen
        self._into = into
        self._is_word = is_word
        self._below = below

    def _said_meanwhile(self, state: ConversationState) -> int:
        """The last of the texts that are the agent's to see: those before anything that is handled by itself (J2)."""
        last = self._into
        for one in state.inbound:
            if one.number > self._into and not one.steered_into:
                if one.kind != "text" or self._is_word(kept_message(one.message).text):
                    break
                last = one.number
        return last

    async def before_model(self, request: HostPolicyRequest) -> HostPolicyResult:
        """The conversation, and behind it what was said meanwhile."""
        state = await self._handle.read()
        last = self._said_meanwhile(state)
        if last > self._into:
            # Theirs is this turn now: durable before the model is shown them.
            await self._pen.write(c.Steer(self._pen.owner, self._pen.fence, self._into, last))
            state = self._handle.state
        shown = _numbers_in(request.messages)
        said = [
            Message(
                role=Role.USER,
                parts=[TextPart(value=kept_message(one.message).text)],
                metadata={_NUMBER: one.number},
            )
            for one in state.inbound
            if one.steered_into == self._into and one.number not in shown
        ]
        request = replace(request, messages=[*request.messages, *said])
        if self._below is not None:
            return await self._below.before_model(request)
        return HostPolicyResult(messages=request.messages, stable_prefix_messages=request.stable_prefix_messages)

    async def before_commit(self, request: FinalOutputPolicyRequest) -> FinalOutputPolicyResult:
        """As the host's own policy has it."""
        if self._below is not None:
            return await self._below.before_commit(request)
        return FinalOutputPolicyResult(output=request.output)


def _numbers_in(messages: list[Message]) -> set[int]:
    """The numbers of the steered messages that a conversation holds."""
    found = ((message.metadata or {}).get(_NUMBER) for message in messages)
    return {number for number in found if isinstance(number, int)}


def _results(turn: TurnHandle) -> Iterator[ModelToolResult]:
    for round_ in rounds_of(turn.state):
        for call, slot in zip(round_.calls, round_.slots, strict=True):
            if slot is not None and slot.result is not None:
                yield stored_result(slot.result, call.provider_call_id or "", call.tool_name)


def has_acted(turn: TurnHandle) -> bool:
    """Whether the turn has begun anything that may not run again."""
    slots = (slot for round_ in rounds_of(turn.state) for slot in round_.slots)
    return any(slot is not None and not slot.replay_safe for slot in slots)


async def run_agent(
    handle: ConversationHandle,
    pen: Pen,
    turn: TurnHandle,
    agent: Agent,
    messages: Sequence[Any],
    *,
    steered_into: int | None,
    is_word: Callable[[str], bool],
    labels: dict[str, str],
) -> AgentAnswer:
    """Run an agent's turn to its end, or give its recorded result.

    With `steered_into`, texts that come while that one is handled are shown to the agent, and settled with the turn; not from
    one on that `is_word` says ends or restarts the flow.

    Raises:
        TurnUnfinished: the turn waits for somebody.
        EffectFailed: it failed; run again, it goes on.
    """
    if steered_into is not None:
        steering = _Steering(handle, pen, steered_into, is_word, agent.host.policy)
        agent = dataclasses.replace(agent, host=dataclasses.replace(agent.host, policy=steering))
    ended = await run_turn(turn, agent, messages, labels=labels)
    if ended.status in ("reconciliation_required", "parked"):
        raise TurnUnfinished(turn.trace_id, ended.status, ended.message or "", ended.open_slots)
    if ended.status != "success":
        raise EffectFailed(f"turn {turn.trace_id!r}", ended.error_kind or "failed", ended.message or "")
    transcript = stored_messages(turn.state)
    if steered_into is not None:
        for number in sorted(_numbers_in(transcript)):
            pen.defer(c.Settle(pen.owner, pen.fence, number, "steered"))
    spoken = [chat_form(message) for message in transcript]
    return AgentAnswer(ended.output, spoken, turn.trace_id, tuple(_results(turn)))
