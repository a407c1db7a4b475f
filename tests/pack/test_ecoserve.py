"""EcoServe's queues: who is grouped, who fits, who waits, and when nothing is decided anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.ecoserve import queues
from headway.policy.pack.ecoserve.packer import EcoServe
from headway.policy.pack.ecoserve.queues import ACTIVE, QUEUED, ROW_STATUS
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.types import Jobs, Slo

SIZE = 16
PLAIN = Options(ordered=False, lends=False, reserve=0.1, idle=1.0)


class Engine:
    """A simulated engine under an EcoServe packer, one iteration at a time."""

    def __init__(self, options: Options, blocks: int = 60, copy: float = math.inf) -> None:
        self.packer = EcoServe(EngineSpec(64, 512, SIZE, blocks * SIZE, copy, None, reservations=True), options)
        self.host = SimulatedEngine(
            self.packer, blocks=blocks, size=SIZE, slots=64, budget=512, max_model_len=blocks * SIZE
        )
        self.now = 0.0

    def add(self, id: str, prompt: int, output: int, **more: Any) -> None:
        self.host.add(id, prompt, output, arrival=self.now, **more)

    def step(self) -> tuple[Ran, dict[str, int]]:
        ran = self.host.schedule(self.now)
        tokens = dict(zip(self.host.jobs.names(ran.rows), ran.tokens.tolist(), strict=True))
        self.now += 0.02
        self.host.complete(ran, self.now)
        return ran, tokens

    def state(self, id: str) -> int:
        return int(self.packer.status["state"][self.host.jobs.row_of[id]])

    def until_done(self) -> list[dict[str, int]]:
        out = []
        while self.host.busy:
            out.append(self.step()[1])
        return out


def table(*lefts: int) -> tuple[Jobs, Any]:
    """Rows 0.. whose predicted answers have these lengths, in order of arrival."""
    jobs, status = Jobs(64), np.zeros(64, ROW_STATUS)
    for i, left in enumerate(lefts):
        row = jobs.add(f"r{i}", prompt=10, serial=i + 1, tokens_left=float(left), ttft=math.inf, e2e=math.inf)
        status["goal"][row], status["serial"][row] = 10 + left, i + 1
    return jobs, status


# ---- groups


def test_equal_lengths_are_together_and_the_oldest_group_first() -> None:
    jobs, status = table(30, 90, 32, 20, 81, 17)
    order = queues.by_group(jobs.data, status, jobs.rows(), SIZE)
    assert order.tolist() == [0, 2, 3, 5, 1, 4]  # 17..32 tokens are two blocks, 81..96 are six


def test_a_group_runs_in_step_and_ends_together() -> None:
    engine = Engine(PLAIN)
    for i in range(4):
        engine.add(f"r{i}", 20, 40)
    steps = engine.until_done()
    assert [len(step) for step in steps] == [4] * 40


def test_a_group_that_does_not_fit_is_split() -> None:
    """Ten blocks less one for the pool: two of three answers of four blocks begin, the third after them."""
    engine = Engine(PLAIN, blocks=10)
    for i in range(3):
        engine.add(f"r{i}", 16, 40)
    assert set(engine.step()[1]) >= {"r0", "r1"}
    assert (engine.state("r0"), engine.state("r1")) == (ACTIVE, ACTIVE)
    alone = [step for step in engine.until_done() if set(step) == {"r2"}]
    assert len(alone) >= 30


def test_without_a_group_ending_nothing_is_scheduled_anew() -> None:
    engine = Engine(PLAIN, blocks=30)
    for i in range(9):
        engine.add(f"r{i}", 30, 60)
    engine.step()
    engine.step()
    full, orders = engine.packer.counters["full"], []
    for _ in range(40):
        ran, _ = engine.step()
        orders.append(ran.rows.tolist())
    assert engine.packer.counters["full"] == full
    assert engine.packer.counters["kept"] >= 40
    assert all(order == orders[0] for order in orders)


def test_unsynchronized_every_iteration_is_scheduled() -> None:
    engine = Engine(Options(synced=False, ordered=False, lends=False))
    engine.add("a", 30, 60)
    engine.until_done()
    assert engine.packer.counters["kept"] == 0
    assert engine.packer.counters["full"] == 60


# ---- prompts fill the compute, generations the KV


def test_prompts_fill_the_iteration_to_the_target_forward_size() -> None:
    engine = Engine(Options(tfs=128, ordered=False, lends=False), blocks=200)
    for i in range(12):
        engine.add(f"r{i}", 50, 80)
    sizes = [sum(engine.step()[1].values()) for _ in range(4)]
    assert sizes == [128] * 4


def test_the_prompts_that_wait_to_generate_stay_within_the_pool() -> None:
    engine = Engine(Options(reserve=0.2, ordered=False, lends=False), blocks=40)
    for i in range(20):
        engine.add(f"r{i}", 32, 200)
    for _ in range(50):
        engine.step()
        jobs, status = engine.host.jobs, engine.packer.status
        queued = [r for r in jobs.rows() if jobs.running[r] and status["state"][r] == QUEUED]
        assert jobs.blocks[queued].sum() <= 8
    assert queued, "prompts are computed ahead of their generation"


def test_an_answer_is_given_all_its_blocks_at_once() -> None:
    engine = Engine(PLAIN)
    engine.add("a", 20, 100)
    engine.step()
    assert engine.host.jobs.blocks[0] == 8


# ---- answers that are longer than predicted


def test_a_longer_answer_goes_on_from_the_pool() -> None:
    engine = Engine(Options(reserve=0.2, ordered=False, lends=False), blocks=20)
    engine.add("a", 16, 60, tokens_left=16.0)
    engine.until_done()
    counts = engine.packer.counters
    assert counts["extended"] == 2  # two blocks each time
    assert counts["stalled"] == counts["rescued"] == 0


def test_without_a_pool_it_pauses_with_its_kv_until_somebody_ends() -> None:
    options = Options(reserve=0.0, ordered=False, lends=False)
    engine = Engine(options, blocks=9)  # the least pool is one block
    engine.add("a", 16, 40, tokens_left=16.0)
    engine.add("b", 16, 80, tokens_left=80.0)
    seen = [(set(engine.step()[1]), engine.host.jobs.evictions[0]) for _ in range(45)]
    assert engine.packer.counters["stalled"] >= 1
    assert seen[-1] == ({"b"}, 0)
    assert engine.host.jobs.blocks[0] >= 2, "a pause frees nothing"
    steps = engine.until_done()
    assert sum("a" in step for step in steps) >= 5


def test_a_late_guest_leaves_and_comes_out_whole() -> None:
    """Its copy is cheap and it has long to go, so it is swapped to the host rather than waited for."""
    engine = Engine(Options(reserve=0.01, buffer=0, ordered=False), blocks=24, copy=1e-9)
    engine.add("host", 16, 320)
    engine.step()
    engine.add("guest", 16, 300, tokens_left=60.0)
    engine.step()
    jobs = engine.host.jobs
    assert jobs.loan_blocks[jobs.row_of["guest"]] > 0
    steps = engine.until_done()
    assert sum(step.get("guest", 0) for step in steps) >= 290
    assert engine.packer.counters["late"] >= 1


# ---- ordering (EcoServe 3.3)


@given(st.lists(st.tuples(st.floats(-2, 40), st.integers(0, 6), st.integers(0, 60)), min_size=1, max_size=40))
@settings(max_examples=66)
def test_order_is_deadline_range_then_held_kv_then_length(rows: list[tuple[float, int, int]]) -> None:
    jobs = Jobs(64)
    for i, (due, blocks, _) in enumerate(rows):
        jobs.add(f"r{i}", arrival=0.0, ttft=math.inf, e2e=due + 10.0, blocks=blocks, serial=i)
    lengths = np.array([length for _, _, length in rows])

    def key(i: int) -> tuple[float, int, int, int]:
        left = rows[i][0]
        band = 0 if left < 0.5 else math.floor(math.log2(left / 0.5)) + 1
        return band, -(rows[i][1] * SIZE // 128), -rows[i][2], i

    order, keys = queues.by_range(jobs.data, jobs.rows(), lengths, SIZE, 10.0, fixed=False)
    assert order.tolist() == sorted(range(len(rows)), key=key)
    assert queues.same_range(keys, 0) == sum(key(i)[:2] == key(int(order[0]))[:2] for i in range(len(rows)))


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(-1, 31), st.data())
@settings(max_examples=100)
def test_best_fit_is_what_trying_all_would_find(lengths: list[int], room: int, data: st.DataObject) -> None:
    falling = np.array(sorted(lengths, reverse=True), np.int64)
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    fits = [i for i in range(start, stop) if falling[i] <= room]
    best = min(fits, key=lambda i: (-falling[i], i), default=stop)
    assert queues.best_fit(falling, start, stop, room) == best


def test_the_longest_that_fits_begins_when_a_group_ends() -> None:
    """Six blocks come free, one stays in the pool for each prompt that leaves it: of 9, 5 and 3, the 5."""
    engine = Engine(Options(lends=False, reserve=0.2), blocks=31)
    for id, output in (("stays", 288), ("ends", 80)):
        engine.add(id, 16, output, slo=Slo(e2e=1000.0))
    engine.step()
    for id, output in (("long", 144), ("short", 48), ("middle", 80)):
        engine.add(id, 16, output, slo=Slo(e2e=1000.0))
    engine.step()
    assert [engine.state(id) for id in ("long", "short", "middle")] != [ACTIVE] * 3
    while "ends" in engine.host.jobs:
        engine.step()
    engine.step()
    assert [engine.state(id) for id in ("long", "short", "middle")] == [QUEUED, QUEUED, ACTIVE]


def test_no_deadline_is_the_last_range() -> None:
    assert queues.deadline_range(math.inf, 0.0, fixed=False) == math.inf
    assert queues.deadline_range(1.0, 5.0, fixed=False) == 0.0
    assert [queues.deadline_range(due, 0.0, fixed=False) for due in (0.4, 0.6, 1.5, 5.0)] == [0.0, 1.0, 2.0, 4.0]


# ---- lending (EcoServe 3.4)


def test_the_guest_is_the_longest_answer_that_is_gone_in_time() -> None:
    """Of 320 tokens the second half is idle for 160 iterations: with a buffer of 8, 150 come in time."""
    engine = Engine(Options(reserve=0.01, ordered=False), blocks=24)
    engine.add("host", 16, 320)
    engine.step()
    for id, output in (("short", 40), ("long", 130), ("late", 170)):
        engine.add(id, 10, output)
    engine.step()
    jobs = engine.host.jobs
    guest = jobs.row_of["long"]
    assert jobs.lender[guest] == jobs.row_of["host"]
    assert jobs.loan_blocks[guest] == 9
    assert jobs.blocks[guest] == 0
    assert not jobs.running[jobs.row_of["late"]] or jobs.loan_blocks[jobs.row_of["late"]] == 0
    engine.until_done()
    assert engine.host.free == 24


def test_of_equal_guests_the_one_with_the_loosest_deadline() -> None:
    for loose, chosen in ((True, "loose"), (False, "tight")):
        engine = Engine(Options(reserve=0.01, ordered=False, loose=loose), blocks=24)
        engine.add("host", 16, 320)
        engine.step()
        for id, due in (("tight", 5.0), ("loose", 500.0)):
            engine.add(id, 10, 130, slo=Slo(e2e=due))
        engine.step()
        jobs = engine.host.jobs
        assert jobs.lender[jobs.row_of[chosen]] == jobs.row_of["host"]
        assert jobs.loan_blocks[jobs.row_of[chosen]] > 0
        engine.until_done()


def test_a_buffer_by_length_keeps_that_share_of_the_answer() -> None:
    """The host comes after 160 iterations: 130 tokens and 15 % of them are in time, 142 are not."""
    for output, lent in ((138, True), (142, False)):
        engine = Engine(Options(reserve=0.01, ordered=False, buffer=0, buffer_share=0.15), blocks=24)
        engine.add("host", 16, 320)
        engine.step()
        engine.add("guest", 10, output)
        engine.step()
        assert (engine.packer.counters["lent"] == 1) == lent


def test_no_prompt_borrows_where_only_generations_may() -> None:
    for prompts in (True, False):
        engine = Engine(Options(reserve=0.01, ordered=False, lends_to_prompts=prompts), blocks=24)
        engine.add("host", 16, 320)
        engine.step()
        engine.add("guest", 10, 130)
        engine.step()
        assert (engine.packer.counters["lent"] == 1) == prompts


def test_a_prompt_alone_takes_the_kv_of_its_prompt() -> None:
    engine = Engine(Options(ordered=False, lends=False, whole=False))
    engine.add("a", 20, 100)
    engine.step()
    assert engine.host.jobs.blocks[0] == 2
    engine.step()
    assert engine.host.jobs.blocks[0] == 8


def test_the_papers_deadline_ranges() -> None:
    dues = (-1.0, 0.1, 0.3, 1.0, 3.0, 99.0, math.inf)
    assert [queues.deadline_range(due, 0.0, fixed=True) for due in dues] == [0, 0, 1, 2, 3, 3, 3]


def test_lending_lets_more_run_at_once() -> None:
    steps = {}
    for lends in (True, False):
        engine = Engine(Options(lends=lends, reserve=0.02, ordered=False), blocks=30)
        for i in range(120):
            engine.add(f"r{i}", 8, 200 if i % 20 == 0 else 30)
        steps[lends] = len(engine.until_done())
        assert (engine.packer.counters["lent"] > 20) == lends
        assert engine.packer.counters["late"] == 0
    assert steps[True] < 0.9 * steps[False], steps


def test_a_range_has_a_row_even_when_its_deadline_is_no_number() -> None:
    """Else who goes from range to range would stand still for ever."""
    assert queues.same_range(np.array([[np.nan, 0.0], [0, 0], [1, 1]]), 0) == 1
