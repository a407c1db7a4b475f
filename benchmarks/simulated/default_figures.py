"""The figures of `headway bench default` that one simulation comes to: promises, and how all are served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.papers.ecoserve_setup import with_slo
from benchmarks.simulated.grounds import Ground
from headway.simulate.outcome import Outcome
from headway.simulate.workload.traffic import Workload
from headway.types import Batch, Bools, Floats
from headway.whatif import slo_violations

DEFAULT, STOCK, BOUND = "headway", "vllm", "bound"
TRUE = "headway with true lengths"  # as the bound, which knows them, too
HINDSIGHT = "headway with hindsight"  # and arrivals, too: how close a search comes to the bound
SMALLEST = "headway with the best limit"  # of the sizes that it forecasts, found afterwards

SILENCE = 1.0  # seconds between two tokens above which a stream counts as silent
_TOP = 0.99  # quantile of all p99 figures
_ANSWER_WORK = 3  # work of an answer's token, in prompt tokens
_NORMAL, _AGAIN, _OF = 1.5, 18, 20  # times its seconds alone; that many of so many arrivals


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation.

    system: a recipe, the default one without one of its parts, `TRUE`, `HINDSIGHT`, `SMALLEST` or `BOUND`.
    length_error: forecasts are off by this factor (one standard deviation, and say so); 0 = the ground's.
    latency_error: `InstanceSpec.latency_error`.
    trials: simulations of the search, for `HINDSIGHT`.
    """

    ground: Ground
    load: float
    seed: int
    system: str
    length_error: float = 0.0
    latency_error: float = 1.0
    trials: int = 0

    @property
    def setting(self) -> str:
        """Return the ground, the load and what is wrong."""
        text = f"{self.ground.name}, {self.load:g}x"
        if self.length_error:
            text += f", lengths off by {self.length_error:g}x"
        return text if self.latency_error == 1.0 else f"{text}, latency learned x{self.latency_error:g}"

    @property
    def place(self) -> tuple[str, float]:
        """Return the ground and the load, whatever is wrong."""
        return self.ground.name, self.load


@dataclass(frozen=True, slots=True)
class Service:
    """How a run to its last completion served everybody; None = there is nobody of that kind.

    tardiness_p99: seconds by which a promised request was late, 0 = in time.
    gap_p99: seconds of the longest silence of a stream.
    silent: share of the streams with a silence above `SILENCE`, %.
    unpromised_p99, unpromised_mean: seconds from arrival to end of requests without an SLO.
    tokens_per_s: answer tokens, from the first arrival to the last completion.
    weighted_wait: mean seconds from arrival to end, weighted by prompt + 3 x answer tokens.
    worst_wait: most seconds from arrival to end of a request that was unpromised or late.
    weighted_attainment: promises kept by weight, %.
    iteration: mean seconds of an iteration.
    recovery: seconds from the end of an overload until new requests are served as on a calm engine, inf =
        they never were; None where there was no overload.
    """

    tardiness_p99: float | None
    gap_p99: float
    silent: float
    unpromised_p99: float | None
    unpromised_mean: float | None
    tokens_per_s: float
    weighted_wait: float
    worst_wait: float | None
    weighted_attainment: float | None
    iteration: float
    recovery: float | None = None

    @classmethod
    def of(cls, workload: Workload, outcome: Outcome, recovery: float | None = None) -> Service:
        """Return the figures of a run in which every request has ended."""
        assert not np.isnan(outcome.end).any(), "a run to the last completion ends every request"
        promised, met = workload.promised, slo_violations.met(workload, outcome)
        late = np.max(list(slo_violations.late(workload, outcome).values()), axis=0)
        wait = outcome.end - workload.arrival
        work = workload.prompt + _ANSWER_WORK * workload.output
        span = float(outcome.end.max() - workload.arrival.min())
        return cls(
            _quantile(late[promised]),
            float(np.quantile(outcome.gap, _TOP)),
            100 * float(np.mean(outcome.gap > SILENCE)),
            _quantile(wait[~promised]),
            _mean(wait[~promised]),
            float(workload.output.sum()) / span,
            float(np.average(wait, weights=work)),
            _most(wait[~(promised & met)]),
            _share(workload.weight, promised, met),
            outcome.busy / max(outcome.iterations, 1),
            recovery,
        )

    @classmethod
    def mean(cls, seeds: Sequence[Service]) -> Service:
        """Return the mean of each figure over the seeds that have it."""
        columns = ([getattr(one, field.name) for one in seeds] for field in fields(cls))
        return cls(*(_mean_of(column) for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cell came to.

    kept: promised requests on time (of the bound: at most).
    promised: how many were promised anything.
    be_tokens: best-effort tokens per second, of answers complete within the arrivals.
    service: None of what is no run of all requests: the bound, and a search with hindsight.
    """

    kept: float
    promised: int
    be_tokens: float
    service: Service | None = None

    @property
    def attainment(self) -> float:
        """Return the share of the promised requests that were on time, in percent; 0 when there are none."""
        return 100 * self.kept / max(self.promised, 1)

    @classmethod
    def sum(cls, seeds: Sequence[Figures]) -> Figures:
        """Return the figures of several seeds together: all their promises, the mean of everything else."""
        services = [one.service for one in seeds if one.service is not None]
        return cls(
            sum(one.kept for one in seeds),
            sum(one.promised for one in seeds),
            float(np.mean([one.be_tokens for one in seeds])),
            Service.mean(services) if services else None,
        )


def figures(cell: Cell, workload: Workload, outcome: Outcome) -> Figures:
    """Return what the run of a cell came to."""
    promised, seconds = workload.promised, cell.ground.seconds(cell.load)
    kept = int(np.count_nonzero(slo_violations.met(workload, outcome) & promised))
    complete = ~promised & (outcome.end <= seconds)
    be_tokens = float(workload.output[complete].sum()) / seconds
    service = Service.of(workload, outcome, _recovery_of(cell, workload, outcome))
    return Figures(kept, int(np.count_nonzero(promised)), be_tokens, service)


def _recovery_of(cell: Cell, workload: Workload, outcome: Outcome) -> float | None:
    if cell.ground.calm is None:
        return None
    alone = with_slo(workload, cell.ground.instance(), 1.0).e2e
    return recovery(workload.arrival, outcome.end, alone, cell.ground.loaded_seconds(cell.load))


def recovery(arrival: Floats, end: Floats, alone: Floats, over: float) -> float:
    """Return the seconds after `over` until new requests take at most 1.5 times their seconds `alone`.

    That is the first arrival after `over` from which on this holds for 18 of 20 arrivals; inf when there is
    none. The columns are sorted by arrival.
    """
    later = arrival >= over
    normal = ((end - arrival) <= _NORMAL * alone)[later]
    if normal.size < _OF:
        return math.inf
    first = np.flatnonzero(np.convolve(normal, np.ones(_OF), "valid") >= _AGAIN)
    return float(arrival[later][first[0]] - over) if first.size else math.inf


def most_tokens(ground: Ground, stock_iteration: float) -> float:
    """Return the tokens/s that promises of tpot leave possible, as a share of stock's.

    Beside an answer with a tpot T iterations take at most T on average, so at least b / T of the time goes
    into their bases b; of stock's, which last t = `stock_iteration` seconds, b / t does. T is the tightest
    tpot of the ground that an engine with one answer meets; without one the share is 1.
    """
    base = ground.latency().seconds(Batch(1, 0, 0))
    tightest = min((tpot for tpot in _paces(ground) if tpot > base), default=None)
    if tightest is None or stock_iteration <= base:
        return 1.0
    return min(1.0, (1 - base / tightest) / (1 - base / stock_iteration))


def _paces(ground: Ground) -> list[float]:
    """Return the promised seconds per token of the ground's classes."""
    return [one.slo_scale * one.slo.tpot for one in ground.classes if one.slo.tpot is not None]


def _quantile(values: Floats) -> float | None:
    return float(np.quantile(values, _TOP)) if values.size else None


def _mean(values: Floats) -> float | None:
    return float(np.mean(values)) if values.size else None


def _most(values: Floats) -> float | None:
    return float(np.max(values)) if values.size else None


def _share(weight: Floats, promised: Bools, met: Bools) -> float | None:
    """Return the share of the promised weight that is met, in percent."""
    return 100 * float(weight[promised & met].sum() / weight[promised].sum()) if promised.any() else None


def _mean_of(values: Sequence[float | None]) -> float | None:
    return _mean(np.array([value for value in values if value is not None]))
