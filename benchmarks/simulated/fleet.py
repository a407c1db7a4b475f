"""`headway bench fleet --simulated`: the mix and the models of the real fleet in virtual time, over seeds.

Two engines, two models of one shape and a rare one of another, as in `benchmarks/real/fleet.py`, without the
noise of a machine that is shared: planners are compared by it. Load times are those that the real runs
measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.real.fleet import DURATION, INSTANCES, MIX, RATE, TAIL, check_swaps, shares_of
from headway.policy.forecast.latency import profiles
from headway.policy.forecast.latency.laws import Additive
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.policy.recipes.registry import find
from headway.simulate.instance import InstanceSpec, Load
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload, concat, gamma, single
from headway.types import Instance
from headway.whatif.load.mix import Mix, format_slo
from headway.whatif.output.plots import colours, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid

MODELS = ("smollm2", "smollm2-near", "smollm2-short")
_PROFILE = "smollm2-135m-cpu2"
_SLOW = 8.0  # times as long as on two idle cores: an engine has one, and shares it with what starts
_SHORT = 0.4  # of the seconds of an iteration: 12 of 30 layers
_RESTART, _IN_PLACE = 45.0, 0.35  # seconds
_LONGEST = 1024
_UNITS = {"attainment": "%", "e2el.p99": "s", "throughput.req_per_s": "req/s", "swaps": "count"}


@dataclass(frozen=True, slots=True)
class Trial:
    """What is simulated, for each of the seeds.

    rate: arrivals per second, of all models. tail: share of them that asks for the last model.
    duration: seconds of arrivals.
    slow: times as long as the latency profile's iterations.
    """

    systems: tuple[str, ...]
    mix: Mix = MIX
    rate: float = RATE
    tail: float = TAIL
    burstiness: float = 1.0
    duration: float = DURATION
    max_running: int = 8
    seeds: int = 5
    slow: float = _SLOW

    def workload(self, seed: int) -> Workload:
        """Return the requests of a seed; prompts are equally likely of any length between their limits."""
        rng, parts = np.random.default_rng(seed), list[Workload]()
        at = gamma(self.rate, self.burstiness, self.duration, rng)
        tiers = rng.choice(len(self.mix.tiers), at.size, p=self.mix.shares)
        models = rng.choice(len(MODELS), at.size, p=shares_of(len(MODELS), self.tail))
        for (t, tier), (m, model) in itertools.product(enumerate(self.mix.tiers), enumerate(MODELS)):
            assert tier.prompt_tokens is not None, "the fleet's classes have prompts within limits"
            mine = at[(tiers == t) & (models == m)]
            prompt = rng.integers(*tier.prompt_tokens, mine.size, endpoint=True)
            parts.append(
                single(mine, prompt, tier.max_tokens, slo=tier.slo, priority=tier.priority, tier=tier.name, model=model)
            )
        return concat(*parts).sorted()

    def instances(self) -> list[InstanceSpec]:
        """Return the engines; each has all models and begins with another frequent one."""
        return [self._instance(id, MODELS[g % (len(MODELS) - 1) :]) for g, id in enumerate(INSTANCES)]

    def _instance(self, id: str, order: Sequence[str]) -> InstanceSpec:
        models = [order[0], *(model for model in MODELS if model != order[0])]
        first, *others = [self._serving(id, model) for model in models]
        return replace(first, others=tuple(others), host_bytes=1 << 30)

    def _serving(self, id: str, model: str) -> InstanceSpec:
        file = profiles.load(_PROFILE)
        assert file.kv_tokens is not None, "the built-in profile has it"
        factor = self.slow * (_SHORT if model == MODELS[-1] else 1.0)
        law = Additive(*(factor * file.coefficients()).tolist())
        alike = frozenset(MODELS[:-1]) if model != MODELS[-1] else frozenset[str]()
        blocks = file.kv_tokens // file.block_size
        return InstanceSpec(
            Instance(id, model, self.max_running, blocks, file.block_size, _LONGEST),
            FixedLatency(law),
            2 * self.max_running,
            2048,
            load=Load(_RESTART, _RESTART, file.weights_bytes, alike - {model}, _IN_PLACE),
        )


@experiment("fleet", "sim", f"Several models on two instances ({SIMULATED})")
def main(ask: Ask, trial: Trial) -> Result:
    """Simulate; `quick`: two minutes of arrivals, two seeds. The figures are means over the seeds."""
    check_swaps(trial.systems)
    if ask.quick:
        trial = replace(trial, duration=min(trial.duration, 120.0), seeds=min(trial.seeds, 2))
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    seeds = range(ask.seed, ask.seed + trial.seeds)
    for name, seed in track([*itertools.product(trial.systems, seeds)], "simulating", disable=ask.as_json):
        for key, value in run(name, trial, seed).items():
            values.setdefault(key, {}).setdefault(name, []).append(value)
    rows = [
        Row(id, name, setting, float(np.mean(some)), _UNITS[id])
        for (id, setting), systems in values.items()
        for name, some in systems.items()
    ]
    workload = (
        f"{SIMULATED}: {_classes(trial.mix)}; {trial.rate:g} req/s for {trial.duration:g} s, burstiness "
        f"{trial.burstiness:g}, {trial.tail:.0%} of them for {MODELS[-1]}; "
        f"two engines, {trial.slow:g} times as slow as {_PROFILE}, batch limit {trial.max_running}; loads "
        f"take {_IN_PLACE:g} s in place, {_RESTART:g} s otherwise; means over {trial.seeds} seeds."
    )
    return Result(rows, workload, lambda: _pictures(rows), system_grid(rows))


def run(system: str, trial: Trial, seed: int) -> dict[tuple[str, str], float]:
    """Return the figures of one system on one workload, by (name, setting)."""
    work = trial.workload(seed)
    outcome = Simulation(find(system), trial.instances(), work).run()
    return dict(_figures(work, outcome))


def _figures(work: Workload, outcome: Outcome) -> Iterator[tuple[tuple[str, str], float]]:
    took = outcome.end - work.arrival
    met, tier, model = took <= work.e2e, np.array(work.tiers)[work.tier], np.array(work.models)[work.model]
    classes = {name: tier == name for name in work.tiers} | {"all": tier != ""}
    for name, rows in (classes | {name: model == name for name in work.models}).items():
        if rows.any():
            yield ("attainment", name), 100 * float(met[rows].mean())
    for name, rows in classes.items():
        if rows.any():
            yield ("e2el.p99", name), float(np.quantile(took[rows], 0.99))
    yield ("throughput.req_per_s", "all"), len(work) / float(outcome.end.max())
    yield ("swaps", "in_place"), float(outcome.swaps - outcome.restarts)
    yield ("swaps", "restart"), float(outcome.restarts)


def _classes(mix: Mix) -> str:
    """Return shares, prompts, answers and SLOs of the classes."""
    return ", ".join(
        f"{share:.0%} {tier.name} ({tier.prompt_tokens[0]} to {tier.prompt_tokens[1]} tokens in, "
        f"{tier.max_tokens} out, {format_slo(tier.slo)})"
        for share, tier in zip(mix.shares, mix.tiers, strict=True)
        if tier.prompt_tokens is not None
    )


def _pictures(rows: Sequence[Row]) -> dict[str, Any]:
    figure, grid = sheet(1, 1, 7.2, 3.4)
    axes, systems = grid[0], list(dict.fromkeys(row.system for row in rows))
    settings = list(dict.fromkeys(row.setting for row in rows if row.id == "attainment"))
    width, shades = 0.8 / len(systems), colours(systems)
    for number, system in enumerate(systems):
        values = {row.setting: row.ours for row in rows if (row.id, row.system) == ("attainment", system)}
        heights = [values.get(setting) or 0.0 for setting in settings]
        places = np.arange(len(settings)) + (number - (len(systems) - 1) / 2) * width
        axes.bar(places, heights, width, color=shades[system], label=system)
    axes.set(xticks=range(len(settings)), xticklabels=settings, ylabel="attainment, %", title=SIMULATED)
    axes.legend(fontsize=8)
    return {"attainment": png(figure)}
