"""`headway bench papers qlm`: the evaluation of QLM (arXiv 2407.00047, section 8), SIMULATED.

Several models on fewer A100s (W_A), one model (W_B), mega prompts (W_C), A10s beside A100s, standing queues,
the group size delta and SLO scales, over QLM, its ablations and the paper's baselines; the estimator's
accuracy and the planning time; the motivation's figures. Workloads: `qlm_workloads.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.papers.parts import PaperPart, part, run_each
from benchmarks.papers.qlm_estimates import ESTIMATED, estimates, planning
from benchmarks.papers.qlm_motivation import motivation
from benchmarks.papers.qlm_orders import plan_orders
from benchmarks.papers.qlm_plots import plots
from benchmarks.papers.qlm_tables import COLD, QLM, QlmResults, QlmTrial, claims, rows, trial
from benchmarks.papers.qlm_workloads import CV, FIVE, ONE, RUNNING, TWELVE, QlmSetting
from benchmarks.papers.recipes import find
from headway.whatif.output.results import SIMULATED, Ask

MULTI = (QLM, "vllm-model-swap", "edf-model-swap", "shepherd", "headway")
# `edf` also overtakes what runs, `edf-model-swap` only what waits, as QLM's EDF.
SINGLE = (QLM, "vllm", "edf-model-swap", "edf", "shepherd", "least-loaded", "llm-d-like", "headway")
LOADED = (QLM, "vllm", "edf", "shepherd", "headway")
# Without load balancing: groups at random. Without an order that considers model swaps: groups by deadline.
ABLATION = (QLM, "qlm-no-evict", "qlm-no-kv-swap", COLD, "qlm-random", "qlm-by-deadline")
PLACED = (QLM, "qlm-round-robin", "qlm-random")
# On a fleet where every model has its instances, so that nothing needs to be swapped.
ROUTED = (*MULTI, "round-robin", "random", "least-loaded", "llm-d-like")
_MEASURED = {
    "delta": "deltas",
    "estimator": "estimated",
    "planning": "queues",
    "orders": "ordered",
    "motivation": "motivated",
}
_PLANNED = 8  # A100s of the fleet for which queues are planned


@dataclass(frozen=True, slots=True)
class QlmPlan:
    """The size of the evaluation.

    queues: lengths of the queues for which planning is timed.
    estimated: requests in the queues whose waits are forecast; 0 = no forecasts.
    ordered: small plans whose order is compared with the best of all; 0 = none.
    deltas: group sizes, in batches.
    delta_setting: the workload on which group sizes are compared.
    motivated: several models and one, for the figures of the motivation (`qlm_motivation.py`); () = none.
    """

    experiments: tuple[PaperPart[QlmSetting], ...]
    queues: tuple[int, ...]
    estimated: int
    ordered: int
    deltas: tuple[int, ...]
    delta_setting: QlmSetting
    motivated: tuple[QlmSetting, ...] = ()


def _multi(seconds: float) -> QlmSetting:
    first = (("mistral-7b", "vicuna-13b"),)
    return QlmSetting("W_A", (("a100", 3),), FIVE, 0.8, seconds, first)


def _single(seconds: float) -> QlmSetting:
    return QlmSetting("W_B", (("a100", 2),), ONE, 1.2, seconds)


def _loads(single: QlmSetting) -> tuple[QlmSetting, ...]:
    """Return one model from a little to far above its capacity, with ten seeds."""
    return tuple(replace(single, load=load, interactive=s, seeds=10) for load in (1.2, 2.0, 3.0) for s in _SHARES)


def _multi_loads(multi: QlmSetting) -> tuple[QlmSetting, ...]:
    """Return the settings of several models at loads from a little to far above the capacity, with three seeds."""
    return tuple(replace(multi, load=load, interactive=s, seeds=3) for s in _SHARES[1:3] for load in (1.2, 2.0, 3.0))


def _warm(multi: QlmSetting) -> tuple[QlmSetting, ...]:
    """Return several models below and above the capacity, with host memory for weights and without."""
    return tuple(replace(multi, load=load, host_gb=gb) for load in (0.8, 3.0) for gb in (multi.host_gb, 0.0))


def _limits(single: QlmSetting) -> tuple[QlmSetting, ...]:
    """Return batch limits at which KV, not the limit, is short, and the usual one, with three seeds."""
    return tuple(replace(single, load=load, limit=n, seeds=3) for n in (RUNNING, 256) for load in (1.2, 2.0, 3.0))


def _mixed(seconds: float, a10: int) -> QlmSetting:
    gpus, names = (("a100", 10 - a10), ("a10", a10)), tuple(model.name for model in TWELVE)
    return QlmSetting("W_A of 7B models", gpus, TWELVE, 0.8, seconds, (names, names[10 - a10 :] + names))


def _fleet(seconds: float, name: str) -> QlmSetting:
    """Return 8 A100s and 8 A10s that start with instances of every model, by its demand."""
    often, half = "vicuna-13b", "mistral-7b"
    a100 = (often, often, half, often, "vicuna-13b-law", often, half, often)
    a10 = ("mistral-7b-sql", "mistral-7b-med")
    return QlmSetting(name, (("a100", 8), ("a10", 8)), FIVE, 1.0, seconds, (a100, a10))


def full() -> QlmPlan:
    """Return the whole evaluation."""
    multi, single = _multi(120.0), _single(120.0)
    mega = replace(multi, name="W_C", load=0.4)
    queued = replace(single, load=0.5)
    return QlmPlan(
        (
            PaperPart("tail", tuple(replace(multi, tail=t) for t in (0.2, 0.5, 1.0)), MULTI),
            PaperPart("multi", tuple(replace(multi, interactive=s) for s in _SHARES), MULTI),
            PaperPart("multi-loads", _multi_loads(multi), MULTI),
            PaperPart("multi-ablation", (multi,), ABLATION),
            PaperPart("warm", _warm(multi), (QLM, "qlm-by-deadline")),
            PaperPart("single", tuple(replace(single, interactive=s) for s in _SHARES), SINGLE),
            PaperPart("loads", _loads(single), LOADED),
            PaperPart("single-ablation", (single,), ABLATION),
            PaperPart("batch-limit", _limits(single), ABLATION[:3]),
            PaperPart("mix", tuple(_mixed(90.0, a10) for a10 in (0, 2, 5, 8, 10)), PLACED),
            PaperPart("mega", tuple(replace(mega, mega=m) for m in (0.0, 0.005, 0.01, 0.02)), MULTI),
            PaperPart("queue", tuple(replace(queued, queued=n) for n in (0, 1000, 10_000)), SINGLE[:5]),
            PaperPart("slo", tuple(replace(multi, slo_scale=s) for s in _SCALES), MULTI),
            PaperPart("fleet", (_fleet(120.0, "W_A on a fleet"),), ROUTED),
            PaperPart("hour", (_fleet(3600.0, "W_A for an hour"),), (QLM,)),
        ),
        (1_000, 10_000, 100_000, 400_000),
        4000,
        20,
        (1, 2, 4, 8, 16),
        multi,
        (multi, single),
    )


def quick() -> QlmPlan:
    """Return W_A and W_B in one setting each, and a selection of the rest."""
    multi, single = _multi(120.0), _single(120.0)
    return QlmPlan(
        (PaperPart("multi", (multi,), MULTI), PaperPart("single", (single,), SINGLE[:5])),
        (10_000,),
        2000,
        0,
        (1, 4),
        multi,
    )


_SHARES = (0.05, 0.2, 0.5, 1.0)
_SCALES = (1.0, 3.0, 11.0)


@experiment("papers qlm", "sim", f"QLM, its ablations and its baselines ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = (), plan: QlmPlan | None = None, seeds: int | None = None) -> Result:
    """Run the evaluation. `quick`: about a minute, W_A and W_B at one rate.

    only: parts; () = all. seeds: number for each setting, instead of its own.
    """
    plan = part(plan or (quick() if ask.quick else full()), only, _MEASURED)
    if seeds is not None:
        parts = (replace(e, settings=tuple(replace(s, seeds=seeds) for s in e.settings)) for e in plan.experiments)
        plan = replace(plan, experiments=tuple(parts))
    results = run(plan, ask.seed, bar=not ask.as_json)
    workload = (
        f"{SIMULATED}: ShareGPT lengths, batch limit {RUNNING}, Gamma arrivals with a coefficient of "
        f"variation of {CV:g}; load = work that arrives / capacity of the fleet; latency-sensitive requests "
        "are due in 25 s, batch ones in 300 s. A run ends with its last request, at most after four times "
        "the seconds of arrivals; throughput = requests ended / seconds until then."
    )
    notes = ("A row with a paper's figure has the best of all settings ('up to'): docs/bench/qlm.md.",)
    return Result([*rows(results), *claims(results)], workload, lambda: plots(results), notes=notes)


def run(plan: QlmPlan, seed: int, *, bar: bool) -> QlmResults:
    """Run a plan."""
    from headway.policy.plan.group_placement import QlmOptions
    from headway.policy.recipes.qlm import variant

    def served(system: str, setting: QlmSetting) -> QlmTrial:
        return trial(system, find(system), setting, seed)

    trials, shown = run_each(plan.experiments, served, bar=bar), partial(track, disable=not bar)
    deltas = {
        delta: trial(QLM, variant(QLM, "groups of another size", QlmOptions(delta=delta)), plan.delta_setting, seed)
        for delta in shown(plan.deltas, "group sizes")
    }
    profiles = ESTIMATED.items() if plan.estimated else ()
    estimated = (estimates(*one, plan.estimated, seed) for one in shown(profiles, "estimating"))
    forecasts = [*chain.from_iterable(estimated)]
    planned = [planning(find(QLM), queued, _PLANNED, seed) for queued in shown(plan.queues, "planning")]
    orders = [*shown(plan_orders(find(QLM), plan.ordered, seed), "small plans", plan.ordered)]
    motivated = [*motivation(plan.motivated, seed)]
    return QlmResults(trials, deltas, forecasts, planned, orders, motivated)
