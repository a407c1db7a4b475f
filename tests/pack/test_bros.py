"""Does BROS's Algorithm 1 do what it says, on tables made by hand?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.recipes import find
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.two_ended.allocation import TwoEndedBudget
from headway.policy.pack.bros import algorithm_1
from headway.policy.pack.bros.packer import BatchSize, Bros
from headway.policy.pack.kernels import due_of
from headway.types import Ints, Jobs, Step

NOW, SIZE = 100.0, 16


def steady() -> OnlineLatency:
    """Iterations of 10 ms, and 1 ms per prompt token or answer: made up, so that times can be said."""
    latency = OnlineLatency()
    latency.theta[:] = [0.010, 0.016, 0.0, 0.512, 0.0]
    return latency


def spec(places: int, *, copy: float = 0.0, pool: bool = True) -> EngineSpec:
    host = 1000 if pool else 0
    return EngineSpec(places, 2048, SIZE, 2048, copy, host, two_ended=pool, latency=steady())


def packer(places: int = 4, *, copy: float = 0.0, pool: bool = True, **options: Any) -> Bros:
    options.setdefault("parts_below", -1.0)  # whole prompts, unless a test is about parts
    options.setdefault("crowded", 1.0)  # batches of two or three are soon half full
    made = Bros(spec(places, copy=copy, pool=pool), batch_size=BatchSize(base=places), **options)
    assert made.batch_size.size == places
    return made


def account(jobs: Jobs, total: int = 100) -> TwoEndedBudget:
    free = total - int(jobs.blocks.sum())
    moves: Ints = np.zeros(len(jobs.keys), np.int64)
    return TwoEndedBudget(total, free, SIZE, 64, moves)


def answering(jobs: Jobs, id: str, left: float, *, output_tokens: int = 10, prompt: int = 30) -> None:
    """Add a real-time answer in progress that has `left` seconds: the first token came accordingly."""
    first = NOW + left - output_tokens * 0.2
    tokens = prompt + output_tokens - 1
    jobs.add(
        id,
        arrival=first - 0.1,
        first=first,
        ttft=0.4,
        tpot=0.2,
        e2e=math.inf,
        prompt=prompt,
        computed=tokens,
        output_tokens=output_tokens,
        blocks=-(-tokens // SIZE),
        running=True,
        serial=len(jobs),
    )


def asking(jobs: Jobs, id: str, left: float, prompt: int = 20) -> None:
    """Add a real-time request whose first token is due in `left` seconds."""
    jobs.add(id, arrival=NOW + left - 0.4, ttft=0.4, tpot=0.2, e2e=math.inf, prompt=prompt, serial=len(jobs))


def batch_job(jobs: Jobs, id: str, *, saved: int = 0, prompt: int = 40, inside: bool = True) -> None:
    """Add a best-effort request that answers, `saved` of its tokens on the host; or one that waits."""
    state = {"computed": prompt, "output_tokens": 1, "blocks": -(-prompt // SIZE), "running": True, "saved": saved}
    never = {"ttft": math.inf, "tpot": math.inf, "e2e": math.inf}
    jobs.add(id, prompt=prompt, arrival=1.0, serial=len(jobs), **never, **(state if inside else {}))


def order(jobs: Jobs, step: Step) -> list[str]:
    return jobs.names(step.order)


def test_real_time_goes_by_time_left_whatever_its_phase() -> None:
    jobs = Jobs()
    answering(jobs, "ahead", 2.0)
    asking(jobs, "new", 0.3)
    answering(jobs, "close", 0.15)
    asking(jobs, "older", 0.2)
    step = packer().pack(jobs, account(jobs), NOW)
    assert order(jobs, step) == ["close", "older", "new", "ahead"]
    assert step.tokens is not None
    assert step.tokens.tolist() == [1, 20, 20, 1]


def test_time_left_of_an_answer_counts_all_its_tokens() -> None:
    jobs = Jobs()
    answering(jobs, "a", 0.7, output_tokens=3)
    rows, left = algorithm_1.polled(jobs.data, jobs.rows(), np.empty(0), NOW, 4, False)
    assert left == pytest.approx(0.7) == due_of(jobs.data, rows[0]) - NOW


def test_best_effort_follows_by_ascending_swap_cost() -> None:
    jobs = Jobs()
    for id, saved in (("far", 30), ("near", 5), ("here", 0)):
        batch_job(jobs, id, saved=saved)
    answering(jobs, "rt", 1.0)
    assert order(jobs, packer().pack(jobs, account(jobs), NOW)) == ["rt", "here", "near", "far"]


def test_nothing_joins_that_makes_the_iteration_longer_than_the_smallest_time_left() -> None:
    jobs = Jobs()
    asking(jobs, "urgent", 0.10, prompt=40)
    asking(jobs, "long", 0.30, prompt=60)
    asking(jobs, "short", 0.35, prompt=10)
    batch_job(jobs, "prompt", prompt=100, inside=False)
    step = packer().pack(jobs, account(jobs), NOW)
    assert order(jobs, step) == ["urgent", "short"], "40 + 60 ms and 10 more would be too long for 100 ms"


def test_an_iteration_is_never_longer_than_a_token_may_take() -> None:
    jobs = Jobs()
    answering(jobs, "ahead", 5.0)
    batch_job(jobs, "prompt", prompt=250, inside=False)
    batch_job(jobs, "small", prompt=100, inside=False)
    assert order(jobs, packer().pack(jobs, account(jobs), NOW)) == ["ahead", "small"]


def test_a_late_request_bounds_nothing_by_what_is_lost() -> None:
    jobs = Jobs()
    asking(jobs, "lost", -0.5)
    batch_job(jobs, "prompt", prompt=300, inside=False)
    assert order(jobs, packer().pack(jobs, account(jobs), NOW)) == ["lost", "prompt"]


def test_copies_count_as_time_when_they_take_longer_than_the_computation() -> None:
    jobs = Jobs()
    answering(jobs, "rt", 0.1)
    batch_job(jobs, "cheap", saved=5)
    batch_job(jobs, "dear", saved=30)
    step = packer(copy=0.01).pack(jobs, account(jobs), NOW)
    assert order(jobs, step) == ["rt", "cheap"], "5 x 10 ms fits into 100 ms, 30 more do not"


def test_when_the_batch_is_full_the_least_urgent_that_can_wait_is_replaced() -> None:
    jobs = Jobs()
    answering(jobs, "close", 0.15)
    answering(jobs, "can wait", 3.0)
    batch_job(jobs, "be")
    assert order(jobs, packer(2).pack(jobs, account(jobs), NOW)) == ["close", "be"]
    assert order(jobs, packer(2, replaces=False).pack(jobs, account(jobs), NOW)) == ["close", "can wait"]


def test_nobody_is_replaced_while_a_real_time_request_is_kept_waiting() -> None:
    jobs = Jobs()
    answering(jobs, "close", 0.15)
    answering(jobs, "can wait", 3.0)
    batch_job(jobs, "be")
    asking(jobs, "too big", 0.1, prompt=200)
    full = account(jobs, total=int(jobs.blocks.sum()) + 1)
    assert order(jobs, packer(2).pack(jobs, full, NOW)) == ["close", "can wait"]


def test_nobody_is_replaced_when_real_time_requests_hold_most_of_the_memory() -> None:
    jobs = Jobs()
    answering(jobs, "close", 0.15, prompt=300)
    answering(jobs, "can wait", 3.0, prompt=300)
    held = int(jobs.blocks.sum())
    for i in range(3):
        batch_job(jobs, f"be{i}")
    for total, second in ((3 * held, "be2"), (int(1.5 * held), "can wait")):
        step = packer(4, crowded=0.5).pack(jobs, account(jobs, total=total), NOW)
        assert order(jobs, step) == ["close", second, "be0", "be1"]


def test_nobody_is_replaced_who_would_be_late_then() -> None:
    jobs = Jobs()
    answering(jobs, "a", 0.010)
    answering(jobs, "b", 0.022)
    batch_job(jobs, "be")
    assert order(jobs, packer(2).pack(jobs, account(jobs), NOW)) == ["a", "b"], "two iterations are 24 ms"


def test_nothing_takes_a_place_that_makes_it_longer_than_the_smallest_time_left() -> None:
    jobs = Jobs()
    answering(jobs, "close", 0.05)
    answering(jobs, "can wait", 3.0)
    batch_job(jobs, "prompt", prompt=60, inside=False)
    assert order(jobs, packer(2).pack(jobs, account(jobs), NOW)) == ["close", "can wait"]


def test_lost_first_tokens_go_last_only_when_told() -> None:
    jobs = Jobs()
    asking(jobs, "lost", -0.1)
    asking(jobs, "fresh", 0.4)
    assert order(jobs, packer().pack(jobs, account(jobs), NOW)) == ["lost", "fresh"]
    assert order(jobs, packer(lost_last=True).pack(jobs, account(jobs), NOW)) == ["fresh", "lost"]


# ---- memory


def test_with_two_ended_blocks_a_real_time_request_comes_in_without_anybody_leaving() -> None:
    jobs = Jobs()
    batch_job(jobs, "be", prompt=160)
    asking(jobs, "rt", 0.3, prompt=40)
    step = packer().pack(jobs, account(jobs, total=12), NOW)
    assert order(jobs, step) == ["rt"]
    assert not step.save.size
    assert not step.evict.size


def test_with_plain_blocks_the_last_best_effort_request_is_swapped_out_for_it() -> None:
    jobs = Jobs()
    batch_job(jobs, "first", prompt=80)
    batch_job(jobs, "last", prompt=80)
    asking(jobs, "rt", 0.3, prompt=40)
    step = packer(two_ended=False).pack(jobs, account(jobs, total=11), NOW)
    assert order(jobs, step)[0] == "rt"
    assert jobs.names(step.save) == ["last"]


def test_without_a_host_it_is_evicted_instead() -> None:
    jobs = Jobs()
    batch_job(jobs, "be", prompt=160)
    asking(jobs, "rt", 0.3, prompt=40)
    step = packer(pool=False).pack(jobs, KvBudget(11, 1, SIZE, 64), NOW)
    assert order(jobs, step) == ["rt"]
    assert jobs.names(step.evict) == ["be"]
    assert not step.save.size


def test_when_real_time_alone_is_too_much_the_least_urgent_goes_to_the_host() -> None:
    jobs = Jobs()
    answering(jobs, "close", 0.1, prompt=39)  # 48 tokens are in 3 full blocks
    answering(jobs, "ahead", 3.0, prompt=30)
    step = packer().pack(jobs, account(jobs, total=6), NOW)
    assert order(jobs, step) == ["close"]
    assert jobs.names(step.save) == ["ahead"]


def test_rows_that_control_holds_are_left_alone() -> None:
    jobs = Jobs()
    answering(jobs, "held", 0.1)
    answering(jobs, "free", 0.5)
    jobs.held[jobs.row_of["held"]] = True
    assert order(jobs, packer().pack(jobs, account(jobs), NOW)) == ["free"]


# ---- the batch size


def test_the_batch_doubles_until_the_time_check_fires() -> None:
    size = BatchSize(base=128, most=400)
    size.learn(late=False)
    assert size.size == 256
    size.learn(late=False)
    assert size.size == 400
    size.learn(late=True)
    assert size.size == 128
    fixed = BatchSize(base=128, most=400, adapts=False)
    fixed.learn(late=False)
    assert fixed.size == 128


def test_a_request_that_is_kept_out_for_time_resets_the_batch() -> None:
    jobs = Jobs()
    for i in range(2):
        answering(jobs, f"r{i}", 1.0)
    made = Bros(spec(8), batch_size=BatchSize(base=2))
    made.pack(jobs, account(jobs), NOW)
    assert made.batch_size.size == 4
    answering(jobs, "close", 0.04)
    asking(jobs, "long", 0.3, prompt=100)
    made.pack(jobs, account(jobs), NOW)
    assert made.batch_size.size == 2


def test_no_replacing_where_real_time_requests_fill_half_of_the_batch() -> None:
    jobs = Jobs()
    for i in range(3):
        answering(jobs, f"r{i}", 5.0)
    batch_job(jobs, "be")
    assert "be" in order(jobs, packer(3).pack(jobs, account(jobs), NOW))
    assert order(jobs, packer(3, crowded=0.5).pack(jobs, account(jobs), NOW)) == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("bros", "two_ended", True),
        ("bros-plain-blocks", "two_ended", False),
        ("bros-no-replacement", "replaces", False),
        ("bros-lost-last", "lost_last", True),
    ],
)
def test_recipes(name: str, field: str, value: bool) -> None:
    output_tokens = find(name).packer(EngineSpec(256, 2048))
    assert isinstance(output_tokens, Bros)
    assert getattr(output_tokens, field) is value
    assert output_tokens.batch_size.size == 128


def test_without_batch_size_the_batch_stays_at_the_base() -> None:
    output_tokens = find("bros-no-sizing").packer(EngineSpec(256, 2048))
    assert isinstance(output_tokens, Bros)
    assert not output_tokens.batch_size.adapts


def test_a_best_effort_prompt_comes_in_parts_within_the_time_bound() -> None:
    jobs = Jobs()
    answering(jobs, "rt", 5.0)
    batch_job(jobs, "long", prompt=900, inside=False)
    step = packer(parts_below=0.9).pack(jobs, account(jobs), NOW)
    assert order(jobs, step) == ["rt", "long"]
    assert step.tokens is not None
    assert step.tokens.tolist() == [1, 149], "10 ms, and 1 ms each: 160 of 200 ms in all"
    assert order(jobs, packer(parts_below=-1.0).pack(jobs, account(jobs), NOW)) == ["rt"]


def test_no_prompt_in_parts_beside_real_time_requests_that_nearly_fill_the_memory() -> None:
    jobs = Jobs()
    answering(jobs, "rt", 5.0, prompt=800)
    batch_job(jobs, "long", prompt=300, inside=False)
    assert order(jobs, packer(parts_below=0.9).pack(jobs, account(jobs, 54), NOW)) == ["rt"]
    assert order(jobs, packer(parts_below=0.9).pack(jobs, account(jobs, 100), NOW)) == ["rt", "long"]


def test_by_the_text_time_counts_from_the_last_token() -> None:
    jobs = Jobs()
    answering(jobs, "rt", 5.0)
    batch_job(jobs, "long", prompt=150, inside=False)
    tried = packer(from_last=True, fixed_bound=True, parts_below=-1.0)
    assert order(jobs, tried.pack(jobs, account(jobs), NOW)) == ["rt", "long"], "200 ms are left"
    assert order(jobs, tried.pack(jobs, account(jobs), NOW + 0.1)) == ["rt"], "100 ms are left"
    ahead = packer(parts_below=-1.0).pack(jobs, account(jobs), NOW + 0.1)
    assert order(jobs, ahead) == ["rt", "long"], "it is 4.9 s ahead"


def test_by_the_text_the_first_that_is_not_in_time_ends_the_batch() -> None:
    jobs = Jobs()
    asking(jobs, "urgent", 0.10, prompt=40)
    asking(jobs, "long", 0.30, prompt=60)
    asking(jobs, "short", 0.35, prompt=10)
    batch_job(jobs, "be")
    assert order(jobs, packer(returns_early=True).pack(jobs, account(jobs), NOW)) == ["urgent"]
    assert order(jobs, packer().pack(jobs, account(jobs), NOW)) == ["urgent", "short", "be"]
