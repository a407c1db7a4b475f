"""Simulated engines in front of which something is cached: KV in host memory, or LoRA adapters (Hermes 5.4).

Both count a hit where a request finds what it needs when it is admitted. A `ReplayLoop` tells them of
requests when these come, also while they wait in the planner, of runs that end, and of what is to be
prewarmed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headway.engines.simulated.engine import Done, Ran, SimulatedEngine
from headway.errors import ConfigError
from headway.policy.memory.budget import KvBudget
from headway.ports import Packer
from headway.simulate.cache_policy import Cache, Lru, Policy
from headway.stages import Resource
from headway.types import Bools, Ints, Jobs, Request, Step


@dataclass(frozen=True, slots=True)
class KvCache:
    """Host memory for KV with a disk behind it.

    tokens: that it holds. load_seconds: to read the KV of one token from the disk.
    """

    policy: Policy
    tokens: int
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters on a disk, in host memory and on the device; each takes one slot.

    slots: on the device (vLLM's max-loras). host: in host memory, those on the device among them
    (max-cpu-loras). load_seconds: from the disk. copy_seconds: from host memory.
    """

    policy: Policy
    slots: int
    host: int
    load_seconds: float
    copy_seconds: float


@dataclass(slots=True)
class _Entry:
    """A request, from its arrival to its end.

    needs: names that it needs. counted: it was admitted before.
    held: names that it holds. found: tokens of its prompt whose KV was found.
    """

    request: Request
    needs: tuple[str, ...]
    counted: bool = False
    output: int = 0
    held: list[str] = field(default_factory=list)
    found: int = 0


class WarmEngine(SimulatedEngine, ABC):
    """A simulated engine with a cache.

    cache: what it holds. admitted: requests so far. hits: those of them that found all that they needed.
    turns, turn_hits: those that went on with a conversation, and found all of it.
    prompt_tokens, hit_tokens: of their prompts, and those whose KV was found.
    rank: of a request that is in the planner (`Planner.rank`).
    """

    cache: Cache

    def __init__(self, packer: Packer, **limits: Any) -> None:
        super().__init__(packer, **limits)
        self.rank: Callable[[str], float] = lambda id: 0.0
        self.admitted = self.hits = self.prompt_tokens = self.hit_tokens = self.turns = self.turn_hits = 0
        self._entries: dict[str, _Entry] = {}
        self._at: dict[int, _Entry] = {}

    def arrived(self, request: Request) -> None:
        """A request comes to the planner."""
        self._entries[request.id] = _Entry(request, self._needs(request))

    def follow(self, now: float) -> None:
        """Tell the cache what waiting requests need: first those inside, then those in the planner."""
        if not self.cache.policy.queue:
            return
        jobs = self.jobs
        rows = jobs.rows()
        rows = rows[~jobs.running[rows]]
        inside = rows[np.lexsort((jobs.serial[rows], jobs.urgency[rows]))].tolist()
        outside = [one for id, one in self._entries.items() if id not in jobs.row_of]
        outside.sort(key=lambda one: self.rank(one.request.id))
        waiting = [*(self._at[row] for row in inside), *outside]
        self.cache.follow((name for one in waiting for name in one.needs), now)

    def warm(self, resource: Resource, run: str, now: float, until: float) -> float:
        """Have a resource ready for a run that is expected to need it; return the seconds of loading."""
        names = self._names(resource, run)
        return max((self.cache.warm(name, now, until) for name in names), default=0.0)

    def run_ended(self, run: str) -> None:
        """A run has ended."""

    def add(self, id: str, prompt: int, output: int, **more: Any) -> int:
        row = super().add(id, prompt, output, **more)
        self._at[row] = self._entries[id]
        self._at[row].output = output
        return row

    def drop(self, id: str) -> None:
        self._at.pop(self.jobs.row_of[id])
        super().drop(id)
        self._forget(self._entries.pop(id))

    def schedule(self, now: float) -> Ran:
        """Decide on one iteration with what is cached now."""
        self.follow(now)
        self._look_up(now)
        ran = super().schedule(now)
        for row in ran.evicted.tolist():
            self._forget(self._at[row])
        entries = [self._at[row] for row in ran.rows[ran.rows.size - ran.admitted :].tolist()]
        for entry in entries:
            if not entry.counted:
                entry.counted = True
                self._count(entry, now)
        self._admit(entries, now)
        return ran

    def complete(self, ran: Ran, now: float) -> Done:
        done = super().complete(ran, now)
        for row in ran.rows[~self.jobs.live[ran.rows]].tolist():
            entry = self._at.pop(row)
            del self._entries[entry.request.id]
            self._forget(entry)
            self._keep(entry, now)
        return done

    def _forget(self, entry: _Entry) -> None:
        """End what an entry holds."""
        for name in entry.held:
            self._release(name)
        entry.held = []

    def _release(self, name: str) -> None:
        self.cache.release(name)

    def _count(self, entry: _Entry, now: float) -> None:
        """Count a request that is admitted for the first time."""
        self.admitted += 1
        self.hits += self._hit(entry, now)
        self.prompt_tokens += entry.request.prompt_tokens
        self.hit_tokens += entry.found

    @abstractmethod
    def _needs(self, request: Request) -> tuple[str, ...]:
        """Return the names that a request needs."""

    @abstractmethod
    def _names(self, resource: Resource, run: str) -> Sequence[str]:
        """Return the names that a resource of a run stands for."""

    @abstractmethod
    def _hit(self, entry: _Entry, now: float) -> bool:
        """Tell whether a request that is admitted now finds all that it needs."""

    def _look_up(self, now: float) -> None:
        """Prepare waiting rows."""

    @abstractmethod
    def _admit(self, entries: Sequence[_Entry], now: float) -> None:
        """Let requests hold what they need."""

    def _keep(self, entry: _Entry, now: float) -> None:
        """Keep what a request that has ended leaves behind."""


class KvCacheEngine(WarmEngine):
    """An engine with KV in host memory (`KvCache`).

    A request needs its unit's template and, where its run has had it before, its conversation. Tokens of
    which the KV is found are copied to the device, in the iteration that admits the request; the others are
    computed, which takes less time than to read them from the disk. The KV of every request is kept when it
    ends. Device memory holds the KV of requests in progress only, and each request's for itself.
    """

    def __init__(self, packer: Packer, kv: KvCache, **limits: Any) -> None:
        super().__init__(packer, **limits)
        self.cache = Cache(kv.policy, kv.tokens, kv.load_seconds)
        self._chains: dict[str, dict[str, str]] = {}  # by run: its latest chain, by template
        self._of_run: dict[str, set[str]] = {}  # all chains of a run

    def run_ended(self, run: str) -> None:
        """Forget a run's KV: no later run asks for it."""
        self._chains.pop(run, None)
        for name in self._of_run.pop(run, ()):
            self.cache.drop(name)

    def _count(self, entry: _Entry, now: float) -> None:
        super()._count(entry, now)
        if entry.needs[1] in self.cache.stored:
            self.turns += 1
            self.turn_hits += self._hit(entry, now)

    def _needs(self, request: Request) -> tuple[str, ...]:
        prefix, stage = request.prefix, request.stage
        if prefix is None or prefix.parent is None or stage is None:
            raise ConfigError(
                f"Request {request.id} does not say what it shares.", "Give the runs prefixes (`with_prefixes`)."
            )
        self._chains.setdefault(stage.run, {})[prefix.parent.id] = prefix.id
        self._of_run.setdefault(stage.run, set()).add(prefix.id)
        return prefix.parent.id, prefix.id

    def _names(self, resource: Resource, run: str) -> Sequence[str]:
        if resource.kind != "prefix":
            return ()
        chain = self._chains.get(run, {}).get(resource.name)
        return (resource.name,) if chain is None else (resource.name, chain)

    def _hit(self, entry: _Entry, now: float) -> bool:
        known = [self.cache.stored[name] for name in entry.needs if name in self.cache.stored]
        return bool(known) and entry.found >= min(sum(known), entry.request.prompt_tokens - 1)

    def _look_up(self, now: float) -> None:
        """Let waiting rows begin after what is found of their prompts, as if it had been swapped out."""
        jobs = self.jobs
        rows = jobs.rows()
        for row in rows[~jobs.running[rows]].tolist():
            entry, found = self._at[row], 0
            for name in entry.needs:
                if not self.cache.resident(name, now):
                    break
                found += int(self.cache.items[name].size)
            entry.found = min(found, entry.request.prompt_tokens - 1)
            jobs.computed[row] = jobs.saved[row] = entry.found

    def _admit(self, entries: Sequence[_Entry], now: float) -> None:
        for entry in entries:
            for name in entry.needs:
                if not self.cache.resident(name, now):
                    break
                self.cache.take(name, now)
                entry.held.append(name)
        for entry in entries:  # templates that this iteration computes: now the others may have to leave
            parent = None if entry.request.prefix is None else entry.request.prefix.parent
            if not entry.held and parent is not None and self.cache.put(parent.id, parent.tokens, now):
                self.cache.take(parent.id, now)
                entry.held.append(parent.id)

    def _keep(self, entry: _Entry, now: float) -> None:
        prefix, request = entry.request.prefix, entry.request
        assert prefix is not None
        assert prefix.parent is not None
        self.cache.put(prefix.id, request.prompt_tokens + entry.output - prefix.parent.tokens, now)


class AdapterEngine(WarmEngine):
    """An engine with LoRA adapters (`Adapters`).

    As in vLLM, a batch has at most `slots` adapters, waiting requests of others are passed over, and an
    iteration that needs an adapter begins when that is loaded. A hit: it was in host memory. What is on the
    device is the least recently used first to leave, whatever the policy. A run in progress is expected to
    need its adapter again, until it ends.
    """

    def __init__(self, packer: Packer, adapters: Adapters, **limits: Any) -> None:
        if not 0 < adapters.slots <= adapters.host:
            raise ConfigError(
                f"{adapters.slots} adapters on the device and {adapters.host} in host memory.",
                "Give 1 slot or more, and host memory for at least as many.",
            )
        super().__init__(_Limited(packer, self), **limits)
        self.slots, self.delay = adapters.slots, 0.0
        self.cache = Cache(adapters.policy, adapters.host, adapters.load_seconds)
        self._runs: dict[str, set[str]] = {}  # in progress that have used an adapter
        self.device = Cache(Lru(), adapters.slots, adapters.copy_seconds)

    def seconds(self, ran: Ran, execution: float) -> float:
        """Return the seconds of the iteration that was scheduled last, after its loads."""
        return super().seconds(ran, execution) + self.delay

    def run_ended(self, run: str) -> None:
        """What only this run needed may go."""
        for name in [name for name, runs in self._runs.items() if runs == {run}]:
            del self._runs[name]
            if name in self.cache.items:
                self.cache.items[name].until = -math.inf
        for runs in self._runs.values():
            runs.discard(run)

    def within(self, order: Ints) -> Bools:
        """Tell which rows of `order` run beside one another with at most `slots` adapters."""
        running = self.jobs.running[order]
        used = {name for row in order[running].tolist() for name in self._at[row].needs}
        fits: Bools = np.array(running)
        for i in np.flatnonzero(~running).tolist():
            needs = set(self._at[int(order[i])].needs)
            if len(used | needs) <= self.slots:
                used |= needs
                fits[i] = True
        return fits

    def _needs(self, request: Request) -> tuple[str, ...]:
        if request.adapter is None:
            return ()
        self.cache.stored[request.adapter] = 1.0
        return (request.adapter,)

    def _names(self, resource: Resource, run: str) -> Sequence[str]:
        return (resource.name,) if resource.kind == "adapter" else ()

    def _hit(self, entry: _Entry, now: float) -> bool:
        return all(self.cache.resident(name, now) for name in entry.needs)

    def _look_up(self, now: float) -> None:
        self.delay = 0.0

    def _admit(self, entries: Sequence[_Entry], now: float) -> None:
        loads, copies = 0.0, 0.0
        for entry in entries:
            for name in entry.needs:
                seconds = self.cache.load(name, now)
                assert seconds is not None, "running requests hold more adapters than fit"
                self.cache.take(name, max(self.cache.items[name].ready, now))
                loads = max(loads, seconds)
                if name not in self.device.items:
                    copies += self.device.rate
                    assert self.device.put(name, 1.0, now), "a batch has more adapters than slots"
                self.device.take(name, now)
                entry.held.append(name)
                if entry.request.stage is not None:
                    self._runs.setdefault(name, set()).add(entry.request.stage.run)
                    self.cache.items[name].until = math.inf
        self.delay = loads + copies

    def _release(self, name: str) -> None:
        super()._release(name)
        self.device.release(name)


class _Limited(Packer):
    """A packer whose steps have no more adapters than the engine has slots."""

    def __init__(self, packer: Packer, engine: AdapterEngine) -> None:
        self.packer, self.engine = packer, engine

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        step = self.packer.pack(jobs, kv_budget, now)
        fits = self.engine.within(step.order)
        tokens = None if step.tokens is None else step.tokens[fits]
        return replace(step, order=step.order[fits], tokens=tokens)


def around(engine: SimulatedEngine, cache: KvCache | Adapters) -> WarmEngine:
    """Return an empty engine like this one with a cache. ConfigError for packers that copy KV themselves."""
    use = engine.packer.kv
    if use.saves or use.reserves or use.two_ended or type(engine) is not SimulatedEngine:
        raise ConfigError(
            "Caches of KV or adapters are simulated with plain blocks and packers that do not swap only.",
            "Set prefix_caching = false, and use a recipe such as hermes or vllm.",
        )
    limits = engine.limits
    same: dict[str, Any] = {
        "blocks": engine.blocks,
        "size": limits.size,
        "slots": limits.slots,
        "budget": limits.budget,
        "max_model_len": limits.max_model_len,
        "copy_seconds": engine.copy_seconds,
    }
    if isinstance(cache, KvCache):
        return KvCacheEngine(engine.packer, cache, **same)
    return AdapterEngine(engine.packer, cache, **same)
