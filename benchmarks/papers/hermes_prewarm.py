"""Prewarming of backends outside the LLM, by its aggressiveness K (Hermes 5.4, figure 14), SIMULATED.

Code generation (CG) starts a container for every execution, which takes 12 of an execution's recorded seconds.
Plan and execution (PE) loads a model per tool; the loading time is not recorded, and assumed to be half of the
median of a tool's recorded seconds. Each application runs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.hermes_workloads import GRAPHS, HERMES, engines, knowledge, pool
from headway.policy.apps.graph import LLM
from headway.policy.apps.prewarming import PrewarmOptions
from headway.policy.apps.runs import RankOptions
from headway.policy.recipes.hermes import variant
from headway.simulate.replay import replay
from headway.simulate.workload.applications import applications, draw
from headway.whatif.output.results import Row

KS = (1.0, 0.75, 0.5, 0.25, 0.1)
_NEVER = 2.0  # no unit comes next with a probability above 1
_CONTAINER_S = 12.0
_RUNS, _SECONDS = 100, 900.0
_LOADING = 0.5  # share of a tool's seconds


@dataclass(frozen=True, slots=True)
class WarmCounts:
    """The outcome of an application with one K.

    act: mean completion time, seconds. cold: the same without prewarming.
    idle: seconds in which started backends waited. used: seconds in which backends served.
    hits: units, out of `units`, that found their backend ready.
    """

    app: str
    k: float
    act: float
    cold: float
    idle: float
    used: float
    hits: int
    units: int


def prewarmed(app: str, ks: Sequence[float], seed: int) -> list[WarmCounts]:
    """Run an application without prewarming, and with every K."""
    served, taught = pool()
    rng = np.random.default_rng(seed)
    runs = draw({app: served[app]}, _RUNS, rng, {app: 1.0})
    engine = engines("7b")
    apps = applications(runs, np.sort(rng.uniform(0, _SECONDS, _RUNS)), engine[0].instance.model)
    seconds: dict[str, list[float]] = {}
    for run in (*taught[app], *served[app]):
        for step in run.steps:
            if step.backend != LLM:
                seconds.setdefault(step.backend, []).append(step.seconds)
    cold_s = _cold_seconds(seconds)
    out, cold = list[WarmCounts](), 0.0
    for k in (_NEVER, *ks):
        options = PrewarmOptions(default=k)
        recipe = variant(HERMES, HERMES, RankOptions(), knowledge(GRAPHS[0]), prewarm=options)
        replayed = replay(recipe, engine, apps, cold_s=cold_s)
        act, warm = float((replayed.end - apps.arrival).mean()), replayed.pool
        cold = cold or act
        out.append(WarmCounts(app, k, act, cold, warm.idle, warm.used, warm.hits, warm.units))
    return out[1:]


def prewarm_rows(results: Sequence[WarmCounts]) -> list[Row]:
    """Return the saved latency, the waste and the hit ratio of prewarming."""
    rows = []
    for one in results:
        setting = f"{one.app}, K={one.k:g}"
        saved, waste = 100 * (1 - one.act / one.cold), 100 * one.idle / (one.idle + one.used)
        rows += [
            Row("prewarm.act_saved_pct", HERMES, setting, saved, "%"),
            Row("waste_pct", HERMES, setting, waste, "%"),
            Row("prewarm.hit_pct", HERMES, setting, 100 * one.hits / max(one.units, 1), "%"),
        ]
    return rows


def _cold_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the seconds that each backend needs to start."""
    return {
        name: _CONTAINER_S if name == "docker" else float(np.median(some)) * _LOADING for name, some in seconds.items()
    }
