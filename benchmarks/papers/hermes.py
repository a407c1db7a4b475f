"""`headway bench papers hermes`: the evaluation of Hermes (section 5), SIMULATED.

Application completion times at three intensities, the ablation, deadlines, the cost of wrong graphs, prewarmed
backends (`hermes_prewarm.py`), and the policy's decision time. Workloads: `hermes_workloads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.papers.hermes_plots import plots
from benchmarks.papers.hermes_policy import policy_rows
from benchmarks.papers.hermes_prewarm import KS, prewarm_rows, prewarmed
from benchmarks.papers.hermes_workloads import (
    AUTHORS,
    DEFAULT,
    FACTORS,
    GRAPHS,
    HERMES,
    ORACLE,
    RUNS,
    WIDE,
    WINDOWS,
    HermesSetting,
    ServedRuns,
    serve,
    source,
)
from benchmarks.papers.parts import PaperPart, part, run_each
from benchmarks.papers.quoted import quoted
from headway.types import Floats
from headway.whatif.output.results import SIMULATED, Ask, Row

_QUICK = ("vllm", "parrot", "vtc", "srtf-mean", HERMES, DEFAULT, ORACLE)
SYSTEMS = (*_QUICK, "vtc-served", "vtc-runs", "vtc-shares")
_ABLATION = (HERMES, "hermes-no-refine", "hermes-mean", ORACLE)
_WARMED = ("CG", "PE")  # applications whose backends need a start
_DEADLINES = ("vllm", "parrot", "edf", HERMES, "hermes-ddl", DEFAULT, "oracle-ddl")
_ON_AUTHORS, _PUBLISHED = "authors' engine", "authors' engine and runs"
_MEASURED = {"prewarm": "ks", "policy": "live"}  # parts beside the experiments
# The paper's reductions of the mean and the P95 in percent, for one 7B model at 1x.
_act = partial(quoted, paper="hermes", section="5.2", line=213)
_REDUCTION = {
    "vllm": (_act(77.0, printed="77.0%"), _act(82.4)),
    "parrot": (_act(76.7), _act(69.0, printed="69.0%")),
    **dict.fromkeys(("vtc", "vtc-served", "vtc-runs", "vtc-shares"), (_act(66.7), _act(74.1))),
}
_REDUCTION_70B = {  # two 70B models at 3x
    "vllm": (_act(58.5), _act(62.2)),
    "parrot": (_act(39.1), _act(21.7)),
    "vtc": (_act(50.3), _act(45.8)),
}
_AT_1X = ("1x", f"1x, {_ON_AUTHORS}", f"1x, {_PUBLISHED}")
# Increase of the mean over that of hermes in %, and DDL's improvement of the deadlines met over EDF.
_INFLATED = {"hermes-no-refine": quoted(15.3, "hermes", "5.3", 221), "hermes-mean": quoted(47.5, "hermes", "5.3", 221)}
_MORE_DEADLINES = quoted(1.0, "hermes", "5.2", 215, "1×")


@dataclass(frozen=True, slots=True)
class HermesPlan:
    """The size of the evaluation.

    seeds: seeds per setting and system. live: numbers of live runs for which the policy is timed.
    ks: aggressiveness K of prewarming; () = no prewarming part.
    """

    experiments: tuple[PaperPart[HermesSetting], ...]
    seeds: int
    live: tuple[int, ...]
    ks: tuple[float, ...]


Results = Mapping[str, Sequence[ServedRuns]]


def full() -> HermesPlan:
    """Return the whole evaluation."""
    intensities = tuple(HermesSetting(name, window=seconds) for name, seconds in WINDOWS.items())
    slow, slow_3x, due = _slow("1x"), _slow("3x"), _deadlines()
    wrong = tuple(HermesSetting(f"graphs: {graphs}", graphs=graphs) for graphs in GRAPHS)
    wide = replace(slow_3x, name=f"{slow_3x.name}, runs that differ widely", apps=(WIDE,), published=True)
    big = HermesSetting("70b, 3x", runs=10 * RUNS, engine="70b")
    return HermesPlan(
        (
            PaperPart("act", intensities, SYSTEMS),
            PaperPart("authors", (slow, _published(slow)), (*SYSTEMS, "hermes-aging-0.1")),
            PaperPart("70b", (big,), (*SYSTEMS[:3], HERMES, DEFAULT, ORACLE)),
            PaperPart("ablation", (HermesSetting("3x"), slow_3x, _published(slow_3x), wide), _ABLATION),
            PaperPart("deadlines", (due, replace(due, name=f"{due.name}, {_ON_AUTHORS}", engine=AUTHORS)), _DEADLINES),
            PaperPart("graphs", wrong, (HERMES, ORACLE)),
        ),
        10,
        (100, 1000, 10_000),
        KS,
    )


def quick() -> HermesPlan:
    """Return one intensity with one seed, and a selection of the rest."""
    return HermesPlan(
        (
            PaperPart("act", (HermesSetting("3x"),), _QUICK),
            PaperPart("authors", (_slow("1x"),), ("vllm", HERMES, ORACLE)),
            PaperPart("ablation", (HermesSetting("3x"),), _ABLATION),
            PaperPart("deadlines", (_deadlines(),), ("edf", "hermes-ddl")),
        ),
        1,
        (100, 10_000),
        KS[1:4],
    )


def _slow(name: str) -> HermesSetting:
    return HermesSetting(f"{name}, {_ON_AUTHORS}", window=WINDOWS[name], engine=AUTHORS)


def _published(setting: HermesSetting) -> HermesSetting:
    return replace(setting, name=setting.name.replace(_ON_AUTHORS, _PUBLISHED), published=True)


def _deadlines() -> HermesSetting:
    return HermesSetting("15 minutes", window=WINDOWS["2x"], deadlines=True)


@experiment("papers hermes", "sim", f"Hermes, its ablations and its baselines ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = (), seeds: int | None = None) -> Result:
    """Run the evaluation: ten seeds of each setting. `quick`: about a minute, one seed of a few settings.

    only: parts; () = all. `authors` alone takes a quarter of an hour on one core. seeds: per setting, instead.
    """
    plan = part(quick() if ask.quick else full(), only, _MEASURED)
    count = seeds or plan.seeds
    numbers = range(ask.seed, ask.seed + count)

    def served(system: str, setting: HermesSetting) -> ServedRuns:
        return _together([serve(system, setting, number) for number in numbers])

    results: Results = run_each(plan.experiments, served, bar=not ask.as_json)
    apps = track(_WARMED if plan.ks else (), "prewarming", disable=ask.as_json)
    warmed = [one for app in apps for one in prewarmed(app, plan.ks, ask.seed)]
    figures = [*_act_rows(results), *_deadline_rows(results), *_graph_rows(results)]
    figures += [*prewarm_rows(warmed), *policy_rows(plan.live)]
    notes = () if count == 1 else (".low and .high: 95 % of 1,000 draws of the seeds with replacement.",)
    workload = (
        f"{SIMULATED}: {source()}; {RUNS} runs within 30, 15 and 10 minutes (1x, 2x, 3x) on one engine "
        "(Llama-2-7B on an A100, KV for 40,000 tokens); graphs learned from other runs than those served; "
        f"{count} seed(s), figures over all of their runs. authors' engine: iterations as in the log that Hermes' "
        "authors published; and runs: the weights of their code, CG of several turns, FEV and MRS by percentiles."
    )
    return Result(figures, workload, lambda: plots(results), notes=notes)


def _together(some: Sequence[ServedRuns]) -> ServedRuns:
    """Return the runs of all seeds as one."""
    act, target, factor = (np.concatenate([getattr(one, name) for one in some]) for name in ("act", "target", "factor"))
    apps = [app for one in some for app in one.apps]
    return ServedRuns(some[0].system, some[0].setting, act, target, factor, apps)


def _act_rows(results: Results) -> list[Row]:
    """Return completion times, and the differences between hermes and the others."""
    served = [one for name in ("act", "authors", "70b", "ablation") for one in results.get(name, ())]
    once = {(one.system, one.setting): one for one in served}
    rows = [row for one in once.values() for row in _times(one)]
    for name, stated, paper in (
        ("act", _AT_1X, _REDUCTION),
        ("authors", _AT_1X, _REDUCTION),
        ("70b", ("70b, 3x",), _REDUCTION_70B),
    ):
        for one in results.get(name, ()):
            if one.system in paper:
                published = paper[one.system] if one.setting.name in stated else (None, None)
                rows += _reductions(_of(results[name], HERMES, one.setting.name), one, published)
                rows += _reductions(_of(results[name], ORACLE, one.setting.name), one, (None, None))
    for one in results.get("ablation", ()):
        for base in (HERMES, ORACLE):
            if one.system != base:
                more = _INFLATED.get(one.system) if base == HERMES else None
                than = _of(results["ablation"], base, one.setting.name)
                rows += _compared(f"act.mean.over_{base}_pct", one.system, one.setting.name, one, than, _more, more)
    return rows


Figure = Callable[[Floats, Floats], float]


def _more(mine: Floats, theirs: Floats) -> float:
    return 100 * float(mine.mean() / theirs.mean() - 1)


def _less(mine: Floats, theirs: Floats) -> float:
    return -_more(mine, theirs)


def _less_p95(mine: Floats, theirs: Floats) -> float:
    return 100 * float(1 - np.quantile(mine, 0.95) / np.quantile(theirs, 0.95))


def _times(one: ServedRuns) -> list[Row]:
    setting = one.setting.name
    p95 = Row("act.p95", one.system, setting, float(np.quantile(one.act, 0.95)), "s")
    return [*_compared("act.mean", one.system, setting, one, one, lambda mine, _: float(mine.mean()), None, "s"), p95]


def _reductions(mine: ServedRuns, other: ServedRuns, paper: tuple[float | None, float | None]) -> list[Row]:
    setting = f"{other.setting.name}, against {other.system}"
    return [
        *_compared("act.mean.reduction_pct", mine.system, setting, mine, other, _less, paper[0]),
        *_compared("act.p95.reduction_pct", mine.system, setting, mine, other, _less_p95, paper[1]),
    ]


def _compared(
    id: str,
    system: str,
    setting: str,
    one: ServedRuns,
    other: ServedRuns,
    figure: Figure,
    paper: float | None,
    unit: str = "%",
) -> list[Row]:
    """Return a figure of the runs of all seeds; of several seeds, also its interval."""
    rows = [Row(id, system, setting, figure(one.act, other.act), unit, paper)]
    mine, theirs = (some.act.reshape(-1, some.setting.runs) for some in (one, other))
    if len(mine) > 1:
        draws = np.random.default_rng(0).integers(0, len(mine), (1000, len(mine)))
        low, high = np.quantile([figure(mine[draw].ravel(), theirs[draw].ravel()) for draw in draws], (0.025, 0.975))
        rows += [
            Row(f"{id}.low", system, setting, float(low), unit),
            Row(f"{id}.high", system, setting, float(high), unit),
        ]
    return rows


def _deadline_rows(results: Results) -> list[Row]:
    rows = []
    for one in results.get("deadlines", ()):
        in_time = one.act <= one.target
        rows.append(Row("deadlines_met_pct", one.system, one.setting.name, 100 * float(in_time.mean()), "%"))
        for factor in FACTORS:
            share = 100 * float(in_time[one.factor == factor].mean())
            rows.append(Row("deadlines_met_pct", one.system, f"{one.setting.name}, {factor:g}x", share, "%"))
    met = {
        (one.setting.name, one.system): float((one.act <= one.target).mean()) for one in results.get("deadlines", ())
    }
    for (setting, system), share in met.items():
        if system in ("hermes-ddl", "oracle-ddl"):
            paper = 1 + _MORE_DEADLINES if system == "hermes-ddl" else None
            rows.append(Row("deadlines_met.over_edf", system, setting, share / met[setting, "edf"], "x", paper))
    return rows


def _graph_rows(results: Results) -> list[Row]:
    """Return the figures of hermes with graphs other than those learned from the other half of the runs."""
    return [row for one in results.get("graphs", ()) for row in _times(one)]


def _of(some: Sequence[ServedRuns], system: str, setting: str) -> ServedRuns:
    return next(one for one in some if one.system == system and one.setting.name == setting)
