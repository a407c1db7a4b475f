"""A trial of the EcoServe benchmark: a recipe on a simulated engine, with the figures of EcoServe 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.papers.ecoserve_setup import TFS, TRUE_LENGTHS, Data, instance, jct_bound, system
from benchmarks.papers.observers import Gauges, inside
from headway.errors import ConfigError
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.ports import Lengths, Packer
from headway.simulate.forecasts import Oracle
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Forecast, Ints, Request


@dataclass(frozen=True, slots=True)
class PaperTrial:
    """The figures of one system; shares are from 0 to 1.

    seed: the workload's seed
    copies: factor of the copy times
    jct: mean job completion time, seconds per request
    jct_bound: least mean JCT of any schedule, seconds
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


@dataclass(frozen=True, slots=True)
class Provisioned:
    """Padded lengths whose errors have a paper's shares: EcoServe 2.3 (77.5 % and figure 5a, on Alpaca).

    lengths: the tokens that each answer of `workload` is allocated.
    """

    workload: Workload
    lengths: Ints

    @classmethod
    def of(
        cls, workload: Workload, accuracy: float, over: float, under: float, rng: np.random.Generator
    ) -> Provisioned:
        """Draw errors independently per request.

        accuracy: share of requests whose allocation suffices.
        over, under: unused and missing tokens as shares of the allocated ones, each the mean of all requests.

        Of what suffices an evenly distributed share is unused, of the rest an exponentially distributed one
        is missing: the papers give means only. Rounding to whole tokens can go below half a token of `over`
        for short answers, but not below `accuracy`. ConfigError unless 0 < accuracy < 1, 0 <= over <
        accuracy / 2 and under >= 0.
        """
        if not (0 < accuracy < 1 and 0 <= over < accuracy / 2 and under >= 0):
            raise ConfigError(
                f"No predictor has accuracy {accuracy:g} with {over:g} unused and {under:g} missing.",
                "Give shares: accuracy between 0 and 1, unused below half of it, missing from 0 on.",
            )
        size = len(workload)
        enough = rng.random(size) < accuracy
        unused = 2 * over / accuracy * rng.random(size)
        lacking = rng.exponential(under / (1 - accuracy), size)
        lengths = np.where(enough, workload.output / (1 - unused), workload.output / (1 + lacking))
        whole = np.where(enough, np.rint(lengths), np.floor(lengths))
        return cls(workload, np.maximum(whole, 1).astype(np.int64))

    def times(self, factor: float) -> Provisioned:
        """Return the same forecasts with another padding: all lengths times `factor`."""
        return replace(self, lengths=np.maximum(np.ceil(self.lengths * factor), 1).astype(np.int64))

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return which share of requests has enough, and the mean unused and missing shares, as in `of`."""
        apart = (self.lengths - self.workload.output) / self.lengths
        return (float((apart >= 0).mean()), float(np.maximum(apart, 0).mean()), float(-np.minimum(apart, 0).mean()))

    def forecast(self, request: Request) -> Forecast:
        """Return the allocated tokens as the only sample."""
        return Forecast(np.array([float(self.lengths[self.workload.row_of(request.id)])]))

    def learn(self, request: Request, output_tokens: int) -> None:
        """Do nothing: the errors are given."""


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
