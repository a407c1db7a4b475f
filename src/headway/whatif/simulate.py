"""`headway simulate`: simulates a scenario under several recipes, with plots and a folder per recorded run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from headway.policy.recipes.registry import find
from headway.simulate.instance import describe
from headway.whatif.experiment import Keep, Results, file_name, simulate
from headway.whatif.load import report
from headway.whatif.output.results import SIMULATED, About, Pictures, deliver, say
from headway.whatif.scenario import Recorded, Scenario, planning_time


def main(
    recipes: Sequence[str], scenario: Scenario | Recorded, *, as_json: bool, out: Path | None, record_mb: float = 1000.0
) -> None:
    """Simulate, print the result, and write page, plots and runs to a folder if one is given."""
    began = time.perf_counter()
    workload, longer = scenario.workload()
    about = About(_describe(recipes, scenario, workload.models[0], longer), scenario.seed)
    keep = Keep(out, record_mb, scenario.seed, about.command, about.workload) if out else None
    found = simulate(
        recipes, scenario.fleet, workload, bar=not as_json, plan_seconds=planning_time(scenario), keep=keep
    )
    seconds = time.perf_counter() - began
    result = report.build(
        found.records, bench="simulate", host="sim", seconds=seconds, about=about, notes=_speeds(found)
    )
    deliver(result, as_json=as_json, out=out, pictures=lambda: _pictures(found))
    for name in found.runs:
        say(f"to see why requests were late: headway explain {out}/runs/{file_name(name)} --worst 10")


def _describe(recipes: Sequence[str], scenario: Scenario | Recorded, model: str, longer: int) -> str:
    """Describe the scenario, the number of requests left out, and the KV memory of each recipe."""
    parts = [scenario.about]
    if longer:
        parts.append(f"{longer} requests longer than any instance holds left out")
    first = scenario.fleet.instances(model)[0]
    memory = {name: describe(find(name), first) for name in recipes}
    return "; ".join([*parts, *(f"{name}: {text}" for name, text in memory.items() if text)])


def _speeds(found: Results) -> list[str]:
    return [
        f"{name}: {speed.times_real:.0f}x real time, {speed.iterations} iterations, "
        f"{speed.wall * 1e6 / max(speed.iterations, 1):.0f} us each{found.events[name]}"
        for name, speed in found.speeds.items()
    ]


def _pictures(found: Results) -> Pictures:
    from headway.whatif import run_plots
    from headway.whatif.load import plots

    engines = {f"engine-{file_name(name)}": run_plots.draw(run) for name, run in found.runs.items()}
    return plots.draw(found.records, SIMULATED) | engines
