"""Grounds of a fleet with prefix caches; those of `headway bench catalog`.

Each workload of the catalog alone; all of them mixed, each with an equal part of the fleet's capacity; and prompts of
100,000 tokens beside chat on engines whose KV holds two of them, with several sizes of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.catalog.workloads import AGENTS, CHAT, CODE, LONG, REASONING, RESEARCH, SUMMARIES, SYNTHETIC
from benchmarks.experiment import refuse_unknown
from headway.policy.forecast.latency.profiles import load
from headway.simulate.fleet import spec
from headway.simulate.instance import InstanceSpec
from headway.simulate.workload.traces import locate
from headway.simulate.workload.traffic import Workload, concat

PROFILE, LONGEST = "llama-3-70b-a100-tp8", 131_072
Make = Callable[[float, float, np.random.Generator], Workload]


@dataclass(frozen=True, slots=True)
class Ground:
    """A workload for one engine at its capacity.

    rate: conversations (of a trace requests, of applications runs, of a mixture conversations of all kinds) per second
        and engine at 1.0 times its capacity: the rate at which one engine with `headway` keeps 95 % of the promises, or
        where there are only deadlines or none, completes as many as come.
    warm: seconds after which conversations of all ages are there; requests count from then on.
    recorded: its file of `HEADWAY_DATA` and, unless it is one of arrivals, that file's folders; () = none.
    engine: settings of its engines that differ (`headway simulate --instance`). several: it has several workloads.
    """

    name: str
    rate: float
    warm: float
    make: Make
    recorded: tuple[str] | tuple[str, tuple[str, ...]] | tuple[()] = ()
    engine: str = ""
    several: bool = False

    def workload(self, engines: int, load: float, seconds: float, seed: int) -> Workload:
        """Return the requests for so many engines at a multiple of their capacity, `seconds` beyond `warm`."""
        return self.make(self.rate * engines * load, self.warm + seconds, np.random.default_rng(seed))

    def fleet(self, engines: int, kv: float = 1.0) -> list[InstanceSpec]:
        """Return so many of its engines. kv: share of the KV that the profile has."""
        tokens = int((load(PROFILE).kv_tokens or 0) * kv)
        return fleet(engines, more=self.engine if kv == 1 else f"{self.engine},kv_tokens={tokens}")


def fleet(engines: int, longest: int = LONGEST, more: str = "") -> list[InstanceSpec]:
    """Return equal engines with prefix caches and, as is the default of `[[engines]]`, no host memory for KV.

    longest: tokens of a request. more: further settings, ",key=value".
    """
    limits = f"max_model_len={longest},host_kv_gib=0"
    return spec(f"{PROFILE}:{engines},prefix_caching=true,{limits},model=default{more}").instances()


def checked(names: Sequence[str], known: Mapping[str, Ground]) -> None:
    """Refuse grounds that are unknown or whose file is not there, before anything is simulated. ConfigError."""
    refuse_unknown("ground", names, known)
    for ground in (known[name] for name in names):
        if ground.recorded:
            locate(*ground.recorded)


def _mixture(parts: Mapping[str, float], rate: float, seconds: float, rng: np.random.Generator) -> Workload:
    """Return conversations of several kinds at `rate` per second, each kind with its share of them."""
    total = sum(parts.values())
    kinds = [(_KINDS[name], rate * part / total) for name, part in parts.items()]
    return concat(*(kind.workload(one, seconds, rng) for kind, one in kinds)).sorted()


_KINDS = {one.name: one for one in (CHAT, CODE, RESEARCH, REASONING, SUMMARIES, SYNTHETIC, AGENTS, LONG)}
ALONE = (
    Ground("interactive-chat", 0.8, 150.0, CHAT.workload),
    Ground("code-generation", 0.02, 350.0, CODE.workload),
    Ground("deep-research", 0.036, 300.0, RESEARCH.workload),
    Ground("reasoning", 0.5, 900.0, REASONING.workload),
    Ground("batch-summarization-rag", 0.24, 100.0, SUMMARIES.workload),
    Ground("batch-synthetic-data-generation", 0.6, 500.0, SYNTHETIC.workload),
    Ground("agentic-trace-replay", 0.02, 300.0, AGENTS.workload),
)
# A seventh of each one's capacity, of reasoning's a fifteenth: its answers take the longest.
_EACH = {ground.name: ground.rate for ground in ALONE} | {"reasoning": 0.24}
_BESIDE = {"interactive-chat": 0.3, "long-prompts": 0.012}
_CHUNKS = (512, 2048, 8192)  # tokens of an iteration
GROUNDS = {
    ground.name: ground
    for ground in (
        *ALONE,
        Ground("mixed", sum(_EACH.values()) / len(_EACH), 350.0, partial(_mixture, _EACH), several=True),
        *(
            Ground(
                f"long-prompts-{chunk}",
                sum(_BESIDE.values()),
                200.0,
                partial(_mixture, _BESIDE),
                engine=f",kv_tokens=240000,budget={chunk}",
                several=True,
            )
            for chunk in _CHUNKS
        ),
    )
}
