"""Hermes' workloads (section 5.1): applications, arrivals, engine, deadlines and demand graphs.

Uses recorded runs and Mooncake's arrivals from HEADWAY_DATA if it is set, else the built-in applications and
Gamma arrivals. Runs are split alternately: the demand graphs learn from one half, the other half is served.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.papers.hermes_vtc import fewest_output_tokens, least_beside_its_share, served_tokens
from benchmarks.papers.quoted import quoted
from headway.policy.apps.demand import SHARED, Knowledge
from headway.policy.apps.graph import LLM, Graph
from headway.policy.apps.runs import RankOptions
from headway.policy.recipes.default import headway
from headway.policy.recipes.hermes import variant
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.simulate import fleet
from headway.simulate.instance import InstanceSpec
from headway.simulate.replay import Replayed, oracle, replay
from headway.simulate.workload import traces
from headway.simulate.workload.application_models import generated
from headway.simulate.workload.applications import (
    SHARES,
    Applications,
    AppRun,
    Step,
    applications,
    draw,
    graphs_of,
    read,
)
from headway.simulate.workload.arrivals import bursty
from headway.types import Batch, Floats

RUNS = int(quoted(300, "hermes", "5.2", 213, "300 and 3000"))
WINDOWS = {  # seconds of arrivals
    name: quoted(seconds, "hermes", "5.2", 213, "10, 15, and 30 minutes", 60)
    for name, seconds in (("1x", 1800.0), ("2x", 900.0), ("3x", 600.0))
}
# Deadlines as multiples of a run's time alone.
FACTORS = tuple(quoted(one, "hermes", "5.2", 215, f"{one:g}×") for one in (1.2, 1.5, 2.0))
_FILES = {"KBQAV": "kbqav", "CC": "cc", "EV": "ev", "ALFWI": "alfwi", "CG": "cg", "PE": "pe", "DM": "dm"}
_BUILT_IN = 200  # runs of each built-in application
# Weights of the script of Hermes' end-to-end evaluation (start_sched_e2e_evaluation.py): 72 % small, 26 % medium and
# 2 % large ones as in section 5.1, where however CG is medium and MRS large. None of their scripts has LLMR, and of FEV
# and MRS they published no runs.
PUBLISHED = {"EV": 4, "FEV": 4, "CC": 16, "KBQAV": 16, "ALFWI": 16, "CG": 16, "PE": 10, "MRS": 16, "DM": 2}
_NOT_RECORDED = ("FEV", "MRS")
WIDE = "WIDE"  # the name of an application of our own
_BUDGET = 2048
_BURSTINESS = 1 / 16  # of generated arrivals: gaps with a coefficient of variation of 4
AUTHORS = "authors"
AUTHORS_PROFILE = Path(__file__).with_name("llama-2-7b-hermes-authors.json")
_ENGINES = {  # by name: latency profile, instances, KV tokens
    "7b": ("llama-2-7b-a100", 1, 40_000),  # an A100 with 40 GB: 22 GB are left for KV
    AUTHORS: (str(AUTHORS_PROFILE), 1, 40_000),
    "70b": ("llama-2-70b-h100-tp4", 2, 400_000),
}
HERMES, ORACLE, DEFAULT = "hermes", "oracle", "headway"
_COUNTED = {"vtc-served": served_tokens, "vtc-runs": fewest_output_tokens, "vtc-shares": least_beside_its_share}
_TRUE = {ORACLE: RankOptions(), "oracle-ddl": RankOptions("slack")}
_OPTIONS = {
    HERMES: RankOptions(),
    "hermes-aging": RankOptions(aging=0.1),
    "hermes-ddl": RankOptions("slack"),
    "hermes-no-refine": RankOptions(refine=False),
    "hermes-mean": RankOptions("mean", refine=False),
    "srtf-mean": RankOptions("mean"),
}
# The runs from which graphs are learned: the other half, or the served ones; none until runs end; the other half
# with the names of units permuted; another application's runs.
GRAPHS = ("the other half", "the same half", "nothing at first", "shuffled units", "of another application")


@dataclass(frozen=True, slots=True)
class HermesSetting:
    """A workload on an engine or fleet.

    runs: number of runs. window: seconds of arrivals. deadlines: whether runs have deadlines.
    graphs: one of `GRAPHS`. apps: applications, equally often; () = all, in the shares of section 5.1.
    published: as in Hermes' published code: the weights of `PUBLISHED`, and of CG the 25 runs of several turns.
    """

    name: str
    runs: int = RUNS
    window: float = WINDOWS["3x"]
    engine: str = "7b"
    deadlines: bool = False
    graphs: str = GRAPHS[0]
    apps: tuple[str, ...] = ()
    published: bool = False


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """The outcome of a setting on a system, by run.

    act: application completion time, seconds. target: deadline, seconds after arrival. factor: the deadline's
    factor, one of `FACTORS`. apps: names of applications.
    """

    system: str
    setting: HermesSetting
    act: Floats
    target: Floats
    factor: Floats
    apps: Sequence[str]


def source() -> str:
    """Return the source of runs and arrivals, for reports."""
    if _data() is None:
        return "built-in applications (percentiles of recorded runs), Gamma arrivals (HEADWAY_DATA is not set)"
    return "recorded application runs, arrivals of the Mooncake conversation trace"


@cache
def pool(*, published: bool = False) -> tuple[Mapping[str, list[AppRun]], Mapping[str, list[AppRun]]]:
    """Return the runs to serve and the runs to learn from, by application. published: as in `HermesSetting`."""
    data = _data()
    if data is None:
        runs = generated(_BUILT_IN, np.random.default_rng(0))
    else:
        runs = {app: read(data / "apps" / f"{name}.jsonl.gz") for app, name in _FILES.items()}
    if published:
        runs["CG"] = [run for run in runs["CG"] if sum(step.backend == LLM for step in run.steps) > 1]
        runs |= generated(_BUILT_IN, np.random.default_rng(0), _NOT_RECORDED)
        runs[WIDE] = _wide(np.random.default_rng(0))
    return {app: some[1::2] for app, some in runs.items()}, {app: some[::2] for app, some in runs.items()}


def _wide(rng: np.random.Generator) -> list[AppRun]:
    """Return runs of an invented application, which differ by more than ten times, as their plans foretell."""
    runs = []
    for parts in rng.choice((1, 4, 40), _BUILT_IN, p=(0.6, 0.25, 0.15)).tolist():
        plan, work = Step("plan", requests=((500, 20 + 10 * parts),)), Step("work", requests=((600, 150),) * parts)
        runs.append(AppRun(WIDE, (plan, work, Step("answer", requests=((400 + 50 * parts, 300),)))))
    return runs


def workload(setting: HermesSetting, seed: int) -> tuple[Applications, Floats]:
    """Return the runs of a setting, and the factor of each one's deadline."""
    rng = np.random.default_rng(seed)
    shares = dict.fromkeys(setting.apps, 1.0) or (PUBLISHED if setting.published else SHARES)
    runs = draw(pool(published=setting.published)[0], setting.runs, rng, shares)
    arrival = _arrivals(setting, rng)
    factor = rng.choice(FACTORS, setting.runs)
    engine = engines(setting.engine)[0]
    alone = np.array([alone_seconds(run, engine) for run in runs])
    target = alone * factor if setting.deadlines else None
    return applications(runs, arrival, engine.instance.model, target), factor


@cache
def engines(name: str) -> tuple[InstanceSpec, ...]:
    """Return the instances of an engine's name."""
    profile, count, kv_tokens = _ENGINES[name]
    spec = fleet.Spec(profile, count, max_running=256, budget=_BUDGET, max_model_len=8192, kv_tokens=kv_tokens)
    return tuple(fleet.build([spec]))


def serve(system: str, setting: HermesSetting, seed: int) -> ServedRuns:
    """Run a system on a setting."""
    apps, factor = workload(setting, seed)
    replayed: Replayed = replay(recipe(system, setting, apps), engines(setting.engine), apps)
    act = replayed.end - apps.arrival
    return ServedRuns(system, setting, act, apps.target, factor, [run.app for run in apps.runs])


def recipe(system: str, setting: HermesSetting, apps: Applications) -> Recipe:
    """Return a system's recipe with the setting's graphs."""
    if system in _TRUE:
        return variant(system, "every run's true demand", _TRUE[system], futures=oracle(apps))
    if system in _COUNTED:
        return _COUNTED[system](apps)
    known = partial(knowledge, setting.graphs, published=setting.published)
    if system in _OPTIONS:
        return variant(system, system, _OPTIONS[system], known())
    return headway(known()) if system == DEFAULT else find(system)


def knowledge(graphs: str, *, published: bool = False) -> Knowledge:
    """Return a planner's initial graphs; it learns further ones only if it starts with none."""
    served, taught = pool(published=published)
    known = Knowledge(learns=graphs == GRAPHS[2])
    runs = {GRAPHS[1]: served, GRAPHS[2]: {}}.get(graphs, taught)
    learned = graphs_of([run for some in runs.values() for run in some])
    if graphs == GRAPHS[3]:
        learned = _shuffled(learned)
    elif graphs == GRAPHS[4]:
        learned = _swapped(learned)
    for graph in learned.values():
        known.put(SHARED, graph)
    return known


def alone_seconds(run: AppRun, engine: InstanceSpec) -> float:
    """Return the seconds of a run on an otherwise idle engine, by the latency profile."""
    seconds = 0.0
    for step in run.steps:
        seconds += step.seconds
        if step.requests:
            prompts = sum(prompt for prompt, _ in step.requests)
            tokens = prompts + sum(output for _, output in step.requests) // 2
            chunks = max(prompts / _BUDGET, 1.0)
            seconds += chunks * engine.latency.seconds(Batch(0, 0, min(prompts, _BUDGET)))
            decode = engine.latency.seconds(Batch(len(step.requests), tokens, 0))
            seconds += decode * max(output for _, output in step.requests)
    return seconds


def _shuffled(graphs: Mapping[str, Graph]) -> dict[str, Graph]:
    """Return the graphs with the names of each graph's units permuted, so that edges and demands are wrong."""
    rng = np.random.default_rng(0)
    shuffled = {}
    for name, graph in graphs.items():
        units = list(graph.units)
        names = [units[i] for i in rng.permutation(len(units))]
        shuffled[name] = graph.renamed(name, dict(zip(units, names, strict=True)))
    return shuffled


def _swapped(graphs: Mapping[str, Graph]) -> dict[str, Graph]:
    """Return the graphs with their applications permuted; units are matched by position."""
    names = list(graphs)
    swapped = {}
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        mine, theirs = list(graphs[name].units), graphs[other]
        renamed = dict(zip(theirs.units, mine, strict=False))
        swapped[name] = theirs.renamed(name, renamed)
    return swapped


def _arrivals(setting: HermesSetting, rng: np.random.Generator) -> Floats:
    if _data() is None:
        at = bursty(setting.runs / setting.window, _BURSTINESS, setting.window, rng)
    else:
        at = np.sort(rng.choice(traces.arrivals("mooncake_conversation"), setting.runs))
    at = at - at[0]
    return np.asarray(at * (setting.window / max(float(at[-1]), 1e-9)))


def _data() -> Path | None:
    folder = os.environ.get("HEADWAY_DATA")
    return Path(folder) if folder else None
