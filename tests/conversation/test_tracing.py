"""F7: a turn that goes on with a row links to the turn that wrote it, and to the span in which its message came."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from tests.conversation.driving import replica, state_of
from tests.conversation.platform import Platform
from turnkeeper.conversation.checkpoint import FlowCheckpoint, FlowCheckpoints, Trace
from turnkeeper.conversation.context import FlowContext
from turnkeeper.conversation.flow import Flow
from turnkeeper.conversation.message import Message
from turnkeeper.conversation.state import TraceContext
from turnkeeper.log.store import Store
from turnkeeper.observe.contexts import valid
from turnkeeper.observe.names import CONVERSATION_TURN
from turnkeeper.observe.telemetry import Telemetry
from turnkeeper.stores.sqlite import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """Traces are opaque to stores."""
    store = await SqliteStore.open(":memory:")
    yield store
    await store.close()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """What was told."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    """Tells it."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def tracer(provider: TracerProvider) -> Tracer:
    """The host's own."""
    return provider.get_tracer("tests")


@pytest.fixture
def telemetry(provider: TracerProvider) -> Telemetry:
    """Ours."""
    return Telemetry(provider)


def asking() -> Flow:
    """Two questions."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        await c.ask("One?")
        await c.ask("Two?")

    return flow


def turns(exporter: InMemorySpanExporter) -> Sequence[ReadableSpan]:
    """The spans of our turns, in order."""
    return [span for span in exporter.get_finished_spans() if span.name == CONVERSATION_TURN]


def ids(span: ReadableSpan) -> tuple[int, int]:
    """A span's trace and span id."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


async def test_links(store: Store, tracer: Tracer, telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    async with replica(store, asking(), Platform(), telemetry=telemetry) as person:
        with tracer.start_as_current_span("webhook one"):
            await person.writes("hi")
        with tracer.start_as_current_span("dispatch one"):
            await person.bot.process("c")
        await person.says("a")  # in the same process: no link to the turn before
    first, second = turns(exporter)
    row = (await state_of(store)).row
    assert row is not None
    assert row.trace is not None
    assert row.trace.traceparent.split("-")[1:3] == [f"{ids(second)[0]:032x}", f"{ids(second)[1]:016x}"]
    async with replica(store, asking(), Platform(), telemetry=telemetry) as person:
        with tracer.start_as_current_span("webhook three"):
            await person.writes("b")
        with tracer.start_as_current_span("dispatch three"):
            await person.bot.process("c")
    third = turns(exporter)[2]
    named = {span.name: span for span in exporter.get_finished_spans()}

    def linked(span: ReadableSpan) -> list[tuple[int, int]]:
        return [(link.context.trace_id, link.context.span_id) for link in span.links]

    assert linked(first) == [ids(named["webhook one"])]
    assert linked(second) == []
    assert linked(third) == [ids(second), ids(named["webhook three"])]
    for span, dispatch in ((first, "dispatch one"), (third, "dispatch three")):
        assert span.parent is not None
        assert span.parent.span_id == ids(named[dispatch])[1]


async def test_what_a_step_does_is_below_its_turn(
    store: Store, tracer: Tracer, telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    """Also where the step's task goes on with another message than it began with."""
    flow = Flow("f")

    @flow.step
    async def only(c: FlowContext) -> None:
        with tracer.start_as_current_span("before"):
            pass
        await c.ask("One?")
        with tracer.start_as_current_span("behind"):
            pass

    async with replica(store, flow, Platform(), telemetry=telemetry) as person:
        await person.says("hi")
        await person.says("a")
    named = {span.name: span for span in exporter.get_finished_spans()}
    for name, turn in zip(("before", "behind"), turns(exporter), strict=True):
        parent = named[name].parent
        assert parent is not None
        assert parent.span_id == ids(turn)[1]


async def test_without_telemetry_nothing_is_written(store: Store) -> None:
    async with replica(store, asking(), Platform()) as person:
        await person.says("hi")
    row = (await state_of(store)).row
    assert row is not None
    assert row.trace is None


async def test_invalid_contexts_are_ignored(store: Store, telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    zero = "00-00000000000000000000000000000000-b7ad6b7169203331-01"
    assert not valid(TraceContext(zero))
    assert not valid(TraceContext("not w3c"))
    assert not valid(TraceContext("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    async with replica(store, asking(), Platform(), telemetry=telemetry) as person:
        await person.bot.receive("c", Message(event_id="e", text="hi"), TraceContext(zero))
        await person.bot.process("c")
    (turn,) = turns(exporter)
    assert list(turn.links) == []
    checkpoints = FlowCheckpoints(store)
    await checkpoints.set("d", FlowCheckpoint(flow="f", step="s", trace=Trace(zero)))
    assert (await state_of(store, "d")).row.trace is None  # pyright: ignore[reportOptionalMemberAccess]
