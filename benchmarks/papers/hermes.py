"""`headway bench papers hermes`: the evaluation of Hermes (section 5), SIMULATED.

Application completion times at three intensities, the ablation, deadlines, the cost of wrong graphs, prewarmed
backends (`hermes_prewarm.py`), and the policy's decision time. Workloads: `hermes_workloads.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.papers.hermes_plots import plots
from benchmarks.papers.hermes_policy import policy_rows
from benchmarks.papers.hermes_prewarm import KS, prewarm_rows, prewarmed
from benchmarks.papers.hermes_workloads import (
    DEFAULT,
    FACTORS,
    GRAPHS,
    HERMES,
    ORACLE,
    RUNS,
    WINDOWS,
    HermesSetting,
    ServedRuns,
    serve,
    source,
)
from benchmarks.papers.parts import PaperPart, part, run_each
from benchmarks.papers.quoted import quoted
from headway.whatif.output.results import SIMULATED, Ask, Row

SYSTEMS = ("vllm", "parrot", "vtc", "srtf-mean", HERMES, DEFAULT, ORACLE)
_ABLATION = (HERMES, "hermes-no-refine", "hermes-mean", ORACLE)
_WARMED = ("CG", "PE")  # applications whose backends need a start
_DEADLINES = ("vllm", "parrot", "edf", HERMES, "hermes-ddl", DEFAULT)
_MEASURED = {"prewarm": "ks", "policy": "live"}  # parts beside the experiments
# The paper's reductions of the mean and the P95 in percent, for one 7B model at 1x.
_act = partial(quoted, paper="hermes", section="5.2", line=213)
_REDUCTION = {
    "vllm": (_act(77.0, printed="77.0%"), _act(82.4)),
    "parrot": (_act(76.7), _act(69.0, printed="69.0%")),
    "vtc": (_act(66.7), _act(74.1)),
}
_REDUCTION_70B = {  # two 70B models at 3x
    "vllm": (_act(58.5), _act(62.2)),
    "parrot": (_act(39.1), _act(21.7)),
    "vtc": (_act(50.3), _act(45.8)),
}
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
    wrong = tuple(HermesSetting(f"graphs: {graphs}", graphs=graphs) for graphs in GRAPHS)
    big = HermesSetting("70b, 3x", runs=10 * RUNS, engine="70b")
    return HermesPlan(
        (
            PaperPart("act", intensities, SYSTEMS),
            PaperPart("70b", (big,), (*SYSTEMS[:3], HERMES, DEFAULT)),
            PaperPart("ablation", (HermesSetting("3x"),), _ABLATION),
            PaperPart("deadlines", (_deadlines(),), _DEADLINES),
            PaperPart("graphs", wrong, (HERMES,)),
        ),
        3,
        (100, 1000, 10_000),
        KS,
    )


def quick() -> HermesPlan:
    """Return one intensity with one seed, and a selection of the rest."""
    return HermesPlan(
        (
            PaperPart("act", (HermesSetting("3x"),), SYSTEMS),
            PaperPart("ablation", (HermesSetting("3x"),), _ABLATION),
            PaperPart("deadlines", (_deadlines(),), ("edf", "hermes-ddl")),
        ),
        1,
        (100, 10_000),
        KS[1:4],
    )


def _deadlines() -> HermesSetting:
    return HermesSetting("15 minutes", window=WINDOWS["2x"], deadlines=True)


@experiment("papers hermes", "sim", f"Hermes, its ablations and its baselines ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = ()) -> Result:
    """Run the evaluation. `quick`: about a minute, 3x with one seed. only: parts; () = all."""
    plan = part(quick() if ask.quick else full(), only, _MEASURED)
    seeds = range(ask.seed, ask.seed + plan.seeds)

    def served(system: str, setting: HermesSetting) -> ServedRuns:
        return _together([serve(system, setting, number) for number in seeds])

    results: Results = run_each(plan.experiments, served, bar=not ask.as_json)
    apps = track(_WARMED if plan.ks else (), "prewarming", disable=ask.as_json)
    warmed = [one for app in apps for one in prewarmed(app, plan.ks, ask.seed)]
    figures = [*_act_rows(results), *_deadline_rows(results), *_graph_rows(results)]
    figures += [*prewarm_rows(warmed), *policy_rows(plan.live)]
    workload = (
        f"{SIMULATED}: {source()}; {RUNS} runs within 30, 15 and 10 minutes (1x, 2x, 3x) on one engine "
        "(Llama-2-7B on an A100, KV for 40,000 tokens); graphs learned from other runs than those served; "
        f"{plan.seeds} seed(s), figures over all of their runs."
    )
    return Result(figures, workload, lambda: plots(results))


def _together(some: Sequence[ServedRuns]) -> ServedRuns:
    """Return the runs of all seeds as one."""
    act, target, factor = (np.concatenate([getattr(one, name) for one in some]) for name in ("act", "target", "factor"))
    apps = [app for one in some for app in one.apps]
    return ServedRuns(some[0].system, some[0].setting, act, target, factor, apps)


def _act_rows(results: Results) -> list[Row]:
    """Return completion times, and the differences between hermes and the others."""
    served = [one for name in ("act", "70b", "ablation") for one in results.get(name, ())]
    once = {(one.system, one.setting): one for one in served}
    rows = [row for one in once.values() for row in _times(one)]
    for name, setting, paper in (("act", "1x", _REDUCTION), ("70b", "70b, 3x", _REDUCTION_70B)):
        for one in results.get(name, ()):
            if one.system in paper and one.setting.name == setting:
                rows += _reductions(_of(results[name], HERMES, setting), one, paper[one.system])
            elif one.system in paper:
                rows += _reductions(_of(results[name], HERMES, one.setting.name), one, (None, None))
    for one in results.get("ablation", ()):
        more = 100 * (one.act.mean() / _of(results["ablation"], HERMES, one.setting.name).act.mean() - 1)
        if one.system != HERMES:
            published = _INFLATED.get(one.system)
            rows.append(Row("act.mean.over_hermes_pct", one.system, one.setting.name, more, "%", published))
    return rows


def _times(one: ServedRuns) -> list[Row]:
    setting = one.setting.name
    mean, p95 = float(one.act.mean()), float(np.quantile(one.act, 0.95))
    return [Row("act.mean", one.system, setting, mean, "s"), Row("act.p95", one.system, setting, p95, "s")]


def _reductions(hermes: ServedRuns, other: ServedRuns, paper: tuple[float | None, float | None]) -> list[Row]:
    mean = 100 * (1 - hermes.act.mean() / other.act.mean())
    p95 = 100 * (1 - np.quantile(hermes.act, 0.95) / np.quantile(other.act, 0.95))
    setting = f"{other.setting.name}, against {other.system}"
    return [
        Row("act.mean.reduction_pct", HERMES, setting, float(mean), "%", paper[0]),
        Row("act.p95.reduction_pct", HERMES, setting, float(p95), "%", paper[1]),
    ]


def _deadline_rows(results: Results) -> list[Row]:
    rows = []
    for one in results.get("deadlines", ()):
        met = one.act <= one.target
        rows.append(Row("deadlines_met_pct", one.system, one.setting.name, 100 * float(met.mean()), "%"))
        for factor in FACTORS:
            share = 100 * float(met[one.factor == factor].mean())
            rows.append(Row("deadlines_met_pct", one.system, f"{one.setting.name}, {factor:g}x", share, "%"))
    by = {one.system: float((one.act <= one.target).mean()) for one in results.get("deadlines", ())}
    if by:
        ratio = by["hermes-ddl"] / by["edf"]
        rows.append(Row("deadlines_met.over_edf", "hermes-ddl", "15 minutes", ratio, "x", 1 + _MORE_DEADLINES))
    return rows


def _graph_rows(results: Results) -> list[Row]:
    """Return the figures of hermes with graphs other than those learned from the other half of the runs."""
    return [row for one in results.get("graphs", ()) for row in _times(one)]


def _of(some: Sequence[ServedRuns], system: str, setting: str) -> ServedRuns:
    return next(one for one in some if one.system == system and one.setting.name == setting)
