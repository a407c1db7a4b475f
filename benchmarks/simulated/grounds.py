"""The grounds on which `headway bench default` compares recipes: an engine, traffic, and its promises.

Each paper's own set-up on one instance, and what operators meet besides: bursts, days and nights, long
prompts, long answers, little KV, few slots, tight pace, several classes. Lengths are the built-in published
statistics. `held_grounds.py` has those on which the default recipe was not tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.papers.ecoserve_setup import with_slo
from headway.policy.forecast.latency import profiles
from headway.policy.forecast.latency.laws import LatencyLaw
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.registry import find
from headway.ports import Lengths
from headway.simulate.forecasts import Noisy
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.arrivals import diurnal, gamma, poisson
from headway.simulate.workload.traffic import TrafficClass, Workload, make
from headway.types import Floats, Instance, Slo

LOADS = (0.7, 1.0, 1.3, 2.0)
_BURST = 400  # requests at once that measure a ground's capacity
_HOST_BYTES = 160e9  # host memory for KV, for recipes that copy
_LEAST = 60.0  # seconds of arrivals


@dataclass(frozen=True, slots=True)
class Calm:
    """Arrivals after those of a ground's load: `load` x capacity for `times` as many seconds."""

    load: float
    times: float


@dataclass(frozen=True, slots=True)
class Ground:
    """One engine under one kind of traffic.

    profile: name of the latency profile.
    classes: of traffic.
    loads: arrivals as multiples of the capacity.
    max_running, budget, longest: batch limit, tokens of an iteration, tokens of a request.
    kv_tokens: tokens of KV; None = the profile's.
    law: seconds of an iteration; None = the profile's.
    pace: seconds of an iteration as a multiple of the law's.
    burstiness: shape of the gamma-distributed gaps, 1 = Poisson.
    swing: peak of a day to its mean, 1 = even.
    calm: what arrives when the overload is over; None = nothing.
    at_once: classes whose requests all arrive at the start.
    idle_scale: e2e targets as a multiple of each request's seconds on an idle engine (EcoServe 4); 0 = the
        classes' own.
    predictor: share of the answers within the predicted length padded by that much (EcoServe 2.3); None =
        lengths are learned per class.
    hints: factors by which forecasts are off that claim to be exact, equally likely; () = none is given.
    rivals: recipes that are run here beside those of every ground.
    requests: about how many arrive, calm not counted.
    most: seconds of these arrivals, at most.
    held: the recipe was not tuned here; the summary has these grounds apart.
    """

    name: str
    profile: str
    classes: tuple[TrafficClass, ...]
    loads: tuple[float, ...] = LOADS
    max_running: int = 256
    budget: int = 2048
    longest: int = 2048
    kv_tokens: int | None = None
    law: LatencyLaw | None = None
    pace: float = 1.0
    burstiness: float = 1.0
    swing: float = 1.0
    calm: Calm | None = None
    at_once: tuple[str, ...] = ()
    idle_scale: float = 0.0
    predictor: tuple[float, float] | None = None
    hints: tuple[float, ...] = ()
    rivals: tuple[str, ...] = ()
    requests: int = 2000
    most: float = 1200.0
    held: bool = False

    def instance(self) -> InstanceSpec:
        """Return the simulated engine, with host memory for recipes that copy KV."""
        profile = profiles.load(self.profile)
        tokens = self.kv_tokens or profile.kv_tokens or 0
        size = profile.block_size
        shape = Instance("e0", "default", self.max_running, tokens // size, size, self.longest)
        slots = max(self.max_running, 1024)
        host = int(_HOST_BYTES // profile.kv_bytes_per_token)
        return InstanceSpec(shape, self.latency(), slots, self.budget, profile.copy_seconds(), host_tokens=host)

    def latency(self) -> FixedLatency:
        """Return the seconds of the engine's iterations."""
        law = self.law or profiles.load(self.profile).law
        return FixedLatency(law if self.pace == 1.0 else _slowed(law, self.pace))

    def workload(self, load: float, seed: int) -> Workload:
        """Return the requests at `load` x the ground's capacity, none too long for the engine."""
        rng = np.random.default_rng(seed)
        return self.requests_at(self._arrivals(load, rng), rng)

    def lengths(self, workload: Workload, seed: int) -> Lengths:
        """Return the forecasts of answers that every recipe gets."""
        rng = np.random.default_rng([seed, 1])
        if self.hints:
            return Noisy(workload, rng.choice(np.array(self.hints), len(workload)), np.ones(1))
        return TaskLengths() if self.predictor is None else Noisy.of(workload, *self.predictor, rng)

    def loaded_seconds(self, load: float) -> float:
        """Return the seconds of arrivals at `load` x capacity."""
        return float(np.clip(self.requests / (load * capacity(self)), _LEAST, self.most))

    def seconds(self, load: float) -> float:
        """Return the seconds of all arrivals, the calm ones too."""
        return self.loaded_seconds(load) * (1.0 if self.calm is None else 1.0 + self.calm.times)

    def _arrivals(self, load: float, rng: np.random.Generator) -> Floats:
        rate, seconds = load * capacity(self), self.loaded_seconds(load)
        if self.swing > 1.0:
            return diurnal(rate, self.swing, seconds / 2, seconds, rng)
        times = gamma(rate, self.burstiness, seconds, rng)
        if self.calm is None:
            return times
        later = poisson(self.calm.load * capacity(self), self.calm.times * seconds, rng)
        return np.concatenate([times, seconds + later])

    def requests_at(self, at: Floats, rng: np.random.Generator) -> Workload:
        """Return requests that arrive at these seconds, none too long for the engine."""
        whole = make(self.classes, at, rng)
        kept = whole.take(np.flatnonzero(whole.prompt + whole.output <= self.longest))
        kept = _at_once(kept, self.at_once) if self.at_once else kept
        return with_slo(kept, self.instance(), self.idle_scale) if self.idle_scale else kept


def _slowed(law: LatencyLaw, factor: float) -> LatencyLaw:
    """Return a law that takes `factor` times as long: all laws are linear in their coefficients."""
    scaled: dict[str, Any] = {field.name: factor * getattr(law, field.name) for field in fields(law)}  # type: ignore[arg-type]
    return replace(law, **scaled)  # type: ignore[type-var]


def _at_once(workload: Workload, names: tuple[str, ...]) -> Workload:
    """Return the workload with all requests of these classes at its start."""
    first = np.isin(workload.tier, [i for i, name in enumerate(workload.tiers) if name in names])
    return replace(workload, arrival=np.where(first, 0.0, workload.arrival)).sorted()


@cache
def capacity(ground: Ground) -> float:
    """Return the requests/s that stock vLLM's order completes while a burst of the ground's traffic lasts.

    The first and the last tenth of the completions are left out: the batch fills and empties then.
    """
    rng = np.random.default_rng(0)
    workload = ground.requests_at(np.zeros(_BURST), rng)
    end = np.sort(Simulation(find("vllm"), [ground.instance()], workload).run().end)
    low, high = int(0.1 * end.size), int(0.9 * end.size)
    return float((high - low) / (end[high] - end[low]))


def _of(
    name: str,
    share: float,
    lengths: str,
    priority: int = 0,
    ttft: float | None = None,
    tpot: float | None = None,
    e2e: float | None = None,
) -> TrafficClass:
    return TrafficClass(name, share, Slo(ttft, tpot, e2e), priority, lengths)


def _bros(lengths: str) -> tuple[TrafficClass, ...]:
    """Return the classes of BROS 7.1: real-time beside half as many best-effort requests."""
    return (_of("rt", 2, lengths, ttft=0.4, tpot=0.2), _of("be", 1, "bros-best-effort", 10))


_MIX = (
    _of("chat", 5, "sharegpt", ttft=1.0, tpot=0.06),
    _of("code", 3, "alpaca", e2e=10.0),
    _of("batch", 2, "bros-best-effort", 10),
)
_ECOSERVE_KV = 14_640  # tokens: 12 GB of OPT-13B (EcoServe 2.1)
_OPT, _LLAMA, _LLAMA_70B = "opt-13b-a100", "llama-2-7b-a100", "llama-2-70b-a100-tp4"


def _ecoserve(lengths: str, predictor: tuple[float, float], longest: int = 2048, requests: int = 2000) -> Ground:
    """Return a ground of EcoServe 4: deadlines of twice the idle seconds, its predictor's accuracy."""
    return Ground(
        f"{lengths}-idle",
        _OPT,
        (_of("all", 1, lengths),),
        longest=longest,
        kv_tokens=_ECOSERVE_KV,
        idle_scale=2.0,
        predictor=predictor,
        requests=requests,
    )


GROUNDS = (
    Ground("bros-sharegpt", _OPT, _bros("sharegpt")),
    Ground("bros-lmsys", _OPT, _bros("lmsys")),
    _ecoserve("alpaca", (0.775, 0.1)),
    _ecoserve("sharegpt", (0.732, 0.15)),
    _ecoserve("bookcorpus", (0.7, 0.2), longest=3200, requests=250),
    Ground("alpaca-e2e", _OPT, (_of("all", 1, "alpaca", e2e=8.0),), kv_tokens=_ECOSERVE_KV),
    Ground(
        "anneal-chat-code",
        _LLAMA,
        (_of("chat", 1, "sharegpt", ttft=10.0, tpot=0.05), _of("code", 1, "alpaca", e2e=30.0)),
        max_running=8,
        requests=1500,
    ),
    Ground(
        "qlm-wb",
        _OPT,
        (
            _of("interactive", 1, "sharegpt", 0, e2e=30.0),
            _of("batch-1", 1, "sharegpt", 1, e2e=120.0),
            _of("batch-2", 1, "sharegpt", 2, e2e=600.0),
        ),
        requests=3000,
    ),
    Ground("bursty", _LLAMA, _MIX, burstiness=0.1),
    Ground("diurnal", _LLAMA, _MIX, swing=1.8, requests=4000),
    Ground(
        "long-prompts",
        _LLAMA_70B,
        (_of("rag", 4, "sharegpt-multiround", ttft=1.0), _of("be", 1, "arxiv", 10)),
        longest=8192,
        requests=1200,
    ),
    Ground(
        "long-answers",
        _LLAMA,
        (_of("writing", 1, "bookcorpus", ttft=2.0, tpot=0.06), _of("be", 1, "bookcorpus", 10)),
        longest=4096,
        requests=1200,
    ),
    Ground("tiny-kv", _LLAMA, _MIX, kv_tokens=8192),
    Ground(
        "tight-tpot", _LLAMA, (_of("chat", 3, "sharegpt", ttft=1.0, tpot=0.03), _of("be", 2, "bros-best-effort", 10))
    ),
    Ground(
        "three-classes",
        _LLAMA,
        (
            _of("gold", 1, "sharegpt", 0, ttft=0.5, tpot=0.05),
            _of("silver", 2, "lmsys", 1, ttft=2.0, tpot=0.1),
            _of("bronze", 2, "alpaca", 2, e2e=20.0),
        ),
    ),
    Ground(
        "few-slots",
        _OPT,
        (_of("chat", 3, "sharegpt", ttft=1.5, tpot=0.15), _of("be", 2, "bros-best-effort", 10)),
        max_running=16,
        burstiness=0.2,
    ),
)
