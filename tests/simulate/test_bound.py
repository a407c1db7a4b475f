"""The bound on what any schedule could keep, against schedules: simulated, exhaustive, and by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from benchmarks.simulated.grounds import GROUNDS
from headway.policy.forecast.latency.laws import Additive, Bros, LatencyLaw, Roofline, SloAware, Stepped
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.registry import find
from headway.ports import Lengths
from headway.simulate.bound import _most_in_order, bound
from headway.simulate.forecasts import Oracle
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload, concat
from headway.types import Batch, Instance
from headway.whatif.slo_violations import late, seen

NEVER = np.inf
LAWS: dict[str, LatencyLaw] = {
    "additive": Additive(0.01, 1e-3, 1e-5, 2e-4, 1e-7),
    "stepped": Stepped(0.01, 1e-3, 1e-5, 2e-4, 1e-7, 0.005),
    "roofline": Roofline(0.004, 0.01, 2e-4, 1e-5, 2e-4, 1e-7),
    "bros": Bros(2e-4, 1e-7, 0.006, 1e-3, 1e-5, 0.01),
    "slo_aware": SloAware(2e-4, 1e-3, 1e-5, 0.006, 1e-5, 1e-3, 1e-5, 0.01),
}


def _spec(law: LatencyLaw, rows: int = 64, blocks: int = 1000, budget: int = 2048) -> InstanceSpec:
    shape = Instance("e0", "default", rows, blocks, 16, 1024)
    return InstanceSpec(shape, FixedLatency(law), 1024, budget, 1e-6, host_tokens=100_000)


def _workload(
    arrival: ArrayLike,
    prompt: ArrayLike,
    output: ArrayLike,
    ttft: ArrayLike = NEVER,
    tpot: ArrayLike = NEVER,
    e2e: ArrayLike = NEVER,
) -> Workload:
    n = np.size(arrival)
    whole = np.zeros(n, np.int64)
    targets = (np.broadcast_to(np.asarray(target, float), n).copy() for target in (ttft, tpot, e2e))
    answers = np.asarray(output, np.int64)
    return Workload(
        np.asarray(arrival, float), np.asarray(prompt, np.int64), answers, answers, *targets, whole, whole, whole, whole
    )


def _equal(n: int, prompt: int, output: int, **targets: float) -> Workload:
    """Return n equal requests that arrive at instant 0."""
    return _workload(np.zeros(n), np.full(n, prompt), np.full(n, output), **targets)


def _kept(recipe: str, spec: InstanceSpec, workload: Workload, *, told: bool = False) -> int:
    """Return how many promised requests a recipe keeps; `told` = it knows the answers' lengths."""
    lengths: Lengths = Oracle(workload) if told else TaskLengths()
    outcome = Simulation(find(recipe), [spec], workload, lengths).run()
    measured = seen(workload, outcome)
    kept = workload.promised
    for name, excess in late(workload, outcome).items():
        kept &= (excess == 0) & np.isfinite(measured[name])
    return int(kept.sum())


def _at_once(workload: Workload, spec: InstanceSpec) -> Workload:
    """Return the workload behind one request without promises, during which all the others arrive.

    An engine that is idle begins with the first that comes, even if others come at the same instant.
    """
    begin = spec.latency.seconds(Batch(1, 0, 0)) - 1e-7
    first = _equal(1, 1, 1)
    return concat(first, replace(workload, arrival=workload.arrival + begin))


def _random(rng: np.random.Generator, n: int, hurry: float) -> Workload:
    """Return requests of all kinds of promises; the smaller `hurry`, the tighter they are."""
    prompt, output = rng.integers(1, 300, n), rng.integers(1, 40, n)
    drawn = rng.uniform(0.5, 4, (3, n)) * hurry
    drawn *= np.stack([0.01 + 4e-4 * prompt, np.full(n, 0.015), 0.02 + 4e-4 * prompt + 0.02 * output])
    targets = np.where(rng.random((3, n)) < 0.6, drawn, NEVER)
    return _workload(np.sort(rng.uniform(0, 0.05 * n, n)), prompt, output, *targets)


# ---- by hand

PACED = Additive(0.01, 1e-3, 0, 1e-3, 0)
TWO_BASES = Bros(2e-3, 0, 0.006, 1e-3, 0, 0.01)
BY_HAND = {  # name: (expected, requests, engine); what limits them is the name
    "work": (3, _equal(5, 100, 1, ttft=0.35), _spec(Additive(0, 1e-3, 0, 1e-3, 0))),
    "rows": (6, _equal(10, 1, 1, e2e=0.3001), _spec(Additive(0.1, 0, 0, 0, 0), rows=2)),
    "blocks": (6, _equal(10, 31, 1, e2e=0.3001), _spec(Additive(0.1, 0, 0, 0, 0), blocks=4)),
    "tokens": (3, _equal(10, 100, 1, e2e=0.3001), _spec(Additive(0.1, 0, 0, 0, 0), budget=100)),
    "pace": (10, _equal(15, 2, 101, ttft=0.0301, tpot=0.020001), _spec(PACED)),
    "tight pace": (4, _equal(9, 2, 101, ttft=0.0181, tpot=0.014001), _spec(PACED)),
    "two bases": (4, _equal(9, 2, 101, ttft=0.0221, tpot=0.014001), _spec(TWO_BASES)),
    "prompts": (30, _equal(40, 10, 1, ttft=0.3501), _spec(Additive(0.05, 1e-3, 0, 1e-3, 0))),
    "base of prompts": (30, _equal(40, 10, 1, ttft=0.3501), _spec(Bros(1e-3, 0, 0.05, 1e-3, 0, 0.2))),
    "floor and work": (10, _equal(20, 10, 1, ttft=0.1001), _spec(Roofline(0, 0.1, 0, 0, 1e-3, 0))),
    "floor as base": (8, _equal(20, 1, 1, e2e=0.4001), _spec(Roofline(0, 0.1, 0, 0, 1e-5, 0), rows=2)),
    "floor as work": (4, _equal(20, 100, 1, e2e=0.41), _spec(Roofline(0, 1e-3, 0, 0, 1e-3, 0))),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_equal_requests_that_are_due_at_one_instant_are_counted_exactly(name: str) -> None:
    expected, workload, spec = BY_HAND[name]
    assert bound(workload, spec) == expected
    chosen = _at_once(workload.take(slice(expected)), spec)
    assert max(_kept(recipe, spec, chosen) for recipe in ("vllm", "bros")) == expected  # it can be reached


def test_the_first_token_and_the_end_are_both_promises() -> None:
    spec = _spec(Additive(0, 1e-3, 0, 1e-3, 0))
    first, end = _equal(8, 100, 1, ttft=0.35), _equal(8, 100, 1, e2e=0.55)
    assert bound(first, spec) == 3
    assert bound(end, spec) == 5
    assert bound(replace(first, e2e=end.e2e), spec) == 3


def test_two_windows_have_room_for_as_many_each() -> None:
    arrival = [0.0] * 4 + [10.0] * 4
    workload = _workload(arrival, [100] * 8, [1] * 8, ttft=0.24)
    assert bound(workload, _spec(Additive(0, 1e-3, 0, 1e-3, 0))) == 4


def test_short_requests_are_kept_first() -> None:
    workload = _workload([0.0] * 6, [100, 900, 100, 900, 100, 100], [1] * 6, e2e=0.95)
    assert bound(workload, _spec(Additive(0, 1e-3, 0, 1e-3, 0))) == 4


def test_a_part_of_a_prompt_does_not_count() -> None:
    """Of each pair one and two thirds could be computed in time."""
    workload = _workload([0.0, 0.1, 10.0, 10.1], [300] * 4, [1] * 4, ttft=0.4)
    assert bound(workload, _spec(Additive(0, 1e-3, 0, 1e-3, 0))) == 2


@pytest.mark.parametrize(("ttft", "kept"), [(0.15, 1), (0.1499, 0)])
def test_a_request_counts_if_it_can_be_kept_alone(ttft: float, kept: int) -> None:
    spec = _spec(Additive(0.05, 1e-3, 0, 1e-3, 0))
    assert bound(_equal(1, 100, 5, ttft=ttft), spec) == kept


def test_an_answer_needs_an_iteration_for_each_token() -> None:
    spec = _spec(Additive(0.05, 0, 0, 0, 0))
    assert bound(_equal(1, 10, 20, e2e=1.0001), spec) == 1
    assert bound(_equal(1, 10, 21, e2e=1.0001), spec) == 0
    assert bound(_equal(1, 10, 21, tpot=0.0499), spec) == 0


def test_a_schedule_may_evict_to_compute_a_context_again_where_that_is_cheaper() -> None:
    """Where prompts cost nothing beside the base, so do answers whose KV is computed again for each token."""
    workload, paced = _equal(15, 2, 101, ttft=0.0301, tpot=0.020001), replace(PACED, prefill=0.0)
    assert bound(workload, _spec(paced)) == 15 > bound(workload, _spec(PACED))


def test_a_request_that_no_memory_holds_is_not_kept() -> None:
    spec = _spec(LAWS["additive"], blocks=4)
    assert bound(_equal(1, 60, 5, e2e=100.0), spec) == 1
    assert bound(_equal(1, 60, 6, e2e=100.0), spec) == 0


# ---- what holds of every workload


def test_no_promises_no_requests() -> None:
    assert bound(_equal(5, 100, 5), _spec(LAWS["bros"])) == 0
    assert bound(_equal(0, 100, 5), _spec(LAWS["bros"])) == 0


@pytest.mark.parametrize("law", LAWS)
def test_a_light_load_is_kept_whole(law: str) -> None:
    workload = _workload(np.arange(50) * 1.0, [50] * 50, [20] * 50, ttft=0.5, tpot=0.1, e2e=3.0)
    spec = _spec(LAWS[law])
    assert bound(workload, spec) == _kept("vllm", spec, workload) == 50


def test_a_loose_target_of_one_kind_does_not_limit() -> None:
    assert bound(_equal(500, 100, 50, tpot=1.0), _spec(LAWS["bros"])) == 500


@pytest.mark.parametrize("law", LAWS)
def test_looser_promises_keep_no_fewer(law: str) -> None:
    workload, spec = _random(np.random.default_rng(1), 200, 2.0), _spec(LAWS[law], rows=8, blocks=60)
    targets = ("ttft", "tpot", "e2e")
    found = [
        bound(replace(workload, **{name: scale * getattr(workload, name) for name in targets}), spec)
        for scale in (0.3, 1.0, 1.5, 2.5, 4.0, 100.0)
    ]
    assert found[0] < 0.9 * found[-1]
    assert all(less <= 1.01 * more + 1 for less, more in pairwise(found))
    assert found[-1] == workload.promised.sum()


def test_a_latency_model_without_a_law_is_refused() -> None:
    with pytest.raises(TypeError, match="OnlineLatency"):
        bound(_equal(1, 1, 1, e2e=1.0), replace(_spec(LAWS["bros"]), latency=OnlineLatency()))


# ---- never below a schedule


@settings(max_examples=8, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    law=st.sampled_from(sorted(LAWS)),
    rows=st.sampled_from([2, 4, 16]),
    blocks=st.sampled_from([24, 48, 200]),
    budget=st.sampled_from([32, 256, 2048]),
    hurry=st.sampled_from([0.7, 1.0, 2.0, 5.0]),
)
def test_no_recipe_keeps_more(seed: int, law: str, rows: int, blocks: int, budget: int, hurry: float) -> None:
    workload, spec = _random(np.random.default_rng(seed), 30, hurry), _spec(LAWS[law], rows, blocks, budget)
    most = bound(workload, spec)
    for recipe in ("vllm", "slack", "edf", "srtf", "bros"):
        assert _kept(recipe, spec, workload) <= most
    assert _kept("srtf", spec, workload, told=True) <= most


@settings(max_examples=66, derandomize=True)
@given(seed=st.integers(0, 100_000), size=st.integers(1, 9), spare=st.sampled_from([1, 4, 8, 20]))
def test_no_choice_of_prompts_in_order_fits_more(seed: int, size: int, spare: int) -> None:
    """A choice fits where the tasks with windows inside any interval take no longer than it."""
    rng = np.random.default_rng(seed)
    start, work = (np.sort(rng.integers(0, 2 * size, size)).astype(float), rng.integers(1, 8, size).astype(float))
    end = np.maximum.accumulate(start + work + rng.integers(0, spare, size))

    def fits(rows: tuple[int, ...]) -> bool:
        chosen = np.array(rows)
        inside = [(start[chosen] >= s) & (end[chosen] <= t) for s in start for t in end]
        lasts = [t - s for s in start for t in end]
        return all(work[chosen][each].sum() <= max(last, 0.0) for each, last in zip(inside, lasts, strict=True))

    sizes = [len(rows) for n in range(1, size + 1) for rows in combinations(range(size), n) if fits(rows)]
    assert _most_in_order(start, end, work) == max(sizes)


@pytest.mark.parametrize("law", LAWS)
def test_no_choice_of_requests_keeps_more(law: str) -> None:
    """Of some requests alone, which is what a schedule with foresight may serve, more are kept."""
    spec, rng = _spec(LAWS[law], rows=2, blocks=40), np.random.default_rng(5)
    most, best = 0.0, 0
    for _ in range(6):
        workload = _random(rng, 6, 1.5)
        subsets = [list(rows) for size in range(1, 7) for rows in combinations(range(6), size)]
        kept = max(_kept("edf", spec, workload.take(np.array(rows))) for rows in subsets)
        limit = bound(workload, spec)
        assert kept <= limit
        most, best = most + limit, best + kept
    assert most <= 1.35 * best  # and it says something


@pytest.mark.parametrize("name", ["anneal-chat-code", "long-prompts", "bookcorpus-idle"])
def test_no_recipe_keeps_more_on_a_ground(name: str) -> None:
    ground = next(ground for ground in GROUNDS if ground.name == name)
    workload, spec = ground.workload(2.0, 0), ground.instance()
    workload = workload.take(workload.promised)
    most = bound(workload, spec)
    short = np.argsort(workload.prompt + workload.output, kind="stable")[: len(workload) // 2]
    assert most < 0.95 * len(workload)
    assert max(_kept("slack", spec, w) for w in (workload, workload.take(np.sort(short)))) <= most
