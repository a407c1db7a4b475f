"""Simulations whose requests share prefixes; `tests/engine/test_prefix_caching.py` has vLLM beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran
from headway.engines.simulated.prefix_blocks import free_queue, keys_of
from headway.errors import ConfigError
from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.ranked import Fcfs
from headway.policy.recipes.registry import find
from headway.ports import Packer
from headway.prefix import Prefix
from headway.simulate.fleet import build, spec
from headway.simulate.outcome import Outcome
from headway.simulate.record import run_folder
from headway.simulate.record.recorder import Recorder
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload, concat, single
from headway.types import Jobs, Slo, Step
from tests.helpers.recorded import Header, Machine, Run, Spy, fleet

SIZE = 16


def talks(count: int, seed: int = 0) -> Workload:
    """Turns of conversations and single calls, all of which begin with one of two system prompts."""
    rng = np.random.default_rng(seed)
    systems = [Prefix("short", 70), Prefix("long", 400)]
    rows, said = [], dict[str, int]()
    for at in np.sort(rng.uniform(0, count / 4, count)).tolist():
        system, own, output = systems[rng.integers(2)], int(rng.integers(5, 60)), int(rng.integers(5, 40))
        prefix, prompt = system, system.tokens + own
        if rng.random() < 0.6:
            name = f"{system.id} {rng.integers(5)}"
            prompt = said.get(name, system.tokens) + own
            prefix = Prefix(name, prompt, answer=True, parent=system)
            said[name] = prompt + output
        if prompt + output <= 2048:
            rows.append((at, prompt, output, prefix))
    arrival, prompts, outputs, pieces = zip(*rows, strict=True)
    table = tuple(dict.fromkeys(pieces))
    plain = single(np.array(arrival), np.array(prompts), np.array(outputs))
    return replace(plain, prefix=np.array([table.index(piece) for piece in pieces]), prefixes=table)


def outcome(recipe: str, workload: Workload, *, caching: bool, blocks: int = 300, fast: bool = True) -> Outcome:
    specs = [replace(one, prefix_caching=caching) for one in fleet(1, blocks)]
    return Simulation(find(recipe), specs, workload, fast=fast).run()


def engine(blocks: int = 40, longest: int = 320) -> CachingEngine:
    return CachingEngine(Fcfs(8), blocks=blocks, size=SIZE, slots=8, budget=512, max_model_len=longest)


def answer(
    engine: CachingEngine, id: str, prompt: int, output: int = 2, prefix: Prefix | None = None, run: int = 0
) -> int:
    """Let one request run to its end; return the tokens of its prompt that were cached."""
    before = engine.cache_stats["hits"]
    engine.add(id, prompt, output, arrival=0.0, prefix=prefix, run=run)
    while engine.busy:
        engine.complete(engine.schedule(0.0), 0.0)
    return engine.cache_stats["hits"] - before


# ---- identity


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 400))
def test_pieces_of_one_chain_have_the_keys_of_the_shorter_one(one: int, other: int, own: int) -> None:
    first, second = (
        keys_of(Prefix("chain", tokens), serial, (tokens + own) // SIZE, SIZE)
        for serial, tokens in ((1, one), (2, other))
    )
    common = min(one, other) // SIZE
    assert (first[:common] == second[:common]).all()
    assert not set(first.tolist()) & set(second[common:].tolist())
    assert len(set(first.tolist())) == first.size


def test_a_child_has_the_keys_of_its_parent_and_goes_its_own_way_behind_it() -> None:
    parent = Prefix("system", 70)
    a, b = (keys_of(Prefix(name, 200, answer=True, parent=parent), 1, 20, SIZE) for name in "ab")
    system = keys_of(parent, 2, 20, SIZE)
    assert (a[:4] == system[:4]).all()
    assert (a[:4] == b[:4]).all()
    assert not set(a[4:].tolist()) & {*b[4:].tolist(), *system[4:].tolist()}
    assert (keys_of(Prefix("a", 300, parent=parent), 9, 18, SIZE) == a[:18]).all(), "and so does a later turn"


def test_impossible_prefixes_are_refused() -> None:
    with pytest.raises(ValueError, match="1 token or more"):
        Prefix("chain", 0)
    with pytest.raises(ValueError, match="no beginning"):
        Prefix("chain", 10, parent=Prefix("system", 11))
    load = single(np.zeros(1), 50, 5)
    for prefix in (Prefix("chain", 51), Prefix("chain", 49, answer=True)):
        with pytest.raises(ConfigError, match="Request 0 has prompt 50"):
            replace(load, prefix=np.zeros(1, int), prefixes=(prefix,))


def test_prefixes_stay_with_their_requests(tmp_path) -> None:  # type: ignore[no-untyped-def]
    load, other = talks(20), single(np.array([1.0]), 10, 2)
    both = concat(load, other, talks(5, seed=3)).sorted()
    assert sorted(r.prefix.id for r in map(both.request, range(len(both))) if r.prefix) == sorted(
        piece.id for part in (load, talks(5, seed=3)) for piece in np.array(part.prefixes)[part.prefix]
    )
    assert sum(both.request(i).prefix is None for i in range(len(both))) == 1
    specs = fleet(1)
    run = Run(
        Header("vllm", tuple(map(Machine.of, specs)), 0, "test"),
        both,
        Simulation(find("vllm"), specs, both).run(),
        Recorder().recording(),
    )
    back = run_folder.load(run_folder.save(run, tmp_path)).workload
    assert [back.request(i) for i in range(len(back))] == [both.request(i) for i in range(len(both))]


# ---- simulations


@pytest.mark.parametrize("recipe", ["vllm", "headway", "slack", "edf"])
def test_what_is_shared_is_computed_once(recipe: str) -> None:
    load = talks(200)
    cached, plain = (outcome(recipe, load, caching=caching) for caching in (True, False))
    assert not np.isnan(cached.end).any()
    assert cached.queried >= load.prompt.sum()
    assert 30 < cached.hit_pct < 100
    assert cached.busy < plain.busy
    assert (plain.queried, plain.hits, plain.hit_pct) == (0, 0, 0.0)


@pytest.mark.parametrize("recipe", ["vllm", "slack"])
def test_requests_that_share_nothing_run_as_without_a_cache(recipe: str) -> None:
    load = replace(talks(60), prefix=np.zeros(0, int), prefixes=(None,))
    cached, plain = (outcome(recipe, load, caching=caching, fast=False) for caching in (True, False))
    np.testing.assert_array_equal(cached.end, plain.end)
    assert (cached.hits, cached.preempted) == (0, 0)
    assert cached.queried == load.prompt.sum()


def test_a_turn_whose_history_is_cached_goes_before_a_long_new_prompt() -> None:
    """None has an SLO: what is due soon after its arrival is what takes little to compute."""
    history = Prefix("talk", 1500)
    arrival, prompts = np.array([0.0, 5.0, 5.001, 5.002]), np.array([1500, 1500, 1500, 1600])
    work = replace(single(arrival, prompts, np.full(4, 8)), prefix=np.array([1, 0, 0, 1]), prefixes=(None, history))
    first = outcome("headway", work, caching=True).first
    assert first[3] < first[2]
    first = outcome("headway", work, caching=False).first
    assert first[3] > first[2]


def test_prefixes_change_nothing_where_caching_is_off() -> None:
    load = talks(60)
    bare = replace(load, prefix=np.zeros(0, int), prefixes=(None,))
    for fast in (True, False):
        one, other = (outcome("slack", some, caching=False, fast=fast) for some in (load, bare))
        np.testing.assert_array_equal(one.end, other.end)


def test_fewer_blocks_find_less() -> None:
    load = talks(300)
    hits = [outcome("vllm", load, caching=True, blocks=blocks).hits for blocks in (140, 200, 400, 4000)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]


def test_a_recording_of_a_cached_run_is_whole() -> None:
    load, spy = talks(80), Spy()
    specs = [replace(one, prefix_caching=True) for one in fleet(1, 140)]
    found = Simulation(find("slack"), specs, load).run(observer=spy)
    lines = spy.recording().iterations
    computed = lines["decodes"].sum() + lines["prefill"].sum() + lines["recompute"].sum()
    assert computed == sum(sum(tokens.values()) for _, _, tokens, _, _ in spy.said)
    assert lines["prefill"].sum() + found.hits == load.prompt.sum()
    assert (lines["blocks"] <= 140).all()


def test_packers_that_lend_kv_or_share_blocks_by_their_ends_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefix caching") as refusal:
        outcome("ecoserve", talks(5), caching=True)
    assert "prefix_caching" in (refusal.value.hint or "")
    two_ended = find("bros").packer(EngineSpec(8, 512, SIZE, 320, 1e-5, 100, two_ended=True))
    with pytest.raises(ConfigError, match="two-ended"):
        CachingEngine(two_ended, blocks=40, size=SIZE, slots=8, budget=512, max_model_len=320)


def test_a_fleet_may_say_so() -> None:
    for text, caching in ((",prefix_caching=true", True), (",prefix_caching=false", False), ("", False)):
        assert [one.prefix_caching for one in build([spec(f"opt-13b-a100:2{text}")])] == [caching] * 2


@pytest.mark.parametrize("recipe", ["headway", "vllm", "qlm"])
def test_a_fleet_has_host_memory_beside_its_prefix_caches(recipe: str) -> None:
    specs, load = build([spec("opt-13b-a100:2,model=default,prefix_caching=true")]), talks(12)
    assert [one.host_tokens for one in specs] == [128 * 2**30 // 819_200] * 2
    found = Simulation(find(recipe), specs, load).run()
    assert np.isfinite(found.end).all()
    assert found.hits > 0


@pytest.mark.parametrize("recipe", ["headway", "bros", "vllm-v0-swap"])
def test_recipes_swap_beside_a_prefix_cache(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best effort gives way to promises; BROS has plain blocks here, as in vLLM."""
    promised = single(np.arange(1.0, 40.0), 900, 10, slo=Slo(ttft=0.5, tpot=0.2))
    load = concat(talks(120), promised).sorted()
    text = "opt-13b-a100,model=default,kv_tokens=2208,max_model_len=2048,prefix_caching=true,host_kv_gib"
    copied, schedule = Counter[str](), CachingEngine.schedule

    def counted(engine: CachingEngine, now: float) -> Ran:
        ran = schedule(engine, now)
        copied[gib] += ran.copied
        assert engine.seconds(ran, 0.0) == ran.copied * engine.copy_seconds
        assert engine.overlap == (recipe != "vllm-v0-swap")
        return ran

    monkeypatch.setattr(CachingEngine, "schedule", counted)
    for gib in ("0", "1"):
        found = Simulation(find(recipe), build([spec(f"{text}={gib}")]), load, fast=False).run()
        assert np.isfinite(found.end).all()
        assert found.hits > 0
    assert copied["0"] == 0 < copied["1"]


# ---- a ledger of blocks, on the device and on the host


class Erratic(Packer):
    """It saves and evicts running rows at random, and names the others in a random order."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    @property
    def kv(self) -> KvUse:
        return KvUse(saves=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        rows = self.rng.permutation(jobs.rows())
        fate = np.where(jobs.running[rows], self.rng.choice(3, rows.size, p=(0.85, 0.1, 0.05)), 0)
        order = rows[fate == 0]
        order = np.concatenate([order[jobs.running[order]], order[~jobs.running[order]]])
        return Step(order, evict=rows[fate == 2], save=rows[fate == 1], max_running=4)


def check_ledger(engine: CachingEngine, host: int) -> None:
    """Every block is free or held, and known by its holders; the host holds what waits, within its room."""
    pool, jobs, rows = engine.pool, engine.jobs, engine.jobs.rows()
    tables = [pool.tables[row, : pool.held[row]] for row in rows.tolist()]
    held = np.concatenate([*tables, *engine._pinned.values(), np.empty(0, np.int64)])
    references = np.bincount(held, minlength=pool.references.size)
    np.testing.assert_array_equal(pool.references, references)
    assert all(np.unique(table).size == table.size for table in tables)
    queue = free_queue(pool)
    assert sorted(queue.tolist()) == (np.flatnonzero(references[1:] == 0) + 1).tolist()
    assert engine.free == queue.size
    assert (pool.held[rows[~jobs.running[rows]]] == 0).all()
    running = rows[jobs.running[rows]]
    assert (pool.held[running] * SIZE >= jobs.computed[running]).all()
    assert engine.usage["held_slots"] == running.size
    assert (jobs.saved[running] == 0).all()
    assert jobs.saved[rows].sum() <= host
    assert engine.host_room >= 0


@given(
    asks=st.lists(
        st.tuples(st.integers(1, 120), st.integers(1, 20), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    ),
    blocks=st.integers(9, 24),
    host=st.sampled_from([0, 15, 64, 200, 4000]),
    seed=st.integers(0, 99),
)
def test_no_block_is_lost_or_held_twice(
    asks: list[tuple[int, int, int, bool]], blocks: int, host: int, seed: int
) -> None:
    """Requests share prefixes, are saved, evicted, preempted and aborted, chains are pinned, and runs end."""
    engine_ = CachingEngine(
        Erratic(seed), blocks=blocks, size=SIZE, slots=4, budget=96, max_model_len=144, copy_seconds=1e-4, host=host
    )
    chains = [Prefix(f"chain {i}", 40 + 20 * i) for i in range(3)]
    ended, aborted, copied = set[str](), set[str](), 0
    for i, (prompt, output, chain, _) in enumerate(asks):
        prefix = chains[chain] if chain < 3 and prompt >= chains[chain].tokens else None
        engine_.add(f"r{i}", prompt, output, arrival=0.0, prefix=prefix, run=i % 3)
    for iteration in range(3000):
        if not engine_.busy:
            break
        ran = engine_.schedule(0.1 * iteration)
        check_ledger(engine_, host)
        assert np.unique(ran.rows).size == ran.rows.size
        assert (engine_.jobs.saved[ran.saved] > 0).all()
        copied += ran.copied
        ended |= set(engine_.complete(ran, 0.1 * iteration + 0.1).ids)
        for id in [f"r{i}" for i, ask in enumerate(asks) if ask[3] and iteration == 3 * i]:
            if id in engine_.jobs:
                engine_.drop(id)
                aborted.add(id)
        engine_.pin(chains[iteration % 3]) if iteration % 4 else engine_.unpin(chains[iteration % 3].id)
        check_ledger(engine_, host)
        check_end(engine_, 1 + iteration % 2)
        check_ledger(engine_, host)
    assert ended | aborted == {f"r{i}" for i in range(len(asks))}
    assert not ended & aborted
    assert copied == 0 or host > 0
    for prefix in chains:
        engine_.unpin(prefix.id)
    assert engine_.free == blocks


def check_end(engine: CachingEngine, run: int) -> None:
    """A run that ends moves its own cached blocks behind leading empty ones, the ends of chains first."""
    pool, before = engine.pool, free_queue(engine.pool)
    count = engine.end_run(run)
    mine = (pool.run[before] == run) & (pool.key[before] != 0)
    after, others = free_queue(pool), before[~mine]
    empty = int(np.argmax(np.append(pool.key[others] != 0, True)))
    moved = after[empty : empty + count]
    assert sorted(moved.tolist()) == sorted(before[mine].tolist())
    assert (np.diff(pool.depth[moved]) <= 0).all()
    assert np.delete(after, np.s_[empty : empty + count]).tolist() == others.tolist()


# ---- runs that have ended


def test_blocks_of_an_ended_run_go_before_older_ones() -> None:
    engine_, system = engine(22), Prefix("system", 32)
    old, ended, live = (Prefix(name, 96, answer=True, parent=system) for name in ("old", "ended", "live"))
    for run, prefix in enumerate((old, ended, live)):
        answer(engine_, prefix.id, 96, prefix=prefix, run=run)
    assert engine_.end_run(1) == 4, "the system prompt is not its own"
    assert engine_.end_run(3) == 0
    answer(engine_, "new", 180)
    for name, found in (("old", 80), ("live", 80), ("ended", 32)):
        prefix = Prefix(name, 96, answer=True, parent=system)
        assert answer(engine_, f"{name} again", 96, prefix=prefix, run=4) == found


def test_blocks_that_another_request_has_used_or_that_are_held_stay() -> None:
    engine_ = engine()
    chain, pinned, goes_on = Prefix("chain", 64), Prefix("pinned", 64), Prefix("goes on", 64)
    for prefix in (chain, pinned, goes_on):
        answer(engine_, prefix.id, 66, prefix=prefix, run=1)
    answer(engine_, "by no run", 66, prefix=chain)
    engine_.pin(pinned)
    engine_.add("still inside", 66, 9, arrival=0.0, prefix=goes_on, run=1)
    engine_.complete(engine_.schedule(0.0), 0.0)
    assert engine_.end_run(1) == 0


# ---- pins


def test_pinned_blocks_stay_and_others_are_given_up() -> None:
    engine_ = engine()
    kept, lost = Prefix("kept", 64), Prefix("lost", 64)
    for prefix in (kept, lost):
        assert answer(engine_, prefix.id, 70, prefix=prefix) == 0
    assert engine_.pin(kept) == 64
    assert engine_.free == 36
    for i in range(4):
        answer(engine_, f"other {i}", 300)
    assert answer(engine_, "lost again", 70, prefix=lost) == 0
    assert answer(engine_, "kept again", 70, prefix=kept) == 64
    engine_.unpin("kept")
    assert engine_.free == 40
    for i in range(4, 8):
        answer(engine_, f"other {i}", 300)
    assert answer(engine_, "kept no more", 70, prefix=kept) == 0


def test_pin_and_unpin_make_a_chain_the_last_to_go() -> None:
    engine_ = engine()
    chains = [Prefix(f"chain {i}", 64) for i in range(3)]
    for prefix in chains:
        answer(engine_, prefix.id, 66, prefix=prefix)
    engine_.pin(chains[0])
    engine_.unpin(chains[0].id)
    queue = free_queue(engine_.pool)
    held = engine_.pool.key[queue[-4:]]
    assert held.tolist() == keys_of(chains[0], 0, 4, SIZE)[::-1].tolist()


def test_pins_leave_room_for_the_longest_request() -> None:
    engine_ = engine(blocks=24)
    chains = [Prefix(f"chain {i}", 48) for i in range(2)]
    for prefix in chains:
        answer(engine_, prefix.id, 60, prefix=prefix)
    assert [engine_.pin(prefix) for prefix in chains] == [48, 16]
    assert engine_.free == 20
    assert answer(engine_, "longest", 300, 20) == 0
    assert engine_.pin(chains[0]) == 48, "again, in place of the pin before"
    engine_.unpin("unknown")


def test_an_aborted_request_gives_its_blocks_back() -> None:
    engine_ = engine()
    prefix = Prefix("chain", 64)
    for id in ("a", "b"):
        engine_.add(id, 70, 50, arrival=0.0, prefix=prefix)
    engine_.complete(engine_.schedule(0.0), 0.0)
    assert engine_.free == 40 - 5 - 1, "four blocks of the prompt are shared"
    engine_.drop("a")
    assert engine_.free == 40 - 5
    engine_.drop("b")
    assert engine_.free == 40
