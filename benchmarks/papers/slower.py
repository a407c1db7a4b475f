"""A latency profile on a slower engine, for papers whose iterations took longer than the profile's."""

from __future__ import annotations

from headway.policy.forecast.latency import profiles
from headway.types import Batch, Floats


class SlowerLatency(profiles.FixedLatency):
    """A latency profile whose iterations take `factor` times as long. Not for compiled loops."""

    def __init__(self, profile: profiles.LatencyProfile, factor: float) -> None:
        super().__init__(profile.law)
        self._factor = factor

    def seconds(self, batch: Batch) -> float:
        return self._factor * super().seconds(batch)

    def prefill_seconds(self, tokens: Floats) -> Floats:
        return self._factor * super().prefill_seconds(tokens)
