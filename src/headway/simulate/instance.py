"""One simulated instance: an engine in virtual time, the models it can load, the host memory for weights.

An instance serves one model at a time. It loads another from disk (cold) or from host memory (warm), which
keeps the models loaded before as far as they fit, the least recently used going first (QLM 5).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.engines.simulated.two_ended import HostPoolEngine, TwoEndedEngine
from headway.errors import ConfigError
from headway.policy.apps.run import number_of
from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.plan.estimator import load_seconds
from headway.policy.recipes.recipe import Recipe
from headway.ports import LatencyModel, Packer
from headway.simulate.event_queue import Timer
from headway.types import Instance, Loadable, Progress, Request


@dataclass(frozen=True, slots=True)
class Load:
    """The cost of loading a model.

    cold_s: seconds from disk.
    warm_s: seconds from host memory.
    bytes: of its weights.
    in_place_of: models whose weights it replaces in the running engine.
    in_place_s: seconds of that from host memory; reading from disk adds as much as to `warm_s`.
    """

    cold_s: float
    warm_s: float
    bytes: int
    in_place_of: frozenset[str] = frozenset()
    in_place_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What is simulated as one instance.

    instance: what the controller is told about it.
    latency: seconds of an iteration.
    slots: requests that may hold KV.
    budget: tokens per iteration.
    copy_seconds: to move one token's KV between device and host.
    load: cost of loading its model; needed, as in `others`, where models are swapped.
    others: this instance as it is with another model loaded.
    host_bytes: host memory for weights.
    request_overhead: seconds from a request's sending to its submission (HTTP, tokenisation).
    token_overhead: seconds from the end of an iteration to the client (detokenisation, streaming).
    interruption: seconds that each request sent adds to the iteration in progress, where gateway and engine
        share cores.
    latency_error: factor of the seconds that the packer's latency model is taught, for studies of wrong ones.
    host_tokens: tokens of KV that host memory has room for; None = unlimited, and blocks are plain.
    start_s: seconds from its start until it serves, where it is started in the run.
    mtbf_s: mean seconds until it fails, at a random time; it starts again.
    prefix_caching: blocks that requests share by their `Prefix` are computed and held once (`loop.py` only).
    """

    instance: Instance
    latency: LatencyModel
    slots: int
    budget: int
    copy_seconds: float = 0.0
    load: Load | None = None
    others: tuple[InstanceSpec, ...] = ()
    host_bytes: int = 0
    request_overhead: float = 0.0
    token_overhead: float = 0.0
    interruption: float = 0.0
    host_tokens: int | None = None
    latency_error: float = 1.0
    prefix_caching: bool = False
    start_s: float = 60.0
    mtbf_s: float = math.inf

    @property
    def delays(self) -> bool:
        """Tell whether there is an overhead between clients and this engine."""
        return bool(self.request_overhead or self.token_overhead or self.interruption)

    def engine_spec(self, latency: OnlineLatency) -> EngineSpec:
        """Return what packers are told about this instance; every simulated engine keeps reservations."""
        instance = self.instance
        return EngineSpec(
            instance.max_running,
            self.budget,
            instance.block_size,
            instance.max_model_len,
            self.copy_seconds,
            self.host_tokens,
            two_ended=bool(self.host_tokens) and not self.prefix_caching,  # as in vLLM
            reservations=True,
            latency=latency,
        )

    def variants(self) -> dict[str, InstanceSpec]:
        """Return this instance by the model that it serves, its first one first."""
        return {variant.instance.model: variant for variant in (self, *self.others)}

    def limit(self, model: str) -> int:
        """Return the tokens of the longest request of a model that it can hold; 0 = it cannot load it."""
        variant = self.variants().get(model)
        return variant.instance.limit if variant is not None else 0


@dataclass(slots=True)
class HostMemory:
    """Weights in host memory, at most `size` bytes, the least recently used going first."""

    size: int
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def keep(self, model: str, bytes: int) -> None:
        """Keep a model as the most recently used one. One that is larger than the memory is not kept."""
        self.held.pop(model, None)
        if bytes > self.size:
            return
        while sum(self.held.values()) + bytes > self.size:
            self.held.popitem(last=False)
        self.held[model] = bytes


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that was taken out of an engine.

    output_tokens: made so far.
    first, last: instants of the first and of the newest of them.
    gap: longest silence between two of them, seconds.
    evictions: times it lost its KV.
    """

    output_tokens: int
    first: float
    last: float
    gap: float
    evictions: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was sent to an engine and is not admitted yet.

    output: tokens that its answer will have.
    tokens_left: the forecast of them.
    spread: the forecast's standard deviation as a share of it.
    rank, soft: as in `Send`.
    preempted: what it had made before it was taken out of another engine.
    """

    request: Request
    output: int
    tokens_left: float
    spread: float = 0.0
    rank: float = 0.0
    soft: float | None = None
    preempted: Preempted | None = None


class SimulatedInstance:
    """An instance at work. The loop (`loop.py`) decides when things begin and end.

    variant: the spec with the model that is loaded now.
    running: the iteration in progress, None = the engine is idle.
    submissions: requests that were sent and not admitted yet.
    interruption_s: seconds that interruptions have added to the iteration in progress.
    asked: requests of which the controller wants to know how far they are when this iteration ends.
    recalled: requests that the controller takes back then, unless they have a token.
    leaving: the model that it will load as soon as this iteration ends.
    timers: the loop's, for the ends of an iteration, a load and a warm-up.
    """

    def __init__(self, spec: InstanceSpec, recipe: Recipe) -> None:
        self.spec, self._recipe = spec, recipe
        self.variants = spec.variants()
        self.memory = HostMemory(spec.host_bytes)
        self.timers: dict[str, Timer] = {}
        self.up, self.leaving = True, ""
        self.serve(spec.instance.model)

    @property
    def id(self) -> str:
        return self.spec.instance.id

    def serve(self, model: str) -> None:
        """Start an empty engine with this model."""
        self.variant = self.variants[model]
        self.leaving, self.loading = "", False
        self._remember(model)
        self._empty()

    def _empty(self) -> None:
        self.learned = OnlineLatency()
        self.engine = engine(self._recipe.packer(self.variant.engine_spec(self.learned)), self.variant)
        self.submissions: list[Submission] = []
        self.running: Ran | None = None
        self.interruption_s = 0.0
        self.asked: list[str] = []
        self.recalled: list[str] = []

    def takes(self, model: str) -> bool:
        """Tell whether a request of this model may be submitted now."""
        return self.up and not self.loading and not self.leaving and self.variant.instance.model == model

    def holds(self, prompt: int, output: int) -> bool:
        """Tell whether a request of this size can be computed here at all."""
        return prompt + output <= self.variant.instance.limit

    def instance(self) -> Instance:
        """Return what the controller is told about this instance as it is now."""
        others = tuple(_loadable(spec) for model, spec in self.variants.items() if model != self.variant.instance.model)
        loaded = _loadable(self.variant) if others else None
        latency, warm = self.variant.latency.seconds, tuple(self.memory.held)
        own = self.engine.packer.own_order
        return replace(self.variant.instance, loadable=others, warm=warm, latency=latency, loaded=loaded, own_order=own)

    @property
    def busy(self) -> bool:
        """Tell whether a request is inside or submitted."""
        return self.engine.busy or bool(self.submissions)

    def submit(self, submission: Submission) -> None:
        """Queue a request for admission: an engine admits between two iterations, as vLLM does."""
        self.submissions.append(submission)

    def admit(self) -> list[tuple[str, int]]:
        """Add the submitted requests to the engine; return their ids and rows."""
        added = [(submission.request.id, self._add(submission)) for submission in self.submissions]
        self.submissions.clear()
        return added

    def _add(self, submission: Submission) -> int:
        """Return the request's row; a preempted one goes on after the tokens that it has made."""
        request, tokens_left, before = submission.request, submission.tokens_left, submission.preempted
        if before is not None:
            tokens_left = max(tokens_left - before.output_tokens, 1.0)
        row = self.engine.add(
            request.id,
            request.prompt_tokens,
            submission.output,
            arrival=request.arrival,
            slo=request.slo,
            priority=request.priority,
            tokens_left=tokens_left,
            urgency=submission.rank,
            spread=submission.spread,
            prefix=request.prefix,
            soft=submission.soft,
            run=number_of(request),
        )
        if before is not None:
            jobs = self.engine.jobs
            jobs.output_tokens[row], jobs.evictions[row] = before.output_tokens, before.evictions
            if before.output_tokens:
                jobs.first[row], jobs.last[row], jobs.gap[row] = before.first, before.last, before.gap
        return row

    def rerank(self, ranks: Mapping[str, float]) -> None:
        """Set the urgency of requests that are inside or submitted; ids of others are ignored."""
        self.engine.rerank(ranks)
        self.submissions = [replace(s, rank=ranks.get(s.request.id, s.rank)) for s in self.submissions]

    def progress(self, ids: Iterable[str]) -> dict[str, Progress]:
        """Return how far the requests are that are inside or submitted; others lack."""
        jobs, found = self.engine.jobs, dict[str, Progress]()
        waiting = {submission.request.id: submission.preempted for submission in self.submissions}
        for id in ids:
            if id in jobs:
                row = jobs.row_of[id]
                found[id] = Progress(int(jobs.computed[row]), int(jobs.output_tokens[row]))
            elif id in waiting:
                before = waiting[id]
                found[id] = Progress(0, before.output_tokens if before is not None else 0)
        return found

    def drop(self, id: str) -> None:
        """Abort a request between two iterations."""
        if id in self.engine.jobs:
            self.engine.drop(id)
        else:
            self.submissions = [other for other in self.submissions if other.request.id != id]

    def take_all(self, *, keep: bool) -> dict[str, Preempted]:
        """Empty the engine.

        keep: output tokens stay, and only their KV is computed again; otherwise all is lost.
        """
        self.admit()
        jobs = self.engine.jobs
        rows = jobs.rows()
        rows = rows[np.argsort(jobs.serial[rows])]
        times = (getattr(jobs, name)[rows].tolist() for name in ("first", "last", "gap"))
        lost = (jobs.computed[rows] > 0) & (jobs.running[rows] | (jobs.saved[rows] > 0))  # else it is another's
        evictions = (jobs.evictions[rows] + lost).tolist()
        columns = zip(jobs.output_tokens[rows].tolist(), *times, evictions, strict=True)
        preempted = [Preempted(made if keep else 0, *rest) for made, *rest in columns]
        out = dict(zip(jobs.names(rows), preempted, strict=True))
        self._empty()
        return out

    def load_seconds(self, model: str) -> float:
        """Return the seconds that loading a model takes now."""
        return load_seconds(self.instance(), model, self.variant.instance.model)

    def warm_seconds(self, model: str) -> float:
        """Return the seconds that bring a model's weights from disk into host memory."""
        load = _load(self.variants[model])
        return 0.0 if model in self.memory.held else max(load.cold_s - load.warm_s, 0.0)

    def warm(self, model: str) -> None:
        """Put a model's weights into host memory."""
        self._remember(model)

    def _remember(self, model: str) -> None:
        load = self.variants[model].load
        if load is not None:
            self.memory.keep(model, load.bytes)


def engine(packer: Packer, spec: InstanceSpec) -> SimulatedEngine:
    """Return the engine of an instance: with a host pool where there is one and the packer uses it."""
    instance, use = spec.instance, packer.kv
    common: dict[str, Any] = {
        "blocks": instance.blocks_total,
        "size": instance.block_size,
        "slots": spec.slots,
        "budget": spec.budget,
        "max_model_len": instance.max_model_len,
        "copy_seconds": spec.copy_seconds,
    }
    host = spec.host_tokens if pools(use, spec) else None
    if spec.prefix_caching:
        return CachingEngine(packer, host=host, overlap=use.overlaps_copies, **common)
    if host is None:
        return SimulatedEngine(packer, **common)
    kind = TwoEndedEngine if use.two_ended else HostPoolEngine
    return kind(packer, host=host, overlap=use.overlaps_copies, **common)


def pools(use: KvUse, spec: InstanceSpec) -> bool:
    """Tell whether a packer's saves are held against this instance's host pool.

    Those of a packer that reserves find room for all, as do those on an instance that states no limit.
    """
    return use.saves and not use.reserves and spec.host_tokens is not None


_LENGTHS = {"padded": "learned lengths, padded", "drawn": "learned lengths, drawn", "oracle": "true lengths"}


def describe(recipe: Recipe, spec: InstanceSpec) -> str:
    """Say how a recipe is simulated on an instance, unless with plain blocks and learned lengths."""
    parts, use = [], recipe.packer(spec.engine_spec(OnlineLatency())).kv
    if use != KvUse():
        kind, room = "two-ended" if use.two_ended else "plain", "unbounded" if use.saves else "no"
        room = f"{spec.host_tokens:,} tokens of" if pools(use, spec) else room
        parts.append(f"{kind} KV blocks, {room} host room")
    if spec.prefix_caching:
        parts.append("prefix caching")
    if recipe.lengths != "learned":
        parts.append(_LENGTHS[recipe.lengths])
    return ", ".join(parts)


def check(instances: Sequence[InstanceSpec]) -> None:
    """Refuse fleets that cannot be simulated: empty, two ids alike, swaps without load times."""
    if not instances:
        raise ConfigError("There is no instance to simulate.", "Give at least one.")
    names = [spec.instance.id for spec in instances]
    if len(set(names)) < len(names):
        raise ConfigError(f"Two instances have one name: {', '.join(sorted(names))}.", "Rename one.")
    for spec in instances:
        for variant in spec.variants().values() if spec.others else ():
            _load(variant)


def _load(spec: InstanceSpec) -> Load:
    if spec.load is None:
        raise ConfigError(
            f"{spec.instance.id} may swap models, but the load time of {spec.instance.model} is unknown.",
            "Give its latency profile load_cold_s and load_warm_s, or let this instance serve one model.",
        )
    return spec.load


def _loadable(spec: InstanceSpec) -> Loadable:
    load, instance = _load(spec), spec.instance
    kv_tokens = instance.blocks_total * instance.block_size
    return Loadable(
        instance.model,
        load.cold_s,
        load.warm_s,
        instance.limit,
        spec.latency.seconds,
        kv_tokens,
        load.in_place_of,
        load.in_place_s + load.cold_s - load.warm_s,
        load.in_place_s,
    )
