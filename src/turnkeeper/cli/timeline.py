"""One line of a turn's time line for each kind of record."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from turnkeeper.cli.output import owner_name
from turnkeeper.turn import records as r


class Line(NamedTuple):
    """What an operator reads of a record.

    Attributes:
        what: the kind of record.
        place: `round` or `round.slot`.
        detail: the rest, in a few words.
        style: how it is coloured.
    """

    what: str
    place: str
    detail: str
    style: str
    fields: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The same for programs: every field that is no frame."""
        return {"record": self.what, **self.fields}


def describe(record: r.AnyRecord) -> Line:
    """The line of a record."""
    fields: dict[str, Any] = {
        name: value
        for name, value in msgspec.structs.asdict(record).items()
        if not isinstance(value, bytes) and name not in ("calls", "labels", "trace")
    }
    trace = getattr(record, "trace", None)
    if trace is not None:
        fields["traceparent"] = trace.traceparent
    what = str(type(record).__struct_config__.tag)
    place = str(fields.get("round_index", ""))
    if "slot_index" in fields:
        place += f".{fields['slot_index']}"
    detail, style = _detail(record)
    return Line(what, place, detail, style, fields)


def _lease(record: Any) -> str:
    return f"{owner_name(record.owner)}, lease {record.lease_ms / 1000:g} s"


def _detail(record: r.AnyRecord) -> tuple[str, str]:
    match record:
        case r.Started():
            return f"input {record.input_fingerprint[:8]}", "bold"
        case r.ModelStarted():
            return _lease(record), "cyan"
        case r.ModelFailed():
            return record.message, "yellow"
        case r.ModelResolved():
            return f"{record.resolution.value}, says {record.who}: {record.why}", "magenta"
        case r.AssistantReserved():
            return ", ".join(call.tool_name for call in record.calls) or "final answer", "cyan"
        case r.PermissionResolved():
            reason = f": {record.reason}" if record.reason else ""
            return f"{'approved' if record.approved else 'denied'}, says {record.who}{reason}", "magenta"
        case r.ToolClaimed() | r.ToolBegun():
            safe = ", may run again" if record.replay_safe else ""
            return f"fence {record.fence}, {_lease(record)}{safe}", "blue"
        case r.ModelRenewed() if record.reference is not None:
            return f"its provider calls it {record.reference.id}, lease {record.lease_ms / 1000:g} s", "cyan"
        case r.ToolRenewed() | r.ModelRenewed():
            return f"lease {record.lease_ms / 1000:g} s", "dim"
        case r.ToolCompleted():
            return "late, accepted as proof" if record.late else "", "green"
        case r.ToolAmbiguous():
            return record.reason, "bold red"
        case r.ToolEvidence():
            return f"a late result from {owner_name(record.owner)}, fence {record.fence}", "yellow"
        case r.ToolResolved():
            return f"{record.resolution.value}, says {record.who}: {record.why}", "magenta"
        case r.RoundCommitted():
            return f"first {record.keep} messages kept", ""
        case r.DeliveryReserved():
            return f"key {record.key}", ""
        case r.DeliveryUnknown():
            return record.reason, "bold red"
        case r.DeliveryResolved():
            return f"not sent, says {record.who}: {record.why}", "magenta"
        case r.Delivered():
            found = f", says {record.who}: {record.why}" if record.who else ""
            return f"message {record.message_id}{found}", "green"
        case r.DeliveryDisputed():
            return f"also as message {record.message_id}", "bold red"
        case r.LeasesReleased():
            return f"{owner_name(record.owner)} is dead, says {record.who}: {record.why}", "magenta"
        case r.RunStopped():
            return f"{record.status}: {record.error_kind}, {record.message}", "yellow"
        case r.Completed():
            return "without a reply" if record.no_output else "", "bold green"
        case _:
            return "", ""
