"""Metrics that are made when a page is asked for: totals, the planner's, and the engines' own families."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger("headway.gateway")
_MOST_LINES, _LONGEST_LINE = 20_000, 2**14  # of an engine's page; its parser takes 20 us and more for a line


class EngineTotals(Collector):
    """Totals of instances and their schedulers, as `headway_engine_NAME_total` with an `instance` label."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, float]] = {}

    def collect(self) -> list[CounterMetricFamily]:
        families: dict[str, CounterMetricFamily] = {}
        for instance, counters in self.engines.items():
            for name, value in counters.items():
                fresh = CounterMetricFamily(f"headway_engine_{name}", f"Total of {name}.", labels=["instance"])
                families.setdefault(name, fresh).add_metric([instance], value)
        return list(families.values())


class PlanGauges(Collector):
    """What the planner sees, as `headway_plan_NAME`."""

    def __init__(self) -> None:
        self.gauges: Mapping[str, float] = {}

    def collect(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily(f"headway_plan_{name}", f"The planner's {name}.", value=value)
            for name, value in self.gauges.items()
        ]


class Wanted(Collector):
    """How many engines models need. counts: returns the number by model, of those with [scale]."""

    def __init__(self) -> None:
        self.counts: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> list[GaugeMetricFamily]:
        help = "Engines that a model's promises need now, of models with [scale]."
        family = GaugeMetricFamily("headway_wanted_engines", help, labels=["model"])
        for model, count in self.counts().items():
            family.add_metric([model], count)
        return [family]


class Families(Collector):
    """Families as they are given."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def relabelled(pages: Mapping[str, str]) -> list[Metric]:
    """Return the engines' own families, each sample with an `instance` label; pages: instance -> its page."""
    families: dict[str, Metric] = {}
    for instance, page in pages.items():
        for family in _parse(instance, page):
            # Process metrics of the API server would collide with those of other exporters.
            if not family.name.startswith("vllm:"):
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "instance": instance}) for sample in family.samples
            ]
    return list(families.values())


def _parse(instance: str, page: str) -> list[Metric]:
    """Return an engine's families; none when it serves no metrics but something else."""
    try:
        lines = page.splitlines()
        if len(lines) > _MOST_LINES or max(map(len, lines), default=0) > _LONGEST_LINE:
            raise ValueError(f"more than {_MOST_LINES:,} lines, or one of {_LONGEST_LINE:,} characters")
        return list(text_string_to_metric_families(page))
    except ValueError as error:
        log.warning("the metrics of engine %s cannot be read: %s", instance, error)
        return []
