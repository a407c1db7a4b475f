"""Runs of QLM's evaluation, and their rows: our figures beside the paper's claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.papers.qlm_estimates import Estimate, PlanningTimes
from benchmarks.papers.qlm_orders import SOLVER_S, PlanOrders
from benchmarks.papers.qlm_workloads import QlmSetting
from benchmarks.papers.quoted import quoted
from headway.policy.recipes.recipe import Recipe
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.whatif.output.results import Row

QLM = "qlm"
COLD = "qlm-no-warm"  # instances keep no weights in host memory: every load is from disk
LATENCY_SENSITIVE = "attainment.latency_sensitive"
_UNITS = {"attainment": "%", LATENCY_SENSITIVE: "%", "throughput.req_per_s": "req/s", "swaps": "swaps"}
_SPREAD = ("attainment", LATENCY_SENSITIVE)  # figures of which the least and the most of several seeds are shown
_ALL = 99.0  # % of met SLOs that counts as all
_GROUP_PAPER = quoted(5000.0, QLM, "8.3", 396, "5 ms", 1000)  # us per request at 400,000 queued
_R2 = quoted(0.99, QLM, "8.3", 390)
_URGENT_MET = quoted(90.0, QLM, "8.1", 336, "more than 90%")  # with less than 5 % latency-sensitive requests


@dataclass(frozen=True, slots=True)
class QlmTrial:
    """The figures of one system in one setting: means of its seeds.

    figures: by the names of `_UNITS`; None = there was no such request. spread: (least, most) of a seed.
    """

    system: str
    setting: QlmSetting
    figures: Mapping[str, float | None]
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QlmResults:
    """The results of a plan's runs.

    trials: by experiment.
    deltas: by group size.
    orders: of small plans, beside the best of all.
    motivated: rows of the motivation's figures.
    """

    trials: Mapping[str, Sequence[QlmTrial]]
    deltas: Mapping[int, QlmTrial]
    estimates: Sequence[Estimate]
    planning: Sequence[PlanningTimes]
    orders: Sequence[PlanOrders] = ()
    motivated: Sequence[Row] = ()


def trial(system: str, recipe: Recipe, setting: QlmSetting, seed: int) -> QlmTrial:
    """Run one system in one setting, with as many seeds as it asks for from this one on."""
    runs = [_run(system, recipe, setting, seed + i) for i in range(setting.seeds)]
    each = {name: [run[name] for run in runs] for name in _UNITS}
    known = {name: [one for one in some if one is not None] for name, some in each.items()}
    means = {name: float(np.mean(some)) if some else None for name, some in known.items()}
    spread = {name: (min(known[name]), max(known[name])) for name in _SPREAD if setting.seeds > 1 and known[name]}
    return QlmTrial(system, setting, means, spread)


def _run(system: str, recipe: Recipe, setting: QlmSetting, seed: int) -> dict[str, float | None]:
    fleet = replace(setting, host_gb=0.0) if system == COLD else setting
    work = setting.workload(seed)
    return judge(work, Simulation(recipe, fleet.instances(), work, until=setting.until).run(), setting.until)


def judge(work: Workload, outcome: Outcome, until: float) -> dict[str, float | None]:
    """Return the figures of a run that ended with its last request, at most at `until`.

    Attainment: the share of requests that were complete within their SLO, without those that wait at the start.
    """
    ended, met = ~np.isnan(outcome.end), outcome.end - work.arrival <= work.e2e
    tier = np.array(work.tiers)[work.tier]
    counted, interactive = tier != "standing", tier == "interactive"
    seconds = float(outcome.end.max()) if ended.all() else until
    return {
        "attainment": 100 * float(met[counted].mean()),
        LATENCY_SENSITIVE: 100 * float(met[interactive].mean()) if interactive.any() else None,
        "throughput.req_per_s": int(ended.sum()) / seconds,
        "swaps": float(outcome.swaps),
    }


def rows(results: QlmResults) -> list[Row]:
    """Return every figure, each system and setting once."""
    found: dict[tuple[str, str, str], Row] = {}
    trials = [one for some in results.trials.values() for one in some]
    for one in trials:
        setting = one.setting.describe()
        for name, value in one.figures.items():
            paper = _paper(name, one)
            found[name, one.system, setting] = Row(name, one.system, setting, value, _UNITS[name], paper)
        for name, ends in one.spread.items():
            for end, value in zip(("least", "most"), ends, strict=True):
                id = f"{name}.{end}"
                found[id, one.system, setting] = Row(id, one.system, setting, value, "%")
    for delta, one in results.deltas.items():
        setting = f"{one.setting.describe()}, delta {delta}"
        for name, value in one.figures.items():
            found[name, QLM, setting] = Row(name, QLM, setting, value, _UNITS[name])
    return [*found.values(), *_estimates(results), *results.motivated]


def _paper(name: str, one: QlmTrial) -> float | None:
    """Return the paper's figure for QLM with at most 5 % latency-sensitive requests."""
    stated = (one.system, name, one.setting.name) == (QLM, "attainment", "W_A")
    return _URGENT_MET if stated and one.setting.interactive <= 0.05 else None


def _estimates(results: QlmResults) -> list[Row]:
    found = [Row("estimator.r2", QLM, one.name, one.r2, "R2", _R2) for one in results.estimates]
    for one in results.planning:
        setting = f"{one.queued} queued, {one.instances} instances"
        paper = _GROUP_PAPER if one.queued == 400_000 else None
        found.append(Row("plan.us_per_request", QLM, setting, one.us_per_request, "us", paper))
        found.append(Row("plan.arrival_us", QLM, setting, one.arrival_us, "us"))
    return found + (_orders(results.orders) if results.orders else [])


def _orders(orders: Sequence[PlanOrders]) -> list[Row]:
    """Return how far the search and HiGHS are from the best of all orders, in % of its cost."""
    groups = [one.items for one in orders]
    setting = f"{len(orders)} plans of {min(groups)} to {max(groups)} items, 2 instances"
    found = []
    for name, each in (
        ("search", [one.search_gap_pct for one in orders]),
        (f"HiGHS, {SOLVER_S:g} s", [one.program_gap_pct for one in orders]),
    ):
        found.append(Row("plan.gap_to_best_pct", name, f"{setting}, mean", float(np.mean(each)), "%"))
        found.append(Row("plan.gap_to_best_pct", name, f"{setting}, largest", max(each), "%"))
    proved = 100 * float(np.mean([one.proved for one in orders]))
    return [*found, Row("plan.proved_pct", f"HiGHS, {SOLVER_S:g} s", setting, proved, "%")]


# ---- claims

# QLM against another system: figure, other system, experiments, comparison, the paper's best.
# points: difference of percentages; times: ratio. The paper states gains in attainment for several models and one
# together, and none over EDF. It compares the gain over random placement with that on instances of one kind (8.3).
_ATTAINMENT = {"vllm": quoted(90.0, QLM, "1", 37, "40–90%"), "shepherd": quoted(90.0, QLM, "1", 37, "50–90%")}
_MULTI_TIMES = quoted(4.0, QLM, "8.1", 334, "3–4×")
_single_more = partial(quoted, paper=QLM, section="8.2", line=364, unit=0.01)
_OVER_VLLM_AND_EDF, _OVER_SHEPHERD = 1 + _single_more(0.2, printed="20%"), 1 + _single_more(0.5, printed="50%")
_WARM_START_TIMES = 1 + quoted(3.0, QLM, "1", 39, "300%", 0.01)
_EVICTION = quoted(80.0, QLM, "1", 39, "80%")
CLAIMS: tuple[tuple[str, str, tuple[str, ...], str, float | None], ...] = (
    ("attainment", "vllm-model-swap", ("multi",), "points", _ATTAINMENT["vllm"]),
    ("attainment", "edf-model-swap", ("multi",), "points", None),
    ("attainment", "shepherd", ("multi",), "points", _ATTAINMENT["shepherd"]),
    ("attainment", "vllm", ("single",), "points", _ATTAINMENT["vllm"]),
    ("attainment", "vllm", ("queue",), "points", _ATTAINMENT["vllm"]),
    ("attainment", "edf-model-swap", ("single",), "points", None),
    ("attainment", "edf", ("single",), "points", None),
    ("attainment", "shepherd", ("single",), "points", _ATTAINMENT["shepherd"]),
    ("attainment", "shepherd", ("queue",), "points", _ATTAINMENT["shepherd"]),
    (LATENCY_SENSITIVE, "vllm-model-swap", ("multi", "multi-loads"), "points", _ATTAINMENT["vllm"]),
    (LATENCY_SENSITIVE, "shepherd", ("multi", "multi-loads"), "points", _ATTAINMENT["shepherd"]),
    (LATENCY_SENSITIVE, "vllm", ("single", "loads"), "points", _ATTAINMENT["vllm"]),
    (LATENCY_SENSITIVE, "shepherd", ("single", "loads"), "points", _ATTAINMENT["shepherd"]),
    ("throughput.req_per_s", "vllm-model-swap", ("tail", "multi"), "times", _MULTI_TIMES),
    ("throughput.req_per_s", "edf-model-swap", ("tail", "multi"), "times", _MULTI_TIMES),
    ("throughput.req_per_s", "shepherd", ("tail", "multi"), "times", _MULTI_TIMES),
    ("throughput.req_per_s", "vllm", ("single",), "times", _OVER_VLLM_AND_EDF),
    ("throughput.req_per_s", "edf-model-swap", ("single",), "times", _OVER_VLLM_AND_EDF),
    ("throughput.req_per_s", "edf", ("single",), "times", None),
    ("throughput.req_per_s", "shepherd", ("single",), "times", _OVER_SHEPHERD),
    ("throughput.req_per_s", COLD, ("multi-ablation",), "times", _WARM_START_TIMES),
    ("attainment", "qlm-no-evict", ("single-ablation",), "points", _EVICTION),
    ("throughput.req_per_s", "qlm-random", ("mix",), "times", None),
    ("throughput.req_per_s", "qlm-round-robin", ("mix",), "times", None),
)
_scale = partial(quoted, paper=QLM, section="A.1", line=489)
_SCALE_PAPER = {
    "vllm-model-swap": _scale(11.0, printed="11x"),
    "edf-model-swap": _scale(3.0, printed="3x"),
    "shepherd": _scale(5.0, printed="5×"),
}


def claims(results: QlmResults) -> list[Row]:
    """Return our figures for the paper's claims: QLM against another system, in the best setting for each."""
    found = []
    for name, other, experiments, how, paper in CLAIMS:
        trials = [one for experiment in experiments for one in results.trials.get(experiment, ())]
        if other == "qlm-random":
            trials = [one for one in trials if _uneven(one.setting)]
        theirs = {one.setting: one.figures.get(name) for one in trials if one.system == other}
        mine = {one.setting: one.figures.get(name) for one in trials if one.system == QLM}
        pairs = [(setting, mine[setting], theirs[setting]) for setting in mine if setting in theirs]
        known = [(setting, a, b) for setting, a, b in pairs if a is not None and b is not None]
        compared = [(_compared(how, a, b), setting) for setting, a, b in known if b or how == "points"]
        if compared:
            best, setting = max(compared, key=lambda one: one[0])
            unit = "points" if how == "points" else "x"
            found.append(Row(f"{name}.{how}", f"qlm vs {other}", setting.describe(), best, unit, paper))
    return found + _warm(results.trials.get("warm", ())) + _scales(results.trials.get("slo", ()))


def _warm(trials: Sequence[QlmTrial]) -> list[Row]:
    """Return throughput with warm starts over that without; bound: if all that arrives is served, or the capacity."""
    found, id = [], "throughput.req_per_s"
    served = {(one.system, one.setting): one.figures[id] or 0.0 for one in trials}
    for (system, setting), warm in served.items():
        if setting.host_gb:
            cold, at = served[system, replace(setting, host_gb=0.0)], setting.describe()
            most = setting.rate() / max(setting.load, 1.0)
            paper = _WARM_START_TIMES if system == QLM else None
            found.append(Row(f"{id}.warm_start.times", system, at, warm / cold, "x", paper))
            found.append(Row(f"{id}.warm_start.times.bound", system, at, most / cold, "x"))
    return found


def _uneven(setting: QlmSetting) -> bool:
    """Return True if 20 to 50 % of the instances are A10s, where the paper sees the largest gain (8.3)."""
    counts = dict(setting.gpus)
    return 0.2 <= counts.get("a10", 0) / sum(counts.values()) <= 0.5


def _compared(how: str, ours: float, theirs: float) -> float:
    return ours - theirs if how == "points" else ours / theirs


def _scales(trials: Sequence[QlmTrial]) -> list[Row]:
    """Return the smallest SLO scale at which each system met all SLOs (figure 20); None = at none."""
    found = []
    for system in dict.fromkeys(one.system for one in trials):
        mine = [one for one in trials if one.system == system]
        met = [one.setting.slo_scale for one in mine if (one.figures["attainment"] or 0.0) >= _ALL]
        setting = replace(mine[0].setting, slo_scale=1.0).describe()
        least = min(met) if met else None
        found.append(Row("slo_scale.all_met", system, setting, least, "x", _SCALE_PAPER.get(system)))
    return found
