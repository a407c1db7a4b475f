"""Grounds of `headway bench placement`: conversations of published workloads on a fleet with prefix caches.

Those of the catalog are statistics of Kubernetes' inference-perf (workload-catalog). A conversation's first prompt is
so long that all its prompts have the mean length. Of code-generation a quarter of that length is taken (its prompts
are longer than any model here reads) and forty turns (mean 540, standard deviation 48,600 cannot both be meant).
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.placement.conversations import Conversations, Spread, Turn, of_turns
from headway.policy.forecast.latency.profiles import load
from headway.prefix import Prefix
from headway.simulate.fleet import spec
from headway.simulate.instance import InstanceSpec
from headway.simulate.workload.application_models import generated
from headway.simulate.workload.applications import AppRun, applications, draw
from headway.simulate.workload.arrivals import poisson, recorded
from headway.simulate.workload.run_prefixes import templates, with_prefixes
from headway.simulate.workload.traces import locate
from headway.simulate.workload.traffic import TrafficClass, Workload, make
from headway.types import Floats, Slo

PROFILE, LONGEST = "llama-3-70b-a100-tp8", 131_072
_CHARS = 4  # of text in a token
_AGENTS = "agentic_coding", ("agents",)
_RUNS = 200  # of each application, from which runs are drawn
_TEXTS = "content", "tool_calls", "tool_results"
CHAT = Conversations(
    "interactive-chat",
    system=1000,
    prompt=Spread(500, 15_000, 4000, 2500),
    added=Spread(10, 1000, 50, 40),
    answer=Spread(10, 1000, 300, 150, "normal"),
    turns=Spread(1, 15, 4, 2.5),
    gap=Spread(5, 300, 45, 40),
    slo=Slo(ttft=1.0, tpot=0.05),
    longest=16_000,
)
CODE = Conversations(
    "code-generation",
    system=3000,
    prompt=Spread(10_000, 90_000, 40_000, 58_400),
    added=Spread(100, 10_000, 1500, 1200),
    answer=Spread(50, 10_000, 425, 825),
    turns=Spread(40, 40, 40, 1),
    gap=Spread(1, 1000, 15, 55),
    slo=Slo(ttft=30.0, tpot=0.1),
    longest=120_000,
)
RESEARCH = Conversations(
    "deep-research",
    system=2000,
    prompt=Spread(2000, 100_000, 45_000, 35_000, "exponential"),
    added=Spread(500, 15_000, 3000, 2500),
    answer=Spread(50, 4000, 300, 850, "exponential"),
    turns=Spread(2, 50, 15, 8.5, "normal"),
    gap=Spread(5, 60, 25, 12, "normal"),
    slo=Slo(ttft=10.0, tpot=0.1),
    longest=120_000,
)


@dataclass(frozen=True, slots=True)
class Ground:
    """A workload for one engine at its capacity.

    rate: conversations (of a trace requests, of applications runs) per second and engine at 1.0 times its capacity:
        the rate at which one engine with `headway` keeps 95 % of the promises.
    warm: seconds after which conversations of all ages are there; requests count from then on.
    recorded: its file of `HEADWAY_DATA` and, unless it is one of arrivals, that file's folders; () = none.
    """

    name: str
    rate: float
    warm: float
    make: Callable[[float, float, np.random.Generator], Workload]
    recorded: tuple[str] | tuple[str, tuple[str, ...]] | tuple[()] = ()

    def workload(self, engines: int, load: float, seconds: float, seed: int) -> Workload:
        """Return the requests for so many engines at a multiple of their capacity, `seconds` beyond `warm`."""
        return self.make(self.rate * engines * load, self.warm + seconds, np.random.default_rng(seed))


def fleet(engines: int, longest: int = LONGEST, kv: float = 1.0) -> list[InstanceSpec]:
    """Return equal engines with prefix caches and, as is the default of `[[engines]]`, no host memory for KV.

    longest: tokens of a request. kv: share of the KV that the profile has.
    """
    tokens = int((load(PROFILE).kv_tokens or 0) * kv)
    limits = f"max_model_len={longest},host_kv_gib=0,kv_tokens={tokens}"
    return spec(f"{PROFILE}:{engines},prefix_caching=true,{limits},model=default").instances()


def in_runs(work: Workload) -> Workload:
    """Return a workload whose conversations are runs of an application, unless it has runs."""
    if any(work.runs):
        return work
    names = np.array([prefix.id if prefix else "" for prefix in work.prefixes])[work.prefix]
    runs, codes = np.unique(names, return_inverse=True)
    return replace(work, run=codes, runs=tuple(runs.tolist()), apps=("conversation",), units=("turn",))


def _mooncake(rate: float, seconds: float, rng: np.random.Generator) -> Workload:
    """Return Mooncake's conversations, their times scaled to the rate; arrivals of one instant are spread."""
    trace = recorded("mooncake_conversation", rate=rate, rng=rng)
    work = make([TrafficClass("mooncake", slo=Slo(ttft=10.0, tpot=0.1), lengths=None)], trace, rng).between(0, seconds)
    return work.take(work.prompt + work.output < LONGEST)


def _agents(rate: float, seconds: float, rng: np.random.Generator) -> Workload:
    """Return agents that code: the recorded conversations, each begun again and again, as Poisson's process says."""
    recorded, turns = _recorded(), list[Turn]()
    for number, begin in enumerate(poisson(rate, seconds, rng).tolist()):
        when, chain = begin, recorded[rng.integers(len(recorded))]
        for prompt, answer, delay in chain:
            if when < seconds and prompt + answer < LONGEST:
                system = Prefix("agent system", min(85, prompt))
                turns.append(Turn(when, answer, Prefix(f"agent {number}", prompt, answer=True, parent=system)))
            when += delay
    return of_turns(turns, Slo(ttft=2.0, tpot=0.1), "agents")


def _hermes(rate: float, seconds: float, rng: np.random.Generator) -> Workload:
    """Return runs of Hermes' LLM applications, as the simulator generates them, in the shares of its section 5.1.

    Open-loop traffic, as all grounds: a step begins when the one before it would have been answered (`_begins`),
    whether or not it is. All applications are one tenant's.
    """
    pool = generated(_RUNS, np.random.default_rng(0))
    at = poisson(rate, seconds, rng)
    apps = applications(draw(pool, at.size, rng), at, "default")
    work = with_prefixes(apps, templates(itertools.chain(*pool.values()))).workload
    arrival = np.concatenate([_begins(run, begin) for run, begin in zip(apps.runs, at.tolist(), strict=True)])
    ttft, tpot = np.full(len(work), 5.0), np.full(len(work), 0.1)
    one = np.zeros(len(work), np.int64)
    work = replace(work, arrival=arrival, ttft=ttft, tpot=tpot, tenant=one, tenants=("default",))
    return work.between(0, seconds).sorted()


def _begins(run: AppRun, begin: float) -> Floats:
    """Return when a run's requests come.

    A step takes a second and a twentieth per token of its longest answer, or its seconds outside the LLM.
    """
    took = [step.seconds or 1.0 + 0.05 * max(answer for _, answer in step.requests) for step in run.steps]
    return np.repeat(begin + np.cumsum([0.0, *took[:-1]]), [len(step.requests) for step in run.steps])


def _recorded() -> list[list[tuple[int, int, float]]]:
    """Return the prompt, the answer and the seconds to the next request of each conversation's turns.

    A turn's answer takes a twentieth of a second per token, and then its tools their time.
    """
    talks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _lines(locate(*_AGENTS)):
        talks[row["conversation_id"]].append(row)
    return [_turns_of(rows) for rows in talks.values()]


def _lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def _turns_of(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, float]]:
    said, turns = 0, list[tuple[int, int, float]]()
    for row in rows:
        tokens = max(sum(len(json.dumps(row[key])) for key in _TEXTS if row.get(key)), _CHARS)
        if row["role"] == "assistant":
            turns.append((said, tokens // _CHARS, 1.0 + 0.05 * tokens / _CHARS))
        elif turns:
            prompt, answer, seconds = turns[-1]
            turns[-1] = prompt, answer, seconds + float(row.get("delay_seconds") or 0.0)
        said += tokens // _CHARS
    return turns


GROUNDS = {
    ground.name: ground
    for ground in (
        Ground("interactive-chat", 0.8, 150.0, CHAT.workload),
        Ground("code-generation", 0.02, 350.0, CODE.workload),
        Ground("deep-research", 0.036, 300.0, RESEARCH.workload),
        Ground("mooncake", 0.25, 60.0, _mooncake, ("mooncake_conversation",)),
        Ground("agents", 0.3, 150.0, _agents, _AGENTS),
        Ground("hermes", 1.0, 300.0, _hermes),
    )
}
