"""With prefix caching the simulated engine takes, step by step, the decisions of vLLM's own scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.validate import prefixes
from benchmarks.validate.conformance import HOOK, STOCK, ConformanceCase, StepTally, Task, tally_of
from benchmarks.validate.prefixes import Caching, compare, draw
from headway.engines.simulated import caching, prefix_blocks
from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran
from headway.prefix import Prefix
from headway.types import Slo

pytestmark = pytest.mark.filterwarnings("default")
LONGEST = 368
PAIRS = [("vllm", STOCK)]
PAIRS += [(name, HOOK) for name in ("vllm", "vtc", "priority", "edf", "slack", "headway", "srtf", "sarathi")]
SWAPS = ("headway", "qlm", "fastserve", "vllm-v0-swap", "bros")  # with a host pool beside the cache
PROMISES = st.sampled_from([Slo(), Slo(0.4, 0.1), Slo(1.5, 0.05), Slo(e2e=6.0), Slo(0.1)])


@st.composite
def workloads(draw: Any) -> ConformanceCase:
    """Return requests that begin with one of two system prompts, go on with a conversation, or do neither."""
    systems = [Prefix(f"system {i}", draw(st.integers(1, 120))) for i in range(2)]
    said = Counter[str]()
    tasks = []
    for _ in range(draw(st.integers(1, 20))):
        own, output = draw(st.integers(1, 150)), draw(st.integers(1, 60))
        kind, system = draw(st.sampled_from(["own", "system", "turn"])), draw(st.sampled_from(systems))
        prompt, prefix = own, None
        if kind == "system":
            prompt, prefix = system.tokens + draw(st.integers(0, 60)), system
        elif kind == "turn":
            name = f"talk {draw(st.integers(0, 1))} {system.id}"
            longer = max(said[name], system.tokens) + own
            if longer + output <= LONGEST:
                prompt, said[name] = longer, longer + output
                prefix = Prefix(name, prompt, answer=True, parent=system)
        tasks.append(
            Task(
                draw(st.floats(0, 3)),
                prompt,
                output,
                draw(PROMISES),
                draw(st.integers(0, 3)),
                tokens_left=draw(st.none() | st.integers(1, 120).map(float)),
                urgency=draw(st.sampled_from([0.0, 0.0, -1.0, 2.0])),
                spread=0.3,
                prefix=prefix,
            )
        )
    return ConformanceCase(
        tuple(tasks),
        draw(st.integers(1, 8)),
        draw(st.sampled_from([64, 200, 512])),
        draw(st.integers(23, 60)),
        LONGEST,
        draw(st.integers(0, 9)),
        draw(st.sampled_from([1e-5, 1e-4])),
        draw(st.sampled_from([1, 4, 12, 1000])),
    )


@pytest.mark.parametrize(("recipe", "host"), [*PAIRS, *((name, HOOK) for name in (*SWAPS[1:], "multires"))])
@given(workloads())
@settings(max_examples=6)
def test_same_steps(recipe: str, host: str, case: ConformanceCase) -> None:
    tally = compare(case, recipe, host)
    assert tally.difference is None
    assert tally.identical == tally.steps >= max(task.output for task in case.tasks)


@pytest.mark.parametrize(("recipe", "host"), PAIRS)
def test_scarce_memory_pins_and_ended_runs(recipe: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are found and lost, requests preempted, chains pinned, runs ended, and all blocks come back."""
    seen, pin = Counter[str](), CachingEngine.pin

    def counted(engine: CachingEngine, prefix: Prefix) -> int:
        tokens = pin(engine, prefix)
        seen["pinned"] += tokens
        return tokens

    monkeypatch.setattr(CachingEngine, "pin", counted)
    for seed in (0, 6):
        both = Caching(draw(np.random.default_rng(seed)), recipe, host)
        tally = tally_of(both)
        assert tally.difference is None
        assert tally.identical == tally.steps > 100
        seen.update(both.lean.cache_stats)
        seen["of ended runs"] += both.ended
        for chain in both.chains:
            both.lean.unpin(chain.id)
        assert both.lean.free == both.case.blocks
    assert seen["hits"] > 1000
    assert seen["preempted_hits"] > 0
    assert (seen["pinned"] > 0) == (seen["of ended runs"] > 0) == (host == HOOK)


@pytest.mark.parametrize("recipe", SWAPS)
def test_kv_on_the_host_beside_the_cache(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV goes to a pool, scarce or ample, and comes back without what the cache has of it still."""
    seen, schedule, save = Counter[str](), CachingEngine.schedule, caching._save

    def counted(engine: CachingEngine, now: float) -> Ran:
        ran = schedule(engine, now)
        seen["copied"] += ran.copied
        return ran

    def tried(*arguments: Any) -> Any:
        kept, copied = save(*arguments)
        seen["without room"] += int(np.count_nonzero(~kept))
        return kept, copied

    monkeypatch.setattr(CachingEngine, "schedule", counted)
    monkeypatch.setattr(caching, "_save", tried)
    for seed, host_blocks in ((1, 30), (4, 30), (4, 1000)):
        both = Caching(replace(draw(np.random.default_rng(seed)), host_blocks=host_blocks), recipe, HOOK)
        tally = tally_of(both)
        assert tally.difference is None
        assert both.lean.host_room == host_blocks
        seen.update(both.real.scheduler.control({"op": "state"})["counters"])
    assert seen["saves"] > 0
    assert seen["without room"] > 0
    assert seen["swapped_tokens"] < seen["copied"] < 2 * seen["swapped_tokens"]


@pytest.mark.parametrize("recipe", ["fastserve", "headway"])
def test_requests_that_are_aborted_while_their_kv_is_on_the_host(recipe: str) -> None:
    from vllm.v1.request import RequestStatus

    aborted, rng = 0, np.random.default_rng(0)
    for seed in range(4):
        both = Caching(replace(draw(np.random.default_rng(seed)), host_blocks=40), recipe, HOOK)
        for difference in both.steps():
            assert difference is None
            for id in both.saved if rng.random() < 0.1 else ():
                both.real.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)
                both.lean.drop(id)
                aborted += 1
        assert both.lean.host_room == 40
    assert aborted > 4


def test_other_accounts_of_the_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver must not be blind to a block too much on the host, or to another order of saves."""
    room, save = CachingEngine.host_room.fget, caching._save
    assert room is not None
    with monkeypatch.context() as patch:
        patch.setattr(CachingEngine, "host_room", property(lambda engine: room(engine) + 1))
        assert differs(1, "fastserve").difference

    def last_first(*arguments: Any) -> Any:
        kept, copied = save(*arguments[:4], arguments[4][::-1].copy(), arguments[5])
        return kept[::-1], copied

    monkeypatch.setattr(caching, "_save", last_first)
    assert any(differs(seed, "fastserve").difference for seed in range(4))


@pytest.mark.parametrize(
    ("name", "careless"), [("missing", lambda jobs, rows: np.ones(rows.size, np.int64)), ("_AHEAD", 0)]
)
def test_small_differences_are_found(name: str, careless: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver must not be blind: to a cap too many, to a request that is not looked up again."""
    monkeypatch.setattr(caching, name, careless)
    assert any(differs(seed, "slack").difference for seed in range(12))


def test_another_order_of_eviction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_block_first(engine: CachingEngine, ran: Any, now: float) -> Any:
        done = super(CachingEngine, engine).complete(ran, now)
        pool = engine.pool
        for row in ran.rows[~engine.jobs.live[ran.rows]].tolist():
            table = pool.tables[row, : pool.held[row]]
            table[:] = table[::-1].copy()
            prefix_blocks.end(pool, row)
        return done

    monkeypatch.setattr(CachingEngine, "complete", first_block_first)
    tally = differs(1, "vllm")
    assert tally.difference is not None
    assert "frees" in tally.difference


def differs(seed: int, recipe: str) -> StepTally:
    return compare(draw(np.random.default_rng(seed)), recipe)


def test_a_fully_cached_prompt_computes_its_last_block() -> None:
    prefix = Prefix("chain", 64)
    tasks = (Task(0.0, 64, 2, Slo(), 0, prefix=prefix), Task(5.0, 64, 2, Slo(), 0, prefix=prefix))
    both = Caching(ConformanceCase(tasks, 2, 512, 30, 368, 0), "vllm", STOCK)
    assert not any(both.steps())
    assert both.lean.cache_stats == {
        "requests": 2,
        "queries": 128,
        "hits": 48,
        "preempted_requests": 0,
        "preempted_queries": 0,
        "preempted_hits": 0,
    }


def test_answers_are_found_by_the_next_turn_only_if_the_chain_goes_on_with_them() -> None:
    for answer, hits in ((True, 96), (False, 32)):
        first = Prefix("talk", 40, answer=answer)
        second = Prefix("talk", 140)
        tasks = (Task(0.0, 40, 60, Slo(), 0, prefix=first), Task(9.0, 140, 5, Slo(), 0, prefix=second))
        both = Caching(ConformanceCase(tasks, 2, 512, 40, 368, 0), "slack", HOOK)
        assert not any(both.steps())
        assert both.lean.cache_stats["hits"] == hits


def test_the_hook_learns_from_what_was_cached() -> None:
    """Of two prompts of one step, the second finds 160 tokens that the packer could not know of."""
    prefix = Prefix("chain", 160)
    tasks = tuple(Task(0.0, 170 + i, 3, Slo(), 0, prefix=prefix) for i in range(2))
    both = Caching(ConformanceCase(tasks, 2, 512, 40, 368, 0), "edf", HOOK)
    assert not any(both.steps())
    decodes, context, prefill, pairs = both.real.scheduler.iteration_log.iterations[0][3:7]
    assert (decodes, context, prefill) == (0, 0, 170 + 11)
    assert pairs == 170 * 170 // 2 + 11 * 160 + 11 * 11 // 2


def test_kv_of_an_ended_run_is_evicted_before_what_is_older() -> None:
    """Of three conversations the second is a run's; what vLLM takes next for the fourth is that run's alone.

    Three blocks that hold nothing go before.
    """
    system = Prefix("system", 32)
    chains = [Prefix(f"talk {i}", 192, answer=True, parent=system) for i in range(3)]
    tasks = [Task(9.0 * i, 192, 2, Slo(), 0, prefix=one, run=i) for i, one in enumerate(chains)]
    tasks.append(Task(30.0, 168, 2, Slo(), 0))
    both = Caching(ConformanceCase(tuple(tasks), 2, 512, 35, 368, 0), "edf", HOOK)
    both.chains, both.ends = [], None
    control = both.real.scheduler.control
    for difference in both.steps():
        assert difference is None
        if both.todo and both.todo[0][1].at == 30.0 and not both.real.busy:
            assert control({"op": "end", "runs": [0, 1, 7]})["ended"] == both.lean.end_run(1) == 10
    held = list[int]()
    for one in chains:
        held.append(control({"op": "pin", "chain": one.id, "tokens": prefixes._tokens(one)})["pinned"])
        control({"op": "unpin", "chain": one.id})
    assert held == [192, 64, 192], "of the second, what it shares with the others and two blocks are left"


def test_pins_end_when_the_cache_is_reset_and_unknown_chains_are_ignored() -> None:
    prefix = Prefix("chain", 64)
    case = ConformanceCase((Task(0.0, 70, 2, Slo(), 0, prefix=prefix),), 2, 512, 60, 368, 0)
    both = Caching(case, "edf", HOOK)
    both.chains = []
    assert not any(both.steps())
    scheduler = both.real.scheduler
    tokens = prefixes._tokens(prefix)
    assert scheduler.control({"op": "unpin", "chain": "unknown"})["blocks_free"] == 60
    answer = scheduler.control({"op": "pin", "chain": "chain", "tokens": tokens})
    assert answer["pinned"] == both.lean.pin(prefix) == 64
    assert answer["blocks_free"] == both.lean.free == 56
    assert scheduler.control({"op": "pin", "chain": "chain", "tokens": tokens})["blocks_free"] == 56
    assert scheduler.reset_prefix_cache()
    answer = scheduler.control({"op": "pin", "chain": "chain", "tokens": tokens})
    assert (answer["pinned"], answer["blocks_free"]) == (0, 60)
    assert "error" in scheduler.control({"op": "pins"})
