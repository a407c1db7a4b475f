"""FastServe: levels, quanta, skipping, promotion, swapping."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.pack.baselines.fastserve import FastServe
from headway.types import Batch
from tests.pack.driven import Ask, Driven, Limits, ample, limits, loads

EXAMPLES = settings(max_examples=20)
PACE = OnlineLatency()  # nobody teaches it here, so quanta stay
SHORTEST = PACE.seconds(Batch(1, 0, 0))


def queue(limits: Limits, **options: float) -> tuple[FastServe, Driven]:
    packer = FastServe(limits.running, limits.budget, PACE, **options)  # type: ignore[arg-type]
    return packer, Driven(packer, limits)


def levels(packer: FastServe, run: Driven) -> dict[str, int]:
    return {name: int(packer.ladder.level[row]) for name, row in run.engine.jobs.row_of.items()}


@given(loads(), limits, st.sampled_from([0.3, 1000.0]))
@EXAMPLES
def test_levels_only_go_down_except_for_who_starved(asks: list[Ask], limits: Limits, starve: float) -> None:
    packer, run = queue(limits, starve=starve)
    last: dict[str, int] = {}
    idle: dict[str, float] = {}
    for seen in run.go(asks):
        now = levels(packer, run)
        for name in now.keys() & last.keys():
            promoted = now[name] == 0 and idle[name] + run.seconds + 1e-6 >= starve
            assert promoted or last[name] <= now[name] <= last[name] + 1
        idle = {name: 0.0 if name in seen.tokens else idle.get(name, 0.0) + run.seconds for name in now}
        last = now


@given(st.integers(1, 4000))
@EXAMPLES
def test_a_request_joins_the_first_level_that_covers_its_prompt(prompt: int) -> None:
    packer, run = queue(Limits(budget=5000))
    next(run.go([Ask(prompt, 1000)]))
    level, first = levels(packer, run)["r0"], float(PACE.prefill_seconds(np.array([float(prompt)]))[0])
    assert SHORTEST * 2.0**level >= first
    assert level == 0 or SHORTEST * 2.0 ** (level - 1) < first


@given(loads(), ample)
@EXAMPLES
def test_lower_levels_run_first(asks: list[Ask], limits: Limits) -> None:
    """With memory for all, nobody runs while somebody of a lower level waits for a place."""
    packer, run = queue(Limits(limits.running, limits.budget, 1000, 64), starve=1000.0)
    for seen in run.go(asks):
        now = levels(packer, run)
        out = [level for name, level in now.items() if name not in seen.tokens]
        ran = [now[name] for name in seen.tokens if name in now]
        if len(seen.tokens) == limits.running and sum(seen.tokens.values()) < limits.budget and out and ran:
            assert max(ran) <= min(out)


def test_quanta_double_and_the_last_has_no_end() -> None:
    packer, run = queue(Limits(running=1, slots=2), levels=3)
    seen = [levels(packer, run)["r0"] for _ in run.go([Ask(1, 12)]) if "r0" in run.engine.jobs]
    assert seen == [0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]  # the level in which each iteration was made
    assert packer.quantum(np.arange(3)).tolist() == [SHORTEST, 2 * SHORTEST, np.inf]


def test_a_short_request_overtakes_a_long_one_that_came_first() -> None:
    _, run = queue(Limits(running=1, slots=4))
    list(run.go([Ask(10, 60), Ask(10, 2, after=10)]))
    assert run.ends["r1"] == 12
    assert run.ends["r0"] == 62


def test_who_waits_too_long_is_promoted() -> None:
    """Short ones keep coming; without promotion the long one would run last."""
    asks = [Ask(10, 15), *(Ask(10, 1, after=i) for i in range(2, 400))]
    _, patient = queue(Limits(running=1, slots=500), starve=1000.0)
    _, fair = queue(Limits(running=1, slots=500), starve=0.1)
    list(patient.go(asks))
    list(fair.go(asks))
    assert patient.ends["r0"] == max(patient.ends.values())
    assert fair.ends["r0"] < patient.ends["r0"]


def test_memory_is_kept_free_for_who_comes_next() -> None:
    """Paused requests leave for the host before their blocks are needed, those that run last first."""
    room = Limits(running=2, budget=200, blocks=100, slots=32)
    packer, run = queue(room, spare=0.75)
    left = 0
    for seen in run.go([Ask(60, 30, after=2 * i) for i in range(12)]):
        jobs, now = run.engine.jobs, levels(packer, run)
        assert run.engine.free >= 75 or not seen.paused
        gone = {name for name, row in jobs.row_of.items() if jobs.saved[row]} - seen.saved
        if gone and seen.paused:
            left += 1
            assert min(now[name] for name in gone) >= max(now[name] for name in seen.paused)
    assert left > 3
    _, never = queue(room, spare=0.0)
    assert sum(step.copied for step in never.go([Ask(60, 30, after=2 * i) for i in range(12)])) == 0


@given(loads(), limits)
@EXAMPLES
def test_what_was_computed_is_never_computed_again(asks: list[Ask], limits: Limits) -> None:
    _, run = queue(limits)
    total = sum(sum(seen.tokens.values()) for seen in run.go(asks))
    assert total == sum(ask.prompt + ask.output - 1 for ask in asks)
