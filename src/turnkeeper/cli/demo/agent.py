"""The demo's agent: a model that replays recorded decisions, tools that write to the ledger, a channel that does too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from turnkeeper.cli.demo.conversations import EFFECT_TOOLS, Turn
from turnkeeper.cli.demo.ledger import Ledger
from turnkeeper.engine.outcomes import DidNotHappen, Happened, LookedUp
from turnkeeper.engine.ports import Agent, ModelRequest, Reply, ReplyPort
from turnkeeper.engine.stored import stored_response_from
from turnkeeper.engine.tools import Tool, ToolContext
from turnkeeper.engine.wire import ModelInvocationResponse, chat_form
from turnkeeper.errors import TurnkeeperError

Reached = Callable[[str], None]


class TranscriptDiffers(TurnkeeperError):
    """The model was shown another conversation than the recorded one: a message is lost, doubled or out of order."""


class Stage:
    """What the demo's agent plays: the turns by id, the ledger, and whom to tell of boundaries.

    Args:
        prefix: stands before the ids of the turns of this run of the demo.
    """

    def __init__(self, turns: Iterable[Turn], ledger: Ledger, prefix: str, reached: Reached) -> None:
        self._turns = {f"{prefix}{turn.id}": turn for turn in turns}
        self._ledger = ledger
        self._reached = reached

    def agent(self, lease_seconds: float) -> Agent:
        """The agent, with a tool for every name in the recorded conversations."""
        names = sorted({name for turn in self._turns.values() for _, _, name, _ in turn.calls})
        longest = max((len(turn.decisions) for turn in self._turns.values()), default=0)
        return Agent(self, [self._tool(name) for name in names], max_rounds=longest + 2, lease_seconds=lease_seconds)

    def reply_port(self) -> ReplyPort:
        """A channel without idempotency keys whose sent messages can be looked up."""
        return ReplyPort(self._send, find=self._find)

    async def invoke(self, request: ModelRequest) -> ModelInvocationResponse:
        """Answer as recorded; the conversation shown must be the recorded one, message by message."""
        turn = self._turns[request.turn_id]
        self._reached("before model call")
        self._ledger.note_model_call(request.turn_id, request.round_index)
        shown = [chat_form(message) for message in request.messages]
        recorded = turn.conversation.messages[: len(shown)]
        if shown != recorded:
            at = next(i for i, (one, other) in enumerate(zip(shown, recorded, strict=False)) if one != other)
            raise TranscriptDiffers(
                f"turn {request.turn_id}: message {at} is {shown[at]!r:.200}, not {recorded[at]!r:.200}"
            )
        self._reached("after model call")
        if request.round_index >= len(turn.decisions):
            return ModelInvocationResponse()
        return stored_response_from(turn.decisions[request.round_index], f"decision of {turn.id}")

    def _tool(self, name: str) -> Tool:
        policy = EFFECT_TOOLS.get(name)
        if policy is None:

            def read(context: ToolContext, **arguments: Any) -> str:
                return self._result(context)

            return Tool(read, name=name, replay_safe=True)

        def change(context: ToolContext, **arguments: Any) -> str:
            self._reached("before effect")
            text = msgspec.json.encode(arguments).decode()
            self._ledger.do(context.operation_id, context.turn_id, name, text, os.getpid())
            self._reached("after effect")
            return self._result(context)

        return Tool(change, name=name, reconcile=self._look_up if policy == "reconcile" else None)

    def _result(self, context: ToolContext) -> str:
        return self._turns[context.turn_id].results[context.round_index, context.slot_index]

    async def _look_up(self, context: ToolContext) -> LookedUp:
        rows = self._ledger.effects(context.operation_id)
        if rows:
            return Happened(self._result(context), f"ledger row {rows[0].id}")
        return DidNotHappen("no ledger row")

    async def _send(self, reply: Reply) -> str:
        self._reached("before send")
        message_id = self._ledger.send(reply.key, reply.turn_id, reply.text)
        self._reached("after send")
        return message_id

    async def _find(self, reply: Reply) -> LookedUp:
        message_id = self._ledger.find_reply(reply.key)
        return (
            DidNotHappen("not in the channel") if message_id is None else Happened(message_id, "found in the channel")
        )
