"""How did one system do on one workload? A recipe on a simulated engine, and the figures EcoServe reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.engines.simulated import SimulatedEngine
from headway.forecast import pacefile
from headway.forecast.pace import OnlinePace
from headway.forecast.padded import Padded
from headway.pack.decoupled import Counts, Decoupled, Options
from headway.ports import Lengths, Recipe
from headway.sim.arrivals import poisson
from headway.sim.forecasts import Noisy, Oracle
from headway.sim.host import Node
from headway.sim.lengths import draw
from headway.sim.outcome import Outcome
from headway.sim.single import Gauges, Single, promised
from headway.sim.workload import Workload, single
from headway.types import Instance

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


def node() -> Node:
    """Return the engine of the paper: OPT-13B on an A100 with 12 GB of KV."""
    file = pacefile.load(PACE)
    blocks = int(KV_BYTES // (file.kv_bytes_per_token * file.block_size))
    instance = Instance("e0", file.model, MAX_RUNNING, blocks, file.block_size, LONGEST)
    return Node(instance, file.pace(), SLOTS, BUDGET, file.copy_seconds())


def workload(data: Data, rate: float, seconds: float, seed: int) -> Workload:
    """Return Poisson arrivals with the data set's lengths, each answer promised at SLO scale 2."""
    rng = np.random.default_rng(seed)
    at = poisson(rate, seconds, rng)
    prompt, output = draw(data.name, at.size, rng)
    kept = np.flatnonzero(prompt + output <= LONGEST)
    return promised(single(at, prompt, output).take(kept), node(), SLO_SCALE)


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
    place, pace = node(), OnlinePace()
    instance = place.instance
    packer = recipe.packer(instance.max_running, place.budget, pace)
    if isinstance(packer, Decoupled):
        packer.copy_seconds, packer.longest = place.copy_seconds, instance.max_model_len
        packer.options = options or packer.options
    engine = SimulatedEngine(
        packer, blocks=instance.blocks_total, size=instance.block_size, slots=place.slots,
        budget=place.budget, max_model_len=instance.max_model_len,
    )  # fmt: skip
    kv = instance.blocks_total * instance.block_size
    gauges = Gauges(kv, TFS, float(load.arrival.max(initial=0.0)))
    outcome = Single(engine, place, load, lengths, pace, gauges).run()
    counts = packer.counts if isinstance(packer, Decoupled) else None
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
