"""What a message is for, by its content and by the flow that the conversation is in; the log's rules decide upon the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnkeeper.conversation import commands as c
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.identity import send_key
from turnkeeper.conversation.message import Message, kept_message
from turnkeeper.conversation.state import ConversationState, Inbound, Row, SendKey
from turnkeeper.errors import FlowUnknown, InvalidInput
from turnkeeper.log import values


def flows_by_name(flows: Sequence[Flow]) -> dict[str, Flow]:
    """A bot's flows.

    Raises:
        InvalidInput: there are none, two have the same name, or one has no steps.
    """
    named = {flow.name: flow for flow in flows}
    if len(named) != len(flows) or not flows:
        raise InvalidInput("flows", "each needs a name of its own, and there has to be one")
    for flow in flows:
        _ = flow.first_step
    return named


class Intents:
    """What messages are for, in a bot with these flows."""

    def __init__(self, flows: Mapping[str, Flow]) -> None:
        self._flows = flows

    def look(self, state: ConversationState, inbound: Inbound) -> tuple[c.Intent, c.Start | None, str]:
        """What a message is for; the flow that it begins, if it does; and why, where it is for nothing.

        Raises:
            FlowUnknown: only a process with other code can tell.
        """
        message = kept_message(inbound.message)
        row = state.flow
        start = self._start(message)
        if row is None:
            return ("start", start, "" if start is not None else "idle")
        flow = self._flows.get(row.flow)
        if flow is None or row.version > flow.version or row.document is not None:
            raise FlowUnknown(state.conversation_id, row.flow, row.version)
        if flow.present_name(row.step) is None:
            return "cancel", None, "version"
        if row.handover is not None and row.handover.kind == "stub":
            return "cancel", None, "interrupted"
        meant = flow.meaning(message.text) if message.kind == "text" else None
        if meant == "cancel":
            return "cancel", None, "cancelled"
        if meant == "restart":
            return "restart", _start_of(flow), ""
        if message.kind == "edit":
            return "unasked", start, "edit"
        if message.kind == "button" and not _belongs(state, row, message):
            return "unasked", start, "stale_button"
        return "answer", start, "older_than_prompt"

    def _start(self, message: Message) -> c.Start | None:
        flow = next((flow for flow in self._flows.values() if flow.begins_with(message)), None)
        return None if flow is None else _start_of(flow)


def _start_of(flow: Flow) -> c.Start:
    state = values.freeze(flow.initial(), "state")
    return c.Start(flow.name, flow.version, flow.first_step, state, flow.resume == "first-wait")


def _belongs(state: ConversationState, row: Row, message: Message) -> bool:
    """Whether a button is one of the prompt that is open."""
    if not message.prompt:
        return False
    # Buttons are under the last chunk; which one that is, only its channel knows.
    keys = [send.key for send in state.sends if send.key[:2] in row.prompts] + [SendKey(*one) for one in row.prompts]
    return any(message.prompt == send_key(state.conversation_id, state.seed, key) for key in keys)
