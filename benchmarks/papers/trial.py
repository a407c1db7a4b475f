"""A trial of the EcoServe benchmark: a recipe on a simulated engine, with the figures of EcoServe 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.papers.ecoserve_setup import TFS, TRUE_LENGTHS, Data, instance, jct_bound, system
from benchmarks.papers.observers import Gauges, inside
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.ecoserve.packer import Options
from headway.ports import Lengths, Packer
from headway.simulate.forecasts import Oracle, Provisioned
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload


@dataclass(frozen=True, slots=True)
class PaperTrial:
    """The figures of one system; shares are from 0 to 1.

    seed: the workload's seed
    copies: factor of the copy times
    jct: mean job completion time, seconds per request
    jct_bound: the least that any schedule has, seconds
    normalized: mean JCT per output token
    tbt: mean time between tokens, by request
    ssr: SLO satisfaction ratio
    throughput: completed requests per second
    kv, compute: utilization
    failures: share of requests that lost KV or paused for lack of it
    thinking: wall seconds of decisions per simulated second
    counts: counters of the packer, by name
    """

    system: str
    data: str
    rate: float
    seed: int
    copies: float
    jct: float
    jct_bound: float
    jct_p99: float
    normalized: float
    tbt: float
    ssr: float
    throughput: float
    kv: float
    compute: float
    failures: float
    thinking: float
    iterations: int
    counts: Mapping[str, int]


def is_oracle(name: str) -> bool:
    """Return True if a system knows the true lengths."""
    return name.endswith("-oracle") or name in TRUE_LENGTHS


def forecasts(name: str, data: Data, load: Workload, seed: int, padding: float | None = None) -> Lengths:
    """Return the lengths that a system plans with: the true ones, or those of the paper's predictor.

    padding: replaces the data set's padding
    """
    if is_oracle(name):
        return Oracle(load)
    rng = np.random.default_rng([seed, 1])
    made = Provisioned.of(load, data.accuracy, data.over, data.under, rng)
    return made if padding is None else made.times((1 + padding) / (1 + data.padding))


def trial(
    name: str,
    data: Data,
    rate: float,
    load: Workload,
    seed: int,
    *,
    copies: float = 1.0,
    steps: float = 1.0,
    options: Options | None = None,
    padding: float | None = None,
) -> PaperTrial:
    """Run a system on a workload; `options` replace those of an EcoServe variant."""
    place, clock, packers = instance(copies, steps), list[float](), list[Packer]()
    recipe = system(name, data, options)

    def packer(spec: EngineSpec) -> Packer:
        packers.append(recipe.packer(spec))
        return packers[0]

    kv = place.instance.blocks_total * place.instance.block_size
    gauges = Gauges(kv, TFS, float(load.arrival.max(initial=0.0)), clock)
    timed = inside(replace(recipe, packer=packer), clock)
    lengths = forecasts(name, data, load, seed, padding)
    outcome = Simulation(timed, [place], load, lengths).run(observer=gauges)
    case = (name, data.name, rate, seed, copies)
    return _figures(case, jct_bound(load, place), load, outcome, gauges, packers[0].counters)


def _figures(
    case: tuple[str, str, float, int, float],
    least: float,
    load: Workload,
    outcome: Outcome,
    gauges: Gauges,
    counts: Mapping[str, int],
) -> PaperTrial:
    jct = outcome.end - load.arrival
    tbt = (outcome.end - outcome.first) / np.maximum(load.output - 1, 1)
    stalled = counts.get("stalled", 0)
    return PaperTrial(
        *case,
        float(jct.mean()),
        least,
        float(np.quantile(jct, 0.99)),
        float((jct / load.output).mean()),
        float(tbt.mean()),
        float((jct <= load.e2e).mean()),
        len(load) / float(outcome.end.max()),
        gauges.kv_utilization,
        gauges.compute_utilization,
        min((np.count_nonzero(outcome.evictions) + stalled) / len(load), 1.0),
        gauges.thinking / gauges.busy,
        outcome.iterations,
        counts,
    )
