"""The licence: the simulated engine takes, step by step, the decisions of vLLM's own scheduler."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.recipes import PATHS
from benchmarks.validate import conformance
from benchmarks.validate.conformance import HOOK, POOL, STOCK, ConformanceCase, Task, compare, draw
from headway.engines.simulated.engine import SimulatedEngine
from headway.policy.pack.bros import packer
from headway.policy.recipes.bros import BROS
from headway.policy.recipes.registry import names
from headway.types import Slo, Step

pytestmark = pytest.mark.filterwarnings("default")
LONGEST = 368
NOBODY = np.empty(0, np.int64)
PAIRS = [("vllm", STOCK), *((name, HOOK) for name in [*names(), *PATHS])]
PAIRS += [(name, POOL) for name in [*BROS, *PATHS] if "bros" in name]
promises = st.sampled_from([Slo(), Slo(0.4, 0.1), Slo(1.5, 0.05), Slo(e2e=6.0), Slo(0.1)])


def cases_of(urgencies: st.SearchStrategy[float]) -> st.SearchStrategy[ConformanceCase]:
    """Return workloads whose requests come with these urgencies, which change unless all are 0."""
    tasks = st.builds(
        Task,
        st.floats(0, 3),
        st.integers(1, 300),
        st.integers(1, 60),
        promises,
        st.integers(0, 3),
        tokens_left=st.none() | st.integers(1, 120).map(float),
        urgency=urgencies,
        spread=st.sampled_from([0.0, 0.3, 1.0]),
    )
    return st.builds(
        ConformanceCase,
        tasks=st.lists(tasks, min_size=1, max_size=24).map(tuple),
        max_running=st.integers(1, 8),
        budget=st.sampled_from([64, 200, 512]),
        blocks=st.integers(23, 89),
        max_model_len=st.just(LONGEST),
        seed=st.integers(0, 9),
        copy_seconds=st.sampled_from([1e-5, 1e-4, math.inf]),
    )


cases = cases_of(st.just(0.0)) | cases_of(st.sampled_from([-math.inf, -1.0, 0.0, 2.0]))


@pytest.mark.parametrize(("recipe", "host"), PAIRS)
@given(cases)
@settings(max_examples=6)
def test_same_steps(recipe: str, host: str, case: ConformanceCase) -> None:
    tally = compare(case, recipe, host)
    assert tally.difference is None
    assert tally.identical == tally.steps >= max(task.output for task in case.tasks)


def test_stock_order_returns_by_arrival_when_ranks_from_outside_have_gone() -> None:
    """The rank of r1 goes while it runs behind r2, which came later (vtc: by rank, then arrival)."""
    urgent, late = -math.inf, 2.0
    brief = (0.0, 1, 1)
    sizes = [brief, (0.0, 97, 1), (1.375, 1, 4), brief, brief, brief, (0.0, 256, 28)]
    tasks = tuple(
        Task(at, prompt, output, Slo(), 0, urgency=late if prompt == 97 else urgent) for at, prompt, output in sizes
    )
    case = ConformanceCase(tasks, max_running=2, budget=64, blocks=23, max_model_len=LONGEST, seed=8, copy_seconds=1e-5)
    assert compare(case, "vtc", HOOK).difference is None


def test_stock_order_returns_also_where_the_earlier_request_waits_as_the_ranks_go() -> None:
    """Stock admits r1 behind r2, which came later and runs already; from the next step on r1 is first."""
    urgent = -math.inf
    sizes = [(0.0, 1, 1, urgent), (0.0, 1, 2, 2.0), (1.0, 1, 3, urgent), (0.0, 1, 1, urgent), (0.0, 1, 17, -1.0)]
    sizes += [(0.0, 192, 30, urgent), (1.0, 1, 13, urgent)]
    tasks = tuple(Task(at, prompt, output, Slo(), 0, urgency=rank) for at, prompt, output, rank in sizes)
    case = ConformanceCase(tasks, max_running=2, budget=64, blocks=23, max_model_len=LONGEST, seed=8, copy_seconds=1e-5)
    assert compare(case, "vtc", HOOK).difference is None


@pytest.mark.parametrize(("recipe", "host"), PAIRS)
def test_bigger_workloads_too(recipe: str, host: str) -> None:
    tally = compare(draw(np.random.default_rng(11)), recipe, host)
    assert tally.difference is None
    assert tally.identical == tally.steps > 100


@given(cases)
@settings(max_examples=20)
def test_stock_priority_is_vllms_own(case: ConformanceCase) -> None:
    """With tokens and memory for everybody and no two at once; see the packer for what differs else."""
    apart = tuple(dataclasses.replace(task, at=task.at + 1e-6 * i) for i, task in enumerate(case.tasks))
    size = case.max_running * LONGEST
    ample = dataclasses.replace(case, tasks=apart, budget=size, blocks=2 * size // conformance.BLOCK)
    tally = compare(ample, "vllm-priority", STOCK)
    assert tally.difference is None


@pytest.mark.parametrize("recipe", ["ecoserve", "benchmarks.papers.recipes:ecoserve-paper"])
@pytest.mark.parametrize("copy_seconds", [1e-5, math.inf])
def test_loans_and_their_emergencies_are_licensed(recipe: str, copy_seconds: float) -> None:
    """Guests are late and leave, answers outgrow their predictions: in memory so scarce that these happen."""
    seen: Counter[str] = Counter()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        outputs = rng.choice((8, 20, 60, 150), 24)
        lefts = np.ceil(outputs * np.exp(0.7 * rng.standard_normal(24)))
        crowd = tuple(
            Task(0.0, int(rng.integers(1, 120)), int(output), Slo(), 0, float(left))
            for output, left in zip(outputs, lefts, strict=True)
        )
        both = conformance.Both(ConformanceCase(crowd, 16, 256, 40, 512, seed, copy_seconds), recipe, HOOK)
        assert not any(both.steps())
        seen.update(both.real.scheduler.control({"op": "state"})["counters"])
        assert both.lean.free == 40
    assert seen["loans"] > 10
    assert seen["evictions"] > 0
    assert (seen["swapped_tokens"] > 0) == math.isfinite(copy_seconds)
    assert seen["alloc_failures"] == 0
    assert seen["preempted"] == seen["evictions"]


@pytest.mark.parametrize("seed", [149, 285, 488])
def test_a_crowd_of_prompts_that_finds_no_blocks_stops_nobody(seed: int) -> None:
    """Best-effort rows whose KV is on the host cost more than any new prompt, but they have blocks."""
    case = draw(np.random.default_rng(seed))
    plain = dataclasses.replace(case, tasks=tuple(dataclasses.replace(task, urgency=0.0) for task in case.tasks))
    tally = compare(plain, "bros", POOL)
    assert tally.difference is None
    assert tally.identical == tally.steps


def test_a_standstill_is_a_difference_and_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer.Bros, "pack", lambda self, jobs, kv_budget, now: Step(NOBODY, NOBODY))
    tally = compare(draw(np.random.default_rng(3)), "bros", POOL)
    assert tally.difference is not None
    assert "nothing runs" in tally.difference
    assert tally.steps < 1000


def test_drawn_workloads_follow_from_the_generator_and_meet_scarce_memory() -> None:
    one, two = (draw(np.random.default_rng(5)) for _ in range(2))
    assert one == two
    many = [draw(rng) for rng in [np.random.default_rng(0)] for _ in range(200)]
    assert all(task.prompt + task.output <= case.max_model_len for case in many for task in case.tasks)
    ranked = [case for case in many if any(task.urgency for task in case.tasks)]
    assert len(ranked) in range(60, 140), "about half of them come with urgencies"
    full = [case for case in many if case.blocks * conformance.BLOCK < 40 * case.max_running]
    assert full, "some must run out of blocks"


def test_a_difference_is_found_and_all_that_follows_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver must not be blind: an engine that takes one token less at some step is caught there."""
    case = dataclasses.replace(draw(np.random.default_rng(3)), max_running=4)
    clean = compare(case, "vllm", HOOK)
    schedule = SimulatedEngine.schedule
    calls = iter(range(10**9))

    def careless(engine: SimulatedEngine, now: float) -> object:
        if next(calls) == 20:
            engine.limits = engine.limits._replace(budget=1)
        return schedule(engine, now)

    monkeypatch.setattr(SimulatedEngine, "schedule", careless)
    tally = compare(case, "vllm", HOOK)
    assert tally.difference is not None
    assert "vLLM" in tally.difference
    assert tally.identical < clean.identical == clean.steps
    assert tally.steps >= clean.steps - 1
