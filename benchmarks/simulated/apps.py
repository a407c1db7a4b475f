"""`headway bench apps --simulated`: the same runs and chat in virtual time.

The engine is the built-in profile of SmolLM2 on two cores; gateway and reports take no time. Beside the recipes there
are `hermes-oracle`, `hermes` with every run's true demand, and `hermes-aging-X`, with `RankOptions.aging` X.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.real.app_load import AppLoad, calls_of
from benchmarks.real.apps import AppsOutcome, AppsTrial, RunResult, ServedApps
from benchmarks.real.apps_report import result
from headway.engines.vllm.process.sizes import CPU
from headway.policy.apps.demand import SHARED, Knowledge
from headway.policy.apps.runs import Futures, RankOptions
from headway.policy.recipes.default import headway
from headway.policy.recipes.hermes import AGED, variant
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.simulate.fleet import Spec, build
from headway.simulate.instance import InstanceSpec
from headway.simulate.replay import oracle, replay
from headway.simulate.run import Simulation
from headway.simulate.workload.applications import Applications, applications
from headway.simulate.workload.traffic import Workload, concat, single
from headway.whatif.experiment import records
from headway.whatif.load.records import Call
from headway.whatif.output.results import SIMULATED, Ask

_PROFILE = "smollm2-135m-cpu2"
_STOCK = "vllm-fcfs"
_AGING = "hermes-aging-"
_OPTIONS = {"hermes": RankOptions(), "hermes-aged": AGED}
_LETTERS = 4  # per token of a prompt


@experiment("apps", "sim", f"Application runs beside chat ({SIMULATED})")
def main(ask: Ask, trial: AppsTrial) -> Result:
    """Simulate all rounds. `quick`: one round of at most a minute."""
    if ask.quick:
        trial = replace(trial, rounds=1, duration=min(trial.duration, 60.0))
    capacity = None if trial.rate else _capacity(trial)
    rate = trial.rate or trial.load * (capacity or 0.0)
    served = {name: ServedApps() for name in trial.systems}
    for number in track(range(trial.rounds), "simulating", disable=ask.as_json):
        load = trial.shape.load(rate, trial.duration, [trial.seed, number])
        for name, one in served.items():
            one.add(_serve(name, trial, load))
    return result(trial, AppsOutcome(served, rate, capacity))


def _capacity(trial: AppsTrial) -> float:
    """Return the runs per second, with their chat, that stock vLLM serves when all their requests come at once."""
    load = trial.shape.load(1.0, 24.0, [trial.seed, 2000])
    calls = [*load.chat, *(call for script in load.scripts for call in calls_of(script))]
    order = np.random.default_rng([trial.seed, 2001]).permutation(len(calls))
    work = _requests(replace(calls[i], at=0.0) for i in order)
    ends = np.sort(Simulation(find("vllm"), [_engine(trial)], work).run().end)
    low, high = len(ends) // 4, 3 * len(ends) // 4  # without ramp-up and drain
    return float((high - low) / (ends[high] - ends[low])) * len(load.scripts) / len(calls)


def _serve(system: str, trial: AppsTrial, load: AppLoad) -> ServedApps:
    apps = applications([one.run for one in load.scripts], np.array([one.at for one in load.scripts]), "default")
    chat = _requests(load.chat)
    replayed = replay(_recipe(system, trial, apps), [_engine(trial)], apps, beside=chat)
    runs = zip(apps.runs, apps.arrival.tolist(), replayed.end.tolist(), strict=True)
    asked = records(concat(chat, apps.workload), replayed.outcome)[: len(chat)]
    return ServedApps([RunResult(run.app, at, end, ()) for run, at, end in runs], asked)


def _recipe(system: str, trial: AppsTrial, apps: Applications) -> Recipe:
    known, options = Knowledge(), _OPTIONS.get(system)
    for graph in trial.shape.graphs():
        known.put(SHARED, graph)
    if system.startswith(_AGING):
        options = RankOptions(aging=float(system.removeprefix(_AGING)))
    if system == "hermes-oracle":
        return variant(system, "", RankOptions(), futures=_futures(apps))
    if options:
        return variant(system, "", options, known)
    return headway(known) if system == "headway" else find("vllm" if system == _STOCK else system)


def _futures(apps: Applications) -> Futures:
    """Return the true demand of runs; nothing is known of chat, whose requests are runs of their own."""
    true, runs = oracle(apps), {str(number) for number in range(len(apps))}
    return lambda run, costs: true(run, costs) if run.key[2] in runs else None


def _requests(calls: Iterable[Call]) -> Workload:
    """Return calls as a workload; each answer has all the tokens that it may have."""
    return concat(
        *(
            single(np.array([one.at]), max(len(one.prompt) // _LETTERS, 1), one.max_tokens, slo=one.slo, tier=one.tier)
            for one in calls
        )
    )


def _engine(trial: AppsTrial) -> InstanceSpec:
    running = trial.engine.max_running or CPU.max_running
    return build(
        [
            Spec(
                _PROFILE,
                model="default",
                max_running=running,
                budget=CPU.max_batched_tokens,
                max_model_len=CPU.max_model_len,
            )
        ]
    )[0]
