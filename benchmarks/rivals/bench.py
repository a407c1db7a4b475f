"""`headway bench rivals`: the default recipe beside the SLO schedulers of other papers, SIMULATED.

Every rival runs by its own published rule, on its own ground and on ours, with the latency and the lengths
that the default learns, too. Where a paper sweeps a parameter, each of its settings runs on the papers'
grounds, and the row of the rival is its best there, by each measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.rivals import fidelity
from benchmarks.rivals.cells import Cell, Figures, Job, mean, run
from benchmarks.rivals.grounds import ARENAS, FIDELITY_ONLY, Arena, conversations
from benchmarks.rivals.systems import DEFAULT, ESSENTIAL, LINE, RIVALS, STOCK, rival_of, settings
from headway.errors import ConfigError
from headway.whatif.output.results import SIMULATED, Ask, Grid, Row, show

_CLOSE = 1.0  # points below the best rival
_NARROW = 2.0  # points of lead below which a cell is run with three seeds
# Whose ground it is -> rivals of a quick run: its own, and the strongest there.
QUICK = {
    "QoServe": ("qoserve", "slos-serve"),
    "SLOs-Serve": ("slos-serve", "scorpio", "qoserve"),
    "Scorpio": ("scorpio", "slos-serve", "qoserve"),
    "JITServe": ("jitserve", "slos-serve", "qoserve"),
    "Headway": ("qoserve",),
}
_GROUPS = {"rivals' grounds": False, "own grounds": True}
_OURS = (DEFAULT, LINE, *STOCK)  # what runs beside the rivals


@experiment("rivals", "sim", f"The default recipe beside the SLO schedulers of other papers ({SIMULATED})")
def main(ask: Ask, grounds: Sequence[str] = (), rivals: Sequence[str] = ()) -> Result:
    """Run all cells; `quick`: one load per ground, fewer requests, the strongest rivals. At most a minute.

    grounds, rivals: those alone, the rivals by their own settings, without `fidelity.*`; () = all. A rival
        does not run on every ground, and in a quick run only on some.
    """
    check_names(grounds, rivals)
    chosen, seed = bool(grounds or rivals), ask.seed
    asked = [job for job in jobs(seed, quick=ask.quick) if not chosen or _is_chosen(job, grounds, rivals)]
    found = run(asked)
    if not ask.quick:
        found |= run(more_seeds(found, seed))
    rows = rows_of(found, asked)
    if not chosen:
        rows += fidelity.rows(found, seed, quick=ask.quick)
    workload = (
        f"{SIMULATED}: {len({row.setting for row in rows if row.system == DEFAULT and 'x' in row.setting})} "
        f"cells; load = arrivals as a multiple of what stock vLLM completes of a burst. Azure's "
        f"conversations: {conversations().about}."
    )
    notes = [*_notes(rows), *([] if chosen else fidelity.UNREPRODUCED)]
    return Result(rows, workload, grid=_grid(rows), notes=notes)


# ---- jobs


def jobs(seed: int, *, quick: bool) -> list[Job]:
    """Return the cells of a run and what `fidelity.*` needs, each once."""
    cells = quick_cells(seed) if quick else all_cells([seed])
    return list(dict.fromkeys([*cells, *fidelity.jobs(seed, quick=quick)]))


def check_names(grounds: Sequence[str], rivals: Sequence[str]) -> None:
    """Raise ConfigError for the name of a ground or a rival that does not exist."""
    for what, given, known in (("ground", grounds, [arena.name for arena in _shown()]), ("rival", rivals, RIVALS)):
        for name in given:
            if name not in known:
                raise ConfigError(f"There is no {what} {name!r}.", f"Use some of {', '.join(known)}.", param=f"{what}s")


def _is_chosen(job: Job, grounds: Sequence[str], rivals: Sequence[str]) -> bool:
    systems = (*_OURS, *(rivals or RIVALS))
    return isinstance(job, Cell) and job.system in systems and (not grounds or job.arena in grounds)


def quick_cells(seed: int) -> list[Job]:
    """Return one load per ground, with the rivals that matter on it."""
    return [
        Cell(arena.name, arena.quick_load, seed, name, True)
        for arena in _shown()
        for name in (*_defaults(arena), *QUICK[arena.paper])
    ]


def all_cells(seeds: Sequence[int]) -> list[Job]:
    """Return every ground, load and rival; on the papers' grounds with all of its settings."""
    return [
        Cell(arena.name, load, seed, name)
        for arena in _shown()
        for load in arena.loads
        for seed in seeds
        for name in _systems(arena)
    ]


def _shown() -> list[Arena]:
    return [arena for arena in ARENAS.values() if arena.name not in FIDELITY_ONLY]


def _defaults(arena: Arena) -> list[str]:
    """Return the default, and where the papers' tpots are promised also that with the token line."""
    return [DEFAULT, LINE] if any(kind.slo.tpot is not None for kind in arena.kinds) else [DEFAULT]


def _systems(arena: Arena) -> list[str]:
    ours = [*_defaults(arena), *STOCK]
    if arena.base is not None or arena.seconds > 1000:
        return [*ours, *(RIVALS if arena.base is not None else ESSENTIAL)]
    one = len({kind.slo.tpot for kind in arena.kinds}) == 1
    return [*ours, *(name for rival in RIVALS for name in settings(rival, one_tpot=one))]


def more_seeds(found: fidelity.Found, seed: int) -> list[Job]:
    """Return two more seeds of the default and the best rival where the lead is narrow."""
    again: list[Job] = []
    for setting, cells in _by_setting(found).items():
        first = [cell for cell in cells if cell.seed == seed and not setting.startswith(FIDELITY_ONLY)]
        kept = {cell.system: _kept(found, cell) for cell in first}
        rivals = [name for name in kept if name not in _OURS]
        if DEFAULT in kept and rivals:
            best = max(rivals, key=kept.__getitem__)
            if abs(kept[DEFAULT] - kept[best]) < _NARROW:
                pair = [cell for cell in first if cell.system in (DEFAULT, best)]
                again += [replace(cell, seed=seed + more) for cell in pair for more in (1, 2)]
    return again


def _kept(found: fidelity.Found, cell: Cell) -> float:
    seen = found[cell]
    assert isinstance(seen, Figures)
    return seen.kept


# ---- rows


def rows_of(found: fidelity.Found, asked: Iterable[Job]) -> list[Row]:
    """Return a row per system, setting and figure, and the sums."""
    rows: list[Row] = []
    for setting, cells in _by_setting(asked).items():
        if not any(cell.system == DEFAULT for cell in cells):
            continue
        rows += _setting_rows(setting, _seeds(found, cells))
    return [*rows, *_summary(rows)]


def _by_setting(asked: Iterable[Job]) -> dict[str, list[Cell]]:
    """Return the cells of the default, stock vLLM and the rivals by ground and load."""
    made: dict[str, list[Cell]] = {}
    for job in asked:
        if isinstance(job, Cell) and (job.system in _OURS or rival_of(job.system) in RIVALS):
            made.setdefault(job.setting, []).append(job)
    return made


def _seeds(found: fidelity.Found, cells: Sequence[Cell]) -> dict[str, Figures]:
    """Return the figures of each system, means over all seeds that were run."""
    seeds: dict[tuple[str, bool], list[Figures]] = {}
    for job, one in found.items():
        if isinstance(job, Cell) and isinstance(one, Figures) and job.setting == cells[0].setting:
            seeds.setdefault((job.system, job.quick), []).append(one)
    return {cell.system: mean(seeds[cell.system, cell.quick]) for cell in cells}


def _setting_rows(setting: str, seen: dict[str, Figures]) -> list[Row]:
    """Return the rows of a setting: of each rival its best, and those of its settings by name."""
    best: dict[str, Figures] = {}
    for name, one in seen.items():
        rival = rival_of(name)
        other = best.get(rival)
        leads = other is None or one.kept > other.kept
        line = one.line if other is None else max(one.line, other.line)
        best[rival] = replace(one if leads or other is None else other, line=line)
    settings_of = {name: one for name, one in seen.items() if name not in best or rival_of(name) != name}
    swept = [Row("attainment.promised", name, setting, one.kept, "%") for name, one in settings_of.items()]
    return [row for name, one in best.items() for row in _rows(name, setting, one)] + swept


def _rows(name: str, setting: str, one: Figures) -> list[Row]:
    figures = (
        ("attainment.promised", one.kept, "%"),
        ("attainment.line", one.line, "%"),
        ("tardiness.p99", one.tardiness, "s"),
        ("tokens_per_s", one.tokens, "tokens/s"),
        ("best_effort.tokens_per_s", one.best_effort, "tokens/s"),
        ("in_time.tokens_per_s", one.in_time, "tokens/s"),
        ("e2e.p99", one.e2e, "s"),
    )
    rows = [Row(id, name, setting, value, unit) for id, value, unit in figures]
    return rows + [Row(f"attainment.{tier}", name, setting, kept, "%") for tier, kept in one.classes.items()]


def _summary(rows: Sequence[Row]) -> list[Row]:
    """Return the default's lead over the best rival: mean, least, and cells more than a point behind."""
    sums: list[Row] = []
    for group, own in _GROUPS.items():
        leads = [lead for setting, lead in leads_of(rows).items() if _is_own(setting) == own]
        if leads:
            behind = float(sum(lead < -_CLOSE for lead in leads))
            sums += [
                Row("cells", DEFAULT, group, float(len(leads)), "cells"),
                Row("cells.behind", DEFAULT, group, behind, "cells"),
                Row("margin.mean", DEFAULT, group, float(np.mean(leads)), "points"),
                Row("margin.least", DEFAULT, group, min(leads), "points"),
            ]
    lines = list(leads_of(rows, "attainment.line", LINE).values())
    return [*sums, Row("margin.line", LINE, "token line", float(np.mean(lines)), "points")] if lines else sums


def _is_own(setting: str) -> bool:
    return ARENAS[setting.partition(",")[0]].base is not None


def leads_of(rows: Sequence[Row], id: str = "attainment.promised", ours: str = DEFAULT) -> dict[str, float]:
    """Return the points by which `ours` leads the best rival in a measure, for each setting that has both."""
    kept: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.id == id:
            kept.setdefault(row.setting, {})[row.system] = row.ours or 0.0
    rivals = {setting: [seen[name] for name in seen if name not in _OURS] for setting, seen in kept.items()}
    return {
        setting: kept[setting][ours] - max(others)
        for setting, others in rivals.items()
        if others and ours in kept[setting]
    }


# ---- what people see


def _grid(rows: Sequence[Row]) -> Grid:
    """Return the matrix, promises kept by setting and rival, then the sums and fidelity."""
    kept = [row for row in rows if row.id == "attainment.promised" and rival_of(row.system) == row.system]
    systems = list(dict.fromkeys(row.system for row in kept))
    at = {(row.setting, row.system): show(row.ours) for row in kept}
    leads = leads_of(rows)
    lines = [
        [setting, *(at.get((setting, name), "") for name in systems), f"{lead:+.1f}"] for setting, lead in leads.items()
    ]
    others = [row for row in rows if row.id.startswith(("fidelity", "headline", "cells", "margin"))]
    sums = [[f"{row.id}, {row.system}, {row.setting}", f"{show(row.ours)} {row.unit}"] for row in others]
    padded = [[*line, *[""] * len(systems)] for line in sums]
    return Grid(["promises kept, %", *systems, "lead"], [lines, padded])


def _notes(rows: Sequence[Row]) -> list[str]:
    sums = {(row.id, row.setting): row.ours for row in rows if row.system == DEFAULT}
    return [
        f"On {group} headway leads the best rival by {show(sums['margin.mean', group])} points on average; "
        f"it is more than {_CLOSE:g} point behind in {show(sums['cells.behind', group])} of "
        f"{show(sums['cells', group])} cells."
        for group in _GROUPS
        if ("cells", group) in sums
    ] + [
        f"By the token line {LINE} leads the best rival by {show(row.ours)} points on average."
        for row in rows
        if row.id == "margin.line"
    ]
