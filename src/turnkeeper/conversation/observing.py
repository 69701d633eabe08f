"""What telemetry is told of conversations. Nothing here is reached where telemetry is off."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from turnkeeper.conversation.channel import NotSent, Refused, SendOutcome, Sent, Unknown
from turnkeeper.conversation.message import Content
from turnkeeper.observe import names
from turnkeeper.observe.contexts import TraceContext
from turnkeeper.observe.telemetry import Telemetry

if TYPE_CHECKING:
    from turnkeeper.observe.spans import Scene


def begin_turn(telemetry: Telemetry, conversation_id: str, number: int, links: Iterable[TraceContext | None]) -> Scene:
    """The span of a message's handling, below the current one; it is told of only when it is ended."""
    attributes = {names.CONVERSATION_ID: conversation_id, names.MESSAGE_NUMBER: number}
    return telemetry.begin(names.CONVERSATION_TURN, "consumer", attributes, links)


@contextmanager
def message_send(
    telemetry: Telemetry, conversation_id: str, key: str, content: Content
) -> Generator[Callable[[SendOutcome], None]]:
    """An attempt at sending a message; hand its outcome to what is given."""
    attributes = {names.CONVERSATION_ID: conversation_id, names.SEND_KEY: key}
    with telemetry.span(names.SEND, "producer", attributes) as scene:
        scene.quote(names.SENT_TEXT, lambda: content.text)

        def ended(outcome: SendOutcome) -> None:
            match outcome:
                case Sent(message_id):
                    scene.put({names.OUTCOME: "success", names.SENT_MESSAGE_ID: message_id})
                case Refused(reason):
                    scene.put({names.OUTCOME: "refused"})
                    scene.fail("send_refused", reason)
                case NotSent(reason):
                    scene.put({names.OUTCOME: "not_sent"})
                    scene.fail("send_not_sent", reason)
                case Unknown(reason):
                    scene.put({names.OUTCOME: "ambiguous"})
                    scene.fail("send_outcome_unknown", reason)

        yield ended
