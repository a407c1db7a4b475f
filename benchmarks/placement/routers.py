"""Other routers, from their public descriptions; each forwards a request to an engine when it arrives.

All see what Headway's own index knows of the engines' caches, which is more than some of them have.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from benchmarks.experiment import Result, experiment
from headway.events import Arrived, Event, Returned
from headway.policy.core.cluster import Cluster
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack import ranked
from headway.policy.pack.promises.packer import Promises
from headway.policy.placement.index import PrefixIndex
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer, Planner
from headway.prefix import GRAIN, CacheReport, prompt_seed, token_keys
from headway.types import Ints, Plan, Request, Send
from headway.whatif.output.results import Ask, Row

_PROMPT = 32_768  # tokens
_ENGINES, _BLOCKS = 64, 8192  # engines, and blocks that each holds
_SOME = 512  # blocks of a report


@experiment("placement-index", "sim", "The index of prefix caches")
def main(ask: Ask) -> Result:
    """Measure one process; half of the engines hold a part of the prompt that is looked up."""
    rng = np.random.default_rng(ask.seed)
    keys = token_keys(rng.integers(0, 30_000, _PROMPT).tolist(), prompt_seed(None, None))
    index, size = _filled(keys, rng)
    rows = [
        ("index.bytes", size / (_ENGINES * _BLOCKS), "bytes/block", f"{_ENGINES} engines of {_BLOCKS} blocks"),
        ("index.lookup_us", _lookup(index, keys), "us", f"{_PROMPT} tokens, {_ENGINES} engines"),
        ("index.keys_ms", _hashing(rng), "ms", f"{_PROMPT} tokens"),
        ("index.events_per_s", _events(index, rng), "1/s", f"reports of {_SOME} blocks"),
    ]
    found = [Row(id, "headway", setting, value, unit) for id, value, unit, setting in rows]
    return Result(found, f"one core; a prompt of {_PROMPT} tokens is half of what an engine with it holds at most")


def _filled(keys: Ints, rng: np.random.Generator) -> tuple[PrefixIndex, int]:
    """Return an index, and the bytes that it takes."""
    reports = []
    for engine in range(_ENGINES):
        held = keys[: rng.integers(1, keys.size)] if engine % 2 else keys[:0]
        more = rng.integers(1, 1 << 62, _BLOCKS - held.size)
        reports.append(CacheReport("a", 0, 1, np.concatenate([held, more]).tobytes(), whole=True))
    tracemalloc.start()
    index = PrefixIndex()
    for engine, report in enumerate(reports):
        index.add(f"e{engine}", _BLOCKS, GRAIN)
        index.report(f"e{engine}", report)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return index, size


def _lookup(index: PrefixIndex, keys: Ints) -> float:
    names, times = [f"e{engine}" for engine in range(_ENGINES)], list[float]()
    for _ in range(200):
        began = time.perf_counter()
        for name in names:
            index.tokens(name, keys)
        times.append(time.perf_counter() - began)
    return 1e6 * float(np.median(times))


def _hashing(rng: np.random.Generator) -> float:
    ids, times = rng.integers(0, 30_000, _PROMPT).tolist(), list[float]()
    for _ in range(20):
        began = time.perf_counter()
        token_keys(ids, b"seed")
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times))


def _events(index: PrefixIndex, rng: np.random.Generator) -> float:
    """Return the blocks taken in and given up per second."""
    before, until, count = rng.integers(1, 1 << 62, _SOME).tobytes(), 1, 0
    began = time.perf_counter()
    while time.perf_counter() < began + 1.0:
        added = rng.integers(1, 1 << 62, _SOME).tobytes()
        index.report("e0", CacheReport("a", until, until + 1, added, before))
        before, until, count = added, until + 1, count + 2 * _SOME
    return count / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a router knows of one engine when a request comes.

    requests: inside it. waiting: of those without a first token. found: tokens of the prompt in its cache.
    prompts: tokens of prompts that are not computed yet. context: tokens of all requests inside.
    kv: tokens that its KV holds.
    """

    requests: int
    waiting: int
    found: int
    prompts: float
    context: float
    kv: int


Choice = Callable[[Request, Sequence[Seen]], int]


class Forward(Planner):
    """Sends each request at once to the engine that `choice` names."""

    def __init__(self, choice: Choice) -> None:
        self._choice, self._new = choice, list[Request]()

    @property
    def pull(self) -> bool:
        """Requests wait inside the engines."""
        return False

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Note what is to be sent."""
        match event:
            case Arrived(request):
                self._new.append(request)
            case Returned(id):
                raise NotImplementedError(f"{id} came back: engines do not fail here")

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the engines of what has come."""
        names, out = list(cluster.instances), list[Send]()
        for request in self._new:
            seen = [_seen(cluster, name, request) for name in names]
            out.append(Send(request.id, names[self._choice(request, seen)]))
        self._new.clear()
        return Plan(out, final=True)


def _seen(cluster: Cluster, name: str, request: Request) -> Seen:
    backlog, rows = cluster.backlog, cluster.inside(name).rows
    instance, pending = cluster.instances[name], backlog.pending[rows]
    prompt = backlog.prompt[rows]
    return Seen(
        rows.size,
        int(pending.sum()),
        cluster.placement.found(request.id, name, request.prompt_tokens),
        float(prompt[pending].sum()),
        float(prompt.sum()),
        instance.blocks_total * instance.block_size,
    )


def _least(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, request: Request, seen: Sequence[Seen]) -> int:
        self._turn += 1
        return self._turn % len(seen)


def least_loaded(request: Request, seen: Sequence[Seen]) -> int:
    """The engine with the fewest requests."""
    return _least([one.requests for one in seen])


def session(request: Request, seen: Sequence[Seen]) -> int:
    """The engine that a hash of the run's or the conversation's name gives (as with a session header)."""
    name = request.prefix.id if request.prefix is not None else request.id
    name = request.stage.run if request.stage is not None else name
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % len(seen)


def sglang(request: Request, seen: Sequence[Seen]) -> int:
    """SGLang's and vLLM's router, `cache_aware`, with its defaults.

    The longest match, if that is more than 0.3 of the prompt, else the engine with the fewest requests; that
    one also once the most loaded has over 64 requests more than the least loaded, and 1.5 times as many.
    """
    load = [one.requests for one in seen]
    if max(load) - min(load) > 64 and max(load) > 1.5 * min(load):
        return _least(load)
    best = max(range(len(seen)), key=lambda i: (seen[i].found, -load[i]))
    return best if seen[best].found > 0.3 * request.prompt_tokens else _least(load)


def llm_d(request: Request, seen: Sequence[Seen]) -> int:
    """llm-d's scheduler: the highest sum of scores from 0 to 1, prefix match 3, queue 2, free KV 2."""
    waiting = [one.waiting for one in seen]
    low, high = min(waiting), max(waiting)

    def score(i: int) -> float:
        queue = 1.0 if high == low else (high - waiting[i]) / (high - low)
        used = min(seen[i].context / seen[i].kv, 1.0)
        return 3 * seen[i].found / request.prompt_tokens + 2 * queue + 2 * (1 - used)

    return _least([-score(i) for i in range(len(seen))])


def dynamo(request: Request, seen: Sequence[Seen]) -> int:
    """Dynamo's router: the fewest blocks to compute, with those that wait there, plus blocks in use."""
    new = [request.prompt_tokens - one.found for one in seen]
    prompts = [one.prompts + more for one, more in zip(seen, new, strict=True)]
    blocks = [(waits + one.context + request.prompt_tokens) / GRAIN for one, waits in zip(seen, prompts, strict=True)]
    return _least(blocks)


CHOICES: Mapping[str, Callable[[], Choice]] = {
    "round-robin": RoundRobin,
    "session": lambda: session,
    "least-loaded": lambda: least_loaded,
    "sglang": lambda: sglang,
    "llm-d": lambda: llm_d,
    "dynamo": lambda: dynamo,
}


def _stock(spec: EngineSpec) -> Packer:
    return ranked.Fcfs(spec.max_running)


def _by_priority(spec: EngineSpec) -> Packer:
    return ranked.StockPriority(spec.max_running)


_PACKERS: Mapping[str, Callable[[EngineSpec], Packer]] = {"": _stock, "priority": _by_priority, "packer": Promises}
NAMES = tuple(f"{rule}+{more}" if more else rule for more in _PACKERS for rule in CHOICES)


def recipe(name: str) -> Recipe:
    """Return a router, one of `NAMES`.

    Stock vLLM is inside the engines, with its priority policy ("llm-d+priority"), or Headway's packer ("llm-d+packer").
    """
    rule, _, more = name.partition("+")
    about = f"{rule} in front of {more or 'stock vLLM'}"
    return Recipe(name, about, lambda: Forward(CHOICES[rule]()), _PACKERS[more])
