"""How did one system do on one workload? A recipe on a simulated engine, and the figures EcoServe reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headway.bench.papers.observers import Gauges, inside
from headway.forecast.latency import profiles
from headway.forecast.latency.online import OnlineLatency
from headway.forecast.lengths.padding import Padded
from headway.pack.ecoserve.packer import Counts, EcoServe, Options
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

PACE = "opt-13b-a100"
KV_BYTES = 12e9
MAX_RUNNING, SLOTS, BUDGET, TFS = 256, 512, 2048, 512
LONGEST = 3200  # tokens of a request: BookCorpus chunks with their answers
SLO_SCALE = 2.0


@dataclass(frozen=True, slots=True)
class Data:
    """A data set: its lengths' name, the paper's rate, the rates of the sweep (req/s), seconds of arrivals.

    padding: the paper's sweet spot; accuracy: how often an answer is within the padded length.
    """

    name: str
    rate: float
    rates: tuple[float, ...]
    seconds: float
    padding: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Trial:
    """What one system did. Seconds per request (jct), seconds per output token (normalized), shares 0..1.

    failures: share of requests that lost KV or paused for want of it. thinking: wall seconds of decisions
    per simulated second. counts: of EcoServe's packer only.
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
    counts: Counts | None


def node() -> InstanceSpec:
    """Return the engine of the paper: OPT-13B on an A100 with 12 GB of KV."""
    file = profiles.load(PACE)
    blocks = int(KV_BYTES // (file.kv_bytes_per_token * file.block_size))
    instance = Instance("e0", "default", MAX_RUNNING, blocks, file.block_size, LONGEST)
    return InstanceSpec(instance, file.latency(), SLOTS, BUDGET, file.copy_seconds())


def workload(data: Data, rate: float, seconds: float, seed: int) -> Workload:
    """Return Poisson arrivals with the data set's lengths, each answer promised at SLO scale 2."""
    rng = np.random.default_rng(seed)
    at = poisson(rate, seconds, rng)
    prompt, output = draw(data.name, at.size, rng)
    kept = np.flatnonzero(prompt + output <= LONGEST)
    return promised(single(at, prompt, output).take(kept), node(), SLO_SCALE)


def promised(workload: Workload, node: InstanceSpec, scale: float) -> Workload:
    """Return the workload, each whole answer promised in `scale` x the seconds it takes on an idle engine.

    (EcoServe 4.1's SLO scale, with t_p and t_g taken from the pace: prefill alone, and one decode a token at
    the context in the middle of the answer.)
    """
    alone = [
        node.latency.seconds(Batch(0, 0, p, p * p // 2)) + o * node.latency.seconds(Batch(1, p + o // 2, 0))
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
    place, clock, packers = node(), list[float](), list[Packer]()

    def packer(running: int, budget: int, latency: OnlineLatency) -> Packer:
        packers.append(recipe.packer(running, budget, latency))
        if isinstance(packers[0], EcoServe):  # the simulation does not see it: it is timed
            packers[0].copy_seconds = place.copy_seconds
            packers[0].longest = place.instance.max_model_len
            packers[0].options = options or packers[0].options
        return packers[0]

    kv = place.instance.blocks_total * place.instance.block_size
    gauges = Gauges(kv, TFS, float(load.arrival.max(initial=0.0)), clock)
    timed = inside(replace(recipe, packer=packer), clock)
    outcome = Simulation(timed, [place], load, lengths).run(observer=gauges)
    counts = packers[0].counts if isinstance(packers[0], EcoServe) else None
    return _figures(recipe.name, data, rate, load, outcome, gauges, counts)


def _figures(
    name: str, data: Data, rate: float, load: Workload, outcome: Outcome, gauges: Gauges,
    counts: Counts | None,
) -> Trial:  # fmt: skip
    jct = outcome.end - load.arrival
    stalled = counts.stalled if counts else 0
    return Trial(
        name, data.name, rate, float(jct.mean()), float(np.quantile(jct, 0.99)),
        float((jct / load.output).mean()), float((jct <= load.e2e).mean()),
        len(load) / float(outcome.end.max()), gauges.kv_utilization,
        gauges.compute_utilization,
        min((np.count_nonzero(outcome.evictions) + stalled) / len(load), 1.0),
        gauges.thinking / gauges.busy, outcome.iterations, counts,
    )  # fmt: skip
