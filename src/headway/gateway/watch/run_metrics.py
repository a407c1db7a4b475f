"""Metrics of application runs, and of the resources that are warmed for them."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway.gateway.watch.label_values import FewValues
from headway.policy.apps.account import EndedRun, RunAccount

_WARM_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60)
_RUN_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


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
            "headway_prewarm_seconds", "Seconds that warming took.", ["kind"], buckets=_WARM_SECONDS, registry=registry
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


class RunMetrics:
    """Metrics by application; the first 64 applications have a label of their own, all others share one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self._ends = Counter("headway_runs", "Application runs ended.", ["app", "outcome"], registry=r)
        self._seconds = Histogram(
            "headway_run_seconds",
            "From a run's first request to the end of its last.",
            ["app"],
            buckets=_RUN_SECONDS,
            registry=r,
        )
        self._owed = Counter("headway_run_slo_owed", "Runs ended with a deadline.", ["app"], registry=r)
        self._met = Counter("headway_run_slo_met", "Runs that met their deadline.", ["app"], registry=r)
        self._attainment = Gauge(
            "headway_run_slo_attainment", "Share of runs that met their deadline.", ["app"], registry=r
        )
        self._live = Gauge("headway_live_runs", "Runs that have not ended.", ["app"], registry=r)
        self._kept: dict[str, list[int]] = {}
        self._label = FewValues().of  # clients choose the names, without limit

    def ended(self, run: EndedRun) -> None:
        """Count a run that has ended."""
        app = self._label(run.key[1])
        self._ends.labels(app, run.outcome).inc()
        if run.seconds is not None:
            self._seconds.labels(app).observe(run.seconds)
        if run.met is None:
            return
        kept = self._kept.setdefault(app, [0, 0])
        kept[0], kept[1] = kept[0] + run.met, kept[1] + 1
        self._owed.labels(app).inc()
        self._met.labels(app).inc(run.met)
        self._attainment.labels(app).set(kept[0] / kept[1])

    def count(self, account: RunAccount) -> None:
        """Set the live runs as they are now."""
        live: Counts[str] = Counts()
        for tenant in account.tenants:
            for app, runs in account.live_by_app(tenant).items():
                live[self._label(app)] += runs
        self._live.clear()
        for app, runs in live.items():
            self._live.labels(app).set(runs)
