"""The simulation obeys queueing theory where there is some, loses nothing and repeats itself exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from headway.policy.recipes.registry import RECIPES
from headway.simulate.run import InstanceSpec, Outcome, Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, concat, make, poisson, single
from headway.types import Batch, Floats, Instance, Ints, Slo
from tests.simulate.machines import Constant


@dataclass(frozen=True)
class Linear:
    """A plausible GPU: fixed cost, cost per answer in progress, cost per prompt token."""

    def seconds(self, batch: Batch) -> float:
        return 0.01 + 1e-4 * batch.decodes + 1e-7 * batch.context + 1.5e-4 * batch.prefill

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


def one_server(each: float) -> InstanceSpec:
    """One request at a time, nothing sent ahead of need that could change the order."""
    return InstanceSpec(Instance("e0", "default", 1, 100_000, 16, 100_000), Constant(each), 2, 100_000)


def queue(rate: float, output: Ints | int, each: float, count: int) -> tuple[Workload, Outcome]:
    rng = np.random.default_rng(5)
    arrivals = poisson(rate, count / rate, rng)
    size = output if isinstance(output, int) else output[: arrivals.size]
    workload = single(arrivals, 1, size)
    return workload, Simulation(RECIPES["vllm"], [one_server(each)], workload).run()


def waits(workload: Workload, outcome: Outcome, each: float) -> Floats:
    """Seconds each request waited before its first iteration."""
    return outcome.first - each - workload.arrival


def lindley(arrival: Floats, service: Floats) -> Floats:
    """The exact waiting times of a single server, first come, first served: W' = max(W + S - A, 0)."""
    wait = np.zeros(arrival.size)
    for i in range(1, arrival.size):
        wait[i] = max(wait[i - 1] + service[i - 1] - (arrival[i] - arrival[i - 1]), 0.0)
    return wait


def test_md1_waiting_time() -> None:
    load = 0.6
    workload, outcome = queue(load, 1, 1.0, 8_000)
    exact = lindley(workload.arrival, np.ones(workload.arrival.size))
    np.testing.assert_allclose(waits(workload, outcome, 1.0), exact, atol=1e-6)
    expected = load / (2 * (1 - load))  # Pollaczek-Khinchine, service 1 s
    assert exact.mean() == pytest.approx(expected, rel=0.15)


def test_mm1_waiting_time() -> None:
    load, mean = 0.7, 6
    rng = np.random.default_rng(8)
    output = np.maximum(np.ceil(rng.exponential(mean, 5_000)), 1).astype(np.int64)
    each = 1.0 / output.mean()
    workload, outcome = queue(load, output, each, 4_000)
    exact = lindley(workload.arrival, workload.output * each)
    np.testing.assert_allclose(waits(workload, outcome, each), exact, atol=1e-6)


def test_littles_law() -> None:
    """Mean number inside = rate x mean stay, here with both sides measured apart."""
    workload, outcome = queue(0.8, 1, 1.0, 2_000)
    span = float(outcome.end.max())
    instants = np.sort(np.concatenate([workload.arrival, outcome.end]))
    steps = np.searchsorted(np.sort(workload.arrival), instants, "right")
    inside = steps - np.searchsorted(np.sort(outcome.end), instants, "right")
    mean_inside = float((inside[:-1] * np.diff(instants)).sum()) / span
    stay = float((outcome.end - workload.arrival).mean())
    assert mean_inside == pytest.approx(workload.arrival.size / span * stay, rel=1e-6)


def mixed(seed: int, rate: float = 12.0) -> Workload:
    rng = np.random.default_rng(seed)
    classes = (
        TrafficClass("chat", 0.6, Slo(ttft=0.4, tpot=0.2), 0, "sharegpt", max_tokens=200),
        TrafficClass("batch", 0.4, Slo(), 10, "bros-best-effort"),
    )
    workload = make(classes, poisson(rate, 20.0, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= 2048))


def fleet(count: int, blocks: int = 3000) -> list[InstanceSpec]:
    return [InstanceSpec(Instance(f"e{i}", "default", 32, blocks, 16, 2048), Linear(), 64, 1024) for i in range(count)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("blocks", [3000, 300])
def test_every_request_ends_once_and_in_order_of_cause(recipe: str, blocks: int) -> None:
    workload = mixed(1)
    outcome = Simulation(RECIPES[recipe], fleet(2, blocks), workload).run()
    assert np.isfinite(outcome.end).all()
    assert (outcome.first > workload.arrival).all()
    assert (outcome.end >= outcome.first).all()
    assert set(outcome.instance.tolist()) == {0, 1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_same_input_same_run(recipe: str) -> None:
    runs = [Simulation(RECIPES[recipe], fleet(2), mixed(2)).run() for _ in range(2)]
    np.testing.assert_array_equal(runs[0].end, runs[1].end)
    np.testing.assert_array_equal(runs[0].first, runs[1].first)


def test_promises_are_kept_that_first_come_first_served_breaks() -> None:
    workload, chat = mixed(3, rate=14.0), 0
    met = {
        name: float(np.mean((run.first - workload.arrival)[workload.tier == chat] <= 0.4))
        for name in ("vllm", "edf", "slack")
        for run in [Simulation(RECIPES[name], fleet(1), workload).run()]
    }
    assert met["slack"] > 1.5 * met["vllm"]
    assert met["edf"] > 1.5 * met["vllm"]


def test_tenants_take_turns_as_on_the_server() -> None:
    """All wait inside the engine; a small tenant for its turns only, as the same tenant for all before it."""
    work = concat(single(np.zeros(200), 50, 20, tenant="large"), single(np.full(5, 0.1), 50, 20, tenant="small"))
    one = replace(work, tenant=np.zeros(205, np.int64), tenants=("large",))
    apart, together = (Simulation(RECIPES["headway"], fleet(1), load).run().end[200:].max() for load in (work, one))
    assert apart < 0.2 * together


def test_progress_is_told() -> None:
    seen: list[int] = []
    workload = mixed(4)
    Simulation(RECIPES["vllm"], fleet(1), workload).run(seen.append)
    assert seen[-1] == workload.arrival.size


# ---- what lies between clients and engine


def test_overheads_move_what_clients_see_and_nothing_else() -> None:
    workload = single(np.array([0.0, 10.0, 20.0]), 5, 4)
    plain = one_server(1.0)
    late = replace(plain, request_overhead=0.25, token_overhead=0.125)
    before, after = (Simulation(RECIPES["vllm"], [one], workload).run() for one in (plain, late))
    np.testing.assert_allclose(after.first - before.first, 0.375)
    np.testing.assert_allclose(after.end - before.end, 0.375)
    assert after.iterations == before.iterations
    assert after.busy == before.busy


def test_each_request_that_comes_makes_the_iteration_in_progress_longer() -> None:
    workload = single(np.array([0.0, 0.5, 0.6]), 5, 1)
    outcome = Simulation(RECIPES["vllm"], [replace(one_server(1.0), interruption=0.1)], workload).run()
    np.testing.assert_allclose(outcome.end, [1.2, 2.2, 3.2])  # two came during the first, nobody later
    assert outcome.busy == pytest.approx(3.2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_overheads_too_every_request_ends_once(recipe: str) -> None:
    workload = mixed(1)
    nodes = [replace(one, request_overhead=0.01, token_overhead=0.004, interruption=0.005) for one in fleet(2)]
    outcome = Simulation(RECIPES[recipe], nodes, workload).run()
    assert np.isfinite(outcome.end).all()
    assert (outcome.first >= workload.arrival + 0.014).all()
