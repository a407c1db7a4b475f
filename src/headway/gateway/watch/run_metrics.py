"""Metrics of application runs: how many ended and how, how long they took, how many kept their deadline."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway.gateway.watch.label_values import FewValues
from headway.policy.apps.account import EndedRun, RunAccount

_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


class RunMetrics:
    """Metrics by application; the first 64 applications have a label of their own, all others share one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self._ends = Counter("headway_runs", "Application runs ended.", ["app", "outcome"], registry=r)
        self._seconds = Histogram(
            "headway_run_seconds",
            "From a run's first request to the end of its last.",
            ["app"],
            buckets=_SECONDS,
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
