"""QLM's workloads and fleets (arXiv 2407.00047, section 8) as plain data, and their requests and instances.

QLM does not state its rates, SLOs or fleet per figure. Ours: rates are relative to the capacity of the fleet
(`QlmSetting.load`), which is the capacity of its engines without any swap; arrivals have Gamma gaps with a
coefficient of variation of 4; latency-sensitive requests are due in 25 s and have answers of at most 512
tokens, so that a full batch can serve them on time; batch requests are due in 5 minutes. Mistral-7B and
Vicuna-13B use the nearest latency profiles (Llama-2-7B, whose KV is four times as large, and OPT-13B);
fine-tuned models have the profile of their base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from headway.policy.recipes.registry import find
from headway.simulate import fleet
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload import lengths
from headway.simulate.workload.arrivals import bursty
from headway.simulate.workload.traffic import TrafficClass, Workload, concat, make, single
from headway.types import Slo

RUNNING, LONGEST = 64, 2048
HOST_GB = 64.0  # host memory for weights per instance: two or three of the five models
CV = 4.0  # coefficient of variation of the gaps between arrivals
INTERACTIVE, BATCH = Slo(e2e=25.0), Slo(e2e=300.0)
ANSWER = 512  # longest answer of a latency-sensitive request
STANDING = Slo(e2e=3600.0)  # of requests that wait when a run begins
MEGA_PROMPT, MEGA_ANSWER, MEGA_LONGEST = (8_000, 12_000), (1_000, 2_000), 16_384  # tokens

# Latency profiles by size of the model and GPU; a 13B model in fp16 does not fit one A10.
PROFILES: Mapping[str, Mapping[str, str]] = {
    "7b": {"a100": "llama-2-7b-a100", "a10": "llama-2-7b-a10"},
    "13b": {"a100": "opt-13b-a100"},
}


@dataclass(frozen=True, slots=True)
class QlmModel:
    """A model: its name, size (a key of `PROFILES`) and share of the requests at its peak.

    tail: the model is rarely used.
    """

    name: str
    size: str
    share: float
    tail: bool = False

    def profile(self, gpu: str) -> str | None:
        """Return the model's latency profile on a GPU; None = the model does not fit."""
        return PROFILES[self.size].get(gpu)


FIVE = (
    QlmModel("mistral-7b", "7b", 0.35),
    QlmModel("vicuna-13b", "13b", 0.35),
    QlmModel("mistral-7b-sql", "7b", 0.1, tail=True),
    QlmModel("vicuna-13b-law", "13b", 0.1, tail=True),
    QlmModel("mistral-7b-med", "7b", 0.1, tail=True),
)
ONE = (QlmModel("vicuna-13b", "13b", 1.0),)
# For fleets of A10s: at least as many models as instances, all of 7B.
TWELVE = (
    *(QlmModel(f"mistral-7b-{i}", "7b", 0.16) for i in range(4)),
    *(QlmModel(f"mistral-7b-tail-{i}", "7b", 0.045, tail=True) for i in range(8)),
)


@dataclass(frozen=True, slots=True)
class QlmSetting:
    """A workload and a fleet.

    name: the workload's name.
    gpus: (kind, number of instances).
    models: models that requests ask for.
    first: names of the models that the instances of each kind serve at the start, in turn; () = all.
    load: work that arrives when every model is at its peak, as a share of the fleet's capacity.
    seconds: of arrivals.
    interactive: share of latency-sensitive requests.
    tail: rate of the tail models, as a share of their peak.
    mega: mega prompts per other request.
    queued: requests that wait at the start.
    slo_scale: factor of all SLOs.
    host_gb: host memory for weights, per instance.
    seeds: runs whose figures are averaged.
    limit: requests in a batch; the load stays that of `RUNNING`.
    """

    name: str
    gpus: tuple[tuple[str, int], ...]
    models: tuple[QlmModel, ...]
    load: float
    seconds: float
    first: tuple[tuple[str, ...], ...] = ()
    interactive: float = 0.2
    tail: float = 1.0
    mega: float = 0.0
    queued: int = 0
    slo_scale: float = 1.0
    host_gb: float = HOST_GB
    seeds: int = 1
    limit: int = RUNNING

    def describe(self) -> str:
        """Return the workload, rate and mix, as in a row's setting."""
        parts = [f"{self.name}, load {self.load:g}"]
        parts.append(" + ".join(f"{count} {gpu.upper()}" for gpu, count in self.gpus if count))
        parts.append(f"{self.interactive:.0%} latency-sensitive")
        if any(model.tail for model in self.models):
            parts.append(f"tail rate {self.tail:g}")
        if self.mega:
            parts.append(f"{self.mega:.2%} mega prompts")
        if self.queued:
            parts.append(f"{self.queued} queued")
        if self.slo_scale != 1:
            parts.append(f"SLO x {self.slo_scale:g}")
        if not self.host_gb:
            parts.append("no warm start")
        if self.limit != RUNNING:
            parts.append(f"batch limit {self.limit}")
        if self.seeds > 1:
            parts.append(f"{self.seeds} seeds")
        return ", ".join(parts)

    @property
    def until(self) -> float:
        """The latest time at which a run ends."""
        standing = (STANDING.e2e or 0.0) if self.queued else 0.0
        return max(4 * self.seconds, standing)

    def instances(self) -> list[InstanceSpec]:
        """Return the fleet, in which each instance can load every model that fits its GPU."""
        specs = []
        for number, (gpu, count) in enumerate(self.gpus):
            fit = [model for model in self.models if model.profile(gpu)]
            names = self.first[number] if self.first else tuple(model.name for model in fit)
            firsts = [next(model for model in fit if model.name == name) for name in names]
            specs += [self._spec(gpu, firsts[i % len(firsts)], fit) for i in range(count)]
        return fleet.build(specs)

    def _spec(self, gpu: str, first: QlmModel, fit: Sequence[QlmModel]) -> fleet.Spec:
        loads = tuple(f"{other.name}@{other.profile(gpu)}" for other in fit if other is not first)
        return fleet.Spec(
            str(first.profile(gpu)),
            model=first.name,
            max_running=self.limit,
            loads=loads,
            host_gb=self.host_gb,
            max_model_len=MEGA_LONGEST if self.mega else LONGEST,
        )

    def rate(self) -> float:
        """Return the requests per second of all models at their peak."""
        return self.load / sum(model.share / self._capacity(model) for model in self.models)

    def _capacity(self, model: QlmModel) -> float:
        """Return the requests per second of a model if the fleet served nothing else."""
        return sum(
            capacity(profile) * count
            for gpu, count in self.gpus
            if count and (profile := model.profile(gpu)) is not None
        )

    def workload(self, seed: int) -> Workload:
        """Return the requests, those that wait at the start first."""
        rng = np.random.default_rng(seed)
        shares = {model.name: model.share * (self.tail if model.tail else 1.0) for model in self.models}
        rate = self.rate() * sum(shares.values()) / sum(model.share for model in self.models)
        classes = [made for name, share in shares.items() for made in self.classes(name, share)]
        work = make(classes, bursty(rate, CV**-2, self.seconds, rng), rng)
        work = work.take(np.flatnonzero(work.prompt + work.output <= LONGEST))
        if self.mega:
            work = concat(work, self._mega(len(work), rng)).sorted()
        if self.queued:
            work = concat(self.standing(rng), work)
        return replace(work, e2e=work.e2e * self.slo_scale)

    def classes(self, model: str, share: float) -> list[TrafficClass]:
        """Return the latency-sensitive and the batch requests for a model, which are `share` of all."""
        found = []
        if self.interactive > 0:
            mine = share * self.interactive
            found.append(TrafficClass("interactive", mine, INTERACTIVE, model=model, max_tokens=ANSWER))
        if self.interactive < 1:
            found.append(TrafficClass("batch", share * (1 - self.interactive), BATCH, model=model))
        return found

    def _mega(self, count: int, rng: np.random.Generator) -> Workload:
        """Return mega prompts for the frequent models, spread over the time."""
        mine, parts = [model.name for model in self.models if not model.tail], []
        size = max(round(self.mega * count / len(mine)), 1)
        for model in mine:
            at = np.sort(rng.uniform(0.0, self.seconds, size))
            prompt, output = (rng.integers(*limits, size, endpoint=True) for limits in (MEGA_PROMPT, MEGA_ANSWER))
            limit = MEGA_ANSWER[1]
            parts.append(single(at, prompt, output, slo=BATCH, tier="mega", model=model, max_tokens=limit))
        return concat(*parts)

    def standing(self, rng: np.random.Generator) -> Workload:
        """Return the requests that wait at the start."""
        classes = [TrafficClass("standing", m.share, STANDING, model=m.name) for m in self.models]
        work = make(classes, np.zeros(self.queued), rng)
        return work.take(np.flatnonzero(work.prompt + work.output <= LONGEST))


@cache
def capacity(profile: str) -> float:
    """Return the ShareGPT requests per second of a saturated engine, first come, first served.

    Measured over the middle half of the completions of 2,000 requests that wait from the start.
    """
    work = burst("m", 2000, 0)
    spec = fleet.Spec(profile, model="m", max_running=RUNNING, max_model_len=LONGEST)
    ends = np.sort(Simulation(find("vllm"), fleet.build([spec]), work).run().end)
    begin, end = ends.size // 4, 3 * ends.size // 4
    return float((end - begin) / (ends[end] - ends[begin]))


def burst(model: str, count: int, seed: int) -> Workload:
    """Return ShareGPT requests without SLO that all come at 0."""
    rng = np.random.default_rng(seed)
    prompt, output = lengths.draw("sharegpt", count, rng)
    kept = prompt + output <= LONGEST
    size = int(np.count_nonzero(kept))
    return single(np.zeros(size), prompt[kept], output[kept], model=model, max_tokens=LONGEST)
