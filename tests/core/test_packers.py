"""What runs in the next iteration, rule by rule, on tables small enough to read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.ranked import Fcfs, Ranked, Slack, by_due, by_priority
from headway.ports import Packer
from headway.types import Batch, Jobs, Step

NOW = 1000.0
PLENTY = KvBudget(10_000, 10_000, 16, 64)


class Table:
    """Jobs by name; a running one is in its decode phase unless it says otherwise."""

    def __init__(self) -> None:
        self.jobs = Jobs()

    def waiting(self, name: str, prompt: int = 32, **values: float) -> Table:
        promises = {"ttft": math.inf, "tpot": math.inf, "e2e": math.inf, "arrival": NOW, "tokens_left": 10.0}
        self.jobs.add(name, prompt=prompt, **{"serial": len(self.jobs) + 1, **promises, **values})
        return self

    def running(self, name: str, prompt: int = 32, output_tokens: int = 1, **values: float) -> Table:
        computed = int(values.pop("computed", prompt + output_tokens - 1))
        first = values.pop("first", NOW if output_tokens else 0.0)
        self.waiting(name, prompt, output_tokens=output_tokens, computed=computed, first=first, **values)
        row = self.jobs.row_of[name]
        self.jobs.running[row], self.jobs.blocks[row] = True, -(-computed // 16)
        return self

    def pack(self, packer: Packer, free: int = 10_000, slots: int = 64) -> Packed:
        kv_budget = KvBudget(free + int(self.jobs.blocks.sum()), free, 16, slots)
        return Packed(self.jobs, packer.pack(self.jobs, kv_budget, NOW))


class Packed:
    """A step by names."""

    def __init__(self, jobs: Jobs, step: Step) -> None:
        self.order = jobs.names(step.order)
        self.evict = jobs.names(step.evict)
        tokens = np.zeros(0, int) if step.tokens is None else step.tokens
        self.tokens = dict(zip(self.order, tokens.tolist(), strict=False))


def ranked(running: int, budget: int = 512) -> Ranked:
    return Ranked(by_priority, running, budget)


def slack(running: int = 8, budget: int = 2048, **options: float) -> Slack:
    return Slack(running, budget, OnlineLatency(), **options)  # type: ignore[arg-type]


# ---- first come, first served


def test_fcfs_takes_running_ones_first_and_then_the_queue_in_order_of_arrival() -> None:
    table = Table().waiting("w1", serial=5).running("r2", serial=2).waiting("w2", serial=6)
    table.running("r1", serial=1).waiting("back", serial=3)
    assert table.pack(Fcfs(8)).order == ["r1", "r2", "back", "w1", "w2"]


def test_fcfs_leaves_tokens_and_eviction_to_the_engine_and_ignores_priority() -> None:
    table = Table().running("low", priority=9).waiting("high", priority=-9)
    step = Fcfs(1).pack(table.jobs, PLENTY, NOW)
    assert table.jobs.names(step.order) == ["low", "high"]
    assert step.tokens is None
    assert not step.evict.size
    assert step.max_running == 1


def test_fcfs_offers_no_more_of_the_queue_than_the_batch_could_take() -> None:
    table = Table()
    for i in range(100):
        table.waiting(f"w{i}")
    assert table.pack(Fcfs(3)).order == ["w0", "w1", "w2"]


# ---- priority


def test_a_more_urgent_arrival_displaces_when_the_batch_is_full() -> None:
    """vLLM's priority policy does not look at the queue while the batch is full (its issue 40004)."""
    table = Table().running("bulk", priority=5).running("chat", priority=0).waiting("alarm", priority=-1)
    step = table.pack(ranked(2))
    assert step.order == ["alarm", "chat"]
    assert step.evict == []  # bulk is paused and keeps its KV


def test_equal_priority_displaces_nobody() -> None:
    table = Table().running("a", arrival=NOW - 2).running("b", arrival=NOW - 1).waiting("c", arrival=NOW)
    assert table.pack(ranked(2)).order == ["a", "b"]


def test_a_paused_row_keeps_its_kv_until_somebody_more_urgent_needs_it() -> None:
    table = Table().running("bulk", 160, priority=5).waiting("alarm", 64, priority=-1)
    assert table.pack(ranked(1), free=6).evict == []
    assert table.pack(ranked(1), free=5).evict == ["bulk"]


def test_the_least_urgent_is_evicted_first_and_no_more_than_needed() -> None:
    table = Table().running("p1", 30, priority=1).running("p2", 30, priority=2).running("p3", 30, priority=3)
    step = table.waiting("alarm", 32, priority=0).pack(ranked(3), free=2)
    assert step.order == ["alarm", "p1", "p2"]
    assert step.evict == ["p3"]


def test_a_row_displaced_is_evicted_when_there_is_no_slot_for_pausing() -> None:
    table = Table().running("bulk", priority=5).waiting("alarm", priority=-1)
    assert table.pack(ranked(1), slots=1).evict == ["bulk"]


def test_nobody_is_displaced_for_a_prompt_that_gets_no_tokens() -> None:
    table = Table().running("bulk", priority=5).waiting("x", 400, priority=1).waiting("y", 400, priority=2)
    step = table.pack(ranked(2, budget=100))
    assert step.order == ["x", "bulk"]
    assert step.tokens == {"x": 99, "bulk": 1}


def test_a_prompt_in_progress_keeps_room_for_its_rest() -> None:
    """Else a later prompt takes the blocks and one of the two is computed for nothing."""
    table = Table().running("big", 320, output_tokens=0, computed=32, priority=0).waiting("next", 64, priority=1)
    assert table.pack(ranked(2, budget=64), free=20).order == ["big"]
    assert table.pack(ranked(2, budget=512), free=23).order == ["big"]
    assert table.pack(ranked(2, budget=512), free=24).order == ["big", "next"]


def test_a_prompt_in_progress_evicts_only_for_what_this_step_computes() -> None:
    table = Table().running("big", 320, output_tokens=0, computed=32, priority=0).running("bulk", 160, priority=5)
    assert table.pack(ranked(2, budget=65), free=10).evict == []
    assert table.pack(ranked(2, budget=305), free=10).evict == ["bulk"]


# ---- when memory is short


def test_small_prompts_do_not_overtake_a_large_one_that_waits_for_memory() -> None:
    table = Table().running("runs", 30, priority=0).waiting("large", 320, priority=1)
    assert table.waiting("small", 16, priority=2).pack(ranked(4), free=12).order == ["runs"]


def test_small_prompts_do_not_overtake_a_large_one_in_progress_that_pauses_for_memory() -> None:
    table = Table().running("runs", 30, priority=0).running("large", 320, output_tokens=0, computed=32, priority=1)
    assert table.waiting("small", 16, priority=2).pack(ranked(4), free=12).order == ["runs"]


def test_running_rows_that_need_no_more_memory_go_on_beside_one_that_pauses_for_it() -> None:
    table = Table().running("runs", 30, priority=0).running("large", 320, output_tokens=0, computed=32, priority=1)
    step = table.running("small", 10, priority=2).pack(ranked(4), free=5)
    assert step.order == ["runs", "small"]
    assert step.evict == []


def test_of_several_the_least_urgent_is_evicted_first() -> None:
    table = Table().running("p1", 30, priority=1).running("p2", 30, priority=2).running("p3", 30, priority=3)
    step = table.waiting("alarm", 62, priority=0).pack(ranked(4), free=2)
    assert step.order == ["alarm", "p1"]
    assert step.evict == ["p3", "p2"]


def test_a_newcomer_takes_a_slot_from_the_least_urgent() -> None:
    """`large` pauses for memory and keeps its slot, so there is none left for `least`."""
    table = Table().running("large", 320, output_tokens=0, computed=32, priority=1).running("least", 10, priority=2)
    step = table.waiting("alarm", 15, priority=0).pack(ranked(2), free=5, slots=2)
    assert step.order == ["alarm"]
    assert step.evict == ["least"]


def test_whoever_fits_runs_when_held_rows_have_the_memory() -> None:
    table = Table().running("held", 160, held=True).waiting("large", 160, priority=0)
    assert table.waiting("small", 16, priority=1).pack(ranked(2), free=4).order == ["small"]


# ---- earliest deadline


def test_edf_orders_by_first_token_or_whole_answer_whichever_is_promised() -> None:
    table = Table().waiting("chat", ttft=3.0).waiting("job", e2e=2.0).waiting("bulk").waiting("both", ttft=4.0, e2e=1.0)
    assert table.pack(Ranked(by_due, 8, 512)).order == ["both", "job", "chat", "bulk"]


def test_edf_runs_best_effort_in_order_of_arrival() -> None:
    table = Table().waiting("late", arrival=NOW).waiting("early", arrival=NOW - 9)
    assert table.pack(Ranked(by_due, 8, 512)).order == ["early", "late"]


# ---- slack


def test_slack_runs_first_what_can_wait_least() -> None:
    """Least slack is not earliest deadline: the work until the token comes out counts."""
    table = Table().waiting("short", 16, ttft=1.0).waiting("long", 1500, ttft=1.2)
    assert table.pack(slack()).order[0] == "long"


def test_what_is_left_to_answer_counts_against_a_promise_for_the_whole() -> None:
    table = Table().waiting("short", e2e=9.0, tokens_left=5.0).waiting("long", e2e=9.1, tokens_left=200.0)
    assert table.pack(slack()).order == ["long", "short"]


def test_a_late_one_does_not_take_the_place_of_one_that_can_still_be_met() -> None:
    table = Table().waiting("lost", ttft=1.0, arrival=NOW - 5).waiting("hope", ttft=1.0)
    assert table.pack(slack(running=1)).order == ["hope"]


def test_a_late_one_still_goes_before_best_effort() -> None:
    table = Table().running("bulk").waiting("lost", ttft=1.0, arrival=NOW - 5)
    assert table.pack(slack(running=1)).order == ["lost"]


def test_an_answer_in_progress_that_is_behind_goes_first() -> None:
    table = Table().waiting("new", ttft=0.5).running("behind", output_tokens=20, first=NOW - 3, ttft=1.0, tpot=0.1)
    assert table.pack(slack()).order == ["behind", "new"]


def test_best_effort_fills_the_rest_in_order_of_arrival_at_the_engine() -> None:
    table = Table().waiting("b2", serial=2).waiting("b1", serial=1).waiting("chat", ttft=1.0, serial=3)
    assert table.pack(slack(running=2)).order == ["chat", "b1"]


def test_an_answer_ahead_of_its_pace_makes_place_for_one_that_is_not() -> None:
    ahead = {"output_tokens": 40, "first": NOW - 1.0, "ttft": 1.0, "tpot": 0.1}
    table = Table().running("ahead", **ahead).waiting("new", ttft=0.5)  # type: ignore[arg-type]
    step = table.pack(slack(running=1))
    assert step.order == ["new"]
    assert step.evict == []


def test_least_slack_pauses_but_does_not_evict_its_equals() -> None:
    ahead = {"output_tokens": 40, "first": NOW - 1.0, "ttft": 1.0, "tpot": 0.1}
    table = Table().running("ahead", 160, **ahead).waiting("new", 160, ttft=0.5)  # type: ignore[arg-type]
    step = table.pack(slack(), free=4)
    assert step.order == ["ahead"]
    assert step.evict == []


def test_best_effort_is_evicted_for_a_promise() -> None:
    table = Table().running("bulk", 160).waiting("chat", 160, ttft=2.0)
    step = table.pack(slack(), free=4)
    assert step.order == ["chat"]
    assert step.evict == ["bulk"]


@pytest.mark.parametrize("packer", [ranked(1), Ranked(by_due, 1, 512), slack(running=1)])
def test_urgency_set_from_outside_goes_before_everything_else(packer: Packer) -> None:
    table = Table().running("vip", ttft=0.1, tpot=0.05, priority=-9).waiting("told", priority=9, urgency=-1.0)
    assert table.pack(packer).order == ["told"]


# ---- how much prompt an iteration computes


def chunk(table: Table, **options: float) -> int:
    return int(table.pack(slack(**options)).tokens["prompt"])  # type: ignore[arg-type]


def answering(slack_tokens: float) -> Table:
    """One answer that may wait about `slack_tokens` x 0.1 s, and a long prompt with a promise."""
    output_tokens = 10
    first = NOW - output_tokens * 0.1 + slack_tokens * 0.1
    table = Table().running("answer", output_tokens=output_tokens, first=first, ttft=1.0, tpot=0.1)
    return table.waiting("prompt", 4000, ttft=9.0)


def test_prompt_chunks_shrink_with_the_slack_of_answers_in_progress() -> None:
    sizes = [chunk(answering(n)) for n in (5, 3, 2, 1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_an_iteration_takes_no_longer_than_answers_in_progress_can_wait() -> None:
    latency = OnlineLatency()
    for tokens in (1.0, 2.0, 3.0):
        step = answering(tokens).pack(Slack(8, 2048, latency))
        n = step.tokens["prompt"]
        assert latency.seconds(Batch(1, 41, n, n * n // 2)) <= tokens * 0.1


def test_without_answers_in_progress_a_prompt_gets_the_whole_budget() -> None:
    table = Table().waiting("prompt", 2048, ttft=9.0)
    assert chunk(table, max_step=100.0) == 2048


def test_without_answers_in_progress_an_iteration_still_ends_in_time_for_an_arrival() -> None:
    n = chunk(Table().waiting("prompt", 4000), max_step=0.2)
    assert 0.15 < OnlineLatency().seconds(Batch(0, 0, n, n * n // 2)) <= 0.2


def test_a_late_answer_catches_up_at_half_its_pace_and_prompts_go_on() -> None:
    n = chunk(answering(-50), min_chunk=48)
    assert n > 48
    assert OnlineLatency().seconds(Batch(1, 41, n, n * n // 2)) <= 0.1 / 2


def test_prompts_progress_by_min_chunk_whatever_was_promised() -> None:
    table = Table().running("answer", output_tokens=10, first=NOW - 5, ttft=1.0, tpot=0.001)
    assert chunk(table.waiting("prompt", 4000, ttft=9.0), min_chunk=48) == 48


def test_a_whole_answer_that_is_late_stops_nobody() -> None:
    table = Table().running("answer", output_tokens=10, e2e=1.0, arrival=NOW - 50)
    assert chunk(table.waiting("prompt", 4000, ttft=9.0), max_step=0.2) > 256


def test_decodes_do_not_eat_the_prompt_chunk() -> None:
    table = Table()
    for i in range(40):
        table.running(f"r{i}", output_tokens=5, first=NOW - 9, tpot=0.001, ttft=1.0)
    table.waiting("prompt", 4000, ttft=9.0)
    step = table.pack(slack(running=64, min_chunk=48))
    assert step.tokens["prompt"] == 48
    assert sum(step.tokens.values()) == 88


def test_prompts_without_a_promise_do_not_spend_the_slack_of_answers() -> None:
    """It is there when somebody with a promise arrives."""
    output_tokens, first = 10, NOW + 0.4
    table = (
        Table().running("answer", output_tokens=output_tokens, first=first, ttft=1.0, tpot=0.1).waiting("prompt", 4000)
    )
    n = chunk(table)
    assert OnlineLatency().seconds(Batch(1, 41, n, n * n // 2)) <= 0.1
    assert n > slack().min_chunk
