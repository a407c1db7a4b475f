"""Reservations and loans on the simulated engine: answers come out whole, every block is accounted for."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.recipes import ECOSERVE
from headway.engines.simulated.engine import SimulatedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.memory import reservations
from headway.policy.pack.ecoserve.packer import EcoServe
from headway.policy.pack.ecoserve.queues import ACTIVE
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.types import Slo

SIZE = 16


class Drive:
    """One engine under an EcoServe packer, with everything checked in every iteration."""

    def __init__(self, options: Options, blocks: int, *, copy: float = 1e-5, slots: int = 64) -> None:
        self.packer = EcoServe(EngineSpec(slots, 256, SIZE, blocks * SIZE, copy, None, reservations=True), options)
        self.engine = SimulatedEngine(
            self.packer, blocks=blocks, size=SIZE, slots=slots, budget=256, max_model_len=blocks * SIZE
        )
        self.output_tokens: dict[str, int] = {}
        self.blocks, self.now, self.iterations = blocks, 0.0, 0

    def iterate(self) -> None:
        jobs = self.engine.jobs
        ran = self.engine.schedule(self.now)
        assert ran.rows.size, "an engine with work computes"
        assert ran.preempted == 0, "an exact allocation never fails"
        assert ran.tokens.sum() <= 256
        before = {id: int(jobs.output_tokens[row]) for id, row in jobs.row_of.items()}
        self.now += 0.02
        done = self.engine.complete(ran, self.now)
        self.output_tokens |= {id: before[id] + 1 for id in done.ids}
        self.iterations += 1
        reservations.check_integrity(jobs.data, jobs.rows(), SIZE, self.blocks, self.engine.free)


def drive(options: Options, seed: int, blocks: int, noise: float, copy: float) -> tuple[Drive, Counter[str]]:
    rng = np.random.default_rng(seed)
    run = Drive(options, blocks, copy=copy)
    wanted: dict[str, int] = {}
    at = np.cumsum(rng.exponential(0.05, 16)).tolist()
    for i, when in enumerate(at):
        while run.engine.busy and run.now < when:
            run.iterate()
        run.now = max(run.now, when)
        prompt, output = int(rng.integers(1, 150)), int(rng.integers(1, 80))
        wanted[f"r{i}"] = output
        left = output * math.exp(noise * rng.standard_normal())
        run.engine.add(f"r{i}", prompt, output, arrival=when, tokens_left=left, slo=Slo(e2e=float(rng.uniform(1, 9))))
    while run.engine.busy:
        run.iterate()
        assert run.iterations < 20_000
    assert run.output_tokens == wanted
    assert run.engine.free == blocks
    return run, Counter(run.packer.counters)


@pytest.mark.parametrize("variant", ECOSERVE)
@given(
    st.integers(0, 10**6),
    st.sampled_from([16, 24, 60, 150]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1e-5, math.inf]),
)
@settings(max_examples=8)
def test_every_answer_comes_out_whole(variant: str, seed: int, blocks: int, noise: float, copy: float) -> None:
    _, counts = drive(ECOSERVE[variant][0], seed, blocks, noise, copy)
    assert counts["lent"] == 0 or ECOSERVE[variant][0].lends
    assert counts["extended"] == counts["stalled"] == 0 or noise


def test_lending_and_its_emergencies_do_occur() -> None:
    """The runs above would prove little if nobody ever lent, was late, or outgrew a prediction."""
    total = Counter[str]()
    for seed in range(12):
        _, counts = drive(Options(), seed, 40, 0.6, 1e-5)
        total.update(counts)
    assert total["lent"] > 20
    assert total["late"] > 5
    assert total["extended"] > 20
    assert total["stalled"] > 0


def test_the_pool_is_never_used_unseen() -> None:
    """With true lengths only prompts that wait to generate are in it, unless the packer counted a rescue."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        run = Drive(Options(reserve=0.1), 80)
        reserve = run.packer.limits(run.engine.kv_budget).reserve
        for i in range(30):
            output = int(rng.integers(1, 80))
            run.engine.add(f"r{i}", int(rng.integers(1, 60)), output, arrival=0.0)
        while run.engine.busy:
            run.iterate()
            jobs = run.engine.jobs
            rows = jobs.rows()
            queued = rows[jobs.running[rows] & (run.packer.status["state"][rows] != ACTIVE)]
            pool = int(jobs.blocks[queued].sum())
            counts = run.packer.counters
            assert run.engine.free >= max(reserve - pool, 0) or counts["rescued"]
            assert counts["extended"] == 0


def test_reserve_holds_blocks_before_they_are_computed() -> None:
    run = Drive(Options(), 40)
    run.engine.add("a", 20, 60, arrival=0.0)
    run.iterate()
    assert run.engine.jobs.blocks[0] == 5
    assert run.engine.free == 35


def test_held_rows_are_left_alone() -> None:
    run = Drive(Options(), 60)
    for i in range(4):
        run.engine.add(f"r{i}", 20, 40, arrival=0.0)
    for _ in range(3):
        run.iterate()
    row = run.engine.jobs.row_of["r2"]
    run.engine.jobs.held[row] = True
    output_tokens = int(run.engine.jobs.output_tokens[row])
    for _ in range(100):
        if len(run.engine.jobs) == 1:
            break
        run.iterate()
    assert int(run.engine.jobs.output_tokens[row]) == output_tokens
    run.engine.jobs.held[row] = False
    while run.engine.busy:
        run.iterate()
    assert run.output_tokens["r2"] == 40
