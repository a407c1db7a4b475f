"""Metrics of warm-ups by kind of resource."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60)


class PrewarmMetrics:
    """Metrics of warm-ups by kind of resource."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._begun = Counter(
            "headway_prewarm",
            "Warm-ups by kind: warmed, kept (warm already), skipped, failed.",
            ["kind", "outcome"],
            registry=registry,
        )
        self._ended = Counter(
            "headway_prewarm_end", "Ends of warm resources: used or wasted.", ["kind", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "headway_prewarm_seconds", "Seconds that warming took.", ["kind"], buckets=_SECONDS, registry=registry
        )
        self._idle = Counter(
            "headway_prewarm_idle_seconds", "Seconds that warm resources waited.", ["kind"], registry=registry
        )

    def begun(self, kind: str, outcome: str) -> None:
        """Count a warm-up: "warmed", "kept", "skipped" or "failed"."""
        self._begun.labels(kind, outcome).inc()

    def took(self, kind: str, seconds: float) -> None:
        """Count the seconds that warming took."""
        self._seconds.labels(kind).observe(seconds)

    def ended(self, kind: str, used: bool, idle: float) -> None:
        """Count the end of a warm resource, and the seconds that it waited for a use."""
        self._ended.labels(kind, "used" if used else "wasted").inc()
        self._idle.labels(kind).inc(idle)
