"""What the in-memory exporters of OpenTelemetry's SDK were told."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from turnkeeper import Telemetry
from turnkeeper.observe import names


class Watched:
    """A host with telemetry."""

    def __init__(self, *, contents: bool = False) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        meters = MeterProvider([self._reader])
        self.telemetry = Telemetry(self.provider, meters, contents=contents)

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """The spans of a kind, in the order in which they ended."""
        ended = self._exporter.get_finished_spans()
        return [span for span in ended if not name or span.name == name or span.name.startswith(f"{name} ")]

    def only(self, name: str) -> ReadableSpan:
        """The one span of a kind."""
        (span,) = self.spans(name)
        return span

    def metric(self, name: str) -> dict[tuple[str, ...], Any]:
        """The points of a metric by the values of its attributes, in the order of their names: a sum, or how many."""
        data = self._reader.get_metrics_data()
        told: list[Any] = [] if data is None else list(data.resource_metrics)
        metrics: list[Any] = [metric for one in told for scope in one.scope_metrics for metric in scope.metrics]
        found: dict[tuple[str, ...], Any] = {}
        for point in (point for metric in metrics if metric.name == name for point in metric.data.data_points):
            attributes: dict[str, Any] = dict(point.attributes or {})
            key = tuple(str(attributes[attribute]) for attribute in sorted(attributes))
            found[key] = point.count if isinstance(point, HistogramDataPoint) else point.value
        return found

    def effects(self) -> dict[tuple[str, ...], Any]:
        """How many effects of which kind were begun, completed and became ambiguous."""
        return self.metric(names.EFFECTS)


def ids(span: ReadableSpan) -> tuple[int, int]:
    """Trace and span id."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    """The same of its parent."""
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    """The same of what it links to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def told(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes."""
    return dict(span.attributes or {})


def emitted(span: ReadableSpan) -> str:
    """Everything that it says, as text."""
    return span.to_json()
