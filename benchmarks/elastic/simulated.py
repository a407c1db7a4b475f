"""`headway bench elastic`: autoscalers under loads that change, in the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.elastic.autoscalers import ConcurrencyTarget, Profile, Schedule, TtftTarget, best_schedule, profile
from benchmarks.elastic.grounds import GROUNDS, MODEL, PROFILE, fleet
from benchmarks.experiment import Result, computed, experiment, refuse_unknown
from headway.config.tables import Scale
from headway.errors import ConfigError
from headway.policy.recipes.registry import find
from headway.policy.scale.rates import STEP_S
from headway.simulate.elastic import Decide, by_promises
from headway.simulate.run import Simulation
from headway.simulate.workload.traces import find as stored
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Slo
from headway.whatif.output.plots import colours, legend, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid

HEADWAY, PEAK, MEAN, HINDSIGHT = "headway", "fixed-at-peak", "fixed-at-mean", "hindsight"
CONCURRENCY, TTFT, NO_FORESIGHT, FIXED = "concurrency-target", "ttft-target", "no-foresight", "fixed"
SYSTEMS = (HEADWAY, PEAK, MEAN, CONCURRENCY, TTFT, NO_FORESIGHT, HINDSIGHT)
SOURCES = ("elastic",)
SHARE, WINDOW_S = 0.99, 60.0
_MOST = 8  # engines of a fixed fleet that are tried
# From the most engines to the fewest: requests in flight, shares of the first token's promise, engines in reserve,
# and points of promises that a plan may lose.
_TARGETS = {
    CONCURRENCY: (5.0, 8.0, 13.0, 20.0, 30.0, 38.0, 45.0),
    TTFT: (0.03, 0.07, 0.09, 0.11, 0.15, 0.3, 0.6),
    NO_FORESIGHT: (3.0, 2.0, 1.0, 0.0),
    HINDSIGHT: (0.6, 1.0),
}
_SECOND = {CONCURRENCY: (300.0, 60.0), TTFT: (180.0,)}  # seconds: the default, and another one to try
_HALF = 0.5  # points that the plan without foresight may lose beside what starts cost
_UNITS = {"attainment.promised": "%", "engine_hours": "h", "engine_hours.of_hindsight": "x"}


Key = tuple[str, float, str]  # ground, seconds of a start, system


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. begin: engines at the start. target, second: a system's settings. schedule: of engines by window.

    profile: of one engine, for `ttft-target`.
    """

    ground: str
    seconds: float
    seed: int
    system: str
    begin: int
    start_s: float = 60.0
    most: int = 0
    target: float = 0.0
    second: float = 0.0
    schedule: tuple[int, ...] = ()
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A run's figures: promises kept in %, engine-hours, and by window the promises kept and made."""

    kept: float
    hours: float
    good: tuple[int, ...]
    made: tuple[int, ...]
    engines: tuple[tuple[float, int], ...] = ()


def run(cell: Cell) -> Found:
    """Simulate a cell."""
    ground = GROUNDS[cell.ground]
    work, before = ground.workload(cell.seconds, cell.seed)
    fixed = cell.system == FIXED
    wanted: list[tuple[float, int]] = [(0.0, cell.begin)]

    def decide(loop: Any, model: str, now: float, have: int) -> int:
        count = scaler(loop, model, now, have)
        if count != wanted[-1][1]:
            wanted.append((now, count))
        return count

    scaler = by_promises if fixed or cell.system == HEADWAY else _autoscaler(cell)
    outcome = Simulation(
        find("headway"),
        fleet(cell.begin, ground.longest, cell.start_s),
        work,
        scale={} if fixed else {MODEL: Scale(max=cell.most, share=SHARE, start_s=cell.start_s)},
        decide=decide,
        history={MODEL: before},
        day_s=ground.day_s,
        fast=False,
    ).run()
    ttft, e2e = outcome.first - work.arrival, outcome.end - work.arrival
    kept = (ttft <= work.ttft) & ((e2e - ttft) / np.maximum(work.output - 1, 1) <= work.tpot)
    place = (work.arrival // WINDOW_S).astype(int)
    made = np.bincount(place)
    good = np.bincount(place, kept, minlength=made.size).astype(int)
    parts = tuple(good.tolist()), tuple(made.tolist())
    return Found(100 * float(kept.mean()), outcome.engine_s / 3600, *parts, tuple(wanted))


def _autoscaler(cell: Cell) -> Decide:
    if cell.system == HINDSIGHT:
        return Schedule(cell.schedule, WINDOW_S, cell.start_s + STEP_S)
    if cell.system == NO_FORESIGHT:
        return Schedule(cell.schedule, WINDOW_S, 0.0, behind=cell.start_s)
    if cell.system == CONCURRENCY:
        return ConcurrencyTarget(cell.target, cell.second)
    assert cell.profile is not None
    slo = _slo(GROUNDS[cell.ground].workload(cell.seconds, cell.seed)[0])
    return TtftTarget(cell.profile, cell.target * (slo.ttft or 0.0), slo.tpot or 0.0, cell.second)


def _slo(work: Workload) -> Slo:
    """Return the promise of a ground's requests, which is one for all."""
    return Slo(float(work.ttft[0]), float(work.tpot[0]))


def profiled(cell: Cell) -> Profile:
    """Measure one engine under a ground's mean request."""
    work, _ = GROUNDS[cell.ground].workload(cell.seconds, cell.seed)
    return profile(work, GROUNDS[cell.ground].longest, _slo(work))


@experiment("elastic", "sim", f"Fleets that follow the load ({SIMULATED})")
def main(
    ask: Ask, systems: tuple[str, ...] = (), grounds: tuple[str, ...] = (), starts: tuple[float, ...] = ()
) -> Result:
    """Simulate; what is not given: `quick`, a short step and a start of 30 s; else all whose traces are there."""
    systems = systems or ((HEADWAY, PEAK, MEAN, CONCURRENCY) if ask.quick else SYSTEMS)
    there = [name for name, ground in GROUNDS.items() if not ground.recorded or stored(ground.recorded, ("arrivals",))]
    grounds = grounds or (("step",) if ask.quick else tuple(there))
    starts = starts or ((30.0,) if ask.quick else (60.0, 300.0))
    _check(systems, grounds, starts)
    sources = () if ask.quick else SOURCES
    fixed = _fixed(ask, grounds, sources)
    found: dict[Key, tuple[Found, str]] = {}
    asked: dict[Key, list[Cell]] = {}
    for ground, start in itertools.product(grounds, starts):
        runs = fixed[ground]
        peak, mean = _plan(runs, 2 if ask.quick else 5)
        for name, count in ((PEAK, peak), (MEAN, mean)):
            found[ground, start, name] = runs[count - 1], f"{count} engines"
        base = Cell(ground, _seconds(ask, ground), ask.seed, HEADWAY, mean, start, 2 * peak)
        for name in systems:
            if name not in (PEAK, MEAN):
                asked[ground, start, name] = _settings(replace(base, system=name), runs, runs[peak - 1].kept, ask)
    asked = _with_profiles(asked, sources)
    found |= _best(asked, {key[:2]: one.kept for key, (one, _) in found.items() if key[2] == PEAK}, sources, ask)
    rows, notes = _rows(found, systems), _notes(found, systems)
    workload = (
        f"{SIMULATED}: engines of {PROFILE}, Headway's scheduler in all; from fixed-at-mean's number on, at most twice "
        f"fixed-at-peak's; an engine costs from its start until it has stopped. Promises are kept within {SHARE:.0%}."
    )
    return Result(rows, workload, lambda: _pictures(found, systems), system_grid(rows), notes)


def _check(systems: Sequence[str], grounds: Sequence[str], starts: Sequence[float]) -> None:
    """Refuse what cannot be simulated before anything is."""
    refuse_unknown("system", systems, SYSTEMS)
    refuse_unknown("ground", grounds, GROUNDS)
    if min(starts) < 0:
        raise ConfigError("A start takes no negative time.", "Give --starts of 0 or more.")


def _seconds(ask: Ask, ground: str) -> float:
    return 360.0 if ask.quick else GROUNDS[ground].seconds


def _fixed(ask: Ask, grounds: Sequence[str], sources: Sequence[str]) -> dict[str, list[Found]]:
    """Return the runs of fixed fleets of 1, 2, ... engines by ground, to a number that suffices in every stretch."""
    found: dict[str, list[Found]] = {ground: [] for ground in grounds}
    for count in range(1, _MOST, 2):
        cells = [
            Cell(ground, _seconds(ask, ground), ask.seed, FIXED, count + more)
            for ground, runs in found.items()
            if not runs or _short(runs[-1], 2 if ask.quick else 5).any()
            for more in (0, 1)
        ]
        for cell, one in computed(cells, run, sources=sources).items() if cells else ():
            found[cell.ground].append(one)
    return found


def _short(one: Found, windows: int) -> Bools:
    """Tell in which stretches of so many windows fewer promises were kept than the share."""
    good, made = (np.array(column, float) for column in (one.good, one.made))
    sums = [np.add.reduceat(column, np.arange(0, column.size, windows)) for column in (good, made)]
    return np.asarray(sums[0] < SHARE * sums[1])


def _plan(runs: Sequence[Found], windows: int) -> tuple[int, int]:
    """Return the engines that suffice at the peak, and those that suffice on average over the stretches."""
    short = np.array([_short(one, windows) for one in runs])
    needed = np.where(short.all(0), len(runs), short.argmin(0) + 1)
    return int(needed.max()), max(round(float(needed.mean())), 1)


def _settings(cell: Cell, runs: Sequence[Found], peak: float, ask: Ask) -> list[Cell]:
    """Return the settings of a system, from the most engines to the fewest. peak: % that fixed-at-peak keeps."""
    targets = _TARGETS.get(cell.system, (0.0,))
    second = _SECOND.get(cell.system, (0.0, 0.0))[0]
    cells = [replace(cell, target=target, second=second) for target in targets[: 1 if ask.quick else None]]
    if cell.system == HINDSIGHT:
        plans = [_planned(runs, peak - one.target, cell.start_s) for one in cells]
        cells = [replace(one, begin=plan[0], schedule=plan) for one, plan in zip(cells, plans, strict=True)]
    elif cell.system == NO_FORESIGHT:
        plan = _planned(runs, peak - _HALF, 0.0)
        plans = [tuple(min(count + int(one.target), cell.most) for count in plan) for one in cells]
        cells = [replace(one, begin=plan[0], schedule=plan) for one, plan in zip(cells, plans, strict=True)]
    return cells


def _with_profiles(asked: Mapping[Key, list[Cell]], sources: Sequence[str]) -> dict[Key, list[Cell]]:
    """Return the settings with the profile that `ttft-target` needs, one per ground."""
    grounds = {
        key[0]: replace(cells[0], start_s=0.0, begin=0, most=0) for key, cells in asked.items() if key[2] == TTFT
    }
    profiles = computed(grounds.values(), profiled, sources=sources) if grounds else {}
    return {
        key: [replace(one, profile=profiles[grounds[key[0]]]) for one in cells] if key[2] == TTFT else cells
        for key, cells in asked.items()
    }


def _best(
    asked: Mapping[Key, list[Cell]], peaks: Mapping[tuple[str, float], float], sources: Sequence[str], ask: Ask
) -> dict[Key, tuple[Found, str]]:
    """Return the run of each system's best setting: the fewest engine-hours within a point of fixed-at-peak's promises.

    If none is, the one that keeps the most. Settings are tried by bisection; the best one with the other window or
    interval, too.
    """
    runs: dict[Cell, Found] = {}

    def good(key: Key, cell: Cell) -> bool:
        return runs[cell].kept >= peaks[key[:2]] - 1

    def best(key: Key) -> Cell:
        tried: list[Cell] = [one for one in asked[key] + again.get(key, []) if one in runs]
        kept = [one for one in tried if good(key, one)]
        if kept:
            return min(kept, key=lambda one: runs[one].hours)
        return max(tried, key=lambda one: runs[one].kept)

    again: dict[Key, list[Cell]] = {}
    bounds = {key: (-1, len(cells)) for key, cells in asked.items()}  # the last good setting, and the first bad one
    while middles := {key: (low + high + 1) // 2 for key, (low, high) in bounds.items() if high - low > 1}:
        runs |= computed([asked[key][i] for key, i in middles.items()], run, sources=sources)
        for key, i in middles.items():
            low, high = bounds[key]
            bounds[key] = (i, high) if good(key, asked[key][i]) else (low, i)
    if not ask.quick:
        again = {key: [replace(best(key), second=_SECOND[key[2]][-1])] for key in asked if key[2] in _SECOND}
        runs |= computed([one for cells in again.values() for one in cells], run, sources=sources) if again else {}
    return {key: (runs[best(key)], _named(best(key))) for key in asked}


def _named(cell: Cell) -> str:
    second = f", {cell.second:g} s" if cell.second else ""
    return f"{cell.target:g}{second}" if cell.system in _TARGETS else ""


def _planned(runs: Sequence[Found], target: float, start_s: float) -> tuple[int, ...]:
    """Return the cheapest schedule that keeps so many promises (%), if each window's are those of a fixed fleet's."""
    kept = np.array([one.good for one in runs], float)
    total = sum(runs[0].made)
    low, high = 1e-5, 1e3  # promises that an engine-second is worth
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        plan = best_schedule(kept, WINDOW_S, start_s, middle)
        share = 100 * sum(kept[count - 1, i] for i, count in enumerate(plan)) / total
        low, high = (middle, high) if share >= target else (low, middle)
    return best_schedule(kept, WINDOW_S, start_s, low)


def _rows(found: Mapping[Key, tuple[Found, str]], systems: Sequence[str]) -> list[Row]:
    rows = []
    for (ground, start, system), (one, _) in found.items():
        if system not in systems:
            continue
        setting = f"{ground}, starts {start:g} s"
        values = {"attainment.promised": one.kept, "engine_hours": one.hours}
        if (least := found.get((ground, start, HINDSIGHT))) is not None:
            values["engine_hours.of_hindsight"] = one.hours / least[0].hours
        rows += [Row(id, system, setting, value, _UNITS[id]) for id, value in values.items()]
    return rows


def _notes(found: Mapping[Key, tuple[Found, str]], systems: Sequence[str]) -> list[str]:
    """Say which settings were best, and where headway misses the goal."""
    notes = [
        f"{ground}, starts {start:g} s: "
        + "; ".join(f"{name}: {found[ground, start, name][1]}" for name in systems if found[ground, start, name][1])
        for ground, start in dict.fromkeys((ground, start) for ground, start, _ in found)
    ]
    for (ground, start, system), (one, _) in found.items():
        least = found.get((ground, start, HINDSIGHT))
        if system != HEADWAY or least is None:
            continue
        lost, more = found[ground, start, PEAK][0].kept - one.kept, one.hours / least[0].hours
        if lost > 1 or more > 1.15:
            notes.append(
                f"{ground}, starts {start:g} s: headway misses the goal (promises within 1 point of fixed-at-peak at "
                f"1.15 times hindsight's engine-hours): {lost:.1f} points fewer at {more:.2f} times."
            )
    return notes


def _pictures(found: Mapping[Key, tuple[Found, str]], systems: Sequence[str]) -> dict[str, Any]:
    """Draw promises against engine-hours, and the engines over time, per ground and start."""
    places = list(dict.fromkeys((ground, start) for ground, start, _ in found))
    figure, grid = sheet(len(places), 2, 9.0, 2.6 * len(places))
    shades = colours(systems)
    for (ground, start), left, right in zip(places, grid[::2], grid[1::2], strict=True):
        for name in systems:
            one, _ = found[ground, start, name]
            left.plot(one.hours, one.kept, "o", color=shades[name])
            if one.engines:
                times, counts = zip(*one.engines, strict=True)
                end = len(one.made) * WINDOW_S
                right.step([*times, end], [*counts, counts[-1]], where="post", color=shades[name])
        left.set(xlabel="engine-hours", ylabel="promises kept, %", title=f"{ground}, starts {start:g} s")
        right.set(xlabel="seconds", ylabel="engines wanted")
    legend(figure, systems)
    return {"elastic": png(figure)}
