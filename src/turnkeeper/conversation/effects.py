"""What the records of a conversation say of its sends, for whoever counts them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnkeeper.conversation import records as r
from turnkeeper.conversation.state import ConversationState
from turnkeeper.observe.telemetry import Change


def changes(records: Sequence[r.AnyRecord], _: ConversationState) -> Iterator[Change]:
    """What records that are durable now say of sends."""
    for record in records:
        match record:
            case r.SendBegun():
                yield Change("send", "begun")
            case r.Sent():
                yield Change("send", "completed")
            case r.SendUnknown():
                yield Change("send", "ambiguous")
            case r.SendResolved():
                yield Change("send", "settled")
                if record.sent:
                    yield Change("send", "completed")
            case _:
                pass
