"""The requests of SLO-aware scheduling's evaluation (5.1), and the figures of an order of them.

Half of the requests are code (an e2e SLO), half chat (TTFT and TPOT). Python-Code-23k-ShareGPT is not
available: its answers are modelled as log-normal with the mean implied by the paper's 3 s per average request;
its prompts and both deviations are assumed. Chat uses the built-in ShareGPT lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.papers.quoted import quoted
from headway.policy.core import mapping as maps
from headway.policy.core.annealing import Schedule, anneal
from headway.policy.core.mapping import Records, Targets, costs_of
from headway.policy.forecast.latency import profiles
from headway.policy.forecast.latency.laws import PUBLISHED, SloAware
from headway.policy.forecast.lengths.task import GaussianLengths
from headway.policy.recipes.registry import find
from headway.ports import Lengths
from headway.simulate.forecasts import Oracle
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.lengths import draw
from headway.simulate.workload.traffic import Workload, concat, single
from headway.types import Batch, Bools, Floats, Instance, Ints, Slo

_TEXT = "slo-aware-annealing"
_TTFT = quoted(10.0, _TEXT, "5.1", 280, "10s")
_TPOT = quoted(0.05, _TEXT, "5.1", 280, "50 milliseconds", 0.001)
_E2E = quoted(30.0, _TEXT, "5.1", 280, "30s")
CODE, CHAT = Slo(e2e=_E2E), Slo(ttft=_TTFT, tpot=_TPOT)
PROFILE = "llama-2-7b-a40"
_PROMPT, _ANSWER = (40.0, 25.0), (180.0, 110.0)  # tokens of code: mean and deviation
_LONGEST = 2000  # tokens: the latency law holds below 2k
_TASKS = ("chat", "code")
Profiled = Literal["draw", "mean"]
_PROFILED = 256  # answers per task to which its Gaussian profile is fitted


@dataclass(frozen=True, slots=True)
class AnnealCase:
    """Requests that arrive together, in their order."""

    prompt: Ints
    output: Ints
    code: Bools

    @classmethod
    def drawn(cls, count: int, seed: int) -> AnnealCase:
        """Draw requests, half of them code, in random order."""
        rng = np.random.default_rng([seed, count])
        half = count // 2
        code_prompt, code_output = _code(half, rng)
        prompt, output = _chat(count - half, rng)
        order = rng.permutation(count)
        return cls(
            np.concatenate([code_prompt, prompt])[order],
            np.concatenate([code_output, output])[order],
            (np.arange(count) < half)[order],
        )

    def costs(self, output: Floats | Ints | None = None, law: SloAware = PUBLISHED) -> Records:
        """Return the costs by the law, with these answers instead of the true ones."""
        tokens = np.asarray(self.output if output is None else output, float)
        targets = Targets(
            np.where(self.code, np.inf, _TTFT), np.where(self.code, np.inf, _TPOT), np.where(self.code, _E2E, np.inf)
        )
        return costs_of(law, self.prompt, self.prompt, tokens, targets, np.zeros(tokens.size))

    def forecast(self, error: float | Profiled, rng: np.random.Generator) -> Floats:
        """Return forecast answers, at least 1 token.

        error: standard deviation as a share of the true length; "draw" or "mean" = that of a Gaussian profile
            of earlier answers of the task (5.1).
        """
        if isinstance(error, float):
            off = error * rng.standard_normal(self.output.size)
            return np.asarray(np.maximum(self.output * (1 + off), 1.0))
        lengths = profiled(rng)
        tasks = [_TASKS[int(code)] for code in self.code]
        if error == "mean":
            return np.array([lengths.profile(task)[0] for task in tasks])
        return np.array([float(lengths.draw(task, rng)) for task in tasks])

    def workload(self, arrival: Floats, scale: float) -> Workload:
        """Return the requests as a workload with SLOs of `scale` times the published ones."""
        parts = [
            single(
                np.zeros(int(rows.sum())),
                self.prompt[rows],
                self.output[rows],
                slo=_times(slo, scale),
                tier=task,
                max_tokens=_LONGEST,
            )
            for rows, slo, task in ((self.code, CODE, _TASKS[1]), (~self.code, CHAT, _TASKS[0]))
        ]
        back = np.argsort(np.concatenate([np.flatnonzero(self.code), np.flatnonzero(~self.code)]))
        return replace(concat(*parts).take(back), arrival=arrival)


@dataclass(frozen=True, slots=True)
class Worth:
    """The figures of a case.

    g: requests that met their SLO per second of latency.
    attainment: from 0 to 1.
    latency: mean, seconds.
    """

    g: float
    attainment: float
    latency: float


def mean(all: list[Worth]) -> Worth:
    """Return the mean of each figure."""
    names = ("g", "attainment", "latency")
    return Worth(*(float(np.mean([getattr(one, name) for one in all])) for name in names))


def worth(costs: Records, order: Ints, sizes: Ints) -> Worth:
    """Return the figures of an order in batches of these sizes, by the paper's model of execution."""
    mapping = maps.empty(order.size)
    maps.set_sizes(costs, mapping, order, sizes)
    met, latency = int(mapping.sums["met"][0]), float(mapping.sums["latency"][0])
    return Worth(met / latency, met / order.size, latency / order.size)


def arrival_order(costs: Records, limit: int) -> Worth:
    """Return the figures of vLLM's order by the same model: first come, first served, in full batches."""
    full = np.full(-(-costs.size // limit), limit)
    full[-1] = costs.size - full[:-1].sum()
    return worth(costs, np.arange(costs.size), full)


def annealed(costs: Records, limit: int, seed: int, schedule: Schedule | None = None) -> tuple[Ints, Ints]:
    """Return the annealed order and its batch sizes; the default schedule is that of the recipes."""
    return anneal(costs, np.arange(costs.size), limit, schedule or Schedule.of(costs.size, limit), seed)


def engine(limit: int) -> InstanceSpec:
    """Return one simulated engine with a batch limit, and KV for a full batch."""
    profile = profiles.load(PROFILE)
    blocks = 2 * _LONGEST * max(limit, 4) // profile.block_size
    shape = Instance("e0", "default", limit, blocks, profile.block_size, 2 * _LONGEST, lead=0)
    return InstanceSpec(shape, profile.latency(), max(4 * limit, 64), 2048)


def slo_scale() -> float:
    """Return the SLO factor that gives code ten times its seconds alone, as in the paper."""
    latency, (prompt, answer) = profiles.load(PROFILE).latency(), (_PROMPT[0], _ANSWER[0])
    alone = latency.seconds(Batch(0, 0, int(prompt), int(prompt**2 / 2)))
    alone += answer * latency.seconds(Batch(1, int(prompt + answer / 2), 0))
    return 10 * alone / _E2E


def profiled(rng: np.random.Generator, draws: np.random.Generator | None = None) -> GaussianLengths:
    """Return Gaussian profiles of both tasks, of `_PROFILED` earlier answers each. draws: as in `GaussianLengths`."""
    lengths = GaussianLengths(draws=draws)
    for task, outputs in ((_TASKS[1], _code(_PROFILED, rng)[1]), (_TASKS[0], _chat(_PROFILED, rng)[1])):
        for output in outputs.tolist():
            lengths.add(task, output)
    return lengths


def simulated(recipe: str, load: Workload, limit: int, lengths: Lengths | None = None) -> Worth:
    """Return a recipe's figures for a workload on the event simulator. lengths: None = the true ones are known."""
    lengths = lengths or Oracle(load)
    outcome = Simulation(find(recipe), [engine(limit)], load, lengths).run()
    first, whole = outcome.first - load.arrival, outcome.end - load.arrival
    tpot = (outcome.end - outcome.first) / np.maximum(load.output - 1, 1)
    met = (first <= load.ttft) & (tpot <= load.tpot) & (whole <= load.e2e)
    return Worth(float(met.sum() / whole.sum()), float(met.mean()), float(whole.mean()))


def capacity(limit: int, seed: int, count: int = 200) -> float:
    """Return the requests per second that vLLM's order serves if all requests wait from the start."""
    load = AnnealCase.drawn(count, seed).workload(np.zeros(count), slo_scale())
    outcome = Simulation(find("vllm"), [engine(limit)], load, Oracle(load)).run()
    return count / float(outcome.end.max())


def _code(count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    return _log_normal(*_PROMPT, count, rng), _log_normal(*_ANSWER, count, rng)


def _chat(count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw chat requests; cut the answers of requests with 2k tokens or more."""
    prompt, output = draw("sharegpt", count, rng)
    return prompt, np.maximum(np.minimum(output, _LONGEST - 1 - prompt), 1)


def _log_normal(center: float, deviation: float, count: int, rng: np.random.Generator) -> Ints:
    """Draw lengths with this mean and deviation, from 1 to half of the longest request."""
    sigma = float(np.sqrt(np.log(1 + (deviation / center) ** 2)))
    tokens = np.exp(rng.normal(np.log(center) - sigma**2 / 2, sigma, count))
    return np.asarray(np.clip(np.rint(tokens), 1, _LONGEST // 2), np.int64)


def _times(slo: Slo, scale: float) -> Slo:
    ttft, tpot, e2e = (None if s is None else s * scale for s in (slo.ttft, slo.tpot, slo.e2e))
    return Slo(ttft, tpot, e2e)
