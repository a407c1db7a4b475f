"""By how many points Headway keeps more promises than the best of other systems, or fewer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

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
