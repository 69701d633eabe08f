"""The instruments of our metrics. Only `telemetry.py` imports this module, and only when it is switched on."""

from __future__ import annotations

from opentelemetry import metrics

from turnkeeper.observe import names

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""An append takes from a fraction of a millisecond (a file) to seconds (a store that is going down)."""
_LONG_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""The conventions' for model calls."""
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
"""The conventions' for tokens."""


class Meters:
    """The instruments of one meter."""

    def __init__(self, provider: metrics.MeterProvider | None, version: str) -> None:
        meter = metrics.get_meter(names.SCOPE, version, provider)
        told = {one.name: {"unit": one.unit, "description": one.counts} for one in names.METRICS}
        self.turns = meter.create_counter(names.TURNS, **told[names.TURNS])
        self.effects = meter.create_counter(names.EFFECTS, **told[names.EFFECTS])
        self.ambiguous = meter.create_up_down_counter(names.AMBIGUOUS_OPEN, **told[names.AMBIGUOUS_OPEN])
        self.lost = meter.create_counter(names.LEASE_LOSSES, **told[names.LEASE_LOSSES])
        self.appends = meter.create_histogram(
            names.APPEND_DURATION, explicit_bucket_boundaries_advisory=_SECONDS, **told[names.APPEND_DURATION]
        )
        self.models = meter.create_histogram(
            names.MODEL_DURATION, explicit_bucket_boundaries_advisory=_LONG_SECONDS, **told[names.MODEL_DURATION]
        )
        self.tokens = meter.create_histogram(
            names.TOKEN_USAGE, explicit_bucket_boundaries_advisory=_TOKENS, **told[names.TOKEN_USAGE]
        )
