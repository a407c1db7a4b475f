"""Runs on an engine with a cache of KV or of adapters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.errors import ConfigError
from headway.policy.apps.demand import SHARED, Knowledge
from headway.policy.apps.graph import LLM
from headway.policy.apps.prewarming import PrewarmOptions
from headway.policy.apps.runs import RankOptions
from headway.policy.recipes.hermes import variant
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.prefix import Prefix
from headway.simulate.cache_policy import Lru, Policy, Prewarmed, WaitingQueue
from headway.simulate.outcome import Observer
from headway.simulate.replay import Replayed, replay
from headway.simulate.warm_engines import AdapterEngine, Adapters, KvCache, WarmEngine
from headway.simulate.workload.application_models import generated
from headway.simulate.workload.applications import (
    Applications,
    AppRun,
    Step,
    applications,
    draw,
    graphs_of,
    templates,
    with_prefixes,
)
from headway.stages import Resource
from tests.simulate.machines import machine

EACH = 0.1  # seconds of an iteration of up to 256 tokens
MACHINE = replace(machine("e0", each=EACH, running=8), copy_seconds=1e-3)


def llm(unit: str, *lengths: tuple[int, int]) -> Step:
    return Step(unit, LLM, lengths)


def apps_of(*runs: tuple[Step, ...], at: tuple[float, ...] = ()) -> Applications:
    some = [AppRun("app", steps) for steps in runs]
    apps = applications(some, np.array(at or np.zeros(len(runs)), float), "default")
    return with_prefixes(apps, templates(some))


def kv(policy: Policy, tokens: int = 10_000, load: float = 0.0) -> KvCache:
    return KvCache(policy, tokens, load)


def done(
    apps: Applications, cache: KvCache | Adapters, recipe: Recipe | None = None, observer: Observer | None = None
) -> tuple[Replayed, WarmEngine]:
    replayed = replay(recipe or find("vllm"), [MACHINE], apps, cache=cache, observer=observer)
    assert replayed.engine is not None
    return replayed, replayed.engine


def test_the_prompts_of_a_loop_are_one_conversation_and_others_are_not() -> None:
    loop = (llm("a", (100, 5)), Step("t", "env", seconds=1.0), llm("a", (120, 5)), llm("a", (50, 5)))
    wide = (llm("b", (80, 5), (90, 5)),)
    apps = apps_of(loop, wide)
    chains = [apps.workload.request(row).prefix for row in range(5)]
    a, b = Prefix("app/a", 50), Prefix("app/b", 80)
    assert [one.parent for one in chains if one is not None] == [a, a, a, b, b]
    names = [one.id for one in chains if one is not None]
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_what_is_found_is_copied_and_the_rest_is_computed() -> None:
    # Alone: an iteration per 256 tokens of prompt; found are the template and the conversation, 505 tokens.
    talk = (llm("a", (500, 5)), llm("a", (600, 1)))
    cold = replay(find("vllm"), [MACHINE], apps_of(talk)).end[0]
    replayed, engine = done(apps_of(talk), kv(Lru()))
    assert cold == pytest.approx(0.6 + 0.3)
    assert replayed.end[0] == pytest.approx(0.6 + 0.1 + 505e-3)
    assert (engine.admitted, engine.hits, engine.hit_tokens) == (2, 1, 505)
    assert engine.prompt_tokens == 1100


def test_templates_are_found_by_other_runs_and_conversations_end_with_theirs() -> None:
    apps = apps_of((llm("a", (100, 5)),), (llm("a", (140, 5)),), at=(0.0, 5.0))
    _, engine = done(apps, kv(Lru()))
    assert (engine.hits, engine.hit_tokens) == (1, 100)
    assert set(engine.cache.items) == {"app/a"}


def test_a_full_cache_loses_the_conversation_unless_it_is_waited_for() -> None:
    pause = Step("t", "env", seconds=30.0)
    talk = (llm("a", (300, 10)), pause, llm("a", (400, 5)))
    others = [(llm("b", (350, 10)), Step("t", "env", seconds=99.0)) for _ in range(3)]
    apps = apps_of(talk, *others, at=(0.0, 5.0, 10.0, 15.0))
    _, engine = done(apps, kv(Lru(), 650))
    assert engine.hits == 2  # the template of b
    _, roomy = done(apps, kv(Lru(), 7000))
    assert roomy.hits == 3


def test_prewarming_brings_back_what_the_next_unit_needs() -> None:
    pause = Step("t", "env", seconds=30.0)
    talk = (llm("a", (300, 10)), pause, llm("a", (400, 5)))
    others = [(llm("b", (350, 10)), Step("t", "env", seconds=99.0)) for _ in range(3)]
    apps = apps_of(talk, *others, at=(0.0, 5.0, 10.0, 15.0))
    known = Knowledge(learns=False)
    for graph in graphs_of(apps.runs[:1] * 30).values():
        known.put(SHARED, graph)
    options = PrewarmOptions(kinds=frozenset({"prefix"}))
    recipe = variant("hermes", "", RankOptions(), known, prewarm=options)
    hits = []
    for policy in (Lru(), WaitingQueue(), Prewarmed()):
        without = variant("hermes", "", RankOptions(), known, prewarm=PrewarmOptions(kinds=frozenset()))
        _, engine = done(apps, kv(policy, 650, 1e-3), recipe if isinstance(policy, Prewarmed) else without)
        hits.append(engine.hits)
    assert hits == [2, 2, 3]


def adapted(apps: Applications, *names: str) -> Applications:
    return replace(apps, adapters=names)


def test_an_adapter_is_loaded_once_and_stops_the_iteration_that_needs_it() -> None:
    apps = adapted(apps_of((llm("a", (10, 3)), llm("a", (20, 2)))), "x")
    replayed, engine = done(apps, Adapters(Lru(), 1, 2, load_seconds=2.0, copy_seconds=0.5))
    assert replayed.end[0] == pytest.approx(0.5 + 2.5)
    assert (engine.admitted, engine.hits) == (2, 1)


def test_the_adapter_of_a_run_in_progress_stays_and_that_of_an_ended_one_goes() -> None:
    talk = (llm("a", (10, 3)), Step("t", "env", seconds=30.0), llm("a", (20, 2)))
    others = [(llm("b", (10, 40)),) for _ in range(3)]
    apps = adapted(apps_of(talk, *others, at=(0.0, 5.0, 5.0, 5.0)), "x", "y", "z", "w")
    seen = {}
    for policy in (Lru(), WaitingQueue(), Prewarmed()):
        _, engine = done(apps, Adapters(policy, 1, 2, load_seconds=1.0, copy_seconds=0.0))
        assert engine.admitted == 5
        seen[type(policy).__name__] = engine.hits
    assert seen == {"Lru": 0, "WaitingQueue": 2, "Prewarmed": 1}  # z and w, or x


class Batches(Observer):
    """Keeps the adapters of each batch."""

    def __init__(self) -> None:
        self.adapters: list[set[str]] = []

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        assert isinstance(engine, AdapterEngine)
        self.adapters.append({name for row in ran.rows.tolist() for name in engine._at[row].needs})


def test_a_batch_has_no_more_adapters_than_slots() -> None:
    runs = [(llm("a", (10, 20)),) for _ in range(6)]
    apps, batches = adapted(apps_of(*runs), "x", "y", "x", "z", "x", "y"), Batches()
    replayed, _ = done(apps, Adapters(Lru(), 2, 3, 0.0, 0.0), observer=batches)
    seen = batches.adapters
    assert max(map(len, seen)) == 2
    assert {"x", "y"} in seen
    assert np.isfinite(replayed.end).all()


@pytest.mark.parametrize("policy", [Lru(), WaitingQueue(), Prewarmed()])
def test_every_run_ends_and_the_same_seed_gives_the_same(policy: Policy) -> None:
    rng = np.random.default_rng(0)
    pool = generated(20, rng)
    pool.pop("DM")
    runs = draw(pool, 20, rng)
    arrival = np.sort(rng.uniform(0, 40, 20))
    apps = with_prefixes(applications(runs, arrival, "default"), templates(runs))
    names = tuple(f"l{i}" for i in rng.integers(0, 8, 20).tolist())
    known = Knowledge(learns=False)
    for graph in graphs_of(runs).values():
        known.put(SHARED, graph)
    recipe = variant("hermes", "", RankOptions(), known)
    roomy = replace(machine("e0", each=0.02, running=8, blocks=600, longest=8192), copy_seconds=1e-5)
    for cache, work in ((kv(policy, 4000, 1e-4), apps), (Adapters(policy, 2, 3, 0.3, 0.01), adapted(apps, *names))):
        first, again = (replay(recipe, [roomy], work, cache=cache) for _ in range(2))
        assert np.isfinite(first.end).all()
        assert (first.end == again.end).all()
        assert first.engine is not None
        assert 0 < first.engine.hits <= first.engine.admitted == len(work.workload)
        assert not any(item.held for item in first.engine.cache.items.values())


def test_what_cannot_be_simulated_is_refused() -> None:
    apps = apps_of((llm("a", (10, 3)),))
    with pytest.raises(ConfigError, match="on one instance"):
        replay(find("vllm"), [MACHINE, machine("e1")], apps, cache=kv(Lru()))
    with pytest.raises(ConfigError, match="10 adapters on the device"):
        replay(find("vllm"), [MACHINE], apps, cache=Adapters(Lru(), 10, 5, 0.0, 0.0))
    with pytest.raises(ConfigError, match="do not swap"):
        replay(find("vllm"), [replace(MACHINE, prefix_caching=True)], apps, cache=kv(Lru()))
    plain = applications(apps.runs, apps.arrival, "default")
    with pytest.raises(ConfigError, match="what it shares"):
        replay(find("vllm"), [MACHINE], plain, cache=kv(Lru()))


def test_what_is_to_be_warmed_is_known_by_unit_and_run() -> None:
    _, engine = done(apps_of((llm("a", (100, 5)),)), kv(Prewarmed()))
    assert engine.warm(Resource("prefix", "app/a"), "0", 9.0, 10.0) == 0  # it is there
    assert engine.warm(Resource("prefix", "app/none"), "0", 9.0, 10.0) == 0
    assert engine.warm(Resource("adapter", "x"), "0", 9.0, 10.0) == 0
