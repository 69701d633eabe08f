"""What the records of a turn say of its effects, for whoever counts them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnkeeper.observe.telemetry import Change
from turnkeeper.turn import records as r
from turnkeeper.turn.state import TurnState


def changes(records: Sequence[r.AnyRecord], before: TurnState) -> Iterator[Change]:
    """What records that are durable now say of effects. `before`: the state that they were appended to.

    Of a refused call nothing is told: it was no effect. Nor of a decision that no model of ours was asked for.
    """
    refused: set[tuple[int, int]] = set()
    asked = before.model is not None
    sender = None if before.delivery is None else before.delivery.owner
    doubtful = before.delivery is not None and before.delivery.unknown
    for record in records:
        match record:
            case r.ModelStarted():
                asked = True
                yield Change("model", "begun")
            case r.AssistantReserved() if asked:
                asked = False
                yield Change("model", "completed")
            case r.ModelFailed(unknown=True):
                yield Change("model", "ambiguous")
            case r.ModelResolved():
                yield Change("model", "settled")
            case r.ToolBegun(refused=True):
                refused.add((record.round_index, record.slot_index))
            case r.ToolBegun():
                yield Change("tool", "begun")
            case r.ToolCompleted() if (record.round_index, record.slot_index) not in refused:
                yield Change("tool", "completed")
            case r.ToolAmbiguous():
                yield Change("tool", "ambiguous")
            case r.ToolResolved():
                yield Change("tool", "settled")
            case r.DeliveryReserved() if record.owner:
                yield Change("send", "begun")
            case r.DeliveryClaimed() if record.owner != sender:  # else it renews its lease
                sender = record.owner
                yield Change("send", "begun")
            case r.DeliveryUnknown() if not doubtful:
                doubtful = True
                yield Change("send", "ambiguous")
            case r.DeliveryResolved() | r.Delivered():
                if doubtful:
                    doubtful = False
                    yield Change("send", "settled")
                if isinstance(record, r.Delivered):
                    yield Change("send", "completed")
            case _:
                pass
