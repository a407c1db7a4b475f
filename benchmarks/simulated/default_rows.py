"""The rows of `headway bench default`: per system and setting, and what sums up the default recipe.

The sixteen grounds are summed up in rows with the setting "all", the held ones in rows with "held".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.simulated.default_figures import (
    BOUND,
    DEFAULT,
    HINDSIGHT,
    SMALLEST,
    STOCK,
    TRUE,
    Cell,
    Figures,
    Service,
    most_tokens,
)
from headway.whatif.output.results import Grid, Row, show

ALL, HELD = "all", "held"  # settings of sums
GROUPS = (ALL, HELD)
CLOSE, SAME_BE = 1.0, 0.95  # points below the best other, share of its best-effort tokens
HIGH = 50.0  # %: a share of a bound below this says little
_NOT_OTHERS = (DEFAULT, TRUE, HINDSIGHT, SMALLEST, BOUND)

At = Mapping[tuple[str, str, str], float]  # {(id, system, setting): figure}


class Goal(NamedTuple):
    """A limit of a figure of the default recipe.

    says: what the figure is outside the limit, for people.
    limit: by the load and the bound of tokens/s.
    least: the figure should not be below the limit; otherwise, not above it.
    """

    id: str
    says: str
    limit: Callable[[float, float], float]
    least: bool = False

    def holds(self, value: float, load: float, bound: float) -> bool:
        """Tell whether a figure is within the limit."""
        limit = self.limit(load, bound)
        return value >= limit if self.least else value <= limit


def _unpromised(load: float, bound: float) -> float:
    """Return the most that the p99 of unpromised requests should be, in multiples of stock's."""
    return 1.25 if load <= 0.7 else 2.0 if load <= 1.0 else math.inf


GOALS = (
    Goal("tokens_per_s", "0.97 of stock's tokens/s x their bound", lambda _, bound: 0.97 * bound, least=True),
    Goal("mean_wait.weighted", "1.1 of stock's mean wait / that bound", lambda _, bound: 1.1 / bound),
    Goal("unpromised.e2el.p99", "1.25 of stock's p99 of the unpromised up to 0.7x, 2 up to 1x", _unpromised),
    Goal("gap.over_1s", "1 % of streams silent for a second", lambda load, bound: 1.0),
)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


# Figures that are summed up over settings: id -> {name: sum}
_SUMS: dict[str, dict[str, Callable[[Sequence[float]], float]]] = {
    "tokens_per_s": {"mean": _mean, "least": min},
    "unpromised.e2el.p99": {"mean": _mean, "most": max},
    "mean_wait.weighted": {"mean": _mean, "most": max},
    "gap.over_1s": {"mean": _mean},
}


class Place(NamedTuple):
    """A setting that is summed up, the group that it belongs to and its load."""

    setting: str
    group: str
    load: float


def rows_of(found: Mapping[Cell, Figures], parts: Collection[str]) -> list[Row]:
    """Return a row per system, setting and figure, and those that sum up the default recipe.

    parts: systems that are the default recipe without one of its parts; only their change is told.
    """
    stock, rows = _stock(found), list[Row]()
    changes: dict[str, dict[str, float]] = {}  # points by part and setting
    for setting, cells in _by_setting(found).items():
        sums = _by_system(found, cells)
        for system, seen in sums.items():
            if system in parts:
                changes.setdefault(system, {})[setting] = seen.attainment - sums[DEFAULT].attainment
            else:
                rows += _promise_rows(system, setting, seen, sums.get(BOUND))
                rows += _service_rows(system, setting, seen.service, stock.get(cells[0].place))
        if BOUND in sums:
            rows += _bound_row(cells[0], stock.get(cells[0].place))
    return rows + _summary(rows, places_of(found)) + _part_rows(changes)


def places_of(found: Iterable[Cell]) -> list[Place]:
    """Return the settings that are summed up: those with a bound, where no forecast is made wrong."""
    places = (Place(c.setting, HELD if c.ground.held else ALL, c.load) for c in found if c.system == BOUND)
    return list(dict.fromkeys(places))


def judged(rows: Iterable[Row], places: Sequence[Place]) -> dict[str, dict[str, bool]]:
    """Return whether the default recipe is within a limit, by the figure's id and the setting.

    Settings without the figure, or without a limit at their load, are left out.
    """
    at = _figures(rows)
    seen: dict[str, dict[str, bool]] = {goal.id: {} for goal in GOALS}
    for goal, place in product(GOALS, places):
        value = at.get((goal.id, DEFAULT, place.setting))
        bound = at.get(("bound.tokens_per_s", BOUND, place.setting), 1.0)
        if value is not None and math.isfinite(goal.limit(place.load, bound)):
            seen[goal.id][place.setting] = goal.holds(value, place.load, bound)
    return seen


def outside(rows: Iterable[Row], places: Sequence[Place]) -> dict[str, list[str]]:
    """Return the settings where the default recipe is outside a limit, by the figure's id."""
    return {id: [name for name, holds in seen.items() if not holds] for id, seen in judged(rows, places).items()}


def _figures(rows: Iterable[Row]) -> dict[tuple[str, str, str], float]:
    return {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows}


def _by_setting(found: Iterable[Cell]) -> dict[str, list[Cell]]:
    cells: dict[str, list[Cell]] = {}
    for cell in found:
        cells.setdefault(cell.setting, []).append(cell)
    return cells


def _by_system(found: Mapping[Cell, Figures], cells: Sequence[Cell]) -> dict[str, Figures]:
    """Return the figures of each system over the seeds of a setting."""
    systems = dict.fromkeys(cell.system for cell in cells)
    return {name: Figures.sum([found[cell] for cell in cells if cell.system == name]) for name in systems}


def _stock(found: Mapping[Cell, Figures]) -> dict[tuple[str, float], Service]:
    """Return stock's service by ground and load; no wrong forecast changes it."""
    seen: dict[tuple[str, float], list[Service]] = {}
    for cell, figures in found.items():
        if cell.system == STOCK and figures.service is not None and cell.latency_error == 1.0:
            seen.setdefault(cell.place, []).append(figures.service)
    return {place: Service.mean(services) for place, services in seen.items()}


# ---- one system in one setting


def _promise_rows(system: str, setting: str, seen: Figures, most: Figures | None) -> list[Row]:
    rows = []
    if seen.promised:
        rows.append(Row("attainment.promised", system, setting, seen.attainment, "%"))
        if system != BOUND and most is not None:
            share = 100 * seen.kept / max(most.kept, 1.0)
            rows.append(Row("share_of_bound", system, setting, share, "%"))
    if system in (BOUND, HINDSIGHT, SMALLEST):  # a search drops best effort
        return rows
    return [*rows, Row("be.tokens_per_s", system, setting, seen.be_tokens, "tokens/s")]


def _service_rows(system: str, setting: str, seen: Service | None, stock: Service | None) -> list[Row]:
    """Return the figures of everybody; ratios are to stock's, whose order is first come, first served."""
    if seen is None:
        return []
    figures = [
        ("attainment.weighted", seen.weighted_attainment, "%"),
        ("tardiness.p99", seen.tardiness_p99, "s"),
        ("gap.p99", seen.gap_p99, "s"),
        ("gap.over_1s", seen.silent, "%"),
        ("recovery_s", seen.recovery, "s"),
    ]
    if stock is not None:
        ratios = (
            ("unpromised.e2el.p99", seen.unpromised_p99, stock.unpromised_p99),
            ("unpromised.e2el.mean", seen.unpromised_mean, stock.unpromised_mean),
            ("tokens_per_s", seen.tokens_per_s, stock.tokens_per_s),
            ("mean_wait.weighted", seen.weighted_wait, stock.weighted_wait),
            ("worst_wait", seen.worst_wait, stock.worst_wait),
        )
        figures += [(id, _ratio(value, base), "x") for id, value, base in ratios]
    return [
        Row(id, system, setting, value if math.isfinite(value) else None, unit)
        for id, value, unit in figures
        if value is not None
    ]


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _bound_row(cell: Cell, stock: Service | None) -> list[Row]:
    if stock is None:
        return []
    share = most_tokens(cell.ground, stock.iteration)
    return [Row("bound.tokens_per_s", BOUND, cell.setting, share, "x")]


# ---- sums


def _part_rows(changes: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return what the default recipe changes by without each of its parts, on average and where most."""
    rows = []
    for system, points in changes.items():
        least = min(points, key=points.__getitem__)
        rows += [
            Row("ablation.mean", system, "all", float(np.mean(list(points.values()))), "points"),
            Row("ablation.least", system, least, points[least], "points"),
        ]
    return rows


def _summary(rows: Sequence[Row], places: Sequence[Place]) -> list[Row]:
    """Return the sums over the settings of each group."""
    at, sums = _figures(rows), list[Row]()
    for group in GROUPS:
        mine = [place for place in places if place.group == group]
        promised = [p.setting for p in mine if ("attainment.promised", DEFAULT, p.setting) in at]
        sums += _margins(at, promised, group) if promised else []
        for system in (DEFAULT, TRUE, HINDSIGHT):
            sums += _shares(at, promised, system, group)
        sums += _service_sums(at, mine, group) + _outside_rows(rows, mine, group)
    return sums


def _margins(at: At, settings: Sequence[str], group: str) -> list[Row]:
    """Return in how many cells the default recipe falls behind the best other, and by how much."""
    behind, short = 0, 0
    margins, weighted = [], []
    for setting in settings:
        best, be = _best_other(at, setting)
        margins.append(at["attainment.promised", DEFAULT, setting] - best)
        behind += margins[-1] < -CLOSE
        short += at["be.tokens_per_s", DEFAULT, setting] < SAME_BE * be
        weighted += _weighted_margin(at, setting)
    figures = [
        ("cells", float(len(settings)), "cells"),
        ("cells.behind", float(behind), "cells"),
        ("cells.less_best_effort", float(short), "cells"),
        ("margin.least", min(margins), "points"),
        ("margin.mean", float(np.mean(margins)), "points"),
    ]
    if weighted:
        figures.append(("margin.weighted.least", min(weighted), "points"))
    return [Row(id, DEFAULT, group, value, unit) for id, value, unit in figures]


def _best_other(at: At, setting: str) -> tuple[float, float]:
    """Return the best attainment of another recipe, and the best-effort tokens of the one that has it."""
    others = [
        (kept, at["be.tokens_per_s", system, setting])
        for (id, system, name), kept in at.items()
        if id == "attainment.promised" and name == setting and system not in _NOT_OTHERS
    ]
    return max(others)


def _weighted_margin(at: At, setting: str) -> list[float]:
    """Return the points of weighted attainment above the best other recipe's; [] where there is none."""
    seen = {system: kept for (id, system, name), kept in at.items() if id == "attainment.weighted" and name == setting}
    others = [kept for system, kept in seen.items() if system not in _NOT_OTHERS]
    return [seen[DEFAULT] - max(others)] if DEFAULT in seen and others else []


def _shares(at: At, settings: Sequence[str], system: str, group: str) -> list[Row]:
    """Return a system's share of the bound, the mean and the least; none where it was not run."""
    seen = {
        setting: at["share_of_bound", system, setting]
        for setting in settings
        if ("share_of_bound", system, setting) in at
    }
    if not seen:
        return []
    high = [share for name, share in seen.items() if at["attainment.promised", BOUND, name] > HIGH]
    return [
        Row("share_of_bound.mean", system, group, float(np.mean(list(seen.values()))), "%"),
        Row("share_of_bound.least", system, group, min(high, default=0.0), "%"),
    ]


def _service_sums(at: At, places: Sequence[Place], group: str) -> list[Row]:
    """Return means and worst cells of how all are served."""
    rows = []
    for id, sums in _SUMS.items():
        seen = [at[id, DEFAULT, p.setting] for p in places if (id, DEFAULT, p.setting) in at]
        unit = "%" if id == "gap.over_1s" else "x"
        rows += [Row(f"{id}.{name}", DEFAULT, group, total(seen), unit) for name, total in sums.items() if seen]
    return rows


def _outside_rows(rows: Sequence[Row], places: Sequence[Place], group: str) -> list[Row]:
    """Return in how many cells the default recipe is outside each limit."""
    seen = {row.setting for row in rows if (row.id, row.system) == ("tokens_per_s", DEFAULT)}
    if not any(place.setting in seen for place in places):
        return []
    cells = outside(rows, places)
    return [Row(f"outside.{id}", DEFAULT, group, float(len(names)), "cells") for id, names in cells.items()]


# Columns of the second part of the table: heading, id, system
MEASURES = (
    ("tokens/s", "tokens_per_s", DEFAULT),
    ("its bound", "bound.tokens_per_s", BOUND),
    ("mean wait", "mean_wait.weighted", DEFAULT),
    ("unpromised p99", "unpromised.e2el.p99", DEFAULT),
    ("worst wait", "worst_wait", DEFAULT),
    ("gap p99, s", "gap.p99", DEFAULT),
    ("silent, %", "gap.over_1s", DEFAULT),
    ("stock, %", "gap.over_1s", STOCK),
    ("late p99, s", "tardiness.p99", DEFAULT),
)


def grid(rows: Sequence[Row], parts: Collection[str]) -> Grid:
    """Return promises by setting and system, how the default recipe serves all, the sums, and its parts.

    parts: systems that are the default recipe without one of its parts.
    """
    at = {(row.id, row.system, row.setting): show(row.ours) for row in rows}
    systems = list(dict.fromkeys(row.system for row in rows if row.id == "attainment.promised"))
    blocks = [_promises(rows, at, systems), _service(rows, at), _sums(rows), _changes(rows, parts)]
    width = max(len(systems), len(MEASURES))
    padded = [[[*line, *[""] * (1 + width - len(line))] for line in block] for block in blocks]
    header = ["promises kept, %", *systems]
    return Grid([*header, *[""] * (1 + width - len(header))], padded)


def _promises(rows: Sequence[Row], at: Mapping[tuple[str, str, str], str], systems: Sequence[str]) -> list[list[str]]:
    names = dict.fromkeys(row.setting for row in rows if row.id == "attainment.promised")
    return [[name, *(at.get(("attainment.promised", system, name), "") for system in systems)] for name in names]


def _service(rows: Sequence[Row], at: Mapping[tuple[str, str, str], str]) -> list[list[str]]:
    """Return a line of headings, and one per setting."""
    names = [row.setting for row in rows if row.id == "bound.tokens_per_s"]
    lines = [[name, *(at.get((id, system, name), "") for _, id, system in MEASURES)] for name in names]
    headings = [f"{DEFAULT} / {STOCK}", *(heading for heading, _, _ in MEASURES)]
    return [headings, *lines] if lines else []


def _sums(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for group in GROUPS:
        for system in (DEFAULT, TRUE, HINDSIGHT):
            name = "" if system == DEFAULT else f", {system}"
            name += "" if group == ALL else ", held grounds"
            lines += [[f"{row.id}{name}", show(row.ours), row.unit] for row in summed(rows, system, group)]
    return lines


def _changes(rows: Sequence[Row], parts: Collection[str]) -> list[list[str]]:
    return [[f"{row.system}, {row.setting}", show(row.ours), row.unit] for row in rows if row.system in parts]


def summed(rows: Sequence[Row], system: str, group: str) -> list[Row]:
    """Return the rows that sum up a system over the settings of a group."""
    return [row for row in rows if row.setting == group and row.system == system]


def notes(rows: Sequence[Row], places: Sequence[Place]) -> list[str]:
    """Return what the sums say in words, and the names of the cells outside each limit."""
    lines = []
    for group in GROUPS:
        seen = {row.id: row.ours for row in summed(rows, DEFAULT, group)}
        where = "" if group == ALL else "On held grounds "
        if "cells" in seen:
            lines.append(
                f"{where}{DEFAULT} is more than {CLOSE:g} point below the best other recipe in "
                f"{seen['cells.behind']:g} of {seen['cells']:g} cells (least margin "
                f"{show(seen['margin.least'])} points), and has less than {100 * SAME_BE:g} % of that "
                f"recipe's best-effort tokens in {seen['cells.less_best_effort']:g}."
            )
        mine = [place for place in places if place.group == group]
        lines += _outside_notes(rows, mine, where) if "outside.tokens_per_s" in seen else []
    return lines


def _outside_notes(rows: Sequence[Row], places: Sequence[Place], where: str) -> list[str]:
    """Return a line per limit that applies to any of these settings."""
    lines, says = [], {goal.id: goal.says for goal in GOALS}
    for id, seen in judged(rows, places).items():
        names = [name for name, holds in seen.items() if not holds]
        listed = f": {'; '.join(names)}" if names else ""
        if seen:
            lines.append(f"{where}{id} is outside {says[id]} in {len(names)} of {len(seen)} cells{listed}.")
    return lines
