"""What every baseline owes: nobody is lost, nothing stands still, no block leaks. And their names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Config
from headway.errors import ConfigError
from headway.gateway.preflight import preflight
from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.core.ranks import ARRIVAL
from headway.policy.memory.budget import KvBudget
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.anneal import ANNEAL
from headway.policy.recipes.baselines import BASELINES, ROUTERS
from headway.policy.recipes.bros import BROS
from headway.policy.recipes.ecoserve import ECOSERVE
from headway.policy.recipes.hermes import HERMES
from headway.policy.recipes.qlm import QLM
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import RECIPES, find, names
from headway.ports import Packer
from headway.simulate.run import InstanceSpec, Simulation
from headway.simulate.workload.traffic import Workload, single
from headway.types import Batch, Instance, Jobs, Step
from headway.whatif.experiment import Fleet, simulate
from tests.pack.driven import SIZE, Ask, Driven, Limits, limits, loads

NAMES = (
    "vllm-priority",
    "vllm-v0",
    "vllm-v0-swap",
    "orca",
    "fastserve",
    "srtf",
    "sjf",
    "fastgen",
    "sarathi",
    "multires",
    "rr",
    "tgi",
)
every = pytest.mark.parametrize("name", NAMES)


def spec(limits: Limits) -> EngineSpec:
    """An engine that can copy KV to a host pool without a stated limit."""
    return EngineSpec(limits.running, limits.budget, SIZE, 2048, copy_seconds=1e-5, host_tokens=None)


def packer(name: str, limits: Limits) -> Packer:
    return find(name).packer(spec(limits))


def test_names() -> None:
    assert tuple(BASELINES) == NAMES
    assert {*RECIPES, *BROS, *ECOSERVE, *QLM, *ANNEAL, *HERMES, *NAMES, *ROUTERS} == {*names()}
    for name, recipe in BASELINES.items():
        assert find(name) is recipe
        assert recipe.name == name
        assert recipe.about
    with pytest.raises(ConfigError, match="Did you mean 'sarathi'"):
        find("sarathy")


@every
@given(loads(), limits)
@settings(max_examples=13)
def test_every_request_is_served_and_no_iteration_is_wasted(name: str, asks: list[Ask], limits: Limits) -> None:
    """`Driven` checks each iteration: blocks, slots, budget, and that something is computed."""
    run = Driven(packer(name, limits), limits, helps=name == "vllm-priority")
    assert run.served(asks) == {f"r{i}": ask.output for i, ask in enumerate(asks)}


@every
@given(loads(), limits, st.data())
@settings(max_examples=5)
def test_held_rows_are_left_alone(name: str, asks: list[Ask], limits: Limits, data: st.DataObject) -> None:
    """What control has paused keeps its KV and gets no tokens, whatever the packer's own order."""
    run = Driven(packer(name, limits), Limits(limits.running, limits.budget, 1000, 40), helps=name == "vllm-priority")
    steps = run.go([*asks, Ask(5, 30)])
    next(steps)
    rows = run.engine.jobs.rows()
    held = int(rows[data.draw(st.integers(0, rows.size - 1))])
    if not run.engine.jobs.running[held] or rows.size == 1:
        return
    run.engine.jobs.held[held] = True
    name, computed = str(run.engine.jobs.keys[held]), int(run.engine.jobs.computed[held])
    others = [row for row in rows.tolist() if row != held]
    for _ in range(3):
        if not any(run.engine.jobs.live[row] for row in others):
            break
        seen = next(steps)
        assert name not in seen.tokens
        assert name not in seen.evicted
        assert run.engine.jobs.computed[held] == computed
        others = [row for row in others if run.engine.jobs.live[row] and not run.engine.jobs.held[row]]


class Linear:
    def seconds(self, batch: Batch) -> float:
        return 0.01 + 1e-4 * batch.decodes + 1.5e-4 * batch.prefill

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


def crowd(count: int) -> Workload:
    """All at once: far more than one engine's window and memory hold."""
    rng = np.random.default_rng(4)
    return single(np.zeros(count), rng.integers(20, 200, count), rng.integers(5, 60, count))


class Noted(Packer):
    """A packer that notes how many jobs it chooses among."""

    def __init__(self, inner: Packer, seen: list[int]) -> None:
        self.inner, self.seen = inner, seen

    @property
    def kv(self) -> KvUse:
        return self.inner.kv

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        self.seen.append(len(jobs))
        return self.inner.pack(jobs, kv_budget, now)


def noted(name: str, seen: list[int]) -> Recipe:
    return replace(find(name), packer=lambda spec: Noted(find(name).packer(spec), seen))


@every
def test_the_queue_is_the_engines_own(name: str) -> None:
    """Everything that waits is inside, so that the packer chooses among all; and all of it ends."""
    node = InstanceSpec(Instance("e0", "default", 8, 100, 16, 2048), Linear(), 16, 512, copy_seconds=1e-5)
    seen: list[int] = []
    outcome, again = (Simulation(noted(name, seen), [node], crowd(60)).run() for _ in range(2))
    assert max(seen) >= 59
    assert np.isfinite(outcome.end).all()
    np.testing.assert_array_equal(outcome.end, again.end)


def test_with_pull_what_has_no_room_stays_outside() -> None:
    node = InstanceSpec(Instance("e0", "default", 8, 100, 16, 2048), Linear(), 16, 512)
    seen: list[int] = []
    Simulation(noted("vllm", seen), [node], crowd(60), fast=False).run()
    assert max(seen) <= node.instance.window


def test_the_compiled_loop_leaves_recipes_without_pull_alone() -> None:
    """It knows only lines that are ours; the outcome must be that of the loop in Python."""
    node = Fleet("opt-13b-a100", max_running=32, budget=512, kv_tokens=2048).instances("default")[0]
    recipe = replace(find("vllm"), planner=lambda: Ordered(ARRIVAL, displaces=False, pull=False))
    ends = [Simulation(recipe, [node], crowd(60), fast=fast).run().end for fast in (True, False)]
    np.testing.assert_array_equal(*ends)
    assert (ends[0] != Simulation(find("vllm"), [node], crowd(60)).run().end).any()


@pytest.mark.parametrize("name", [name for name in NAMES if BASELINES[name].wants.saves])
def test_who_swaps_is_refused_where_no_engine_can(name: str) -> None:
    with pytest.raises(ConfigError, match="swaps KV to the host"):
        preflight(Config(recipe=name))
    with pytest.raises(ConfigError, match="profile of e0 has no"):
        simulate([name], Fleet("smollm2-135m-cpu2"), crowd(3), bar=False)


@pytest.mark.parametrize("name", NAMES)
def test_only_those_that_say_so_swap(name: str) -> None:
    """A crowd in little memory: who claims to swap does, the others never touch the host."""
    tight = Limits(running=6, budget=200, blocks=16, slots=12)
    asks = [Ask(60, 40, after=i) for i in range(12)]
    copied = sum(seen.copied for seen in Driven(packer(name, tight), tight, helps=name == "vllm-priority").go(asks))
    if name == "multires":
        assert copied == 0, "with exact forecasts its allocation never fails"
    else:
        assert (copied > 0) == BASELINES[name].wants.saves


def test_the_command_line_names_them_all() -> None:
    text = "".join(CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "400"}).output.split())
    for name in names():
        assert name in text
