"""`headway bench papers anneal`: the evaluation of SLO-aware scheduling (section 5), SIMULATED.

With the paper's model of execution and latency law: overhead, distance from the best order, G, attainment and
latency against vLLM's order, sweeps of the search, of length errors and of instances. Then the recipes on the
event simulator, whose engine batches continuously and has another latency law.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment, refuse_unknown
from benchmarks.papers.anneal_cases import (
    PROFILE,
    AnnealCase,
    Profiled,
    Worth,
    annealed,
    arrival_order,
    capacity,
    engine,
    mean,
    profiled,
    simulated,
    slo_scale,
    worth,
)
from benchmarks.papers.exhaustive import exhaustive, most_met
from benchmarks.papers.quoted import quoted
from headway.policy.core.annealing import Schedule
from headway.policy.core.mapping import Records
from headway.policy.forecast.latency.laws import PUBLISHED
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.annealed import Assignment
from headway.simulate.workload.arrivals import poisson
from headway.types import Instance, Ints
from headway.whatif.output.plots import colours, line_legend, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Grid, Row, show

ANNEAL, VLLM, BEST = "anneal", "vllm", "exhaustive"
BATCHES = (1, 2, 4)
_SWEPT = ((10, 1), (20, 2), (40, 4))  # Figure 8
_HOT = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_MOVES = (5, 20, 100, 500, 2000)
_ERRORS: tuple[tuple[str, float | Profiled], ...] = (
    ("none", 0.0),
    ("2.5 %", 0.025),
    ("5 %", 0.05),
    ("10 %", 0.1),
    ("Gaussian draw", "draw"),
    ("Gaussian mean", "mean"),
)
_TEXT = "slo-aware-annealing"
_ours = partial(quoted, paper=_TEXT, section="Table 1", line=304, unit=1000)
_tried = partial(quoted, paper=_TEXT, section="Table 1", line=305, unit=1000)
_most = partial(quoted, paper=_TEXT, section="5.2", line=310)
_appendix = partial(quoted, paper=_TEXT, section="5.2", line=312)
_scaled = partial(quoted, paper=_TEXT, section="5.5", line=340)
_MOST = _most(46.5)  # the largest G over vLLM, in %
_INSTANCES = (1, 2, 4, 8)
_RECIPES = (VLLM, ANNEAL, "anneal-queue", "anneal-batches", "headway", "srtf", "edf")
_DRAWN = (ANNEAL, "anneal-draws", "anneal-paper")
# Figures of the paper by (id, setting).
_PAPER = {
    ("overhead.ms", "4 requests, batch 1"): _ours(0.23, printed="0.00023"),
    ("overhead.ms", "6 requests, batch 1"): _ours(0.32, printed="0.00032"),
    ("overhead.ms", "8 requests, batch 1"): _ours(0.43, printed="0.00043"),
    ("overhead.ms", "10 requests, batch 1"): _ours(0.48, printed="0.00048"),
    ("overhead.ms", "10 requests each, 2 instances"): _scaled(0.93),
    ("overhead.ms", "10 requests each, 4 instances"): _scaled(1.91),
    ("g", "10 requests, batch 1, over vllm"): _MOST,
    ("g", "10 requests, batch 1, length error Gaussian draw, over vllm"): _MOST,  # the same: its own forecast
    ("g", "together, 10 requests, batch 1, drawn lengths, over vllm"): _MOST,
    ("g", "40 requests, batch 4, length error 2.5 %, over vllm"): quoted(84.0, _TEXT, "5.3", 322, "84%"),
    # 1.84 / 1.65: 84 % over vLLM, 65 % over this (5.3).
    ("g", "40 requests, batch 4, length error Gaussian draw, over vllm"): 11.5,
    ("g.change_pct", "10 requests, batch 4, coefficients off, largest decline"): quoted(-1.9, _TEXT, "5.4", 333),
    ("attainment", "10 requests, batch 1, over vllm"): _most(33.4),
    ("latency.mean", "10 requests, batch 2, over vllm"): _most(-16.3),
    # Of Qwen2.5-32B and Qwen2.5-7B on LMDeploy and an A800.
    ("attainment.times", "40 requests, batch 1, over vllm"): _appendix(5.0, printed="5×"),
    ("latency.mean", "8 requests, batch 2, over vllm"): _appendix(-31.6),
    ("gap_to_exhaustive_pct", "all settings, largest of the means"): quoted(1.0, _TEXT, "5.2", 314, "1.0%"),
}
_TRIED_MS = {  # of the exhaustive search
    4: _tried(1.2, printed="0.0012"),
    6: _tried(39.0, printed="0.039"),
    8: _tried(88_200.0, printed="88.2"),
    10: _tried(287_000.0, printed="287"),
}


@dataclass(frozen=True, slots=True)
class AnnealPlan:
    """The size of the evaluation.

    seeds: cases per setting.
    counts: requests per case.
    tried: the most requests that are searched exhaustively, by batch limit.
    simulated: requests that arrive together, on the event simulator, and cases of each.
    loads: arrival rates as multiples of the engine's capacity, requests of a run, batch limits and seeds.
    """

    seeds: int
    counts: tuple[int, ...]
    tried: dict[int, int]
    simulated: tuple[tuple[int, ...], int]
    loads: tuple[tuple[float, ...], int, tuple[int, ...], int]


FULL = AnnealPlan(
    40,
    (4, 6, 8, 10, 20, 40, 100, 1000),
    {1: 10, 2: 7, 4: 7},
    ((10, 20, 40), 10),
    ((0.7, 1.0, 1.5, 2.0), 300, (1, 2, 4, 8), 3),
)
QUICK = AnnealPlan(10, (4, 6, 8, 10, 20, 40, 1000), {1: 10, 2: 6, 4: 6}, ((10, 40), 3), ((0.7, 1.5), 80, (1, 4), 1))
_NOTES = (
    "Unless a setting says otherwise: by the paper's model of execution (batches one after another) and its Table 2;",
    "vllm is arrival order in full batches. G in requests per 1,000 s of latency; over vllm: of means.",
    f"together, load: event simulator ({PROFILE}), continuous batching, SLOs x {slo_scale():.2f} so that code has",
    "ten times its seconds alone. Together: all come at 0 s. Load: a multiple of vllm's own. Lengths are",
    "true ones; learned: the mean of the task's answers so far.",
    "overhead.ms: one search on this machine, the median; exhaustive: the mean. hot: first temperature,",
    "in requests; moves: at each of the 32 temperatures. The paper's figures are of one draw each.",
)
_ALL_SIZES = 100  # requests up to which all figures are reported; beyond it the overhead alone


@experiment("anneal", "sim", f"SLO-aware scheduling ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = (), plan: AnnealPlan | None = None) -> Result:
    """Run the evaluation. `quick`: fewer cases, and fewer settings of the event simulator. only: parts; () = all."""
    refuse_unknown("part", only, PARTS)
    plan, rows = plan or (QUICK if ask.quick else FULL), list[Row]()
    _compile(ask.seed)
    for name in track(only or [*PARTS], "simulating", disable=ask.as_json, transient=True):
        rows += PARTS[name](plan, ask.seed)
    pictures = (lambda: {"anneal": _plot(rows)}) if "orders" in (only or PARTS) else None
    return Result(rows, _describe(plan), pictures, _grid(rows), _NOTES)


def _describe(plan: AnnealPlan) -> str:
    (_, cases), (_, arrivals, _, seeds) = plan.simulated, plan.loads
    return (
        f"{SIMULATED}: half code, half chat, {plan.seeds} cases a setting; event simulator: {cases} cases a"
        f" setting, loads of {arrivals} Poisson arrivals x {seeds} seeds"
    )


def _compile(seed: int) -> None:
    """Run all timed code once, so that times do not include compilation."""
    costs = AnnealCase.drawn(4, seed).costs()
    for limit in BATCHES:
        annealed(costs, limit, seed)
        exhaustive(costs, limit)


def _setting(count: int, limit: int) -> str:
    return f"{count} requests, batch {limit}"


def _row(id: str, system: str, setting: str, ours: float, unit: str) -> Row:
    paper = _PAPER.get((id, setting)) if system.startswith(ANNEAL) else None
    return Row(id, system, setting, ours, unit, paper)


def _figures(system: str, setting: str, w: Worth) -> Iterator[Row]:
    yield _row("g", system, setting, 1000 * w.g, "req/ks")
    yield _row("attainment", system, setting, 100 * w.attainment, "%")
    yield _row("latency.mean", system, setting, w.latency, "s")


def _over(setting: str, ours: Worth, theirs: Worth, system: str = ANNEAL) -> Iterator[Row]:
    """Return the gains of an annealed order over vLLM's."""
    setting = f"{setting}, over {VLLM}"
    yield _row("g", system, setting, _more(ours.g, theirs.g), "%")
    yield _row("attainment", system, setting, 100 * (ours.attainment - theirs.attainment), "points")
    if theirs.attainment:
        yield _row("attainment.times", system, setting, ours.attainment / theirs.attainment, "x")
    yield _row("latency.mean", system, setting, _more(ours.latency, theirs.latency), "%")


def _spread(setting: str, ours: Sequence[Worth], theirs: Sequence[Worth], system: str = ANNEAL) -> Iterator[Row]:
    """Return the gain in G over vLLM's order case by case: percentiles, and how many cases have the paper's most."""
    setting = f"{setting}, over {VLLM}"
    each = [_more(one.g, other.g) for one, other in zip(ours, theirs, strict=True)]
    for share in (10, 50, 90):
        yield _row(f"g.p{share}", system, setting, float(np.percentile(each, share)), "%")
    yield _row("g.reached_pct", system, setting, 100 * float(np.mean(np.array(each) >= _MOST)), "%")


def _more(ours: float, theirs: float) -> float:
    return round(100 * (ours / theirs - 1), 9)


# ---- by the paper's model of execution


def _orders(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Figure 7 and Table 1."""
    gaps = list[float]()
    for count in plan.counts:
        cases = [AnnealCase.drawn(count, seed + i).costs() for i in range(plan.seeds)]
        for limit in BATCHES:
            setting, spent = _setting(count, limit), list[float]()
            found = [_timed(costs, limit, seed + i, spent) for i, costs in enumerate(cases)]
            yield _row("overhead.ms", ANNEAL, setting, 1000 * float(np.median(spent)), "ms")
            if count > _ALL_SIZES:
                continue
            ours, theirs = mean(found), mean([arrival_order(costs, limit) for costs in cases])
            yield from (*_figures(VLLM, setting, theirs), *_figures(ANNEAL, setting, ours))
            yield from _over(setting, ours, theirs)
            if limit == 1:
                most = float(np.mean([most_met(costs) for costs in cases])) / count
                yield _row("attainment.bound", BEST, setting, 100 * most, "%")
                if theirs.attainment:
                    yield _row("attainment.times.bound", BEST, f"{setting}, over {VLLM}", most / theirs.attainment, "x")
            if count <= plan.tried[limit]:
                yield from _against_best(cases, found, limit, setting, gaps)
    yield _row("gap_to_exhaustive_pct", ANNEAL, "all settings, largest of the means", max(gaps), "%")


def _timed(costs: Records, limit: int, seed: int, spent: list[float]) -> Worth:
    """Return the figures of the annealed order; append the seconds of the search to `spent`."""
    began = time.perf_counter()
    order, sizes = annealed(costs, limit, seed)
    spent.append(time.perf_counter() - began)
    return worth(costs, order, sizes)


def _against_best(
    cases: Sequence[Records], found: Sequence[Worth], limit: int, setting: str, gaps: list[float]
) -> Iterator[Row]:
    """Return the distance from the best order, over the first cases, and the time of the exhaustive search."""
    few = cases[: 4 if cases[0].size * limit > 6 * 4 else 20]
    began = time.perf_counter()
    best = [exhaustive(costs, limit) for costs in few]
    seconds = (time.perf_counter() - began) / len(few)
    each = [round(100 * (1 - one.g / top), 9) + 0.0 for one, top in zip(found, best, strict=False)]
    gaps.append(float(np.mean(each)))
    yield _row("gap_to_exhaustive_pct", ANNEAL, setting, gaps[-1], "%")
    yield _row("gap_to_exhaustive_pct", ANNEAL, f"{setting}, largest of {len(few)} cases", max(each), "%")
    paper = _TRIED_MS.get(cases[0].size) if limit == 1 else None
    yield Row("overhead.ms", BEST, setting, 1000 * seconds, "ms", paper)


def _sweeps(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Figure 8: G over vllm by the first temperature and by the moves per temperature."""
    for count, limit in _SWEPT:
        cases = [AnnealCase.drawn(count, seed + i).costs() for i in range(plan.seeds)]
        theirs, usual = mean([arrival_order(c, limit) for c in cases]), Schedule.of(count, limit)
        tried = [(f"hot {hot:g}", usual._replace(hot=hot, cold=hot / 10)) for hot in _HOT]
        tried += [(f"moves {moves}", usual._replace(moves=moves)) for moves in _MOVES]
        for name, schedule in tried:
            ours = [worth(c, *annealed(c, limit, seed + i, schedule)) for i, c in enumerate(cases)]
            setting = f"{_setting(count, limit)}, {name}, over {VLLM}"
            yield _row("g", ANNEAL, setting, _more(mean(ours).g, theirs.g), "%")


def _errors(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Figure 9: G over vllm if the search knows only inexact lengths; of draws also case by case."""
    for count in (10, 20, 40):
        cases = [AnnealCase.drawn(count, seed + i) for i in range(plan.seeds)]
        for limit in BATCHES:
            theirs = [arrival_order(case.costs(), limit) for case in cases]
            for name, error in _ERRORS:
                ours = []
                for i, case in enumerate(cases):
                    forecast = case.forecast(error, np.random.default_rng([seed + i, 1]))
                    ours.append(worth(case.costs(), *annealed(case.costs(forecast), limit, seed + i)))
                setting = f"{_setting(count, limit)}, length error {name}"
                yield _row("g", ANNEAL, f"{setting}, over {VLLM}", _more(mean(ours).g, mean(theirs).g), "%")
                if error == "draw":
                    yield from _spread(setting, ours, theirs)


def _coefficients(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Figure 10: the change of G if the search has one coefficient of the law wrong, for prompts and answers.

    Also attainment: requests that look slower than they are may be given up.
    """
    cases, setting = [AnnealCase.drawn(10, seed + i) for i in range(plan.seeds)], _setting(10, 4)
    costs = [case.costs() for case in cases]
    right = mean([worth(c, *annealed(c, 4, seed + i)) for i, c in enumerate(costs)])
    yield _row("attainment", ANNEAL, f"{setting}, right coefficients", 100 * right.attainment, "%")
    changes = list[float]()
    for name in ("alpha", "beta", "gamma", "delta"):
        for factor in (0.5, 0.8, 0.9, 1.1, 1.2, 1.5):
            fields = {field: factor * getattr(PUBLISHED, field) for field in (f"prefill_{name}", f"decode_{name}")}
            wrong = [case.costs(law=replace(PUBLISHED, **fields)) for case in cases]
            found = mean(
                [worth(c, *annealed(w, 4, seed + i)) for i, (c, w) in enumerate(zip(costs, wrong, strict=True))]
            )
            changes.append(_more(found.g, right.g))
            yield _row("g.change_pct", ANNEAL, f"{setting}, {name} x {factor:g}", changes[-1], "%")
            yield _row("attainment", ANNEAL, f"{setting}, {name} x {factor:g}", 100 * found.attainment, "%")
    yield _row("g.change_pct", ANNEAL, f"{setting}, coefficients off, largest decline", min(changes), "%")


def _instances(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Figure 11: 10 requests per instance, assigned by memory and annealed instance by instance."""
    for instances in _INSTANCES:
        fleet = [replace(engine(1).instance, id=f"e{i}") for i in range(instances)]
        spent, ours, theirs = list[float](), list[Worth](), list[Worth]()
        for i in range(plan.seeds):
            case = AnnealCase.drawn(10, seed + i)
            many = replace(case, **{name: np.tile(getattr(case, name), instances) for name in case.__slots__})
            costs, began = many.costs(), time.perf_counter()
            parts = _assigned(many, fleet)
            found = [annealed(costs[part], 1, seed + i) for part in parts]
            spent.append(time.perf_counter() - began)
            each = [worth(costs[part], *order) for part, order in zip(parts, found, strict=True)]
            ours.append(mean(each))
            theirs.append(mean([arrival_order(costs[part], 1) for part in parts]))
        setting = f"10 requests each, {instances} instances"
        yield _row("overhead.ms", ANNEAL, setting, 1000 * float(np.median(spent)), "ms")
        gain = _more(mean(ours).g, mean(theirs).g)
        yield _row("g", ANNEAL, f"{setting}, over {VLLM}", gain, "%")


def _assigned(case: AnnealCase, fleet: Sequence[Instance]) -> list[Ints]:
    """Return the requests of each instance (equation 20)."""
    places, names = Assignment(), [one.id for one in fleet]
    places.follow(fleet)
    tokens = (case.prompt + case.output).tolist()
    home = np.array([names.index(places.take(size, names)) for size in tokens])
    return [np.flatnonzero(home == i) for i in range(len(fleet))]


# ---- on the event simulator


def _together(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Return the recipes' figures for requests that all arrive at once."""
    counts, seeds = plan.simulated
    scale = slo_scale()
    for count in counts:
        loads = [AnnealCase.drawn(count, seed + i).workload(np.zeros(count), scale) for i in range(seeds)]
        for limit in BATCHES:
            for name in _RECIPES:
                w = mean([simulated(name, load, limit) for load in loads])
                yield from _figures(name, f"together, {_setting(count, limit)}", w)


def _drawn(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Return the figures of continuous batching with Gaussian draws as lengths, and with the annealed batches, too.

    As the paper has it (5.1): requests that all arrive at once, profiles of earlier answers, and more cases, as
    draws differ widely.
    """
    counts, _ = plan.simulated
    scale = slo_scale()
    for count in counts:
        loads = [AnnealCase.drawn(count, seed + i).workload(np.zeros(count), scale) for i in range(plan.seeds)]
        for limit in BATCHES:
            setting = f"together, {_setting(count, limit)}, drawn lengths"
            theirs = [simulated(VLLM, load, limit) for load in loads]
            yield from _figures(VLLM, setting, mean(theirs))
            for name in _DRAWN:
                rngs = (
                    (np.random.default_rng([seed + i, 1]), np.random.default_rng(seed + i)) for i in range(len(loads))
                )
                ours = [simulated(name, load, limit, profiled(*two)) for load, two in zip(loads, rngs, strict=True)]
                yield from _figures(name, setting, mean(ours))
                yield from _over(setting, mean(ours), mean(theirs), name)
                yield from _spread(setting, ours, theirs, name)


def _loads(plan: AnnealPlan, seed: int) -> Iterator[Row]:
    """Return the recipes' figures for Poisson arrivals around an engine's capacity."""
    shares, count, limits, seeds = plan.loads
    for limit in limits:
        rate, scale = capacity(limit, seed), slo_scale()
        for share in shares:
            loads = []
            for i in range(seeds):
                at = poisson(share * rate, count / (share * rate), np.random.default_rng([seed + i, 2]))
                loads.append(AnnealCase.drawn(at.size, seed + i).workload(at, scale))
            for name in (VLLM, ANNEAL, "headway"):
                w = mean([simulated(name, load, limit) for load in loads])
                yield from _figures(name, f"load {share:g}, batch {limit}", w)
            for name in (ANNEAL, "headway"):
                w = mean([simulated(name, load, limit, TaskLengths()) for load in loads])
                yield from _figures(name, f"load {share:g}, batch {limit}, learned lengths", w)


PARTS: dict[str, Callable[[AnnealPlan, int], Iterator[Row]]] = {
    "orders": _orders,
    "sweeps": _sweeps,
    "errors": _errors,
    "coefficients": _coefficients,
    "instances": _instances,
    "together": _together,
    "drawn": _drawn,
    "loads": _loads,
}


# ---- tables


def _grid(rows: Sequence[Row]) -> Grid:
    """Return a table with a line per setting and system; the last columns have other figures and the paper's."""
    ids = tuple(_UNITS)
    lines = []
    for setting, system in dict.fromkeys((row.setting, row.system) for row in rows):
        mine = {row.id: row for row in rows if (row.setting, row.system) == (setting, system)}
        cells = [_cell(mine[id]) if id in mine else "" for id in ids]
        paper = ", ".join(f"{id} {show(row.paper)}" for id, row in mine.items() if row.paper is not None)
        more = ", ".join(f"{id} {show(row.ours)} {row.unit}" for id, row in mine.items() if id not in ids)
        lines.append([setting, system, *cells, more, paper])
    header = ("setting", "system", *(" ".join(pair) for pair in _UNITS.items()), "more", "paper")
    return Grid(header, [lines], header[2:-2])


# Ids of figures, with the unit in the column's header; other units are shown beside the figure.
_UNITS = {"g": "req/ks", "attainment": "%", "latency.mean": "s", "overhead.ms": "", "gap_to_exhaustive_pct": ""}


def _cell(row: Row) -> str:
    usual = row.unit in (_UNITS[row.id], "ms") or row.id == "gap_to_exhaustive_pct"
    over = row.setting.endswith(f"over {VLLM}")  # a difference: its unit is never the column's
    return show(row.ours) if usual and not over else f"{show(row.ours)} {row.unit}"


# ---- plots


def _plot(rows: Sequence[Row]) -> bytes:
    """Return a PNG: G, attainment and latency against the number of requests, a column per batch limit."""
    by = {(r.id, r.system, r.setting): r.ours for r in rows}
    counts = [n for n in FULL.counts if ("g", ANNEAL, _setting(n, 1)) in by]
    panels_of = (("g", "G, req/ks"), ("attainment", "attainment, %"), ("latency.mean", "mean latency, s"))
    figure, panels = sheet(len(panels_of), len(BATCHES), 10, 8)
    for number, axes in enumerate(panels):
        (id, label), limit = panels_of[number // len(BATCHES)], BATCHES[number % len(BATCHES)]
        for system, shade in colours((VLLM, ANNEAL)).items():
            values = [by[id, system, _setting(n, limit)] or 0.0 for n in counts]
            axes.plot(counts, values, marker="o", color=shade, label=system)
        axes.set(xscale="log", ylabel=label if number % len(BATCHES) == 0 else "")
        axes.set_title(f"batch {limit}" if number < len(BATCHES) else "", fontsize=10)
        axes.set_xlabel("requests" if number >= len(panels) - len(BATCHES) else "")
    line_legend(figure, 2)
    figure.suptitle(f"{SIMULATED}: by the paper's model of execution", fontsize=10)
    return png(figure)
