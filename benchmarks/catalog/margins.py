"""By how many points Headway keeps more promises than the best of other systems, or fewer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headway.whatif.output.plots import colours, legend, png, sheet
from headway.whatif.output.results import Row

HEADWAY = "headway"
WITHIN = 1.0  # points: as good as the best


class Case(NamedTuple):
    """A system at a setting, as rows name it, of a load."""

    load: float
    setting: str
    system: str


def margins(kept: Mapping[Case, float], others: Collection[str]) -> dict[tuple[float, str], tuple[float, str]]:
    """Return by load and setting the points that Headway is ahead, and of which of the others, the best one.

    kept: %. Settings without Headway or without any of the others are left out.
    """
    best: dict[tuple[float, str], tuple[float, str]] = {}
    for case, value in kept.items():
        if case.system in others:
            best[case[:2]] = max(best.get(case[:2], (-1.0, "")), (value, case.system))
    mine = {case[:2]: value for case, value in kept.items() if case.system == HEADWAY}
    return {key: (mine[key] - value, name) for key, (value, name) in best.items() if key in mine}


def margin_rows(kept: Mapping[Case, float], others: Collection[str]) -> Iterator[Row]:
    """Yield the mean margin and the least of each load, and the share of settings where none is better by a point."""
    found = margins(kept, others)
    for load in dict.fromkeys(load for load, _ in found):
        values = np.array([margin for key, (margin, _) in found.items() if key[0] == load])
        setting = f"all, {load:g}x"
        yield Row("margin.mean", HEADWAY, setting, float(values.mean()), "points")
        yield Row("margin.least", HEADWAY, setting, float(values.min()), "points")
        yield Row("margin.within", HEADWAY, setting, 100 * float((values >= -WITHIN).mean()), "% of settings")


def bars(rows: Sequence[Row], labels: Mapping[str, str]) -> bytes:
    """Return a picture with one plot for each id of `labels`, which names its axis."""
    chosen = [row for row in rows if row.id in labels]
    systems = list(dict.fromkeys(row.system for row in chosen))
    settings = list(dict.fromkeys(row.setting for row in chosen))
    figure, grid = sheet(len(labels), 1, 9.0, 3.0 * len(labels))
    width, shades = 0.8 / len(systems), colours(systems)
    for axes, (id, label) in zip(grid, labels.items(), strict=True):
        for number, system in enumerate(systems):
            values = {row.setting: row.ours for row in chosen if (row.id, row.system) == (id, system)}
            places = np.arange(len(settings)) + (number - (len(systems) - 1) / 2) * width
            axes.bar(places, [values.get(one) or 0.0 for one in settings], width, color=shades[system])
        ticks = [one.replace(", ", "\n") for one in settings]
        axes.set(xticks=range(len(settings)), xticklabels=ticks, ylabel=label)
    legend(figure, systems)
    return png(figure)
