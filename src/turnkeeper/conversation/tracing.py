"""Trace contexts of conversations (flows.md F7): a turn that goes on with a row links to the turn that wrote it.

OpenTelemetry is imported only where the host gives a tracer.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from turnkeeper.conversation.state import TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, Tracer

SPAN_NAME: Final = "turnkeeper.conversation.turn"
"""The span of handling one message."""
CONVERSATION_ID: Final = "gen_ai.conversation.id"
MESSAGE_NUMBER: Final = "turnkeeper.message.number"

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LONGEST_STATE: Final = 512


def valid(context: TraceContext) -> bool:
    """Whether it is W3C's form, with ids that are not zero."""
    return _TRACEPARENT.fullmatch(context.traceparent) is not None and len(context.tracestate) <= _LONGEST_STATE


def context_of(span: Span) -> TraceContext | None:
    """A span's context, where it has W3C's form."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    found = TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))
    return found if valid(found) else None


def current_context() -> TraceContext | None:
    """The context of the span that is current, where there is one."""
    from opentelemetry import trace

    return context_of(trace.get_current_span())


def _links(contexts: Iterable[TraceContext | None]) -> list[Link]:
    """Links to contexts; what is not W3C's form is ignored."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    links: list[Link] = []
    for context in contexts:
        if context is None or not valid(context):
            continue
        carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
        remote = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
        if remote.is_valid:
            links.append(trace.Link(remote))
    return links


def begin_span(tracer: Tracer, conversation_id: str, number: int, links: Iterable[TraceContext | None]) -> Span:
    """The span of a message's handling, below the current one; it is told of only when it is ended."""
    from opentelemetry import trace

    attributes = {CONVERSATION_ID: conversation_id, MESSAGE_NUMBER: number}
    return tracer.start_span(SPAN_NAME, kind=trace.SpanKind.CONSUMER, attributes=attributes, links=_links(links))


@contextmanager
def within(span: Span | None) -> Generator[None]:
    """Make the span the current one, and end it."""
    if span is None:
        yield
        return
    from opentelemetry import trace

    with trace.use_span(span, end_on_exit=True):
        yield


def continue_in(span: Span | None) -> None:
    """Make the span the current one of this task, which goes on with another message than it began with."""
    if span is not None:
        from opentelemetry import context, trace

        context.attach(trace.set_span_in_context(span))
