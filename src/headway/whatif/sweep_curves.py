"""The curves of a sweep: each figure by recipe, class and rate, as its mean and range over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.types import Slo
from headway.whatif.load.metrics import ALL
from headway.whatif.load.mix import parse_slo
from headway.whatif.sweep import Cell, Sweep


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One figure at one rate over its seeds; None when no seed has it."""

    mean: float | None
    low: float | None
    high: float | None
    unit: str
    seeds: int


@dataclass(frozen=True, slots=True)
class Curves:
    """The figures of a sweep against the rate.

    points: {(recipe, class, figure): {rate: CurvePoint}}
    slo: SLO of chat
    """

    points: Mapping[tuple[str, str, str], Mapping[float, CurvePoint]]
    recipes: tuple[str, ...]
    rates: tuple[float, ...]
    classes: tuple[str, ...]
    slo: Slo

    def of(self, recipe: str, tier: str, figure: str) -> Mapping[float, CurvePoint]:
        """Return a curve, empty if there is none. `attainment` is the attainment of the class."""
        name = f"attainment.{tier}" if figure == "attainment" else figure
        return self.points.get((recipe, tier, name), {})

    def has_slo(self, tier: str) -> bool:
        """Tell whether a class has an SLO: chat has, and every class that missed one."""
        points = [p for recipe in self.recipes for p in self.of(recipe, tier, "attainment").values()]
        return tier == "chat" or any(point.low is not None and point.low < 100 for point in points)


def collect(sweep: Sweep, found: Mapping[Cell, dict[str, Any]]) -> Curves:
    """Return the curves of the computed cells."""
    seen: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    units: dict[str, str] = {}
    for cell, data in found.items():
        for figure, tier, ours, unit in data["rows"]:
            values = seen.setdefault((cell.recipe, tier, figure), {}).setdefault(cell.rate, [])
            values += [] if ours is None else [ours]
            units[figure] = unit
    points = {
        key: {rate: _point(values, units[key[2]]) for rate, values in by_rate.items()} for key, by_rate in seen.items()
    }
    tiers = dict.fromkeys(tier for _, tier, _ in points if tier != ALL)
    return Curves(points, sweep.recipes, tuple(sorted(set(sweep.rates))), (*tiers, ALL), parse_slo(sweep.slo))


def _point(values: list[float], unit: str) -> CurvePoint:
    if not values:
        return CurvePoint(None, None, None, unit, 0)
    return CurvePoint(float(np.mean(values)), min(values), max(values), unit, len(values))
