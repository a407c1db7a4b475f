"""Grounds of `headway bench placement`: conversations of published workloads on a fleet with prefix caches.

Three are of the catalog (`benchmarks/catalog/workloads.py`), two are recorded, one is of Hermes' applications.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from benchmarks.catalog.conversations import Turn, of_turns
from benchmarks.catalog.grounds import ALONE, LONGEST, Ground
from benchmarks.catalog.recorded import FILE, SYSTEM, conversations
from headway.prefix import Prefix
from headway.simulate.workload.application_models import generated
from headway.simulate.workload.applications import AppRun, applications, draw, templates, with_prefixes
from headway.simulate.workload.arrivals import poisson, recorded
from headway.simulate.workload.traffic import TrafficClass, Workload, make
from headway.types import Floats, Slo

_RUNS = 200  # of each application, from which runs are drawn


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
    recorded, turns = conversations(), list[Turn]()
    for number, begin in enumerate(poisson(rate, seconds, rng).tolist()):
        when, chain = begin, recorded[rng.integers(len(recorded))]
        for prompt, answer, tools_s in chain:
            if when < seconds and prompt + answer < LONGEST:
                system = Prefix("agent system", min(SYSTEM, prompt))
                turns.append(Turn(when, int(answer), Prefix(f"agent {number}", prompt, answer=True, parent=system)))
            when += 1.0 + 0.05 * answer + tools_s  # a twentieth of a second per token, then the tools
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


GROUNDS = {
    ground.name: ground
    for ground in (
        *ALONE[:3],
        Ground("mooncake", 0.25, 60.0, _mooncake, ("mooncake_conversation",)),
        Ground("agents", 0.3, 150.0, _agents, FILE),
        Ground("hermes", 1.0, 300.0, _hermes),
    )
}
