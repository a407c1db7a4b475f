"""The table and the notes of `headway bench default`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from benchmarks.simulated.default_figures import BOUND, DEFAULT, HINDSIGHT, STOCK, TRUE
from benchmarks.simulated.default_rows import ALL, CLOSE, GOALS, GROUPS, SAME_BE, Place, judged
from headway.whatif.output.results import Grid, Row, show

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
