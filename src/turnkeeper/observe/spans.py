"""Spans, as the rest of the library sees them. Only `telemetry.py` imports this module, and only when it is switched on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from turnkeeper.observe import names
from turnkeeper.observe.contexts import TraceContext, valid

Value = str | bool | int | float
Attributes = Mapping[str, Value | None]

KINDS: Final = {kind.name.lower(): kind for kind in trace.SpanKind}

_propagator: Final = TraceContextTextMapPropagator()


def given(attributes: Attributes) -> dict[str, Value]:
    """Those that are known."""
    return {key: value for key, value in attributes.items() if value is not None}


def context_of(span: trace.Span) -> TraceContext | None:
    """A span's context, where it has W3C's form."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    found = TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))
    return found if valid(found) else None


def span_context(context: TraceContext | None) -> trace.SpanContext | None:
    """What a context names, to be linked to; None where it is not W3C's form: that is never an error (flows.md F7)."""
    if context is None or not valid(context):
        return None
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    found = trace.get_current_span(_propagator.extract(carrier)).get_span_context()
    return found if found.is_valid else None


class Scene:
    """One span.

    Attributes:
        context: of the span, as logs keep it; None where it cannot be linked to.
        contents: whether it may hold what people, models and tools said; error messages quote that, too.
    """

    __slots__ = ("_linked", "_span", "contents", "context", "error")

    def __init__(self, span: trace.Span, *, contents: bool) -> None:
        self._span = span
        self._linked: set[TraceContext] = set()
        self.contents = contents
        self.context = context_of(span)
        self.error: str | None = None

    def put(self, attributes: Attributes) -> None:
        """Add attributes; those that are None are not known."""
        self._span.set_attributes(given(attributes))

    def quote(self, key: str, value: Callable[[], Any]) -> None:
        """Add what somebody said, where the host wants that."""
        if self.contents:
            told = value()
            text = told if isinstance(told, str) else msgspec.json.encode(told, enc_hook=str).decode()
            self._span.set_attribute(key, text)

    def link(self, context: TraceContext | None) -> bool:
        """Link to another span, once. Whether there is such a span."""
        if context is None or context == self.context:
            return False
        if context not in self._linked:
            found = span_context(context)
            if found is None:
                return False
            self._linked.add(context)
            self._span.add_link(found)
        return True

    def fail(self, kind: str, message: str | None = None) -> None:
        """It ended in an error of this kind."""
        self.error = kind
        self._span.set_attribute(names.ERROR_TYPE, kind)
        self._span.set_status(trace.StatusCode.ERROR, message if self.contents and message else kind)

    def raised(self, error: BaseException) -> None:
        """It ended in this exception."""
        self.fail(names.error_type(error), str(error))
        if self.contents and isinstance(error, Exception):
            self._span.record_exception(error)

    @contextmanager
    def current(self) -> Generator[Scene]:
        """Make the span the current one of this block and of the tasks that are begun in it, and end it."""
        with trace.use_span(self._span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield self
            except BaseException as e:
                if self.error is None:
                    self.raised(e)
                raise

    def go_on(self) -> None:
        """Make the span the current one of this task, which goes on with something else than it began with."""
        contexts.attach(trace.set_span_in_context(self._span))


class Spans:
    """Makes spans with one tracer."""

    def __init__(self, provider: trace.TracerProvider | None, version: str, *, contents: bool) -> None:
        self._tracer = trace.get_tracer(names.SCOPE, version, provider)
        self._contents = contents

    def begin(self, name: str, kind: str, attributes: Attributes, links: Iterable[TraceContext | None] = ()) -> Scene:
        """A span below the current one; it is told of only when it is ended."""
        found = [trace.Link(one) for one in map(span_context, links) if one is not None]
        span = self._tracer.start_span(name, kind=KINDS[kind], attributes=given(attributes), links=found)
        return Scene(span, contents=self._contents)


def current_context() -> TraceContext | None:
    """The context of the span that is current, where there is one."""
    return context_of(trace.get_current_span())
