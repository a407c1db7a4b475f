"""Liveness: every recipe finishes requests that each fit alone, in a bounded number of iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.simulated.engine import SimulatedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.recipes.registry import RECIPES
from headway.types import Slo
from tests.core.tables import SIZE, Bits
from tests.helpers.stepping import MAX_MODEL_LEN, Iteration, Stepper, Task

_BITS = st.integers(0, 2**30 - 1)
# Iterations allowed per iteration of the same requests run one after another; recomputation costs the rest.
PATIENCE = 2


def task(i: int, bits: Bits, blocks: int) -> Task:
    """Return a request that fits alone with a block to spare; its SLO may be unattainable."""
    prompt = 1 + bits.take(min(90, (blocks - 1) * SIZE - 2))
    target = 1 + bits.take(min(24, (blocks - 1) * SIZE - prompt))
    promise = [None, 0.02, 0.2, 2.0]
    slo = Slo(promise[bits.take(4)], promise[bits.take(4)], [None, 0.3, 5.0][bits.take(3)])
    return Task(f"j{i}", prompt, target, slo=slo, priority=bits.take(3))


def engine(recipe: str, *, blocks: int, running: int, slots: int, budget: int) -> Stepper:
    latency = OnlineLatency()
    packer = RECIPES[recipe].packer(EngineSpec(running, budget, SIZE, latency=latency))
    if recipe == "slack":
        packer.min_chunk = 8  # type: ignore[attr-defined]
    simulated = SimulatedEngine(
        packer, blocks=blocks, size=SIZE, slots=slots, budget=budget, max_model_len=MAX_MODEL_LEN
    )
    return Stepper(simulated, latency)


def alone(tasks: list[Task], chunk: int) -> int:
    """Return the iterations that the requests take one after another."""
    return sum(-(-t.prompt // chunk) + t.target for t in tasks)


@pytest.mark.parametrize("recipe", RECIPES)
@given(rows=st.lists(_BITS, min_size=1, max_size=12), limits=_BITS, seconds=st.sampled_from([0.0, 0.05, 1.0]))
def test_every_request_that_fits_alone_finishes(recipe: str, rows: list[int], limits: int, seconds: float) -> None:
    bits = Bits(limits)
    blocks, running = 4 + bits.take(30), 1 + bits.take(4)
    slots, budget = running + bits.take(4), running + 7 + bits.take(40)
    stepper = engine(recipe, blocks=blocks, running=running, slots=slots, budget=budget)
    tasks = [task(i, Bits(row), blocks) for i, row in enumerate(rows)]
    finished: list[str] = []
    waiting, log = list(tasks), 0
    while waiting or len(stepper.engine.jobs):  # arrivals are `seconds` apart
        while waiting and (
            len(stepper.engine.jobs) == 0 or len(tasks) - len(waiting) <= stepper.now / max(seconds, 1e-9)
        ):
            stepper.add(waiting.pop(0))
        ran = stepper.step()
        assert ran.tokens, "an iteration with work computed nothing"
        finished += ran.finished
        log += 1
        assert log <= PATIENCE * alone(tasks, 8), f"{len(stepper.engine.jobs)} requests unfinished"
    assert sorted(finished) == sorted(t.id for t in tasks)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "vllm"])
@given(rows=st.lists(_BITS, min_size=2, max_size=12), limits=_BITS)
def test_the_engine_never_preempts_for_memory(recipe: str, rows: list[int], limits: int) -> None:
    """A step names only what fits, so vLLM's own preemption never happens."""
    bits = Bits(limits)
    blocks, running = 4 + bits.take(30), 1 + bits.take(4)
    stepper = engine(recipe, blocks=blocks, running=running, slots=running + bits.take(4), budget=running + 12)
    for i, row in enumerate(rows):
        stepper.add(task(i, Bits(row), blocks))
    stepper.run(10_000)
    assert stepper.preempted == 0


def duel(slots: int, blocks: int) -> tuple[list[Iteration], list[Task]]:
    """Run two requests with equal SLOs that do not fit together; their prompts take many chunks."""
    stepper = engine("slack", blocks=blocks, running=2 if slots > 1 else 1, slots=slots, budget=16)
    tasks = [Task(id, 60, 30, slo=Slo(ttft=0.2, tpot=0.02)) for id in ("a", "b")]
    for one in tasks:
        stepper.add(one)
    return stepper.run(PATIENCE * alone(tasks, 8)), tasks


@pytest.mark.parametrize(("slots", "blocks"), [(4, 30), (1, 100)], ids=["memory", "slots"])
def test_requests_with_equal_slos_do_not_evict_each_other_repeatedly(slots: int, blocks: int) -> None:
    """Plain least slack would: a waiting request's slack shrinks, and each eviction recomputes a prompt."""
    log, _ = duel(slots, blocks)
    assert sum(len(ran.evicted) for ran in log) <= 1
