"""Hit ratios of KV and LoRA caches, and completion times with them (Hermes 5.4, figure 13), SIMULATED.

KV: host memory of 8, 16 and 32 GiB backed by a disk, 500 runs within 15 minutes; and one in which LRU finds about
45 %. LoRA: 10 adapters on the device, 20 in host memory, 200 on the disk, 1,000 runs within 25 minutes. All systems
schedule like `hermes`; they differ in the caches' policy (`simulate/cache_policy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment, refuse_unknown
from benchmarks.papers.hermes_plots import hit_ratios
from benchmarks.papers.hermes_workloads import (
    AUTHORS,
    GRAPHS,
    HERMES,
    HermesSetting,
    engines,
    knowledge,
    pool,
    source,
    workload,
)
from benchmarks.papers.quoted import quoted
from headway.policy.apps.prewarming import PrewarmOptions
from headway.policy.apps.runs import RankOptions
from headway.policy.recipes.hermes import variant
from headway.simulate.cache_policy import Lru, Policy, Prewarmed, WaitingQueue
from headway.simulate.replay import replay
from headway.simulate.warm_engines import Adapters, KvCache
from headway.simulate.workload.applications import templates, with_prefixes
from headway.types import Floats
from headway.whatif.output.results import SIMULATED, Ask, Row

POLICIES: Mapping[str, Callable[[], Policy]] = {"lru": Lru, "epwq": WaitingQueue, HERMES: Prewarmed}
NO_CACHE = "no-cache"
_TOKEN = 2 * 2 * 32 * 4096  # bytes of KV of a token: keys and values of 16 bits, 32 layers of Llama-2-7B
_DISK, _SLOW_DISK = 3e9, 1e8  # bytes per second: an NVMe disk, assumed; as Hermes' authors measured
_ADAPTERS = int(quoted(200, "hermes", "5.4", 227, "200 LoRA adapters"))
_ADAPTER_LOAD_S = 0.3  # from the disk: the margin of Hermes' published code for it
_ADAPTER_COPY_S = 16.8e6 / 15.5e9  # rank 8, four matrices per layer; over the bus, as fast as KV
_SMALL = ("KBQAV", "CC", "EV", "ALFWI")  # whose runs Hermes' published code draws for LoRA, and FEV's
_K = 0.5
_LORA, _ALL, _TIGHT = "LoRA", "LoRA, all applications", "KV 2.75 GiB"
# %: Hermes' largest gain in hit ratio over another policy, and its reduction of the mean ACT.
_KV_GAIN = {
    "lru": quoted(111.0, "hermes", "5.4", 225, "1.11 ×", 100),
    "epwq": quoted(33.0, "hermes", "5.4", 225, "0.33 ×", 100),
}
_ACT_LESS = {"lru": quoted(18.0, "hermes", "5.4", 225, "18%"), "epwq": quoted(6.0, "hermes", "5.4", 225, "6%")}
_LORA_GAIN = {"epwq": quoted(21.1, "hermes", "5.4", 227)}


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A cache with a workload.

    gib: host memory for KV; 0 = the LoRA cache. disk: bytes per second.
    """

    setting: HermesSetting
    gib: float = 0.0
    disk: float = _DISK

    @property
    def kind(self) -> str:
        """The kind of cache, as in the ids of rows."""
        return "kv" if self.gib else "lora"


@dataclass(frozen=True, slots=True)
class Cached:
    """One case with one policy. act: completion times, seconds. each: of every seed; the others count in the engine."""

    system: str
    case: CacheCase
    act: Floats
    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    loaded: float = 0.0
    wasted: float = 0.0
    turns: int = 0
    turn_hits: int = 0
    each: tuple[Cached, ...] = ()

    @property
    def hit_pct(self) -> float:
        """Requests that found everything they needed in the cache."""
        return 100 * self.hits / self.requests


def cases(*, quick: bool) -> list[CacheCase]:
    """Return the settings of figure 13, also on the authors' engine. quick: a fifth of the runs of three of them."""
    kv, lora = HermesSetting("", runs=500, window=900.0), HermesSetting(_LORA, runs=1000, window=1500.0, apps=_SMALL)
    if quick:
        kv, lora = replace(kv, runs=100, window=180.0), replace(lora, runs=200, window=300.0)
        every = [CacheCase(replace(kv, name="KV 8 GiB"), 8)]
        return [*every, CacheCase(lora), CacheCase(replace(lora, name=_ALL, apps=()))]
    every = [CacheCase(replace(kv, name=f"KV {gib} GiB"), gib) for gib in (8, 16, 32)]
    every += [
        CacheCase(replace(kv, name="KV 8 GiB, slow disk"), 8, _SLOW_DISK),
        CacheCase(replace(kv, name=_TIGHT), 2.75),
        CacheCase(replace(kv, name=f"{_TIGHT}, instant disk"), 2.75, math.inf),
        CacheCase(lora),
        CacheCase(replace(lora, name=_ALL, apps=())),
    ]
    theirs = [one for one in every if one.setting.name in ("KV 8 GiB", _TIGHT, _LORA, _ALL)]
    return [*every, *(replace(one, setting=_on_authors(one.setting)) for one in theirs)]


def _on_authors(setting: HermesSetting) -> HermesSetting:
    """Return a setting on the authors' engine; with FEV among the small applications, as in their code."""
    apps = (*setting.apps, "FEV") if setting.apps else ()
    return replace(setting, name=f"{setting.name}, authors' engine", engine=AUTHORS, apps=apps, published=True)


def run(
    some: Sequence[CacheCase],
    seeds: Sequence[int],
    *,
    bar: bool,
    serve: Callable[[str, CacheCase, int], Cached] | None = None,
) -> list[Cached]:
    """Run every case with every policy, and the first case without a cache; merge the seeds.

    serve: runs a case with a policy and a seed, None = simulates it.
    """
    serve = serve or _serve
    jobs = [(NO_CACHE, some[0]), *((system, case) for case in some for system in POLICIES)]
    shown = track(jobs, "simulating", disable=not bar)
    return [_together([serve(system, case, seed) for seed in seeds]) for system, case in shown]


def rows(results: Sequence[Cached]) -> list[Row]:
    """Return hit ratios, waste and completion times, and hermes against the others."""
    out = []
    for one in results:
        name = one.case.setting.name
        if one.requests:
            out += _shares(one)
        out.append(Row("act.mean", one.system, name, float(one.act.mean()), "s"))
    for kind, gains in (("kv", _KV_GAIN), ("lora", _LORA_GAIN)):
        for system in ("lru", "epwq"):
            theirs = [one for one in results if (one.system, one.case.kind) == (system, kind)]
            pairs = [(_of(results, HERMES, one.case), one) for one in theirs]
            papers = [pair for pair in pairs if _is_the_papers(pair[0].case)]
            groups = [(kind, papers)] if papers else []
            groups += [(mine.case.setting.name, [(mine, one)]) for mine, one in pairs]
            for name, some in groups:
                paper = gains.get(system) if name in (kind, f"{_LORA}, authors' engine") else None
                most = f"{name}, at most, against {system}" if name == kind else f"{name}, against {system}"
                out += _interval(f"{kind}.hit.gain_pct", most, some, _most_gain, paper)
                out += _interval(f"{kind}.hit.gain_pct.bound", most, some, _possible_gain, None)
                paper = _ACT_LESS[system] if kind == "kv" and name == kind else None
                out += _interval("act.mean.reduction_pct", f"{name}, against {system}", some, _less, paper)
    return out


Pairs = Sequence[tuple[Cached, Cached]]


def _most_gain(pairs: Pairs) -> float:
    return max(100 * (mine.hit_pct / one.hit_pct - 1) for mine, one in pairs)


def _possible_gain(pairs: Pairs) -> float:
    """Return the largest gain in hits, %, of a policy that finds everything."""
    return max(100 * (100 / one.hit_pct - 1) for _, one in pairs)


def _less(pairs: Pairs) -> float:
    return float(100 * (1 - sum(m.act.mean() for m, _ in pairs) / sum(o.act.mean() for _, o in pairs)))


def _interval(id: str, setting: str, pairs: Pairs, figure: Callable[[Pairs], float], paper: float | None) -> list[Row]:
    """Return a figure of hermes against another policy over all seeds and, of several, the extremes of one."""
    found = [Row(id, HERMES, setting, figure(pairs), "%", paper)]
    seeds = [[(mine.each[i], one.each[i]) for mine, one in pairs] for i in range(len(pairs[0][0].each))]
    if len(seeds) > 1:
        each = [figure(some) for some in seeds]
        found += [
            Row(f"{id}.least", HERMES, setting, min(each), "%"),
            Row(f"{id}.most", HERMES, setting, max(each), "%"),
        ]
    return found


@experiment("papers hermes-caches", "sim", f"Hermes, caches of KV and LoRA adapters ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = (), seeds: int | None = None) -> Result:
    """Run figure 13 alone. `quick`: a fifth of the runs of three settings, one seed.

    only: kinds of caches; () = all. seeds: per setting.
    """
    refuse_unknown("part", only, ("kv", "lora"))
    some = [one for one in cases(quick=ask.quick) if not only or one.kind in only]
    numbers = range(ask.seed, ask.seed + (seeds or (1 if ask.quick else 10)))
    results = run(some, numbers, bar=not ask.as_json)
    text = (
        f"{SIMULATED}: {source()}; caches in front of one engine (Llama-2-7B on an A100, KV for 40,000 "
        f"tokens); authors' engine: iterations as in the log that Hermes' authors published, and the weights and "
        f"applications of their code; {len(numbers)} seed(s), figures over all of their runs (.least, .most: of one)."
    )
    return Result(rows(results), text, lambda: pictures(results))


def pictures(results: Sequence[Cached]) -> Mapping[str, bytes]:
    """Return {name: PNG} of figure 13, without the authors' engine."""
    drawn = [one for one in results if one.requests and one.case.setting.engine != AUTHORS]
    hits = {(one.system, one.case.setting.name): one.hit_pct for one in drawn}
    return {"hermes-caches": hit_ratios(hits)}


def _serve(system: str, case: CacheCase, seed: int) -> Cached:
    apps, _ = workload(case.setting, seed)
    rng = np.random.default_rng([seed, 1])
    if case.gib:
        runs = [run for half in pool(published=case.setting.published) for some in half.values() for run in some]
        apps = with_prefixes(apps, templates(runs))
    else:
        names = tuple(f"adapter {number}" for number in rng.integers(0, _ADAPTERS, len(apps)).tolist())
        apps = replace(apps, adapters=names)
    warmed = frozenset({"prefix", "adapter"}) if system == HERMES else frozenset[str]()
    prewarm = PrewarmOptions(default=_K, kinds=warmed)
    recipe = variant(
        HERMES, HERMES, RankOptions(), knowledge(GRAPHS[0], published=case.setting.published), prewarm=prewarm
    )
    cache = None if system == NO_CACHE else _cache(case, POLICIES[system]())
    replayed = replay(recipe, engines(case.setting.engine), apps, cache=cache)
    act, engine = replayed.end - apps.arrival, replayed.engine
    if engine is None:
        return Cached(system, case, act)
    return Cached(
        system,
        case,
        act,
        engine.admitted,
        engine.hits,
        engine.prompt_tokens,
        engine.hit_tokens,
        engine.cache.loaded,
        engine.cache.wasted,
        engine.turns,
        engine.turn_hits,
    )


def _cache(case: CacheCase, policy: Policy) -> KvCache | Adapters:
    if case.gib:
        return KvCache(policy, int(case.gib * 2**30) // _TOKEN, _TOKEN / case.disk)
    return Adapters(policy, 10, 20, _ADAPTER_LOAD_S, _ADAPTER_COPY_S)


def _together(some: Sequence[Cached]) -> Cached:
    """Return the results of all seeds as one."""
    names = ("requests", "hits", "turns", "turn_hits", "prompt_tokens", "hit_tokens", "loaded", "wasted")
    sums = {name: sum(getattr(one, name) for one in some) for name in names}
    return replace(some[0], act=np.concatenate([one.act for one in some]), each=tuple(some), **sums)


def _shares(one: Cached) -> list[Row]:
    name, kind = one.case.setting.name, one.case.kind
    found = [Row(f"{kind}.hit_pct", one.system, name, one.hit_pct, "%")]
    if kind == "kv":
        tokens = 100 * one.hit_tokens / one.prompt_tokens
        found.append(Row("kv.tokens_hit_pct", one.system, name, tokens, "%"))
        if one.turns:
            turns = 100 * one.turn_hits / one.turns
            found.append(Row("kv.conversation_hit_pct", one.system, name, turns, "%"))
    if one.loaded:
        found.append(Row(f"{kind}.waste_pct", one.system, name, 100 * one.wasted / one.loaded, "%"))
    return found


def _is_the_papers(case: CacheCase) -> bool:
    """Return True if the paper has figures for this case."""
    if case.setting.engine == AUTHORS:
        return False
    return case.disk == _DISK and case.setting.name != _TIGHT if case.gib else bool(case.setting.apps)


def _of(results: Sequence[Cached], system: str, case: CacheCase) -> Cached:
    return next(one for one in results if (one.system, one.case) == (system, case))
