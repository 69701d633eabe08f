"""The switch: a host that makes a `Telemetry`, and hands it over, has traces and metrics; nobody else pays for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from turnkeeper.errors import TurnkeeperError
from turnkeeper.observe import names
from turnkeeper.observe.contexts import TraceContext

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from turnkeeper.observe.spans import Attributes, Scene

Effect = Literal["model", "tool", "send"]


class Change(NamedTuple):
    """What a durable record says of an effect; `settled`: it was ambiguous, and is not any more."""

    effect: Effect
    event: Literal["begun", "completed", "ambiguous", "settled"]


Watch = Callable[[Sequence[Any], Any, "float | None"], None]
"""Is shown what a log has taken: the records, the state before them, and how long that took, where it is known."""


class OpenTelemetryMissing(TurnkeeperError, ImportError):
    """OpenTelemetry's API is not installed."""

    def __init__(self, cause: ImportError) -> None:
        super().__init__(f"telemetry: {cause}; pip install 'turnkeeper[otel]'")


class Telemetry:
    """Traces and metrics of everything that it is handed to: `Keeper.open(…, telemetry=…)`, `Conversations`, `Service`.

    Needs the extra `otel`. What is emitted is in docs/telemetry.md.

    Args:
        tracer_provider: OpenTelemetry's; the global one if None.
        meter_provider: OpenTelemetry's; the global one if None.
        contents: also tell what was said: messages, arguments, results, and the texts of errors, which quote them.

    Raises:
        OpenTelemetryMissing: its API is not installed.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        contents: bool = False,
    ) -> None:
        try:
            from turnkeeper.observe import meters, spans
        except ImportError as e:
            raise OpenTelemetryMissing(e) from e
        ours = version("turnkeeper")
        self.contents = contents
        self._spans = spans.Spans(tracer_provider, ours, contents=contents)
        self._meters = meters.Meters(meter_provider, ours)
        self.current_context = spans.current_context
        """The context of the span that is current, where there is one."""

    # --- spans -----------------------------------------------------------------------------------------------

    def begin(self, name: str, kind: str, attributes: Attributes, links: Iterable[TraceContext | None] = ()) -> Scene:
        """A span below the current one, not current itself yet; it is told of only when it is ended."""
        return self._spans.begin(name, kind, attributes, links)

    @contextmanager
    def span(self, name: str, kind: str, attributes: Attributes) -> Generator[Scene]:
        """A span below the current one, around the block. An exception makes it an error."""
        with self._spans.begin(name, kind, attributes).current() as scene:
            yield scene

    # --- metrics ---------------------------------------------------------------------------------------------

    def turn_ended(self, status: str, error: str | None) -> None:
        """A run of a turn has ended."""
        told = {names.TURN_STATUS: status}
        self._meters.turns.add(1, told if error is None else {**told, names.ERROR_TYPE: error})

    def lease_lost(self) -> None:
        """A lease was lost while its owner was at work."""
        self._meters.lost.add(1)

    def model_called(
        self, attributes: dict[str, str], seconds: float, error: str | None, tokens: tuple[int, int]
    ) -> None:
        """A model call has ended. `tokens`: of its input and of its output."""
        told = attributes if error is None else {**attributes, names.ERROR_TYPE: error}
        self._meters.models.record(seconds, told)
        for kind, count in zip(("input", "output"), tokens, strict=True):
            if count:
                self._meters.tokens.record(count, {**attributes, names.TOKEN_TYPE: kind})

    def _changed(self, change: Change) -> None:
        effect = {names.EFFECT: change.effect}
        if change.event != "settled":
            self._meters.effects.add(1, {**effect, names.EVENT: change.event})
        if change.event in ("ambiguous", "settled"):
            self._meters.ambiguous.add(1 if change.event == "ambiguous" else -1, effect)

    def watch(self, store: object, changes: Callable[[Sequence[Any], Any], Iterable[Change]]) -> Watch:
        """A watch over a log in this store. `changes` says what its records mean.

        Effects are counted as they become durable, by who wrote that: each once, whoever else reads it.
        """
        where = {names.STORE: kind_of_store(store)}

        def watch(records: Sequence[Any], before: Any, seconds: float | None) -> None:
            if seconds is not None:
                self._meters.appends.record(seconds, where)
            for change in changes(records, before):
                self._changed(change)

        return watch


def kind_of_store(store: Any) -> str:
    """A short name of a store's kind: `sqlite`, `postgres`; of one that wraps another, that one's."""
    beneath = getattr(store, "beneath", None)
    return type(store).__name__.removesuffix("Store").lower() if beneath is None else kind_of_store(beneath)
