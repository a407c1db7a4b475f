"""The rivals' own grounds, and the sixteen of `headway bench default`: one simulated engine each.

Lengths are built-in published statistics. Where HEADWAY_DATA names a folder with the recorded trace of
Azure's conversations, its lengths are drawn instead (`Arena.about` says which).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from benchmarks.simulated.grounds import GROUNDS, Ground
from headway.policy.forecast.latency import profiles
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.registry import find
from headway.ports import Lengths
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload import lengths as sizes
from headway.simulate.workload import traces
from headway.simulate.workload.arrivals import phases, poisson
from headway.simulate.workload.traffic import TrafficClass, Workload, make
from headway.types import Floats, Instance, Slo

LOADS = (0.9, 1.2, 1.3, 2.0)
_PROFILE = "llama-2-7b-a100"
_BURST = 400  # requests at once that measure an arena's capacity
_ROWS = 4000  # drawn once from the built-in statistics of Azure's conversations
_SHORT_OWN = 30.0  # seconds of arrivals on one of our grounds, in a quick run
_RECORDED = "azure_conv_2023"
# Quantiles of that trace: conversations of Azure's LLM inference trace of 2023, 19,366 rows (Splitwise,
# ISCA 2024; Azure/AzurePublicDataset), in the manner of `simulate/workload/lengths.py`.
_CONVERSATIONS = sizes.Source(
    sizes.Quantiles(
        (
            2,
            29,
            120,
            181,
            207,
            387,
            403,
            703,
            1020,
            1071,
            1130,
            1189,
            1315,
            1876,
            2734,
            4083,
            4092,
            4142,
            4831,
            6179,
            14050,
        )
    ),
    sizes.Quantiles((7, 16, 28, 41, 54, 77, 91, 103, 129, 177, 384, 395, 400, 411, 424, 451, 522, 601, 643, 954, 1000)),
    0.0728,
    "built-in statistics of Azure's conversations of 2023: 19,366 rows",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of traffic.

    source: its lengths, "conversations" (Azure's) or a name of `simulate/workload/lengths.py`.
    prompts: ttft as a multiple of the seconds of the prompt on an idle engine (SLOs-Serve); 0 = the `slo`'s.
    """

    name: str
    slo: Slo
    source: str
    prompts: float = 0.0
    share: float = 1.0

    def traffic(self) -> TrafficClass:
        """Return the class as workloads are made of."""
        lengths = conversations() if self.source == "conversations" else self.source
        return TrafficClass(self.name, self.share, self.slo, 0, lengths)


@dataclass(frozen=True, eq=False)
class Arena:
    """An engine under traffic that arrives for `seconds` at a load.

    paper: whose ground it is.
    kinds: classes of traffic.
    swing: low and high arrivals as multiples of the load, in phases of `phase` seconds by turns; () = even.
    loads: that the full run has. quick, quick_load: seconds of arrivals and the load of the quick run.
    base: the ground of `headway bench default` that it stands for, if any.
    """

    name: str
    paper: str
    kinds: tuple[Kind, ...] = ()
    seconds: float = 240.0
    quick: float = 90.0
    profile: str = _PROFILE
    longest: int = 8192
    swing: tuple[float, ...] = ()
    phase: float = 90.0
    loads: tuple[float, ...] = LOADS
    quick_load: float = 1.3
    base: Ground | None = None

    def instance(self) -> InstanceSpec:
        """Return the simulated engine."""
        if self.base is not None:
            return self.base.instance()
        profile = profiles.load(self.profile)
        size, host = profile.block_size, int(160e9 // profile.kv_bytes_per_token)
        shape = Instance("e0", "default", 256, (profile.kv_tokens or 0) // size, size, self.longest)
        return InstanceSpec(shape, profile.latency(), 1024, 2048, profile.copy_seconds(), host_tokens=host)

    def window(self, load: float, *, quick: bool) -> float:
        """Return the seconds of arrivals."""
        if self.base is None:
            return self.quick if quick else self.seconds
        whole = self.base.seconds(load)
        if self.base.swing > 1:  # a day of two
            return whole / 2 if quick else whole
        return min(whole, max(_SHORT_OWN, whole / 8)) if quick else whole

    def workload(self, load: float, seed: int, *, quick: bool = False) -> Workload:
        """Return the requests at `load` x the engine's capacity."""
        if self.base is not None:
            return self.base.workload(load, seed).between(0.0, self.window(load, quick=quick))
        rng, seconds = np.random.default_rng(seed), self.window(load, quick=quick)
        return self._requests(self._arrivals(load * self.capacity, seconds, rng), rng)

    def lengths(self, workload: Workload, seed: int) -> Lengths:
        """Return the forecasts of answers that every system gets."""
        return TaskLengths() if self.base is None else self.base.lengths(workload, seed)

    def lasting(self, seconds: float) -> Arena:
        """Return the same arena with other seconds of arrivals, and the same capacity."""
        other = replace(self, seconds=seconds)
        other.__dict__["capacity"] = self.capacity
        return other

    @cached_property
    def capacity(self) -> float:
        """Requests/s that stock vLLM's order completes of a burst, the first and last tenth left out."""
        workload = self._requests(np.zeros(_BURST), np.random.default_rng(0))
        end = np.sort(Simulation(find("vllm"), [self.instance()], workload).run().end)
        low, high = int(0.1 * end.size), int(0.9 * end.size)
        return float((high - low) / (end[high] - end[low]))

    def _arrivals(self, rate: float, seconds: float, rng: np.random.Generator) -> Floats:
        if not self.swing:
            return poisson(rate, seconds, rng)
        length = min(self.phase, seconds / len(self.swing))
        count = max(round(seconds / length), 1)
        return phases([rate * self.swing[k % len(self.swing)] for k in range(count)], length, rng)

    def _requests(self, at: Floats, rng: np.random.Generator) -> Workload:
        whole = make([kind.traffic() for kind in self.kinds], at, rng)
        kept = whole.take(np.flatnonzero(whole.prompt + whole.output <= self.longest))
        factor = np.array([kind.prompts for kind in self.kinds])[self._kind_of(kept)]
        alone = self._alone(kept.prompt.astype(float))
        return replace(kept, ttft=np.where(factor > 0, factor * alone, kept.ttft))

    def _alone(self, prompt: Floats) -> Floats:
        """Return the seconds of prompts on an idle engine, by the law that systems can learn."""
        base, _, _, token, pair = profiles.load(self.profile).coefficients().tolist()
        return np.asarray(base + token * prompt + pair * prompt**2 / 2)

    def _kind_of(self, workload: Workload) -> list[int]:
        place = {kind.name: number for number, kind in enumerate(self.kinds)}
        return [place[workload.tiers[tier]] for tier in workload.tier]


@cache
def conversations() -> traces.Lengths:
    """Return the lengths of Azure's conversations: recorded ones where they are there, else statistics."""
    if traces.find(_RECORDED) is not None:
        return traces.read_lengths(_RECORDED)
    rng = np.random.default_rng(0)
    prompt, output = sizes.tied(_CONVERSATIONS.rho, _ROWS, rng)
    tokens = [
        np.asarray(np.rint(side.at(share)), np.int64)
        for side, share in ((_CONVERSATIONS.prompt, prompt), (_CONVERSATIONS.output, output))
    ]
    return traces.Lengths(tokens[0], tokens[1], _CONVERSATIONS.about)


def _qoserve(scale: float) -> tuple[Kind, ...]:
    """Return QoServe's three tiers, a third each: (6 s, 50 ms), 600 s and 1800 s, deadlines x `scale`."""
    return (
        Kind("q1", Slo(ttft=6.0, tpot=0.05), "conversations"),
        Kind("q2", Slo(e2e=600.0 * scale), "conversations"),
        Kind("q3", Slo(e2e=1800.0 * scale), "conversations"),
    )


_CHAT = Kind("chat", Slo(tpot=0.1), "sharegpt-multiround", prompts=5)
_SHORT = Kind("short", Slo(tpot=0.1), "sharegpt", prompts=5)
_SUMMARY = Kind("summary", Slo(tpot=0.1), "arxiv", prompts=3)
_TIGHT = Kind("short-tight", Slo(tpot=0.05), "sharegpt", prompts=5)
# Scorpio's classes for an 8B model: ttft s, tpot s; the shares are not stated, so a sixth each.
_SCORPIO = ((0.5, 0.03), (2.0, 0.03), (3.0, 0.03), (0.5, 0.05), (1.0, 0.05), (7.5, 0.05))
_SIX = tuple(Kind(f"c{i}", Slo(ttft, tpot), "sharegpt") for i, (ttft, tpot) in enumerate(_SCORPIO))
_JITSERVE = (
    Kind("latency", Slo(ttft=0.8, tpot=0.08), "lmsys"),
    Kind("deadline", Slo(e2e=8.0), "lmsys"),
    Kind("collective", Slo(e2e=8.0), "lmsys"),
)

# SLAI's ground: 5 % pay and are promised 0.1 s between tokens, the others 0.5 s. For its own figure only.
_SLAI = (
    Kind("paying", Slo(tpot=0.1), "sharegpt-multiround", share=1),
    Kind("others", Slo(tpot=0.5), "sharegpt-multiround", share=19),
)
FIDELITY_ONLY = ("G5-slai",)

ARENAS: dict[str, Arena] = {
    arena.name: arena
    for arena in (
        Arena("G1-conv", "QoServe", _qoserve(0.1), quick=90.0, quick_load=2.0),
        Arena("G1-conv-published", "QoServe", _qoserve(1.0), quick=45.0, quick_load=2.0),
        Arena(
            "G1-transient", "QoServe", _qoserve(0.1), 540.0, 45.0, swing=(0.57, 1.43), loads=(1.0, 1.2), quick_load=1.2
        ),
        Arena("G1-hour", "QoServe", _qoserve(1.0), 3600.0, 45.0, loads=(1.2,), quick_load=1.2),
        Arena("G2-chat", "SLOs-Serve", (_CHAT,), quick_load=1.2),
        Arena("G2-chat-short", "SLOs-Serve", (_SHORT,), quick=40.0, quick_load=1.2),
        Arena("G2-summary", "SLOs-Serve", (_SUMMARY,), quick=45.0, quick_load=1.2),
        Arena("G2-mix", "SLOs-Serve", (_TIGHT, _SUMMARY), quick=45.0, quick_load=1.2),
        Arena("G3", "Scorpio", _SIX, quick=30.0, loads=(*LOADS, 3.0), quick_load=3.0),
        Arena("G4", "JITServe", _JITSERVE, quick=30.0, quick_load=2.0),
        Arena("G5-slai", "SLAI", _SLAI, loads=(0.9,), quick_load=0.9),
        *(Arena(ground.name, "Headway", base=ground) for ground in GROUNDS),
    )
}
