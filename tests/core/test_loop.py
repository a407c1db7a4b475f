"""Nothing deadlocks: what fits alone is finished together, by every recipe, in a bounded number of steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.engine_spec import EngineSpec
from headway.forecast.latency.online import OnlineLatency
from headway.recipes.registry import RECIPES
from headway.types import Slo
from tests.core.tables import SIZE, Bits
from tests.core.toy import Ran, Task, ToyEngine, run_all

_BITS = st.integers(0, 2**30 - 1)
# Steps allowed per step of the same jobs one after another; recomputation is what may cost more.
PATIENCE = 2


def task(i: int, bits: Bits, blocks: int) -> Task:
    """A job that fits alone with a block to spare, with promises of any kind, some of them hopeless."""
    prompt = 1 + bits.take(min(90, (blocks - 1) * SIZE - 2))
    target = 1 + bits.take(min(24, (blocks - 1) * SIZE - prompt))
    promise = [None, 0.02, 0.2, 2.0]
    slo = Slo(promise[bits.take(4)], promise[bits.take(4)], [None, 0.3, 5.0][bits.take(3)])
    return Task(f"j{i}", prompt, target, slo=slo, priority=bits.take(3))


def engine(recipe: str, *, blocks: int, running: int, slots: int, budget: int) -> ToyEngine:
    latency = OnlineLatency()
    packer = RECIPES[recipe].packer(EngineSpec(running, budget, SIZE, latency=latency))
    if recipe == "slack":
        packer.min_chunk = 8  # type: ignore[attr-defined]
    return ToyEngine(packer, blocks=blocks, size=SIZE, slots=slots, budget=budget, latency=latency)


def alone(tasks: list[Task], chunk: int) -> int:
    """Steps that the jobs take one after another."""
    return sum(-(-t.prompt // chunk) + t.target for t in tasks)


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=100)
@given(rows=st.lists(_BITS, min_size=1, max_size=12), limits=_BITS, seconds=st.sampled_from([0.0, 0.05, 1.0]))
def test_every_job_that_fits_alone_is_finished(
    recipe: str, rows: list[int], limits: int, seconds: float
) -> None:
    bits = Bits(limits)
    blocks, running = 4 + bits.take(30), 1 + bits.take(4)
    slots, budget = running + bits.take(4), running + 7 + bits.take(40)
    toy = engine(recipe, blocks=blocks, running=running, slots=slots, budget=budget)
    tasks = [task(i, Bits(row), blocks) for i, row in enumerate(rows)]
    finished: list[str] = []
    waiting, log = list(tasks), 0
    while waiting or len(toy.jobs):  # the jobs come one by one, `seconds` apart
        while waiting and (len(toy.jobs) == 0 or len(tasks) - len(waiting) <= toy.now / max(seconds, 1e-9)):
            toy.add(waiting.pop(0))
        ran = toy.step()
        assert ran.tokens, "the engine stands still with work in it"
        finished += ran.finished
        log += 1
        assert log <= PATIENCE * alone(tasks, 8), f"{len(toy.jobs)} jobs unfinished"
    assert sorted(finished) == sorted(t.id for t in tasks)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "vllm"])
@settings(max_examples=100)
@given(rows=st.lists(_BITS, min_size=2, max_size=12), limits=_BITS)
def test_the_engine_never_has_to_preempt_by_itself(recipe: str, rows: list[int], limits: int) -> None:
    """The packer's claims are true: what a step names fits, so stock vLLM takes nobody's blocks."""
    bits = Bits(limits)
    blocks, running = 4 + bits.take(30), 1 + bits.take(4)
    toy = engine(recipe, blocks=blocks, running=running, slots=running + bits.take(4), budget=running + 12)
    for i, row in enumerate(rows):
        toy.add(task(i, Bits(row), blocks))
    run_all(toy, 10_000)
    assert toy.preempted == 0


def duel(slots: int, blocks: int) -> tuple[list[Ran], list[Task]]:
    """Two answers with equal promises that do not fit together, prompts in many chunks."""
    toy = engine("slack", blocks=blocks, running=2 if slots > 1 else 1, slots=slots, budget=16)
    tasks = [Task(id, 60, 30, slo=Slo(ttft=0.2, tpot=0.02)) for id in ("a", "b")]
    for one in tasks:
        toy.add(one)
    return run_all(toy, PATIENCE * alone(tasks, 8)), tasks


@pytest.mark.parametrize(("slots", "blocks"), [(4, 30), (1, 100)], ids=["memory", "slots"])
def test_equal_promises_do_not_evict_each_other_back_and_forth(slots: int, blocks: int) -> None:
    """Least slack alone would: whoever waits has ever less of it, and each turn costs a whole prompt."""
    log, _ = duel(slots, blocks)
    assert sum(len(ran.evicted) for ran in log) <= 1
