"""One trial of the EcoServe benchmark: a recipe on a simulated engine, and the figures of EcoServe 4.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.bench.papers.observers import Gauges, inside
from headway.core.engine_spec import EngineSpec
from headway.forecast.latency import profiles
from headway.forecast.lengths.padding import Padded
from headway.pack.ecoserve.packer import EcoServe, Options
from headway.ports import Lengths, Packer
from headway.recipes.recipe import Recipe
from headway.sim.forecasts import Noisy, Oracle
from headway.sim.instance import InstanceSpec
from headway.sim.outcome import Outcome
from headway.sim.run import Simulation
from headway.sim.workload.arrivals import poisson
from headway.sim.workload.lengths import draw
from headway.sim.workload.traffic import Workload, single
from headway.types import Batch, Instance

PROFILE = "opt-13b-a100"
KV_BYTES = 12e9
MAX_RUNNING, SLOTS, BUDGET, TFS = 256, 512, 2048, 512
LONGEST = 3200  # tokens of a request: BookCorpus chunks with their answers
SLO_SCALE = 2.0


@dataclass(frozen=True, slots=True)
class Data:
    """A data set of the evaluation.

    name: name of its length distribution
    rate: the paper's rate, req/s
    rates: rates of the sweep, req/s
    seconds: seconds of arrivals
    padding: the padding that the paper tunes for it
    accuracy: share of outputs within the padded length
    """

    name: str
    rate: float
    rates: tuple[float, ...]
    seconds: float
    padding: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Trial:
    """The figures of one system; shares are from 0 to 1.

    jct: mean job completion time, seconds per request
    normalized: mean JCT per output token
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
    jct: float
    jct_p99: float
    normalized: float
    ssr: float
    throughput: float
    kv: float
    compute: float
    failures: float
    thinking: float
    iterations: int
    counts: Mapping[str, int]


def instance() -> InstanceSpec:
    """Return the engine of the paper: OPT-13B on an A100 with 12 GB of KV."""
    profile = profiles.load(PROFILE)
    blocks = int(KV_BYTES // (profile.kv_bytes_per_token * profile.block_size))
    shape = Instance("e0", "default", MAX_RUNNING, blocks, profile.block_size, LONGEST)
    return InstanceSpec(shape, profile.latency(), SLOTS, BUDGET, profile.copy_seconds())


def workload(data: Data, rate: float, seconds: float, seed: int) -> Workload:
    """Return Poisson arrivals with the data set's lengths and an SLO of `SLO_SCALE`."""
    rng = np.random.default_rng(seed)
    at = poisson(rate, seconds, rng)
    prompt, output = draw(data.name, at.size, rng)
    kept = np.flatnonzero(prompt + output <= LONGEST)
    return with_slo(single(at, prompt, output).take(kept), instance(), SLO_SCALE)


def with_slo(workload: Workload, spec: InstanceSpec, scale: float) -> Workload:
    """Return the workload with an e2e SLO of `scale` x the seconds on an idle engine (EcoServe 4.1).

    t_p and t_g come from the latency profile: a prefill alone, and one decode per token with the context of
    the middle of the output.
    """
    alone = [
        spec.latency.seconds(Batch(0, 0, p, p * p // 2)) + o * spec.latency.seconds(Batch(1, p + o // 2, 0))
        for p, o in zip(workload.prompt.tolist(), workload.output.tolist(), strict=True)
    ]
    never = np.full(len(workload), np.inf)
    return replace(workload, ttft=never, tpot=never, e2e=scale * np.array(alone))


def forecasts(data: Data, load: Workload, seed: int, *, oracle: bool, share: float | None = None) -> Lengths:
    """Return the true lengths, or those of a predictor of the data set's accuracy, padded to `share`."""
    if oracle:
        return Oracle(load)
    noisy = Noisy.of(load, data.accuracy, data.padding, np.random.default_rng([seed, 1]))
    return Padded(noisy, data.accuracy if share is None else share)


def trial(
    recipe: Recipe, data: Data, rate: float, load: Workload, lengths: Lengths, options: Options | None = None
) -> Trial:
    """Run a recipe on a workload; `options` replace those of an EcoServe recipe."""
    place, clock, packers = instance(), list[float](), list[Packer]()

    def packer(spec: EngineSpec) -> Packer:
        packers.append(recipe.packer(spec) if options is None else EcoServe(spec, options))
        return packers[0]

    kv = place.instance.blocks_total * place.instance.block_size
    gauges = Gauges(kv, TFS, float(load.arrival.max(initial=0.0)), clock)
    timed = inside(replace(recipe, packer=packer), clock)
    outcome = Simulation(timed, [place], load, lengths).run(observer=gauges)
    return _figures(recipe.name, data, rate, load, outcome, gauges, packers[0].counters)


def _figures(
    name: str, data: Data, rate: float, load: Workload, outcome: Outcome, gauges: Gauges,
    counts: Mapping[str, int],
) -> Trial:  # fmt: skip
    jct = outcome.end - load.arrival
    stalled = counts.get("stalled", 0)
    return Trial(
        name, data.name, rate, float(jct.mean()), float(np.quantile(jct, 0.99)),
        float((jct / load.output).mean()), float((jct <= load.e2e).mean()),
        len(load) / float(outcome.end.max()), gauges.kv_utilization,
        gauges.compute_utilization,
        min((np.count_nonzero(outcome.evictions) + stalled) / len(load), 1.0),
        gauges.thinking / gauges.busy, outcome.iterations, counts,
    )  # fmt: skip
