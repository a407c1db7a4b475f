"""What losing KV costs is counted, for stock order too: with numbers that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.engines import clockwork
from headway.engines.clockwork import Clockwork
from headway.engines.vllm.hook import HeadwayScheduler
from headway.types import Step

pytestmark = pytest.mark.filterwarnings("default")


def clock_of(recipe: str, blocks: int, host_gib: float = 0.0) -> Clockwork:
    setup = clockwork.config(
        max_running=2, max_batched_tokens=256, max_model_len=128, block_size=16, recipe=recipe,
        host_gib=host_gib,
    )  # fmt: skip
    return Clockwork(clockwork.scheduler(setup, blocks + 1, 16, HeadwayScheduler))


def counts(clock: Clockwork) -> dict[str, Any]:
    counters: dict[str, Any] = clock.scheduler.control({"op": "state"})["counters"]
    return counters


def test_nothing_is_lost_where_there_is_enough() -> None:
    clock = clock_of("vllm", 16)
    clock.add("a", 40, 40)
    clock.add("b", 40, 40)
    while clock.busy:
        clock.step()
    names = ("alloc_failures", "preempted", "recomputed", "swapped_tokens", "loans")
    assert [counts(clock)[name] for name in names] == [0] * 5


def test_stock_preempts_the_last_one_and_computes_it_again() -> None:
    """Both fill 3 blocks of 8 with 40 tokens; the 65th token of each needs a fifth block: b goes."""
    clock = clock_of("vllm", 8)
    clock.add("a", 40, 60)
    clock.add("b", 40, 30)
    while clock.busy:
        clock.step()
    seen = counts(clock)
    assert clock.finished == ["a", "b"]
    assert seen["alloc_failures"] == seen["preempted"] == 1
    assert seen["recomputed"] == 64
    assert seen["evictions"] == 0, "the packer took nothing"


class Saves:
    """First come first served; at the third step the second request goes to the host, or loses its KV."""

    def __init__(self, inner: Any, save: bool) -> None:
        self.inner, self.save, self.steps = inner, save, 0

    def pack(self, jobs: Any, ledger: Any, now: float) -> Step:
        step: Step = self.inner.pack(jobs, ledger, now)
        self.steps += 1
        if self.steps != 3:
            return step
        struck, none = np.array([jobs.row_of["b"]]), np.empty(0, np.int64)
        order = np.setdiff1d(step.order, struck)
        return Step(order, evict=none if self.save else struck, save=struck if self.save else none)


@pytest.mark.parametrize("save", [True, False])
def test_what_is_copied_is_not_computed_again(save: bool) -> None:
    clock = clock_of("vllm", 16, host_gib=0.1)
    clock.scheduler.packer = Saves(clock.scheduler.packer, save)
    clock.add("a", 20, 9)
    clock.add("b", 30, 9)
    while clock.busy:
        clock.step()
    seen = counts(clock)
    assert (seen["swapped_tokens"], seen["recomputed"]) == ((31, 0) if save else (0, 31))
    assert seen["preempted"] == 0
